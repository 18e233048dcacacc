"""The stub of a driver: what is asked of it is done and written down; what a driver refuses is refused."""

import numpy as np
import pytest
from ptx_on_cuda import device

from tools.cuda import ledger, pages, resources, stub_driver

driver = device.driver
few_blocks = pytest.mark.filterwarnings("ignore:Grid size")


def cuda():
    from numba import cuda

    return cuda


def core():
    from cuda.core import Device

    here = Device()
    here.set_current()
    return here


def test_all_functions_of_the_bindings_are_there():
    names = stub_driver.functions()
    assert len(names) > 400
    assert {"cuLaunchKernelEx", "cuMemAlloc_v2", "cuLibraryLoadData"} <= set(names)
    text = stub_driver.source()
    assert all(f'{{"{name}"' in text for name in names if not name.startswith("cuGetProcAddress"))


def test_a_copy_there_and_back():
    x = np.arange(12.0).reshape(3, 4)
    with driver.calls() as log:
        there = cuda().to_device(x)
        back = there.copy_to_host()
    assert np.array_equal(back, x)
    assert log.groups()["blocking copies"] == 2
    assert log.groups()["allocations"] == 1
    assert [call.note for call in log.calls if call.name == "cuMemAlloc"] == [x.nbytes]
    _, size = driver.allocation(there.__cuda_array_interface__["data"][0])
    assert size == x.nbytes


def test_pinned_and_pageable_copies_are_told_apart():
    here, stream = cuda().device_array(1000, np.uint8), cuda().stream()
    pinned, pageable = cuda().pinned_array(1000, np.uint8), np.zeros(1000, np.uint8)
    with driver.calls() as log:
        here.copy_to_device(pinned, stream=stream)
    assert (log.groups()["async copies"], log.groups()["blocking copies"]) == (1, 0)
    with driver.calls() as log:
        here.copy_to_device(pageable, stream=stream)
    assert (log.groups()["async copies"], log.groups()["blocking copies"]) == (0, 1)


def test_streams_events_and_waits():
    here = core()
    a, b = here.create_stream(), here.create_stream()
    with driver.calls() as log:
        event = a.record()
        b.wait(event)
        event.sync()
        b.sync()
    assert log.groups()["async waits"] == 1
    assert log.groups()["blocking waits"] == 2


def test_memory_of_pools():
    here = core()
    stream = here.create_stream()
    with driver.calls() as log:
        buffer = here.allocate(100, stream=stream)
        buffer.close()
    assert log.names["cuMemAllocAsync"] == log.names["cuMemFreeAsync"] == 1
    assert driver.allocation(64) is None


@few_blocks
def test_a_launch_is_seen_with_its_sizes_and_checked():
    seen = []
    hooks = driver._hooks

    @cuda().jit
    def kernel(x):
        x[0] = 1

    x = cuda().device_array(4, np.float32)
    driver.on_launch(seen.append)
    try:
        kernel[3, 64, 0, 256](x)
        with pytest.raises(Exception, match="INVALID_VALUE"):
            kernel[1, 64, 0, 60_000](x)  # more shared memory than one may have without asking
        with pytest.raises(Exception, match="INVALID_VALUE"):
            kernel[1, 2048](x)
    finally:
        driver._hooks = hooks
        driver._c.stub_on_launch(*hooks)
    (launch,) = seen
    assert (launch.grid, launch.block, launch.shared_bytes) == ((3, 1, 1), (64, 1, 1), 256)
    assert "kernel" in launch.name


def test_what_would_break_a_capture_is_refused():
    stream = core().create_stream()
    builder = stream.create_graph_builder()
    builder.begin_building(mode="global")
    with pytest.raises(Exception, match="STREAM_CAPTURE_UNSUPPORTED"):
        cuda().device_array(10, np.float32)
    with pytest.raises(Exception, match="STREAM_CAPTURE_UNSUPPORTED"):
        cuda().to_device(np.zeros(3))
    with pytest.raises(RuntimeError, match="invalidated"):
        builder.end_building()


@few_blocks
def test_a_captured_launch_runs_when_it_is_replayed():
    """By the interpreter, with the contents that memory has then."""

    @cuda().jit
    def twice(x):
        i = cuda_thread()
        x[i] *= 2

    @cuda().jit(device=True)
    def cuda_thread():
        return module.threadIdx.x

    module = cuda()
    x = module.to_device(np.arange(32, dtype=np.float32))
    device.forget()
    twice[1, 32](x)
    builder = core().create_stream().create_graph_builder()
    builder.begin_building()
    stream = module.external_stream(int(builder.stream.handle))
    twice[1, 32, stream](x)
    graph = builder.end_building().complete()
    assert list(x.copy_to_host()) == [2 * i for i in range(32)]
    graph.launch(core().create_stream())
    graph.launch(core().create_stream())
    device.check()
    assert list(x.copy_to_host()) == [8 * i for i in range(32)]


def test_a_missing_function_is_no_success():
    from cuda.bindings import driver as bindings

    with driver.calls() as log:
        (error, *_) = bindings.cuArrayCreate(bindings.CUDA_ARRAY_DESCRIPTOR())
    assert error == bindings.CUresult.CUDA_ERROR_NOT_SUPPORTED
    assert log.names["cuArrayCreate (missing)"] == 1


# ---------------------------------------------------------------- what is written


def test_a_line_of_the_ledger():
    import numkv

    make = ledger.Maker()
    a, b = ((make.array((4, 2, 32), np.float16), make.array((4, 2), np.float32)) for _ in range(2))
    line = ledger.Line("merge_states fp16", lambda: numkv.merge_states(*a, *b))
    row = ledger.measure(driver, line, 0.01)
    assert row.groups["launches"] == 1
    assert row.groups["blocking waits"] == 0
    assert row.microseconds > 0
    assert "| merge_states fp16 | 1 |" in ledger.table([row])


def test_limits_of_the_ledger():
    nothing = dict.fromkeys(stub_driver.GROUPS, 0.0)
    append = "paged_append int8, Numba arrays"
    assert ledger.over(ledger.Measured(append, {**nothing, "launches": 1.0}, {}, 9.0)) == []
    found = ledger.over(
        ledger.Measured(append, {**nothing, "launches": 2.0, "frees": 0.5}, {}, 9.0)
    )
    assert found == ["launches 2 (at most 1)", "frees 0.5 (at most 0)"]
    assert ledger.over(ledger.Measured("of no limit", {**nothing, "launches": 99.0}, {}, 9.0)) == []


def test_pages(tmp_path):
    pages.write(
        tmp_path / "a" / "page.md", "Title", "About.", pages.table(["a", "b"], [["x", "1"]])
    )
    text = (tmp_path / "a" / "page.md").read_text()
    assert text.startswith("# Title\n\n20")
    assert "| a | b |\n| --- | --: |\n| x | 1 |" in text
    assert "numba" in text


def test_the_linkers_log():
    log = (
        "ptxas info : Used 96 registers, used 1 barriers, 36 bytes cumulative stack size, 4608 bytes smem\n"
        "    40 bytes stack frame, 36 bytes spill stores, 48 bytes spill loads\n"
    )
    row = resources.of_log("kernel", "sm_90", log)
    assert row == ("kernel", "sm_90", 96, 36, 48, 40, 4608, 1)
    other = row._replace(architecture="sm_80", spill_stores=0, spill_loads=0)
    assert "| kernel | 96 | 36 / 48 | 40 | 96 | 0 | 40 | 4,608 |" in resources.table([row, other])
    with pytest.raises(ValueError, match="registers"):
        resources.of_log("kernel", "sm_90", "nothing")


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8_e4m3"])
def test_narrow_floats_go_to_the_device_and_back(kind):
    """Numba copies no dtypes of ml_dtypes; what the target copies are their words, as files and swaps hand it."""
    import numkv
    from numkv import targets

    where, x = targets.get("cuda"), np.arange(6).reshape(2, 3).astype(numkv.kind(kind).dtype)
    there = where.asarray(x)
    assert there.dtype == x.dtype
    assert np.array_equal(where.to_host(there), x)
    words = where.words(there)
    assert np.array_equal(where.to_host(words), x.view(words.dtype))


def test_what_the_driver_refuses_is_an_error():
    """A copy that was not made must not pass for one: its array would hold what lay there before."""
    from numkv.kernels.cuda import streams, uploads

    cuda().current_context()
    with pytest.raises(RuntimeError, match=r"^cuDeviceGet: .* got CUDA_ERROR_INVALID_DEVICE$"):
        streams.ask("cuDeviceGet", 99)
    with pytest.raises(MemoryError, match="no room"):
        streams.ask("cuMemAlloc", 1 << 60)
    for size in (10, uploads.RING):  # through the ring, and past it
        with streams.on(streams.place(0, 0)):
            x = np.arange(size, dtype=np.uint8)
            assert np.array_equal(uploads.upload(x).copy_to_host(), x)

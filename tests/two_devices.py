"""Check two devices on the stub driver, a fork, or the end of a process, and print "fine".

NUMBA_ENABLE_CUDASIM=0 python tests/two_devices.py devices|fork|end
"""

import os
import re
import sys
import traceback
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.cuda import interpret, ptx_device

HEADS, DIM = 2, 32


def expect(error, text, call):
    with pytest.raises(error, match=re.escape(text)):
        call()


def devices():
    device = ptx_device.start()
    driver = device.driver
    driver.devices(2)
    import naive
    from captured import captured, new_stream
    from numba import cuda

    import numkv
    from numkv import targets
    from numkv.kernels.cuda import launches, streams

    interpret.few_blocks()
    where = targets.get("cuda")
    assert not streams.one_device()
    rng = np.random.default_rng(0)

    def on(number, x):
        with cuda.gpus[number]:
            return where.asarray(x)

    def on_stream(stream, call, *args):
        with numkv.on_stream(stream):
            return call(*args)

    def device_of(x):
        return x.gpu_data.context.device.id

    k = rng.standard_normal((1, HEADS, 8, DIM)).astype(np.float16)
    q = rng.standard_normal((1, 4, DIM)).astype(np.float16)
    lens = np.array([7])
    want, _ = naive.attention(q, k, k, lens)

    # Device 0 is current; the arrays say where the call runs, and its result is there.
    there = [on(1, x) for x in (q, k, k, lens)]
    here = [on(0, x) for x in (q, k, k, lens)]
    assert [device_of(x) for x in there] == [1] * 4
    for arrays, number in ((there, 1), (here, 0), (there, 1)):
        for _ in range(2):
            out = numkv.decode_attention(*arrays)
            assert device_of(out) == number
            np.testing.assert_allclose(where.to_host(out), want, atol=2e-3)
    assert cuda.get_current_device().id == 0
    device.check()

    # A kernel is loaded once for each device.
    loads = 0
    with driver.calls() as log:
        for arrays in (there, here) * 2:
            numkv.decode_attention(*arrays)
    loads = log.names["cuLibraryLoadData"] + log.names["cuModuleLoadData"]
    assert loads == 0, log.names
    assert not log.groups()["allocations"] + log.groups()["blocking waits"]

    # Mixed arrays, and streams of the other device.
    expect(numkv.NotSupported, "[0, 1]", lambda: numkv.decode_attention(here[0], *there[1:]))
    with cuda.gpus[1]:
        far = new_stream(1)
    near = new_stream(0)
    expect(
        numkv.NotSupported,
        "stream of the arrays' device 0, got one of device 1",
        lambda: on_stream(far, numkv.decode_attention, *here),
    )
    for arrays, stream in ((there, far), (here, near), (there, far)):
        for _ in range(2):
            with driver.calls() as log:
                out = on_stream(stream, numkv.decode_attention, *arrays)
            assert {c.stream for c in log.calls if c.name.startswith("cuLaunchKernel")} == {stream}
        np.testing.assert_allclose(where.to_host(out), want, atol=2e-3)
    with numkv.on_stream(far):  # of its device, though another one is current
        made = where.asarray(k)
        assert device_of(made) == 1
        assert streams.current() is streams.place(1, far)

    # Objects stay where they were made.
    with cuda.gpus[1]:
        layer = numkv.ContiguousLayer(8, HEADS, DIM, kind="int8", target="cuda")
        cache = numkv.PagedKVCache(1, HEADS, DIM, num_blocks=4, target="cuda")
    row = rng.standard_normal((1, HEADS, DIM)).astype(np.float16)
    on_0, on_1 = on(0, row), on(1, row)
    layer.append(on_1, on_1)
    on_stream(far, layer.append, on_1, on_1)
    expect(numkv.NotSupported, "[0, 1]", lambda: layer.append(on_0, on_0))
    expect(numkv.NotSupported, "[0, 1]", lambda: layer.decode_attention(here[0]))
    assert device_of(layer.decode_attention(there[0])) == 1
    with numkv.on_stream(far):
        buffers = cache.step_buffers(1, max_length=8)
    seq = cache.add()
    step = cache.reserve([seq], 1, into=buffers)
    expect(numkv.NotSupported, "[0, 1]", lambda: step.append(0, on_0, on_0))
    on_stream(far, step.append, 0, on_1, on_1)
    with captured(far) as graph:
        out = step.attention(0, there[0])
    cache.commit(step)
    graph.launch(far)
    np.testing.assert_allclose(
        where.to_host(out), np.repeat(row, 2, 1).astype(np.float64), atol=2e-3
    )
    cache.check()

    # Errors that a kernel of the other device reports are raised here.
    bad = row.copy()
    bad[0, 1, 3] = np.nan
    layer.append(on(1, bad), on_1)
    expect(numkv.NonFiniteInput, "truncate to 2", lambda: layer.append(on_1, on_1))
    layer.truncate(2)
    layer.check()
    assert cuda.get_current_device().id == 0
    device.check()
    assert launches.SIMULATED is False


def fork():
    ptx_device.start()
    import numkv
    from numkv import targets

    where = targets.get("cuda")
    x = where.asarray(np.ones((1, 1, 4, 8), np.float16))
    cache = numkv.KVCache(1, 1, 8, kind="fp16", target="cuda")
    child = os.fork()
    if not child:
        status = 1
        try:
            for call in (
                lambda: where.asarray(np.ones(3)),
                lambda: numkv.decode_attention(x[:, 0], x, x, [2]),
                lambda: cache.append(0, x[0, :, 0], x[0, :, 0]),
                lambda: numkv.KVCache(1, 1, 8, max_seq_len=4, target="cuda"),
            ):
                expect(numkv.NumkvError, "got a fork of one that had used CUDA", call)
            numkv.KVCache(1, 1, 8).append(0, *[np.ones((1, 8), np.float32)] * 2)  # the CPU works
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert where.to_host(x).all()


def end():
    """Keep arrays as long as their module lives, beside a kernel of the user's own."""
    global kept
    ptx_device.start()
    from numba import config, cuda

    from numkv import targets

    where = targets.get("cuda")
    config.CUDA_LOW_OCCUPANCY_WARNINGS = 0

    @cuda.jit
    def own(x):
        x[0] = 1

    kept = own, [where.asarray(np.ones((1, 1, 4, 8), np.float16)) for _ in range(3)]
    own[1, 1](kept[1][0])


if __name__ == "__main__":
    {"devices": devices, "fork": fork, "end": end}[sys.argv[1]]()
    print("fine")

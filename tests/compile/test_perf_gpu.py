"""``python -m perf.gpu``: its arithmetic and its page, on made-up times; its calls, on the stub driver."""

import pytest
from ptx_on_cuda import device

from perf import gpu, gpu_lines, gpu_page
from perf.gpu_page import Page, Timing

US = 1e-6


def made_up():
    return [
        Timing("decode B8/bf16", "numkv paged", [100 * US, 90 * US, 110 * US, 400 * US, 80 * US], 200_000_000),
        Timing("decode B8/bf16", "torch SDPA math", [900 * US] * 5, 200_000_000),
        Timing("decode B8/bf16", "FlashInfer paged", [80 * US] * 5, 200_000_000),
        Timing("decode B8/bf16", "flash-attn", reason="ImportError: no"),
        Timing("prefill P/bf16", "numkv paged", [2e-3] * 5, 0, 3 * 10**12),
        Timing("append 1/int8", "numkv paged", reason="RuntimeError: broken"),
    ]  # fmt: skip


def test_shares_and_ratios():
    timings = made_up()
    assert timings[0].typical == pytest.approx(100 * US)
    assert gpu_page.share(timings[0], 4e12) == pytest.approx(0.5)
    assert gpu_page.share(timings[4], 4e12) is None
    assert gpu_page.share(timings[3], 4e12) is None
    assert gpu_page.beside(timings, "decode B8/bf16") == ("FlashInfer paged", pytest.approx(0.8))
    assert gpu_page.beside(timings, "prefill P/bf16") is None
    assert gpu_page.beside(timings, "append 1/int8") is None
    assert gpu_page.spread(timings[1]) == 0
    assert 0 < gpu_page.spread(timings[0]) < 3


def test_the_page_and_its_picture():
    checks = [
        ("every kernel against the oracle", "checked 9 cases"),
        ("compute-sanitizer", "not installed"),
    ]
    page = Page("a GPU", 4e12, made_up(), checks, "numkv 1.", ["step B8/bf16"], 3.21)
    text = gpu_page.page(page)
    assert "# numkv on a GPU" in text
    assert "reads and writes 4,000 GB/s" in text
    assert "| decode B8/bf16 | numkv paged | 100.0 |" in text
    assert "| 50% |" in text
    assert "| prefill P/bf16 | numkv paged | 2,000.0 | 0% |  | 1500.0 |" in text
    assert "| append 1/int8 | numkv paged |  |  |  |  | RuntimeError: broken |" in text
    assert "| decode B8/bf16 | FlashInfer paged | 0.80 |" in text
    assert "Left out for want of time: step B8/bf16." in text
    assert "| compute-sanitizer | not installed |" in text
    picture = gpu_page.picture(page)
    assert picture.startswith("<svg")
    assert picture.count("<rect") == 2  # the ground, and one line that has a share


def test_bytes_and_flops_of_lines():
    line = next(x for x in gpu_lines.LINES if x.name == "decode B8/bf16")
    assert line.bytes == 8 * 8192 * 8 * 256 * 2
    assert line.flops == 0
    prefill = next(x for x in gpu_lines.LINES if x.what == "prefill")
    assert prefill.bytes == 0
    assert prefill.flops == 2 * 32 * (8192 * 8193 // 2) * 256
    append = next(x for x in gpu_lines.LINES if x.name == "append 64/int8")
    assert append.bytes == round(64 * 8 * 256 * (1 + 4 / 128))


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert gpu.main([]) == 0
    assert "nothing to time" in capsys.readouterr().out


def test_a_line_that_fails_is_told():
    def broken():
        raise RuntimeError("no such kernel\nat all")

    line = gpu_lines.LINES[0]
    assert (
        gpu._timing(line, "numkv paged", broken, 0.1).reason
        == "RuntimeError: no such kernel at all"
    )


@pytest.mark.parametrize("what", ["append", "write"])
def test_numkvs_calls_run(what):
    """Small ones, on the interpreter."""
    line = next(
        x for x in gpu_lines.LINES if x.what == what and x.kind == "int8" and x.shape.batch == 64
    )
    shape = line.shape._replace(batch=2, q_heads=2, kv_heads=1, dim=64, length=32)
    device.forget()
    job = gpu_lines.numkv_calls(line._replace(shape=shape), cold=1)
    gpu_lines.turns(job.calls)()
    assert device.launches
    device.check()

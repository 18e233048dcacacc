"""Made-up results of comparisons, for tests of pages and pictures."""

from perf import fairness, report


def compared(in_race, alone):
    return fairness.Compared(
        "C", "bf16", "PyTorch", "SDPA", dict(enumerate(in_race)), dict(enumerate(alone))
    )


def row(library, form, ratio):
    """Return a contestant's result of `ratio` milliseconds, at half of the bandwidth."""
    return report.Row(library, form, seconds=ratio * 1e-3, share=0.5, ratio=ratio, bytes=1)


def lines():
    ours = report.Row(
        "numkv", "", seconds=1e-3, share=0.8, ratio=1.0, error=1.234e-7, bytes=40_000_000
    )
    paged = report.Row("numkv", "paged by 128", seconds=9e-4, share=0.81, ratio=0.9, bytes=1)
    slow = report.Row(
        "PyTorch", "SDPA", seconds=3.5e-3, share=0.2, ratio=3.5, error=2e-7, bytes=40_000_000
    )
    quick = report.Row("OpenVINO", "PagedAttention", seconds=2e-3, share=0.4, ratio=2.0, bytes=1)
    gone = report.Row("NumPy", "", reason="no dtype")
    probes = [4.8e10, 5.2e10, 5e10]
    pieces = {4096: [1.1, 1.2, 1.4], 32768: [1.0, 1.05, 1.1]}
    return [
        report.Line("A", "fp32", [ours, paged, slow, quick, gone], probes, pieces=pieces),
        report.Line("B", "fp32", [ours, gone], probes),
    ]

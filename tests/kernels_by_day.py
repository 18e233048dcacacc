"""The slow kernels that every run may compile on the CPU; `pytest --ledger` prints the time of each.

A test that needs another one fails, until it has the marker `nightly` or `slow`, or the kernel stands here.
"""

from kinds import APART

_SAME = ("fp32", "fp16", "bf16", "fp8_e4m3", "int8", "int4", "code4")

_ATTENTION = {
    *(f"K {kind}, V {kind}, computing in float32" for kind in _SAME),
    *(f"K {k}, V {v}, computing in float32" for k, v in APART),
    *(
        f"K {kind}, V int8, computing in float32"
        for kind in ("int8_channel", "int4_channel_fine", "int4_channel")
    ),
    "K bf16, V bf16, computing in pairs of bf16",
    "K fp64, V fp64, computing in float64",
}

#: By the first words of watched labels: the rest of the labels that every run may compile.
BY_DAY = {
    **{f"attention of {rows} query rows": _ATTENTION for rows in (1, 2, 4, 8)},
    "append_attend": {
        *(f"rows fp32, q fp32, K {kind}, V {kind}" for kind in ("fp32", "fp16", "bf16", "int8", "int4")),
        "rows bf16, q bf16, K bf16, V bf16",
        "rows fp32, q fp32, K int8_channel, V int8, newest fp32 and fp32",
    },
    "write_rows": {
        *(f"fp32 to K {kind}, V {kind}" for kind in ("fp32", "fp8_e4m3", "int8", "int4")),
        "bf16 to K bf16, V bf16",
    },
    "scatter_write": {f"fp32 to K {kind}, V {kind}" for kind in ("fp32", "int8")},
    "attend_codes": {"4 bits", "8 bits", "4 bits and 3"},
}  # fmt: skip

_unlisted: list[str] = []


def watch() -> None:
    """Record kernels built from now on, by modules that are not imported yet."""
    from numkv.kernels import builder

    build = builder.build

    def noted(function, signature, *, label, **options):
        operation, _, kinds = label.partition(", ")
        if kinds not in BY_DAY.get(operation, {kinds}):
            _unlisted.append(label)
        return build(function, signature, label=label, **options)

    builder.build = noted


def unlisted() -> list[str]:
    """Return labels of kernels that were built since the last call and are not in the list."""
    found = list(_unlisted)
    _unlisted.clear()
    return found

"""Keys by channel for the interpreter of PTX: the tests of `tests/kernels/test_channel.py`."""

from kernels import test_channel as channel
from ptx_writes import host, to


def quantise_groups(rng, kind, dim, source):
    channel.test_quantise_groups("cuda", to, host, rng, kind, dim, source)


def attention_by_channel(rng, kind):
    """Several queries, windows that begin within a group, ranges."""
    for case in channel.CASES[1::2]:
        channel.test_attention("cuda", to, host, rng, kind, *case)


def mass_by_channel(rng, kind):
    channel.test_attention_weights("cuda", to, host, rng, kind)


def bounds_by_channel(rng, kind):
    channel.test_bounds("cuda", to, host, rng, kind)


def dequantise_by_channel(rng, kind):
    channel.test_rows_decoded("cuda", to, host, rng, kind)


def add_cases(case):
    for kind, dim in (("int8_channel", 5), ("int4_channel_fine", 34), ("int4_channel", 34)):
        everyday = kind == "int4_channel"
        case(quantise_groups, kind, dim, "fp32", everyday=everyday)
        case(quantise_groups, kind, dim, "bf16")
        case(attention_by_channel, kind, everyday=everyday)
        case(mass_by_channel, kind)
        case(bounds_by_channel, kind)
        case(dequantise_by_channel, kind)

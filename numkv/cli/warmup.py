"""``numkv warmup``: compile ahead of time."""

from __future__ import annotations

import argparse
import time

import numkv
from numkv.cli.output import KernelProgress
from numkv.demo.cache import CacheChoice


def run(arguments: argparse.Namespace) -> None:
    """Fill the kernel cache.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    """
    choices: list[CacheChoice] = arguments.kind
    kinds = [choice.kinds for choice in choices]
    started = time.perf_counter()
    with KernelProgress():
        found = numkv.warmup(
            kinds, dtypes=arguments.dtype, target=arguments.target, rotate=arguments.rotate,
            residual=arguments.residual, processes=arguments.processes,
        )  # fmt: skip
    print(
        f"{found['misses']} kernels compiled, {found['hits']} there already, "
        f"{time.perf_counter() - started:.1f} s"
    )

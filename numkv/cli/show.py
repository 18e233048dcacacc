"""``numkv show FILE``: draw the contents of a saved cache."""

from __future__ import annotations

import argparse

import numkv
from numkv.cli.output import UsageError
from numkv.files.api import written_in


def run(arguments: argparse.Namespace) -> None:
    """Draw saved caches.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    """
    for number, path in enumerate(arguments.path):
        try:
            mark = written_in(path)
        except ImportError as error:
            raise UsageError(f"show: {error}") from error
        found = numkv.load(path, mark=mark)
        if len(arguments.path) > 1:
            print(f"{chr(10) if number else ''}==> {path} <==")
        for cache in found if isinstance(found, list) else [found]:
            numkv.show(cache)

"""``numkv cache`` and ``numkv warmup``: list, clear and fill the folders of compiled kernels."""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numkv
from numkv.cli.output import UsageError, is_installed, kernel_progress, table
from numkv.drawing.picture import format_bytes
from numkv.errors import NotSupported
from numkv.kernels.disk_cache import is_stale, kernel_files, places


def run(arguments: argparse.Namespace) -> None:
    """List compiled kernels, or remove them.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options ``clear`` and ``stale``.

    Raises
    ------
    UsageError
        For ``--stale`` without ``--clear``, or if a file cannot be removed.
    """
    if arguments.stale and not arguments.clear:
        raise UsageError("--stale goes with --clear; `numkv cache` counts such files")
    folders = {folder: files for folder in places() if (files := kernel_files(folder))}
    if arguments.clear:
        _clear(folders, only_stale=arguments.stale)
    else:
        _show(folders)


def warm_up(arguments: argparse.Namespace) -> None:
    """Compile kernels ahead of time.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.

    Raises
    ------
    UsageError
        For ``--arch`` without ``--export``, or the other way round.
    NumkvError
        If a file to load is refused, or nothing can be compiled.
    """
    started = time.perf_counter()
    if (arguments.export is None) != (arguments.arch is None):
        raise UsageError(
            "--export FILE and --arch NAME go together, as in --export kernels.zip --arch sm_90"
        )
    if (arguments.load or arguments.export) and not is_installed("numba_cuda"):
        raise UsageError(
            "--export and --load need numba-cuda, which is not installed; try pip install 'numkv[cuda]'"
        )
    if arguments.load is not None:
        return _load(arguments.load)
    storage = [choice.kinds for choice in arguments.kind]
    names = ("head_dim", "rotate", "residual", "processes")
    options = {"dtypes": arguments.dtype} | {name: getattr(arguments, name) for name in names}
    if arguments.export is not None:
        from numkv.compile_ahead import export

        with kernel_progress():
            count = export(arguments.export, arguments.arch, storage, **options)
        size = format_bytes(arguments.export.stat().st_size)
        print(
            f"{arguments.export}: {count} kernels for {arguments.arch}, {size}, {time.perf_counter() - started:.1f} s"
        )
        return None
    with kernel_progress():
        found = numkv.warmup(storage, target=arguments.target, **options)
    print(
        f"{found['misses']} kernels compiled, {found['hits']} there already, "
        f"{time.perf_counter() - started:.1f} s"
    )
    return None


def _load(files: list[Path]) -> None:
    """Install exported kernels on this machine; reject kernels for another GPU if it has one."""
    with contextlib.suppress(NotSupported):  # installing needs no GPU
        numkv.targets.get("cuda")
    from numkv.kernels.cuda.carried import device, take

    for file in files:
        print(f"{file}: {take(file, device())} kernels")


def _show(folders: dict[Path, list[Path]]) -> None:
    if not folders:
        print(
            "no kernels on disk: neither in NUMBA_CACHE_DIR, nor next to the sources, nor among the user's files"
        )
        return
    rows, stale = [], []
    every = [path for files in folders.values() for path in files]
    for folder, files in (*folders.items(), ("all", every)):
        stale = [path for path in files if is_stale(path)]
        rows.append([str(folder), str(len(files)), format_bytes(size_of(files)), str(len(stale))])
    print(table(["folder", "kernels", "size", "of other sources"], rows))
    if stale:  # of all of them, which come last
        print(
            f"\nFiles of other sources ({format_bytes(size_of(stale))}) belong to other versions of numkv, or to an "
            "edit of this one; `numkv cache --clear --stale` removes them."
        )
    for line in warnings_of(folders):
        print(f"warning: {line}")


def _clear(folders: dict[Path, list[Path]], *, only_stale: bool) -> None:
    """Remove files; continue after an error."""
    errors = []
    count = total = 0
    for folder, files in folders.items():
        gone = size = 0
        for path in files:
            if only_stale and not is_stale(path):
                continue
            try:
                bytes_of = path.lstat().st_size
                path.unlink()
            except FileNotFoundError:  # another process was first
                continue
            except OSError as error:
                errors.append(error)
                continue
            gone, size = gone + 1, size + bytes_of
        if gone:
            print(f"{folder}: {gone} kernels removed, {format_bytes(size)}")
        count, total = count + gone, total + size
    print(f"{count} kernels removed, {format_bytes(total)}")
    if errors:
        raise UsageError(f"{len(errors)} kernels cannot be removed; the first: {errors[0]}")


def size_of(files: Iterable[Path]) -> int:
    """Return the bytes of files that there are."""
    total = 0
    for path in files:
        with contextlib.suppress(FileNotFoundError):  # just replaced or removed
            total += path.lstat().st_size
    return total


def warnings_of(folders: Iterable[Path]) -> list[str]:
    """Return warnings for folders in which other users could put machine code.

    Parameters
    ----------
    folders : iterable of Path
        Folders that exist.

    Returns
    -------
    list of str
        A line for each folder that another user can write to or replace.
    """
    found = []
    for folder in folders:
        for place in (folder, *folder.resolve().parents):
            reason = _open_to_others(place, below=place != folder)
            if reason is not None:
                found.append(
                    f"{place} {reason}: whoever writes there can run code in processes that load kernels"
                )
                break
    return list(dict.fromkeys(found))


def _open_to_others(folder: Path, *, below: bool) -> str | None:
    """Return why users other than this one and root can change a folder's contents; None if they cannot.

    In a sticky folder, such as /tmp, they cannot replace the folder ``below``, which belongs to another user.
    """
    if not hasattr(os, "geteuid"):  # Windows has other rules
        return None
    try:
        state = folder.stat()
    except OSError:
        return None
    if state.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user ({_name(folder.owner, state.st_uid)})"
    if below and state.st_mode & stat.S_ISVTX:
        return None
    if state.st_mode & stat.S_IWOTH:
        return "is writable by everyone"
    if state.st_mode & stat.S_IWGRP and not _is_private_group(folder, state.st_gid):
        return f"is writable by a group ({_name(folder.group, state.st_gid)})"
    return None


def _name(of: Callable[[], str], number: int) -> str:
    """Return the name of an owner or a group, or its number if it has none."""
    try:
        return of()
    except KeyError:
        return str(number)


def _is_private_group(folder: Path, gid: int) -> bool:
    """Return whether a folder's group is its user's private group, with the same name and no other members."""
    import grp

    try:
        user, group = folder.owner(), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user and not set(group.gr_mem) - {user}

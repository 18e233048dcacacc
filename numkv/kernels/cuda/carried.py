"""Files of machine code that one machine writes and another one loads: kernels of one architecture and version.

Names in the disk cache depend on everything that affects machine code, including toolchain versions. The disk cache is
therefore not portable. These files identify kernels by their sources. `take` puts them into the disk cache under this
machine's names, as if they were compiled here. Calls do not depend on such files.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from numba import cuda

from numkv.errors import NotSupported, NumkvError
from numkv.kernels import disk_cache
from numkv.kernels.cuda.absent import OPTIN_BYTES, pretend
from numkv.kernels.cuda.launches import Kernel, architecture, kept_as, named, noted
from numkv.replace import replacing

__all__ = ["capability", "device", "elsewhere", "take", "write"]

_CONTENTS, _FORMAT = "contents.json", 1
_PARTS = 6  # of `Kernel.parts`
_ROOM = "numkv.kernels.cuda."


def capability(text: str) -> tuple[int, int]:
    """Return the compute capability of an architecture such as ``"sm_90"``.

    Raises
    ------
    NotSupported
        If numkv does not know the architecture.
    """
    known = {f"sm_{major}{minor}": (major, minor) for major, minor in OPTIN_BYTES}
    found = known.get(text.removesuffix("a"))
    if found is None:
        raise NotSupported(f"architecture: expected one of {', '.join(known)}, got {text!r}")
    return found


def device() -> tuple[int, int] | None:
    """Return this machine's compute capability; None without a GPU."""
    return cuda.get_current_device().compute_capability if cuda.is_available() else None


@contextlib.contextmanager
def elsewhere(cc: tuple[int, int]) -> Iterator[dict[Kernel, None]]:
    """Simulate a device of a compute capability, and record the kernels that are launched; see `pretend`."""
    pretend(cc)
    with noted() as kernels:
        yield kernels


def write(path: Path | None, kernels: Iterable[Kernel], cc: tuple[int, int]) -> int:
    """Write machine code for a compute capability atomically; kernels that are not on disk are compiled.

    Parameters
    ----------
    path : Path or None
        The file. With None, kernels are only compiled.
    kernels : iterable of Kernel
        The kernels of the file.
    cc : tuple of int
        The compute capability.

    Returns
    -------
    int
        The number of kernels written.
    """
    of, rows, codes = architecture(cc), [], []
    for kernel in kernels:
        entry, code = kernel.machine_code(of)
        digest = hashlib.sha256(code).hexdigest()
        rows.append({"parts": kernel.parts(of), "entry": entry, "digest": digest})
        codes.append(code)
    if path is None:
        return len(rows)
    contents = {
        "format": _FORMAT, "architecture": named(of), "sources": disk_cache.source_digest(), "kernels": rows,
    }  # fmt: skip
    with (
        replacing(path, durable=False) as descriptor,
        open(descriptor, "wb", closefd=False) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        archive.writestr(_CONTENTS, json.dumps(contents))
        for i, code in enumerate(codes):
            archive.writestr(f"{i}.cubin", code)
    return len(rows)


def take(path: Path, cc: tuple[int, int] | None) -> int:
    """Put the kernels of a file into this machine's disk cache; a rejected file changes nothing.

    Parameters
    ----------
    path : Path
        The file. Its author can run any code on this machine's GPU.
    cc : tuple of int or None
        This machine's compute capability, if it has a GPU.

    Returns
    -------
    int
        The number of kernels in the file.

    Raises
    ------
    NumkvError
        If the file is damaged, of another version, or for another device; its name is in the message.
    OSError
        If it cannot be read.
    """
    try:
        contents, codes = _read(path)
        kernels = [(row["parts"], row["entry"], row["digest"]) for row in contents["kernels"]]
        found = (contents["format"], contents["architecture"], contents["sources"])
        whole = all(
            hashlib.sha256(code).hexdigest() == digest and len(parts) == _PARTS
            and all(isinstance(x, str) for x in (*parts, entry))
            for code, (parts, entry, digest) in zip(codes, kernels, strict=True)
        )  # fmt: skip
    except (ArithmeticError, AttributeError, EOFError, KeyError, LookupError, NotImplementedError, RuntimeError,
            TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:  # fmt: skip
        _refuse(path, f"whole, got a damaged one ({error!r}); copy it again", error)
    if not whole:
        _refuse(path, "whole, got one whose checksums are wrong; copy it again")
    if (found[0], found[2]) != (_FORMAT, disk_cache.source_digest()):
        _refuse(
            path,
            "of this version of numkv, got one of another version; export it again from this one",
        )
    if cc is not None and found[1] != named(architecture(cc)):
        _refuse(path, f"for {named(architecture(cc))}, this machine's GPU, got one for {found[1]}")
    places = [_place(path, parts) for parts, _, _ in kernels]
    for place, (_, entry, _), code in zip(places, kernels, codes, strict=True):
        if place is not None:
            disk_cache.save(place, entry.encode() + b"\0" + code)
    return len(kernels)


def _refuse(path: Path, why: str, error: Exception | None = None) -> NoReturn:
    raise NumkvError(f"{path}: expected a file of kernels {why}") from error


def _read(path: Path) -> tuple[dict[str, Any], list[bytes]]:
    """Return the contents, and the machine code of each kernel."""
    with zipfile.ZipFile(path) as archive:
        contents = json.loads(archive.read(_CONTENTS))
        return contents, [archive.read(f"{i}.cubin") for i in range(len(contents["kernels"]))]


def _place(path: Path, parts: list[str]) -> Path | None:
    """Return the path of a kernel in this machine's disk cache."""
    module, name, *_ = parts
    factory = None
    if module.startswith(_ROOM):
        factory = getattr(importlib.import_module(module), name, None)
    if factory is None:
        _refuse(path, f"of this version of numkv, got one with {module}.{name}, which there is not")
    return kept_as(factory, parts)

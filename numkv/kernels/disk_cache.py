"""Compiled kernels on disk: one file for each build, with checksums that prove it complete and up to date.

Numba's own disk cache does not fit here for three reasons. It stamps the one file that defines a function, so an edited
row function would leave stale kernels. It identifies a closure by pickling its variables, so a kernel made of
intrinsics or of other closures is never found again. And it trusts its files, so a damaged file stops every later
start.

A build is identified by the factory and its arguments, the signature, the options, the processor, and the versions of
Python, NumPy and Numba. They make up the file's name. The file has a digest of all sources under `_SOURCES` and a
checksum, then the machine code as Numba pickles it. A file with another source digest is out of date. The kernel is
then compiled, and the new file replaces it, so the folder does not grow with edits. A damaged file is reported once,
and the kernel compiled. Files are replaced whole, never written in place. A process that needs a kernel which another
one is compiling waits for it (`Turn`).

The files are pickles and machine code: only users who are trusted to run code here may have write access to the folder.
Files of CUDA kernels (`path_of`, `load`, `save`) have the same form, but end with the name of the entry and the machine
code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
import pickle
import re
import stat
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import config
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import (
    CompileResultCacheImpl,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
    UserWideCacheLocator,
    _Cache,
)
from numba.core.serialize import dumps

from numkv.errors import NotSupported
from numkv.replace import SUFFIX as PARTIAL
from numkv.replace import replacing, write_all

#: Ending of the files' names.
SUFFIX = ".kernel"

_MAGIC = b"numkv kernel 1\n"
# A file's name, and that of one that is being written.
_NAME = re.compile(rf".+-[0-9a-f]{{32}}{re.escape(SUFFIX)}(\.\w+{re.escape(PARTIAL)})?")
#: Folders of the package with the sources of kernels.
_SOURCES = ("blocks", "cells", "kernels", "rows")
_DIGEST = hashlib.sha256().digest_size
# Seconds that a process waits for another one to compile a kernel, at most.
_PATIENCE = 60.0
_BEGUN = time.time()
_PACKAGE = Path(__file__).resolve().parent.parent
# Settings of Numba that change the machine code.
_SETTINGS = ("BOUNDSCHECK", "OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "ENABLE_AVX", "DEBUGINFO_DEFAULT")  # fmt: skip


def _number_functions_apart() -> None:
    """Make Numba number functions from a random start below 2^56, which differs from process to process.

    A symbol in machine code is a function's name, that number and the types of its arguments. Kernels for fp16 and bf16
    differ in the number alone, as both see words. If every process counted from 1, a kernel from disk could have the
    symbol of another kernel that this process has compiled. The linker would then use one for both.
    """
    FunctionIdentity._unique_ids = itertools.count(int.from_bytes(os.urandom(7), "little"))


_number_functions_apart()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_number_functions_apart)


@functools.cache
def source_digest() -> str:
    """Return the digest of all source files of kernels.

    If one has changed since this process began, the process may run other code, so its kernels are not shared.
    """
    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    if sources_changed():
        digest.update(os.urandom(16))
    return digest.hexdigest()


@functools.cache
def _sources() -> list[Path]:
    return sorted(path for folder in _SOURCES for path in (_PACKAGE / folder).rglob("*.py"))


def sources_changed() -> bool:
    """Return whether a source file has been changed or removed since this process began."""
    try:
        return any(path.stat().st_ctime > _BEGUN for path in _sources())
    except OSError:
        return True


def warn_no_cache(reason: str) -> None:
    """Warn, once for each reason, that compiled kernels are not kept."""
    _warn(
        f"numkv cannot keep compiled kernels on disk ({reason}); every process compiles them again. "
        "Set NUMBA_CACHE_DIR to a writable folder."
    )


@functools.cache
def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def folder_of(function: Callable[..., Any]) -> Path:
    """Return where kernels of the module that defines `function` lie; ``RuntimeError`` if there is no such place."""
    return Path(CompileResultCacheImpl(function).locator.get_cache_path())


def places() -> list[Path]:
    """Return every folder where kernels of this package may be, whether it exists or not.

    Numba uses the first one that it can write: in ``NUMBA_CACHE_DIR`` if that is set, next to the sources, among the
    user's files. Folders that it used before the setting changed count, too.
    """
    found = []
    locators = [InTreeCacheLocator, UserWideCacheLocator]
    if config.CACHE_DIR:
        locators.insert(0, UserProvidedCacheLocator)
    sources = {path.parent for folder in _SOURCES for path in (_PACKAGE / folder).rglob("*.py")}
    for locator in locators:
        for folder in sorted(sources):
            found.append(Path(locator(places, str(folder / "file.py")).get_cache_path()))
    return found


def kernel_files(folder: Path) -> list[Path]:
    """Return the files of kernels in a folder, by their names: of any version, including half written ones."""
    with contextlib.suppress(OSError):
        return sorted(
            path for path in folder.iterdir() if _NAME.fullmatch(path.name) and _is_file(path)
        )
    return []


def _is_file(path: Path) -> bool:
    """Return whether it is a file itself, and still there: another process may have renamed it since it was listed."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def is_stale(path: Path) -> bool:
    """Return whether a file was made of other sources than today's, or is none that can be read."""
    stamp = _MAGIC + source_digest().encode()
    try:
        with path.open("rb") as file:
            return file.read(len(stamp)) != stamp
    except OSError:
        return True


class _Damaged(Exception):
    """The defect of a file."""


class Turn:
    """One process after another compiles a kernel of some file; those that come later find it.

    The turns are record locks on a file among temporary ones, a byte for each kernel. They end with the process. Where
    there are no such locks, or somebody does not come to an end, the work is done twice, and either file serves.

    Attributes
    ----------
    waited : bool
        Whether somebody else had the turn before.
    """

    _file: int | None = None

    def __init__(self, path: Path) -> None:
        self.waited = False
        self._at: int | None = int(hashlib.sha256(str(path).encode()).hexdigest()[:7], 16)
        try:
            file = self._opened()
            until = time.monotonic() + _PATIENCE
            while not self._taken(file) and time.monotonic() < until:
                self.waited = True
                time.sleep(0.01)
        except (AttributeError, ImportError, OSError):  # a system without such locks, or no place
            self._at = None

    @classmethod
    def _opened(cls) -> int:
        """Return the file of turns. It is closed only with the process, as closing a file releases its locks."""
        if Turn._file is None:
            name = Path(tempfile.gettempdir()) / f"numkv-turns-{os.getuid()}"
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            Turn._file = os.open(name, flags, 0o600)
        return Turn._file

    def _taken(self, file: int) -> bool:
        import fcntl  # which there is not everywhere

        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._at or 0)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def end(self) -> None:
        """Let others go on."""
        if self._at is not None and Turn._file is not None:
            import fcntl

            with contextlib.suppress(OSError):
                fcntl.lockf(Turn._file, fcntl.LOCK_UN, 1, self._at)


class KernelCache(_Cache):  # type: ignore[misc]
    """The cache that a Numba dispatcher asks for its machine code, for one build.

    Parameters
    ----------
    kernel : function
        The Python function of the kernel.
    identity : tuple of str
        The identity of the build: module and name of the factory, its arguments, its options.
    on_miss : function
        Called without arguments before the kernel is compiled.
    """

    def __init__(
        self, kernel: Callable[..., Any], identity: tuple[str, ...], on_miss: Callable[[], None]
    ) -> None:
        self._impl = CompileResultCacheImpl(kernel)
        self._folder = Path(self._impl.locator.get_cache_path())
        self._identity = identity
        self._on_miss = on_miss
        self._turn: Turn | None = None

    @property
    def cache_path(self) -> str:
        """The folder."""
        return str(self._folder)

    def enable(self) -> None:
        """Do nothing: it always is."""

    def disable(self) -> None:
        """Do nothing: it cannot be."""

    def flush(self) -> None:
        """Do nothing: files are replaced when they are out of date."""

    def path(self, signature: Any, codegen: Any) -> Path:
        """Return the file of a build.

        Parameters
        ----------
        signature : tuple of numba types
            Types of the kernel's arguments.
        codegen : object
            Numba's code generator, which knows the processor.
        """
        parts = (*self._identity, str(signature), str(codegen.magic_tuple()))
        return _named(self._folder, self._identity[1], parts)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled kernel, or None where there is none that can be used."""
        target_context.refresh()
        path = self.path(sig, target_context.codegen())
        unpack = functools.partial(_unpacked, self._impl, target_context)
        found = load(path, unpack)
        if found is None:
            self._turn = Turn(path)
            if self._turn.waited:
                found = load(path, unpack)
        if found is None:
            self._on_miss()
        return found

    def end(self) -> None:
        """Let other processes have the kernel: it is on disk, or will not be."""
        if self._turn is not None:
            self._turn.end()

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save a compiled kernel; a folder that cannot be written is reported once, and is no error."""
        if not self._impl.check_cachable(data):
            return
        save(self.path(sig, data.codegen), dumps(self._impl.reduce(data)))


def _unpacked(impl: Any, target_context: Any, content: bytes) -> Any:
    return impl.rebuild(target_context, pickle.loads(content))


def _named(folder: Path, name: str, parts: tuple[str, ...]) -> Path:
    """Return the file of a kernel made from `parts`, under these versions and settings."""
    parts = (
        *parts, sys.version, numba.__version__, np.__version__,
        *(f"{setting}={getattr(config, setting, None)}" for setting in _SETTINGS),
    )  # fmt: skip
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return folder / f"{name}-{key}{SUFFIX}"


def path_of(function: Callable[..., Any], name: str, parts: tuple[str, ...]) -> Path | None:
    """Return the file of a kernel that Numba's dispatcher does not load itself.

    Parameters
    ----------
    function : function
        The kernel in Python.
    name : str
        The beginning of the file's name.
    parts : tuple of str
        The kernel's identity, in addition to the sources and this Python.

    Returns
    -------
    Path or None
        None if there is no folder for files, which is reported once.
    """
    try:
        return _named(folder_of(function), name, parts)
    except RuntimeError as error:
        warn_no_cache(str(error))
        return None


def load(path: Path, unpack: Callable[[bytes], Any]) -> Any:
    """Load a file; None if no usable one exists. A damaged file is reported.

    It stays until a compiled kernel replaces it, as another process may already have replaced this name.

    Parameters
    ----------
    path : Path
        The file.
    unpack : function
        Makes the result from its content; an exception means that the file is damaged.
    """
    try:
        return unpack(_read(path))
    except FileNotFoundError:
        pass
    except OSError as error:
        warn_no_cache(str(error))
    except MemoryError:
        raise
    except Exception as error:  # whatever a damaged file leads to
        _warn(f"the compiled kernel {path} cannot be used ({error!r}); it is compiled again")
    return None


def save(path: Path, content: bytes) -> None:
    """Save a compiled kernel; a folder that cannot be written is reported once, and is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, content)
    except FileNotFoundError:
        pass  # somebody clears the folder at this moment: the next process compiles again
    except (OSError, NotSupported) as error:
        warn_no_cache(str(error))


def _read(path: Path) -> bytes:
    """The content of a file that is whole; ``FileNotFoundError`` where there is none of today's sources."""
    data = path.read_bytes()
    stamp = source_digest().encode()
    start = len(_MAGIC) + len(stamp)
    if not data.startswith(_MAGIC) or len(data) < start + _DIGEST:
        raise _Damaged("it does not begin as such files do")
    if data[len(_MAGIC) : start] != stamp:
        raise FileNotFoundError
    content = data[start + _DIGEST :]
    if _checksum(data[:start], path, content) != data[start : start + _DIGEST]:
        raise _Damaged("its checksum is wrong")
    return content


def _checksum(head: bytes, path: Path, content: bytes) -> bytes:
    """Return the checksum of a file's content and name: another kernel's file under this name is damage, too."""
    return hashlib.sha256(b"\0".join((head, path.name.encode(), content))).digest()


def _write(path: Path, content: bytes) -> None:
    """Put a file in its place, whole or not at all."""
    head = _MAGIC + source_digest().encode()
    checksum = _checksum(head, path, content)
    with replacing(path, durable=False, mode=0o600) as descriptor:
        write_all(descriptor, [memoryview(head + checksum + content)])

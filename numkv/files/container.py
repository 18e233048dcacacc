"""Files of tensors with checksums: written in one go, and read into existing memory.

A file is safetensors: eight bytes with the length of a JSON header, the header, and the tensors one after another. Its
metadata has the entry ``numkv``, also JSON, with the small values of the object and the CRC-32 of each tensor, and the
entry ``numkv_crc32``, the CRC-32 of that text.

A file is not trusted. Its header is bounded and checked before anything is allocated: tensors lie within the file, do
not overlap, and leave no gap.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import queue
import re
import stat
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from numkv.interrupts import uninterrupted
from numkv.replace import after, replacing, write_all
from numkv.snapshots.fields import Damaged, Fields, Foreign, expect
from numkv.snapshots.saved import Spec
from numkv.snapshots.snapshot import Tensor, bytes_of

# Most chunks that wait for their checksum; more would only use memory.
_WAITING = 4

_Job = tuple[str, Sequence[memoryview]]


class Checksums:
    """CRC-32 by name, of memory that is passed piece by piece; a context manager.

    Another thread computes it while the disk works: CRC-32 runs at several GB a second on one core, and zlib releases
    the GIL. It detects damage (flipped bits, mixed or broken transfers), not malice.

    Attributes
    ----------
    found : dict of str to int
        The checksum of each name, complete after the context ends.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self._jobs: queue.Queue[_Job | None] = queue.Queue(_WAITING)
        self._worker = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        return self

    @uninterrupted
    def __exit__(self, *exception: object) -> None:
        if self._worker.is_alive():
            self._jobs.put(None)
            self._worker.join()

    @uninterrupted  # an error within the queue may leave it locked
    def add(self, name: str, views: Sequence[memoryview]) -> None:
        """Continue the checksum of a name; the memory must not change before the context ends."""
        # An error: there are no more threads, or the interpreter is about to end.
        with contextlib.suppress(RuntimeError):
            if not self._worker.is_alive():
                self._worker.start()  # here, where it is certain that `__exit__` follows
        if self._worker.is_alive():
            self._jobs.put((name, views))
        else:
            self._update(name, views)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._update(*job)

    def _update(self, name: str, views: Sequence[memoryview]) -> None:
        found = self.found.get(name, 0)
        for view in views:
            found = zlib.crc32(view, found)
        self.found[name] = found


#: The only format that is read and written; earlier ones were never published.
FORMAT_VERSION = 3

# Most bytes of one read or write, and most arrays, of which systems accept 1,024.
_CHUNK = 8 << 20
_VIEWS = 1000
# Most bytes of a header, which is safetensors' own bound, and most levels of brackets.
_LONGEST_HEADER = 100_000_000
_DEEPEST = 32

#: NumPy's dtypes by their names in safetensors; floats of 16 and 8 bits are words.
DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": "<f8", "F32": "<f4", "U8": "u1", "I8": "i1", "U16": "<u2", "I32": "<i4", "I64": "<i8",
    }.items()
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


# -- writing


def write(path: str | os.PathLike[str], fields: dict[str, Any], tensors: list[Tensor]) -> None:
    """Write a file in place of another; see `replacing`.

    Parameters
    ----------
    path : path-like
        The file.
    fields : dict
        The small values of the header, for JSON.
    tensors : list of Tensor
        The tensors, in the order of the file.

    Raises
    ------
    OSError
        The system's error; the old file is untouched.
    """
    # Checksums stand first and are known last, so they have a fixed length.
    header = _header(fields, tensors, dict.fromkeys((tensor.name for tensor in tensors), 0))
    with replacing(path) as descriptor:
        write_all(descriptor, [memoryview(header)])
        with Checksums() as checksums:
            for tensor in tensors:
                written = 0
                for views in _chunks(tensor.pieces()):
                    checksums.add(tensor.name, views)
                    written += write_all(descriptor, views)
                assert written == tensor.spec.nbytes, tensor.name
        os.lseek(descriptor, 0, os.SEEK_SET)
        write_all(descriptor, [memoryview(_header(fields, tensors, checksums.found))])


def _header(fields: dict[str, Any], tensors: list[Tensor], checksums: dict[str, int]) -> bytes:
    """Return the first bytes of the file, with the checksums."""
    crc32 = {tensor.name: f"{checksums.get(tensor.name, 0):08x}" for tensor in tensors}
    text = json.dumps(
        {"version": FORMAT_VERSION} | fields | {"crc32": crc32},
        allow_nan=False,
        default=operator.index,
    )
    entries: dict[str, Any] = {
        "__metadata__": {"numkv": text, "numkv_crc32": f"{zlib.crc32(text.encode()):08x}"}
    }
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.spec.nbytes
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.spec.dtype], "shape": list(tensor.spec.shape), "data_offsets": [begin, end],
        }  # fmt: skip
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % 64)
    return len(header).to_bytes(8, "little") + header


def _chunks(pieces: Iterable[NDArray[Any]]) -> Iterator[list[memoryview]]:
    """Return the bytes of contiguous arrays, in lists of about as many bytes."""
    views: list[memoryview] = []
    size = 0
    for piece in pieces:
        if not piece.size:
            continue
        assert piece.flags.c_contiguous
        rest = bytes_of(piece)
        while len(rest):
            part, rest = rest[: _CHUNK - size], rest[_CHUNK - size :]
            views.append(part)
            size += len(part)
            if size == _CHUNK or len(views) == _VIEWS:
                yield views
                views, size = [], 0
    if views:
        yield views


# -- reading


class Entry(NamedTuple):
    """A tensor in a file, and its byte range after the header."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


class Header(NamedTuple):
    """The header of a file: where tensors begin, its metadata, and its tensors."""

    data: int
    metadata: dict[str, str]
    entries: dict[str, Entry]


def read_header(descriptor: int, dtypes: dict[str, np.dtype[Any]]) -> Header:
    """Read and check the header of a safetensors file.

    Parameters
    ----------
    descriptor : int
        The open file.
    dtypes : dict of str to dtype
        The permitted dtypes by their names in the file.

    Raises
    ------
    Damaged
        If it is no such file, or its header contradicts its size.
    """
    size = os.fstat(descriptor).st_size
    if size < 10:
        raise Foreign(f"expected a safetensors file, got {size} bytes")
    first = bytearray(8)
    read_at(descriptor, 0, [memoryview(first)])
    length = int.from_bytes(first, "little")
    if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
        raise Foreign(
            f"expected a safetensors file, got a header of {length} bytes in a file of {size}"
        )
    header = bytearray(length)
    read_at(descriptor, 8, [memoryview(header)])
    try:
        entries = _parse(header.decode())
    except UnicodeDecodeError as error:
        raise Foreign(
            f"expected a safetensors file, got a header that is not UTF-8 ({error})"
        ) from error
    except Damaged as error:
        raise Foreign(f"expected a safetensors file, got a damaged header ({error})") from error
    expect(isinstance(entries, dict), "expected an object as the header")
    metadata = entries.pop("__metadata__", {})
    plain = isinstance(metadata, dict) and all(isinstance(x, str) for x in metadata.values())
    expect(plain, "expected strings as metadata")
    found = {name: _entry(name, entry, dtypes) for name, entry in entries.items()}
    end = 0
    for name, entry in sorted(found.items(), key=lambda x: (x[1].begin, x[1].end)):
        expect(entry.begin == end, f"tensor {name!r} begins at {entry.begin}, and not at {end}")
        end = entry.end
    data = 8 + length
    expect(data + end == size, f"expected {data + end} bytes, got {size}")
    return Header(data, metadata, found)


def read_at(descriptor: int, offset: int, views: list[memoryview]) -> None:
    """Read bytes of a file from an offset on."""
    rest = views
    while rest:
        n = os.preadv(descriptor, rest, offset)
        expect(n > 0, f"the file ends at byte {offset}")
        rest, offset = after(rest, n), offset + n


class Container:
    """An open file: its checked header, and its tensors, which are checked as they are read.

    Attributes
    ----------
    fields : Fields
        The small values of the header.
    """

    def __init__(self, descriptor: int, checksums: Checksums) -> None:
        self._descriptor, self._checksums = descriptor, checksums
        self._data, metadata, self._entries = read_header(descriptor, DTYPES)
        if "numkv" not in metadata:
            raise Foreign(f"expected a file of numkv's format {FORMAT_VERSION}, got another one")
        text = metadata["numkv"]
        # Before any of the text is used, also its version.
        found = f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"
        expect(found == metadata.get("numkv_crc32"), "the checksum of the header is wrong")
        self.fields = Fields(_parse(text))
        version = self.fields.integer("version")
        if version != FORMAT_VERSION:
            raise Foreign(
                f"expected a file of numkv's format {FORMAT_VERSION}, got format {version}"
            )
        self._expected: dict[str, int] = {}
        crc32 = self.fields.part("crc32")
        for name in self._entries:
            found = crc32.text(name)
            expect(re.fullmatch("[0-9a-f]{8}", found) is not None, f"{found!r} is no checksum")
            self._expected[name] = int(found, 16)
        self._taken: set[str] = set()
        self._position = dict.fromkeys(self._entries, 0)

    def take(self, name: str, spec: Spec) -> None:
        """Require a tensor of this dtype and shape."""
        expect(name in self._entries, f"there is no tensor {name!r}")
        found = self._entries[name]
        expect(
            (found.dtype, found.shape) == spec,
            f"expected {spec.dtype} {spec.shape} as tensor {name!r}, got {found.dtype} {found.shape}",
        )
        self._taken.add(name)

    def all_taken(self) -> None:
        """Require that every tensor was taken."""
        rest = sorted(self._entries.keys() - self._taken)
        expect(not rest, f"there are {len(rest)} unexpected tensors, {rest[:1]} first")

    def fill(self, name: str, pieces: Iterable[NDArray[Any]]) -> None:
        """Read the next bytes of a tensor into contiguous arrays."""
        entry = self._entries[name]
        for views in _chunks(pieces):
            at = entry.begin + self._position[name]
            size = sum(map(len, views))
            assert at + size <= entry.end, name
            read_at(self._descriptor, self._data + at, views)
            self._position[name] += size
            self._checksums.add(name, views)

    def array(self, name: str) -> NDArray[Any]:
        """Read a small tensor, and compare its checksum at once."""
        entry = self._entries[name]
        found = np.empty(entry.shape, entry.dtype)
        if found.size:
            view = bytes_of(found)
            read_at(self._descriptor, self._data + entry.begin, [view])
            self._compare(name, zlib.crc32(view))
        self._position[name] = entry.end - entry.begin
        self._expected.pop(name, None)
        return found

    def _compare(self, name: str, found: int) -> None:
        expect(found == self._expected[name], f"the checksum of tensor {name!r} is wrong")

    def verify(self) -> None:
        """Compare all checksums, and require that every tensor was read."""
        for name, entry in self._entries.items():
            assert self._position[name] == entry.end - entry.begin, name
        self._checksums.__exit__()
        for name in self._expected:
            self._compare(name, self._checksums.found.get(name, 0))


@contextlib.contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[Container]:
    """Open a file and check its header.

    Raises
    ------
    Damaged
        If it is no such file, or damaged.
    OSError
        The system's error.
    """
    # Opening a pipe without a writer would block.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Foreign("expected a safetensors file, got a folder, a device or a pipe")
        with Checksums() as checksums:
            yield Container(descriptor, checksums)
    finally:
        os.close(descriptor)


# The closing quote is optional, so that the search is linear for any text.
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_BRACKETS = re.compile(r"[\[\]{}]")


def _parse(text: str) -> Any:
    """Parse JSON with bounded depth, without NaN and without duplicate names."""
    depth = 0
    for bracket in _BRACKETS.findall(_STRINGS.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        expect(depth <= _DEEPEST, f"brackets are more than {_DEEPEST} deep")
    try:
        return json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_constant)
    except ValueError as error:
        raise Damaged(f"no JSON: {error}") from error


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    expect(len(found) == len(pairs), "a name comes twice")
    return found


def _no_constant(name: str) -> Any:
    raise Damaged(f"{name} is no JSON")


def _entry(name: str, given: Any, dtypes: dict[str, np.dtype[Any]]) -> Entry:
    fields = Fields(given, f"tensor {name!r}")
    dtype = dtypes[fields.text("dtype", list(dtypes))]
    shape = tuple(fields.integers("shape", most=2**62))
    begin, end = fields.integers("data_offsets", 2, most=2**62)
    expect(len(shape) <= 8, f"tensor {name!r} has {len(shape)} axes")
    size = dtype.itemsize * math.prod(shape)
    expect(end - begin == size, f"tensor {name!r} has {end - begin} bytes, and not {size}")
    return Entry(dtype, shape, begin, end)

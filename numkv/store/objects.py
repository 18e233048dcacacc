"""The format of an object: a header that describes a block, then its bytes in all layers.

Byte format, version 1
----------------------
All integers are little-endian. The header has a multiple of 64 bytes, and the content follows it:

======  =============================================================================================
offset  content
======  =============================================================================================
0       ``"numkvblk"``
8       version of the format u32, bytes of the header u32
16      bytes of the content u64
24      bytes of the identity u32, token ids u32
32      name of the block, 32 bytes
64      CRC-32 of the content u32, CRC-32 of the header u32, as if this one were 0
72      the identity (JSON: see `Section.of`), the token ids int32, zeros
======  =============================================================================================

The content of a block has the layers of its group in turn. Each has the stored words of K and of V, and the scales of
rows of K and of V if the kind has them. The content of states has the arrays of each layer with states, in turn.
The name of states differs only in its first 8 bytes from that of the block before them. Names of blocks of all groups
but the first differ from the first group's in the same way.

CRC-32 detects damage: flipped bits and missing parts. It does not detect malice.
"""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

from numkv.blocks.prefix import FORMAT_VERSION as NAMES_VERSION

FORMAT_VERSION = 1
_MAGIC = b"numkvblk"
_FIXED = struct.Struct("<8sIIQII32sII")
_ALIGNMENT = 64
#: The end of a path at which an object lies (`Section.key`), or a file that is being written to become one.
OBJECT = re.compile(r"(?:^|(?<=/))[0-9a-f]{32}/[0-9a-f]{2}/(?:[0-9a-f]{62}|\..*\.partial)$")


class DamagedObject(Exception):
    """An object differs from its written bytes."""


class OtherSize(DamagedObject):
    """An object has more or fewer bytes than requested."""


class ForeignObject(Exception):
    """An object is valid, but its identity differs from that of its place."""


class Layout:
    """The common layout of all objects of an identity.

    Parameters
    ----------
    identity : bytes
        Everything that decides the bytes of blocks in addition to their tokens; see `Section.of`.
    block_size : int
        Tokens in a block.
    content : int
        Bytes of a block in all its layers.

    Attributes
    ----------
    header : int
        Bytes of the header.
    nbytes : int
        Bytes of an object.
    """

    def __init__(self, identity: bytes, block_size: int, content: int) -> None:
        self.identity, self.block_size, self.content = identity, block_size, content
        end = _FIXED.size + len(identity) + 4 * block_size
        self.header = -(-end // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = self.header + content
        self._tokens = slice(end - 4 * block_size, end)

    def make_header(self, name: bytes, tokens: bytes, crc: int) -> bytes:
        """Return the header of a block.

        Parameters
        ----------
        name : bytes
            Name of the block, 32 bytes.
        tokens : bytes
            Its token ids, little-endian int32.
        crc : int
            CRC-32 of its content.
        """
        made = self._header(name, tokens, crc, 0)
        return self._header(name, tokens, crc, zlib.crc32(made))

    def _header(self, name: bytes, tokens: bytes, crc: int, own: int) -> bytes:
        fixed = _FIXED.pack(
            _MAGIC, FORMAT_VERSION, self.header, self.content, len(self.identity), self.block_size,
            name, crc, own,
        )  # fmt: skip
        return (fixed + self.identity + tokens).ljust(self.header, b"\0")

    def check_header(self, header: bytes | bytearray, name: bytes, tokens: bytes) -> int:
        """Validate the header of a block, and return the CRC-32 that the content must have.

        Raises
        ------
        DamagedObject
            If the header is damaged, or belongs to another block.
        ForeignObject
            If the header is valid, but of another identity.
        """
        *_, its_name, crc, found = _FIXED.unpack_from(header)
        if header == self.make_header(name, tokens, crc):
            return int(crc)
        own = bytearray(header)
        own[68:72] = bytes(4)
        if zlib.crc32(own) != found:
            raise DamagedObject("the checksum of the header is wrong")
        if self.make_header(its_name, bytes(own[self._tokens]), crc) != header:
            raise ForeignObject("it is of another mark, RoPE, kind, size or version")
        raise DamagedObject("it is another block, or has other tokens")


def crc32_of(pieces: Iterable[Any]) -> int:
    """Return the CRC-32 of contiguous buffers, one after another."""
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc


class Section(NamedTuple):
    """The objects of one identity."""

    folder: str
    layout: Layout

    @classmethod
    def of(
        cls, mark: Any, rope: Any, fields: dict[str, Any], block_size: int, content: int
    ) -> Section:
        """Return the section of blocks of `content` bytes; the identity is JSON, equal for equal facts.

        Parameters
        ----------
        mark, rope : str, dict or None
            The user's descriptions of the model and of its RoPE.
        fields : dict
            Sizes, kinds, windows and scales of the cache, for JSON.
        block_size, content : int
            See `Layout`.
        """
        facts = {
            "format": FORMAT_VERSION,
            "names": NAMES_VERSION,
            "bytes": sys.byteorder,
            "mark": mark,
            "rope": rope,
            **fields,
        }
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
        identity = text.encode()
        return cls(sha256(identity).hexdigest()[:32], Layout(identity, block_size, content))

    def key(self, name: bytes) -> str:
        """Return where the object of a name lies."""
        digits = name.hex()
        return f"{self.folder}/{digits[:2]}/{digits[2:]}"


class Readings(Protocol):
    """Blocks to read into memory."""

    names: Sequence[bytes]

    def tokens(self, i: int) -> bytes:
        """Return the token ids of a block."""

    def content(self, i: int) -> list[Any]:
        """Return buffers for a block's content."""

    def sound(self, content: Sequence[Any]) -> bool:
        """Return whether content that was read is valid for a pool."""


class Objects:
    """The objects of blocks to read; see `numkv.store.folder.Jobs`."""

    def __init__(self, section: Section, of: Readings) -> None:
        self._layout, self._of = section.layout, of
        self.keys: Sequence[str] = [section.key(name) for name in of.names]
        self.nbytes = section.layout.nbytes

    def views(self, i: int) -> list[Any]:
        """Return memory for the header, then that of the content."""
        return [bytearray(self._layout.header), *self._of.content(i)]

    def check(self, i: int, views: Sequence[Any]) -> None:
        """Validate the header and the checksum of an object that was read."""
        header, *content = views
        crc = self._layout.check_header(header, self._of.names[i], self._of.tokens(i))
        if crc32_of(content) != crc:
            raise DamagedObject("the checksum of the content is wrong")
        if not self._of.sound(content):
            raise DamagedObject("it has NaN, infinity or negative numbers as scales")

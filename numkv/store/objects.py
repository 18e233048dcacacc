"""The format of an object: a header that says what a block is, then its bytes in all layers.

Byte format, version 1
----------------------
All integers are little-endian. The header has a multiple of 64 bytes, and the content follows it:

======  =============================================================================================
offset  what
======  =============================================================================================
0       ``"numkvblk"``
8       version of the format u32, bytes of the header u32
16      bytes of the content u64
24      bytes of the identity u32, token ids u32
32      name of the block, 32 bytes
64      CRC-32 of the content u32, CRC-32 of the header u32, as if this one were 0
72      the identity (JSON: see `numkv.store.places`), the token ids int32, zeros
======  =============================================================================================

The content of a block is, for each layer of its group in turn, the words of K and of V as they are stored, and the
scales of rows of K and of V where the kind has such; that of states the arrays of each layer that keeps some, in turn.
States have the name of the block that they come after but for its first 8 bytes, as have blocks of all groups but the
first.

CRC-32 finds damage: flipped bits, parts that are missing. It does not find malice.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Any

FORMAT_VERSION = 1
_MAGIC = b"numkvblk"
_FIXED = struct.Struct("<8sIIQII32sII")
_ALIGNMENT = 64


class DamagedObject(Exception):
    """An object is not as it was written."""


class OtherSize(DamagedObject):
    """An object has more or fewer bytes than were asked for."""


class ForeignObject(Exception):
    """An object is whole, but of another identity than that in whose place it lies."""


class Layout:
    """What all objects of an identity have in common.

    Parameters
    ----------
    identity : bytes
        From `identity_text`.
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
        """The header of a block.

        Parameters
        ----------
        name : bytes
            32 of them.
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
        """The CRC-32 that the content must have, if the header is that of a block.

        Raises
        ------
        DamagedObject
            If it is not as it was written, or is that of another block.
        ForeignObject
            If it is whole, and of blocks of another identity.
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
    """CRC-32 of contiguous buffers, one after another."""
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return crc

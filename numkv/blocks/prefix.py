"""Hashes for cached prefixes: a chain of sha256 digests over token ids, equal in every process and on every machine.

The hash of a full block is a digest of its own token ids and of its parent's digest. So it identifies the whole prefix
up to the block's end. A partial last block has no hash. Other inputs that decide K and V are tagged extra keys: an
adapter, a salt that separates tenants, the content behind placeholder tokens.

Byte format, version 1
----------------------
All integers are little-endian; ``||`` joins bytes. A *link* is 32 bytes: the parent's digest, or 32 zero bytes.

- The root of a chain: ``sha256(link || "K" || "numkv" || version u32 || block_size u32 || keys)``.
- ``keys``: for each extra key, in the order of the tags' UTF-8 bytes, ``len(tag) u32 || tag || type || len(value) u32
  || value``. The type is ``"i"``, ``"s"`` or ``"b"``: the value is the decimal digits of an integer, a string in UTF-8,
  or bytes. Lengths and types make any two sets of keys differ.
- A block: ``sha256(link || "T" || its block_size token ids as int32)``; the first block's link is the root.
- Extra keys in the middle of a chain (an image that begins at a block) are a root whose link is the digest before it.

"K" and "T" make the two kinds of message differ whatever the token ids are. Another format gets another version.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.checks import host_array
from numkv.errors import DimensionMismatch, UnsupportedDType
from numkv.numbers import check_size

#: Version of the byte format; it is part of every root.
FORMAT_VERSION = 1

#: Bytes in a digest.
DIGEST_SIZE = 32

_NO_PARENT = bytes(DIGEST_SIZE)

#: Bits of the largest integer, and bytes of the longest string, that may be an extra key.
_MOST_BITS = 4096
_MOST_BYTES = 2**32 - 1
#: Tokens in a block: names hold 32 bits of the number.
_MOST_TOKENS = 2**32 - 1


def token_ids(tokens: Any, name: str = "tokens") -> NDArray[np.int32]:
    """Token ids as int32, checked.

    Parameters
    ----------
    tokens : array-like of int
        Ids in ``[0, 2**31)``, of any integer dtype and shape.
    name : str
        What errors call it.

    Returns
    -------
    int32 array
        C-contiguous; `tokens` itself where it is one already.

    Raises
    ------
    UnsupportedDType
        They are not integers.
    ValueError
        An id is out of range.
    """
    x = host_array(name, tokens)
    if x.dtype.kind not in "iu":
        raise UnsupportedDType(f"`{name}`: expected integers, got {x.dtype}; pass token ids")
    if x.size:
        least = int(x.min())
        most = 0 if x.dtype == np.int32 else int(x.max())
        if least < 0 or most >= 2**31:
            wrong = least if least < 0 else most
            raise ValueError(f"`{name}`: expected ids in [0, 2**31), got {wrong}")
    return np.require(x, np.int32, ["C", "A"])


def prompt_ids(tokens: Any) -> NDArray[np.int32]:
    """Token ids of one prompt, checked; see `token_ids`."""
    ids = token_ids(tokens)
    if ids.ndim != 1:
        raise DimensionMismatch(
            f"`tokens`: expected int32 (num_tokens,), got {ids.dtype} {ids.shape}; pass one prompt",
            expected=("num_tokens",),
            actual=ids.shape,
        )
    return ids


def plain_extra(
    extra: Mapping[str, int | str | bytes] | None,
) -> dict[str, int | str | bytes] | None:
    """Extra keys as a dictionary of plain values, checked, with no reference to the caller's objects.

    Parameters
    ----------
    extra : mapping of str to int, str or bytes, or None
        The argument.

    Raises
    ------
    TypeError
        It is no mapping, a key is not a string, or its value no int, str or bytes.
    ValueError
        A value is too long, or a string is no Unicode text.
    """
    if extra is None:
        return None
    if not isinstance(extra, Mapping):
        raise TypeError(
            f"`extra`: expected a mapping or None, got {type(extra).__name__}; pass "
            'extra keys by tag, such as {"adapter": 7}'
        )
    plain: dict[str, int | str | bytes] = {}
    for tag, value in list(extra.items()):
        if not isinstance(tag, str):
            raise TypeError(f"`extra`: expected strings as tags, got {tag!r}")
        plain[str(tag)] = _plain_value(tag, value)
        _utf8(tag)
    return plain


def _plain_value(tag: str, value: Any) -> int | str | bytes:
    if isinstance(value, str):
        _utf8(value)
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        packed = bytes(value)
        if len(packed) > _MOST_BYTES:
            raise ValueError(
                f"`extra`: expected less than 4 GiB under {tag!r}, got {len(packed)} bytes; pass a digest"
            )
        return packed
    try:
        if isinstance(value, (bool, np.bool_)):  # True would be the key 1
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"`extra`: expected int, str or bytes under {tag!r}, got {type(value).__name__}"
        ) from None
    if number.bit_length() > _MOST_BITS:
        raise ValueError(
            f"`extra`: expected an integer of at most {_MOST_BITS} bits under {tag!r}, got one of "
            f"{number.bit_length()}; pass its bytes or a digest"
        )
    return int(number)


def _utf8(text: str) -> bytes:
    try:
        packed = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"`extra`: expected Unicode text, got {text!r}, which UTF-8 cannot hold ({error.reason})"
        ) from None
    if len(packed) > _MOST_BYTES:
        raise ValueError(
            f"`extra`: expected texts below 4 GiB, got {len(packed)} bytes; pass a digest"
        )
    return packed


def _packed(extra: Mapping[str, int | str | bytes] | None) -> bytes:
    """Extra keys in the byte format."""
    parts = []
    for tag, value in (plain_extra(extra) or {}).items():
        if isinstance(value, str):
            kind, packed = b"s", value.encode()
        elif isinstance(value, bytes):
            kind, packed = b"b", value
        else:
            kind, packed = b"i", b"%d" % value
        name = tag.encode()
        size = len(name).to_bytes(4, "little"), len(packed).to_bytes(4, "little")
        parts.append((name, b"".join((size[0], name, kind, size[1], packed))))
    return b"".join(packed for _, packed in sorted(parts))


def _link(parent: Any) -> bytes:
    """A parent digest as bytes."""
    if parent is None:
        return _NO_PARENT
    if isinstance(parent, np.ndarray):
        if parent.dtype != np.uint8 or parent.shape != (DIGEST_SIZE,):
            raise DimensionMismatch(
                f"`parent`: expected uint8 ({DIGEST_SIZE},), got {parent.dtype} {parent.shape}; "
                "pass one row of block_digests",
                expected=(DIGEST_SIZE,),
                actual=parent.shape,
            )
        return parent.tobytes()
    if not isinstance(parent, bytes):
        raise TypeError(f"`parent`: expected bytes or a uint8 array, got {type(parent).__name__}")
    if len(parent) != DIGEST_SIZE:
        raise DimensionMismatch(
            f"`parent`: expected {DIGEST_SIZE} bytes, got {len(parent)}; pass a sha256 digest",
            expected=DIGEST_SIZE,
            actual=len(parent),
        )
    return parent


def root_digest(
    block_size: int,
    extra: Mapping[str, int | str | bytes] | None = None,
    *,
    parent: bytes | NDArray[np.uint8] | None = None,
) -> bytes:
    """Return the digest that a chain of blocks begins with: of the format, the block size and extra keys.

    Parameters
    ----------
    block_size : int
        Tokens in a block.
    extra : mapping of str to int, str or bytes, optional
        Extra keys by tag, such as ``{"adapter": 7, "salt": b"tenant a"}``; their order does not matter.
    parent : bytes or uint8 array (32,), optional
        The digest that the extra keys come after; by default they come first.

    Returns
    -------
    bytes
        32 of them.
    """
    block_size = check_size("block_size", block_size, 1, _MOST_TOKENS)
    header = FORMAT_VERSION.to_bytes(4, "little") + block_size.to_bytes(4, "little")
    return sha256(_link(parent) + b"Knumkv" + header + _packed(extra)).digest()


def block_digests(
    tokens: Any,
    block_size: int,
    extra: Mapping[str, int | str | bytes] | None = None,
    *,
    parent: bytes | NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """Names of the full blocks of a prompt.

    Parameters
    ----------
    tokens : array-like of int (num_tokens,)
        Token ids in ``[0, 2**31)``.
    block_size : int
        Tokens in a block.
    extra : mapping of str to int, str or bytes, optional
        Extra keys by tag; prompts with different ones share nothing. With `parent` they apply from here on.
    parent : bytes or uint8 array (32,), optional
        Digest of the block before `tokens`, to go on with a chain; by default `tokens` is the beginning.

    Returns
    -------
    uint8 array (num_tokens // block_size, 32)
        One digest per full block.

    Raises
    ------
    UnsupportedDType, ValueError
        See `token_ids`.
    DimensionMismatch
        `tokens` is not one-dimensional, `block_size` is not positive or `parent` is not 32 bytes.
    TypeError, ValueError
        An extra key is not a string, its value no int, str or bytes, or one of them is too long.

    Examples
    --------
    >>> from numkv.blocks import block_digests
    >>> block_digests(range(40), 16).shape
    (2, 32)
    """
    block_size = check_size("block_size", block_size, 1, _MOST_TOKENS)
    ids, extra = prompt_ids(tokens), plain_extra(extra)
    if parent is None or extra:
        link = root_digest(block_size, extra, parent=parent)
    else:
        link = _link(parent)
    num_blocks = len(ids) // block_size
    if num_blocks == 0:
        return np.empty((0, DIGEST_SIZE), np.uint8)
    width = 4 * block_size
    messages = np.empty((num_blocks, 1 + width), np.uint8)
    messages[:, 0] = ord("T")
    whole = ids[: num_blocks * block_size].astype("<i4", copy=False)
    messages[:, 1:] = whole.view(np.uint8).reshape(num_blocks, width)
    # One bytes object per block, cut up by NumPy: the loop then has nothing to do but hash.
    digests = []
    for message in messages.reshape(-1).view(f"V{1 + width}").tolist():
        link = sha256(link + message).digest()
        digests.append(link)
    joined = np.frombuffer(bytearray().join(digests), np.uint8)
    return joined.reshape(num_blocks, DIGEST_SIZE)

"""Compressed heads in files: `numkv.HeadCompressor`, `numkv.MultiHeadCompressor` and `numkv.PagedCompressor`.

Private names of these classes that are used here: ``_stored``, ``_allocate``, ``_target`` and ``_quantiser``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.compression.blocks import BLOCK_SIZE, Sequence
from numkv.compression.compressor import HeadCompressor, MultiHeadCompressor
from numkv.compression.config import CompressorConfig
from numkv.compression.paged import PagedCompressor
from numkv.errors import NumkvError
from numkv.files.container import Container, bytes_of
from numkv.files.plan import Plan, Saved, tensor_of
from numkv.files.rows import HostBuffers
from numkv.rows.codes import packed_bytes
from numkv.snapshots.fields import Fields, claims, expect
from numkv.snapshots.snapshot import Options, Spec

CLASSES: dict[str, Any] = {
    "HeadCompressor": HeadCompressor,
    "MultiHeadCompressor": MultiHeadCompressor,
    "PagedCompressor": PagedCompressor,
}

_PARTS = ("codes", "scales", "signs", "residuals")
# Elements of a head: the random rotation of larger ones would take minutes to make.
_LARGEST_DIM = 4096


def describe(cache: Any, prefix: str) -> Saved:
    """What a compressor is in a file."""
    config, heads, stored = cache.config, int(cache._quantiser.rotation.shape[0]), cache._stored
    paged = isinstance(cache, PagedCompressor)
    select, more = _of_blocks(stored) if paged else (slice(stored.begin, stored.end), {})
    tokens = more["num_blocks"] * BLOCK_SIZE if paged else len(cache)
    fields = {
        "layout": "codes",
        "num_heads": heads,
        "num_q_heads": getattr(cache, "num_q_heads", 1),
        "head_dim": config.head_dim,
        "bits": config.bits,
        "projections": config.projections,
        "seed": str(config.seed),
        "tokens": tokens,
        "quantiser": _fingerprint(cache),
        **more,
    }
    if config.v_bits is not None:  # what earlier versions do not know
        fields["v_bits"] = config.v_bits
    tensors = []
    for side, encoded in (("k", stored.keys), ("v", stored.values)):
        specs = _specs(side, config, heads, tokens)
        for part, x in zip(_PARTS, encoded.arrays(), strict=True):
            name = f"{side}_{part}"
            if name in specs:
                pieces = _pieces(cache._target, x, select, part)
                tensors.append(tensor_of(prefix + name, *specs[name], pieces))
    return Saved(fields, tensors, [(cache, False)])


def _of_blocks(stored: Any) -> tuple[Any, dict[str, Any]]:
    """Which tokens of the buffers a file gets: whole blocks, each once, and -1 for those of no sequence; its fields."""
    tables = [found.blocks for found in stored.sequences.values()]
    used = np.unique(np.concatenate(tables)) if tables else np.empty(0, np.int64)
    slots = (used[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)
    own = [found.slots() for found in stored.sequences.values()]
    if own:
        slots[~np.isin(slots, np.concatenate(own))] = -1
    sequences = [
        {
            "number": number,
            "length": found.length,
            "blocks": np.searchsorted(used, found.blocks).tolist(),
        }
        for number, found in stored.sequences.items()
    ]
    return slots, {
        "num_blocks": len(used),
        "following": stored.following,
        "sequences": sequences,
    }


def _pieces(target: Any, x: Any, select: Any, part: str) -> Any:
    def of_heads() -> Iterator[NDArray[Any]]:
        for head in target.to_host(x):
            piece = head[select]
            if not isinstance(select, slice):
                piece[select < 0] = 0
            if part in ("scales", "residuals") and not np.isfinite(piece).all():
                raise NumkvError(
                    f"`cache`: expected finite {part}, got NaN or infinity in vectors that were pushed with "
                    "check_finite=False; drop these tokens"
                )
            yield piece

    return of_heads


def _specs(side: str, config: CompressorConfig, heads: int, tokens: int) -> dict[str, Spec]:
    bytes_, floats = np.dtype(np.uint8), np.dtype(np.float32)
    shape, bits = (heads, tokens), (config.kind if side == "k" else config.v_kind).bits
    found = {
        f"{side}_codes": Spec(bytes_, (*shape, packed_bytes(config.head_dim, bits))),
        f"{side}_scales": Spec(floats, shape),
    }
    if side == "k" and config.projections:
        found["k_signs"] = Spec(bytes_, (*shape, packed_bytes(config.projections, 1)))
        found["k_residuals"] = Spec(floats, shape)
    return found


def _fingerprint(cache: Any) -> str:
    """The CRC-32 of the codebooks and the rotations, without which codes mean nothing."""
    quantiser, found = cache._quantiser, 0
    parts = [quantiser.levels, quantiser.rotation, quantiser.sketch]
    if cache.config.v_bits is not None:
        parts.append(quantiser.v_levels)
    for x in parts:
        if x.size:
            found = zlib.crc32(bytes_of(np.ascontiguousarray(cache._target.to_host(x))), found)
    return f"{found:08x}"


def plan(name: str, fields: Fields, prefix: str, file: Container, options: Options) -> Plan:
    """Check what the header says of a compressor, and how to make it."""
    fields.text("layout", ["codes"])
    heads = fields.integer("num_heads", 1)
    q_heads = fields.integer("num_q_heads", 1)
    expect(q_heads % heads == 0, f"{q_heads} q heads are no multiple of {heads} heads")
    expect(name != "HeadCompressor" or (heads, q_heads) == (1, 1), f"{heads} heads of one")
    dim, tokens = fields.integer("head_dim", 1, _LARGEST_DIM), fields.integer("tokens")
    projections = fields.optional("projections", 1, 16 * _LARGEST_DIM)
    seed = fields.text("seed")
    expect(seed.isascii() and seed.isdigit() and len(seed) <= 80, f"{seed!r} is no seed")
    bits = fields.integer("bits", 1, 16)
    v_bits = fields.integer("v_bits", 1, 16) if fields.has("v_bits") else None
    expect(v_bits != bits, f"{bits} bits of values, said apart from those of keys")
    with claims("the config"):
        config = CompressorConfig(dim, bits, projections, int(seed), v_bits)
    sequences, following = _sequences(fields, tokens) if name == "PagedCompressor" else ({}, 0)
    fingerprint = fields.text("quantiser")
    names = []
    for side in ("k", "v"):
        specs = _specs(side, config, heads, tokens)
        names += list(specs)
        for of_side, spec in specs.items():
            file.take(prefix + of_side, spec)

    def build(file: Container) -> Any:
        target = options.place.name
        cache: Any
        if name == "HeadCompressor":
            cache = HeadCompressor(config, target=target)
        else:
            cache = CLASSES[name](heads, config, num_q_heads=q_heads, target=target)
        found = _fingerprint(cache)
        expect(
            found == fingerprint,
            f"codes of another codebook or rotation, {fingerprint}, than {found}",
        )
        keys, values = cache._allocate(tokens)
        host = HostBuffers(cache._target)
        for side, encoded in (("k", keys), ("v", values)):
            for part, x in zip(_PARTS, encoded.arrays(), strict=True):
                if f"{side}_{part}" in names:
                    to = host.of(x)
                    file.fill(f"{prefix}{side}_{part}", list(to))
                    if part in ("scales", "residuals"):
                        plain = bool((np.isfinite(to) & (to >= 0)).all())
                        expect(plain, f"'{side}_{part}' holds NaN, infinity or a negative number")
        host.upload()
        cache._stored = cache._stored._replace(keys=keys, values=values)
        if name == "PagedCompressor":
            cache._stored = cache._stored._replace(
                sequences=sequences, following=following, shared=True
            )
        else:
            cache._stored = cache._stored._replace(end=tokens)
        return cache

    # The quantiser: matrices in float32 there and back, and while they are made in float64.
    random = (
        heads * dim * (2 * dim + (projections or 0)) * 12
        + dim * dim * 16
        + (1 << max(bits, v_bits or 0)) * 32
    )
    codes = sum(file.spec(prefix + x).nbytes for x in names)
    return Plan(random + codes, build)


def _sequences(fields: Fields, tokens: int) -> tuple[dict[int, Sequence], int]:
    """The sequences of a `PagedCompressor`, and the number of the next one."""
    num_blocks, following = fields.integer("num_blocks"), fields.integer("following")
    expect(tokens == num_blocks * BLOCK_SIZE, f"{tokens} tokens of {num_blocks} blocks")
    found: dict[int, Sequence] = {}
    places: dict[int, int] = {}
    for part in fields.parts("sequences"):
        number, length = part.integer("number"), part.integer("length", 0, tokens)
        blocks = part.integers("blocks", -(-length // BLOCK_SIZE), 0, num_blocks - 1)
        expect(number < following and number not in found, f"sequence {number}, or two of them")
        apart = len(set(blocks)) == len(blocks)
        alike = all(places.setdefault(x, i) == i for i, x in enumerate(blocks))
        expect(
            apart and alike,
            f"blocks {blocks[:8]} of sequence {number}, which others have elsewhere",
        )
        found[number] = Sequence(np.array(blocks, np.int64), length)
    return found, following

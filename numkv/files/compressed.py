"""Compressed heads in files: `numkv.HeadCompressor` and `numkv.MultiHeadCompressor`.

Private names of these classes that are used here: ``_keys``, ``_values``, ``_allocate``, ``_begin``, ``_end``,
``_target`` and ``_quantiser``.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.compression.compressor import HeadCompressor, MultiHeadCompressor
from numkv.compression.config import CompressorConfig
from numkv.errors import NumkvError
from numkv.files.container import Container, Spec, Tensor, bytes_of
from numkv.files.fields import Fields, claims, expect
from numkv.files.plan import Options, Plan, Saved
from numkv.files.rows import HostBuffers
from numkv.rows.codes import packed_bytes

__all__ = ["CLASSES", "describe", "plan"]

CLASSES = {"HeadCompressor": HeadCompressor, "MultiHeadCompressor": MultiHeadCompressor}

_PARTS = ("codes", "scales", "signs", "residuals")
# Elements of a head: the random rotation of larger ones would take minutes to make.
_LARGEST_DIM = 4096


def describe(cache: Any, prefix: str) -> Saved:
    """What a compressor is in a file."""
    config, heads = cache.config, int(cache._quantiser.rotation.shape[0])
    fields = {
        "layout": "codes",
        "num_heads": heads,
        "num_q_heads": getattr(cache, "num_q_heads", 1),
        "head_dim": config.head_dim,
        "bits": config.bits,
        "projections": config.projections,
        "seed": str(config.seed),
        "tokens": len(cache),
        "quantiser": _fingerprint(cache),
    }
    if config.v_bits is not None:  # what earlier versions do not know
        fields["v_bits"] = config.v_bits
    begin, end = cache._begin, cache._end
    tensors = []
    for side, encoded in (("k", cache._keys), ("v", cache._values)):
        specs = _specs(side, config, heads, len(cache))
        for part, x in zip(_PARTS, encoded.arrays(), strict=True):
            name = f"{side}_{part}"
            if name in specs:
                pieces = _pieces(cache._target, x, begin, end, part)
                tensors.append(Tensor(prefix + name, *specs[name], pieces))
    return Saved(fields, tensors, [(cache, False)])


def _pieces(target: Any, x: Any, begin: int, end: int, part: str) -> Any:
    def of_heads() -> Iterator[NDArray[Any]]:
        for head in target.to_host(x):
            piece = head[begin:end]
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
    expect(name == "MultiHeadCompressor" or (heads, q_heads) == (1, 1), f"{heads} heads of one")
    dim, tokens = fields.integer("head_dim", 1, _LARGEST_DIM), fields.integer("tokens")
    projections = fields.optional("projections", 1, 16 * _LARGEST_DIM)
    seed = fields.text("seed")
    expect(seed.isascii() and seed.isdigit() and len(seed) <= 80, f"{seed!r} is no seed")
    bits = fields.integer("bits", 1, 16)
    v_bits = fields.integer("v_bits", 1, 16) if fields.has("v_bits") else None
    expect(v_bits != bits, f"{bits} bits of values, said apart from those of keys")
    with claims("the config"):
        config = CompressorConfig(dim, bits, projections, int(seed), v_bits)
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
            cache = MultiHeadCompressor(heads, config, num_q_heads=q_heads, target=target)
        found = _fingerprint(cache)
        expect(
            found == fingerprint,
            f"codes of another codebook or rotation, {fingerprint}, than {found}",
        )
        cache._keys, cache._values = cache._allocate(tokens)
        host = HostBuffers(cache._target)
        for side, encoded in (("k", cache._keys), ("v", cache._values)):
            for part, x in zip(_PARTS, encoded.arrays(), strict=True):
                if f"{side}_{part}" in names:
                    to = host.of(x)
                    file.fill(f"{prefix}{side}_{part}", list(to))
                    if part in ("scales", "residuals"):
                        plain = bool((np.isfinite(to) & (to >= 0)).all())
                        expect(plain, f"'{side}_{part}' holds NaN, infinity or a negative number")
        host.upload()
        cache._end = tokens
        return cache

    # The quantiser: matrices in float32 there and back, and while they are made in float64.
    random = (
        heads * dim * (2 * dim + (projections or 0)) * 12
        + dim * dim * 16
        + (1 << max(bits, v_bits or 0)) * 32
    )
    codes = sum(file.spec(prefix + x).nbytes for x in names)
    return Plan(random + codes, build)

"""Snapshots of compressors: the small values that compressors are rebuilt from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from numkv.compression.blocks import BLOCK_SIZE, Sequence
from numkv.compression.config import CompressorConfig
from numkv.compression.encoded import Encoded
from numkv.snapshots.fields import claims, expect
from numkv.snapshots.saved import Saved, Spec, integer, integers, optional, parts, text

# Elements of a head: the random rotation of larger ones would take minutes to make.
_LARGEST_DIM = 4096


@dataclass(kw_only=True)
class SavedCodes(Saved):
    """The codes of heads, and what they mean."""

    layout = "codes"

    num_heads: int = integer(1)
    num_q_heads: int = integer(1)
    head_dim: int = integer(1, _LARGEST_DIM)
    bits: int = integer(1, 16)
    projections: int | None = optional(1, 16 * _LARGEST_DIM)
    seed: str = text()  # which may be larger than JSON's numbers
    tokens: int = integer()
    quantiser: str = text()
    v_bits: int | None = integer(1, 16, missing=None)

    def check(self) -> None:
        """See that there is such a config."""
        several = self.num_q_heads % self.num_heads == 0
        expect(several, f"{self.num_q_heads} q heads are no multiple of {self.num_heads} heads")
        digits = self.seed.isascii() and self.seed.isdigit() and len(self.seed) <= 80
        expect(digits, f"{self.seed!r} is no seed")
        expect(
            self.v_bits != self.bits, f"{self.bits} bits of values, said apart from those of keys"
        )
        with claims("the config"):
            _ = self.config

    @property
    def config(self) -> CompressorConfig:
        """How vectors are compressed."""
        return CompressorConfig(
            self.head_dim, self.bits, self.projections, int(self.seed), self.v_bits
        )

    def arguments(self) -> dict[str, Any]:
        """What the class is given for such a compressor."""
        return {
            "config": self.config, "num_heads": self.num_heads, "num_q_heads": self.num_q_heads,
        }  # fmt: skip

    def specs(self) -> dict[str, Spec]:
        """See `Saved.specs`."""
        return self.specs_of("k") | self.specs_of("v")

    def specs_of(self, side: str) -> dict[str, Spec]:
        """The tensors of ``"k"`` or ``"v"``."""
        kind = self.config.kind if side == "k" else self.config.v_kind
        return Encoded.specs(side, self.num_heads, self.tokens, self.head_dim, kind)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, and of the quantiser: float32 there and back, and float64 while it is made."""
        dim, bits = self.head_dim, max(self.bits, self.v_bits or 0)
        random = self.num_heads * dim * (2 * dim + (self.projections or 0)) * 12
        codes = sum(spec.nbytes for spec in self.specs().values())
        return random + dim * dim * 16 + (1 << bits) * 32 + codes


@dataclass(kw_only=True)
class SavedHead(SavedCodes):
    """A `numkv.HeadCompressor`."""

    def check(self) -> None:
        """See `SavedCodes.check`."""
        super().check()
        one = (self.num_heads, self.num_q_heads) == (1, 1)
        expect(one, f"{self.num_heads} heads of one")

    def arguments(self) -> dict[str, Any]:
        """See `SavedCodes.arguments`."""
        return {"config": self.config}


@dataclass(kw_only=True)
class SavedSequence(Saved):
    """A sequence, in blocks as the file counts them."""

    number: int = integer()
    length: int = integer()
    blocks: list[int] = integers()


@dataclass(kw_only=True)
class SavedBlocks(SavedCodes):
    """A `numkv.PagedCompressor`: whole blocks, each once."""

    num_blocks: int = integer()
    following: int = integer()
    sequences: list[SavedSequence] = parts(SavedSequence)

    def check(self) -> None:
        """See `SavedCodes.check`; and a block that several sequences have is at one place in all of them."""
        super().check()
        whole = self.tokens == self.num_blocks * BLOCK_SIZE
        expect(whole, f"{self.tokens} tokens of {self.num_blocks} blocks")
        places: dict[int, int] = {}
        seen: set[int] = set()
        for x in self.sequences:
            fits = len(x.blocks) == -(-x.length // BLOCK_SIZE)
            there = all(block < self.num_blocks for block in x.blocks)
            expect(fits and there, f"{x.length} tokens in blocks {x.blocks[:8]}")
            known = x.number < self.following and x.number not in seen
            expect(known, f"sequence {x.number}, or two of them")
            seen.add(x.number)
            apart = len(set(x.blocks)) == len(x.blocks)
            alike = all(places.setdefault(block, i) == i for i, block in enumerate(x.blocks))
            expect(
                apart and alike,
                f"blocks {x.blocks[:8]} of sequence {x.number}, which others have elsewhere",
            )

    def by_number(self) -> dict[int, Sequence]:
        """Return the sequences."""
        return {x.number: Sequence(np.array(x.blocks, np.int64), x.length) for x in self.sequences}

"""What a benchmark of a model found, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from numkv.bench.rounds import Measured

#: Names of the contestants that others are compared with.
DYNAMIC, STATIC, FLOOR = "DynamicCache + SDPA", "StaticCache + SDPA", "attention left out"


@dataclass(frozen=True)
class Agreement:
    """How a contestant's logits agree with a reference's.

    Attributes
    ----------
    same, predictions : int
        How many greedy tokens are the same, and of how many.
    error : float
        Relative L2 error of the logits, the mean over the predictions.
    """

    same: int
    predictions: int
    error: float


@dataclass
class Line:
    """What ran in turns: steps at one context, or prompts of one length.

    Attributes
    ----------
    tokens : int
        The context, or the length of the prompts.
    measured : Measured
        Times.
    batch : int
        Sequences.
    prompt : bool
        Whether prompts were read; if not, each step computed a token of each sequence.
    padded : bool
        Whether half of the sequences have half of the tokens, and padding before them.
    sizes : dict of str to int
        By contestant, the bytes of its cache, room included.
    read : dict of str to int
        By contestant, the bytes that a step has to read of it.
    agreement : dict of str to Agreement
        By contestant.
    absent : dict of str to str
        Who did not take part, and why.
    """

    tokens: int
    measured: Measured
    batch: int = 1
    prompt: bool = False
    padded: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    agreement: dict[str, Agreement] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """What ran."""
        if not self.prompt:
            what = f"Decode at {self.tokens:,} tokens"
        else:
            what = f"Prompts of {self.tokens:,} tokens"
        if self.padded:
            what += ", every other one half as long, padded on the left"
        return f"{what}, batch {self.batch}" if self.batch > 1 else what

    @property
    def names(self) -> list[str]:
        """Who has been timed, in order."""
        return [name for name in self.sizes if self.measured.seconds(name) is not None]

    @property
    def new_tokens(self) -> int:
        """Tokens that a turn computes; padding is none."""
        if not self.prompt:
            return self.batch
        short = self.batch // 2 if self.padded else 0
        return (self.batch - short) * self.tokens + short * (self.tokens // 2)

    def rate(self, name: str) -> float:
        """Tokens a second."""
        seconds = self.measured.seconds(name)
        return self.new_tokens / seconds if seconds else 0.0

"""Long-range recall: whether a model still finds a name in its cache that a text defined far back.

Texts are lines of held-out modules, of the kind that the bundled model knows, with needles between them: definitions
of random names, and a later line that uses each name. Its first letters are given, and only the definition determines
the others. A model that finds the definition copies them (induction); one whose cache has lost it guesses.

Source: Olsson et al., "In-context Learning and Induction Heads" (arXiv:2209.11895), for copying as a measure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.demo.cache import CacheFactory
from numkv.demo.checkpoint import Progress, no_progress
from numkv.demo.evaluate import Document, log_softmax
from numkv.demo.model import PREFILL_CHUNK, Model, Session
from numkv.demo.tokenizer import Tokenizer

#: Distances of definitions, as shares of the context. The bundled model, trained mostly on windows of 256 to 1,024
#: bytes, finds nothing much further away with any cache.
DISTANCES = (0.1, 0.2, 0.3, 0.4)
#: Letters of a name, and those that are given.
_LETTERS, _GIVEN = 12, 4
_LONGEST_LINE = 80


@dataclass(frozen=True)
class Needle:
    """The place of a name to copy.

    Attributes
    ----------
    begin, end : int
        Its tokens to predict, ``[begin, end)``.
    num_bytes : int
        Their bytes.
    group : int
        Index of its distance.
    distance : int
        Tokens from the name's definition to its use.
    """

    begin: int
    end: int
    num_bytes: int
    group: int
    distance: int


@dataclass(frozen=True)
class Haystack:
    """A text with needles.

    Attributes
    ----------
    tokens : int array (num_tokens,)
        The text.
    needles : tuple of Needle
        The names to copy, in order.
    """

    tokens: NDArray[np.int64]
    needles: tuple[Needle, ...]


@dataclass(frozen=True)
class Recall:
    """The recall with a cache.

    Attributes
    ----------
    label : str
        Name of the cache.
    num_needles : int
        Names to copy.
    bits_per_byte : float
        Cross entropy of the names in bits per byte.
    copied : float
        Share of the names' tokens that are the most probable ones.
    by_distance : sequence of float
        This share for each distance, from the nearest.
    """

    label: str
    num_needles: int
    bits_per_byte: float
    copied: float
    by_distance: Sequence[float]


def haystacks(
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    *,
    context: int,
    num_texts: int = 4,
    num_needles: int = 8,
    defined: bool = True,
) -> list[Haystack]:
    """Make texts with needles, reproducibly.

    Names are used in the second half of a text, and defined before by `DISTANCES` of the context.

    Parameters
    ----------
    tokenizer : Tokenizer
        The model's tokenizer.
    documents : sequence of Document
        Source of the other lines.
    context : int
        Tokens of a text.
    num_texts, num_needles : int
        Number of texts, and of names in each; fewer if the context has less than 100 tokens for each.
    defined : bool
        Whether definitions have the names that are used. If not, they have other names, so names can only be guessed.

    Returns
    -------
    list of Haystack

    Raises
    ------
    ValueError
        If there are no lines, or no needle fits into the context.
    """
    count = min(num_needles, max(1, context // 100))
    made = [
        _haystack(tokenizer, _lines(documents, i), context, count, i, defined)
        for i in range(num_texts)
    ]
    if not all(haystack.needles for haystack in made):
        raise ValueError(
            f"context: expected room for names and what is between, got {context} tokens"
        )
    return made


def _lines(documents: Sequence[Document], first: int) -> list[str]:
    """Return the lines of all documents from one on, without very long and repeated blank lines."""
    first = first % max(len(documents), 1)
    lines = [
        line
        for document in (*documents[first:], *documents[:first])
        for line in document.text.splitlines(keepends=True)
        if line.endswith("\n") and len(line) <= _LONGEST_LINE
    ]
    if not lines:
        raise ValueError("documents: expected texts with lines, got none")
    return lines


def _haystack(
    tokenizer: Tokenizer, lines: list[str], context: int, num_needles: int, seed: int, defined: bool
) -> Haystack:
    rng = np.random.default_rng(seed)
    start = tokenizer.encode("")

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text)[len(start) :]

    # Places of definitions, and of uses with the needle's group; the last use must fit.
    last_use = max(context / 2, min(context * 0.95, context - 100))
    uses = np.linspace(context / 2, last_use, num_needles)
    pieces: list[tuple[float, int, str, str]] = []
    for i, place in enumerate(uses):
        name, other = (
            "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), _LETTERS)) for _ in "ab"
        )
        group = i % len(DISTANCES)
        there = name if defined else other
        pieces.append((place - DISTANCES[group] * context, -1, f"    def {there}(self):\n", name))
        pieces.append((place, group, f"        self.{name[:_GIVEN]}", name))
    tokens, needles, places = list(start), [], {}
    more = itertools.cycle(lines)
    for place, group, text, name in sorted(pieces):
        while len(tokens) < place:
            tokens += encode(next(more))
        if group < 0:
            places[name] = len(tokens)
            tokens += encode(text)
            continue
        distance = len(tokens) - places[name]
        tokens += encode(text)
        begin, rest = len(tokens), name[_GIVEN:]
        tokens += encode(rest)
        needles.append(Needle(begin, len(tokens), len(rest), group, distance))
        tokens += encode("()\n")
    kept = [needle for needle in needles if needle.end <= context]
    last = kept[-1].end if kept else 0
    return Haystack(np.array(tokens[:last], np.int64), tuple(kept))


def recall(
    model: Model,
    texts: Sequence[Haystack],
    caches: Mapping[str, CacheFactory],
    *,
    target: str = "cpu",
    chunk: int = PREFILL_CHUNK,
    progress: Progress = no_progress,
) -> list[Recall]:
    """Measure how well names are copied from caches.

    All tokens of a text are given, also those of the names, whatever the model predicts.

    Parameters
    ----------
    model : Model
        The model.
    texts : sequence of Haystack
        Texts of `haystacks`.
    caches : mapping of str to callable
        Factories of the caches by name, such as a `CacheChoice`.
    target : str
        Target of all caches.
    chunk : int
        Tokens that are computed at once; see `numkv.demo.evaluate.evaluate`.
    progress : callable, optional
        Called with the number of tokens done and their total.

    Returns
    -------
    list of Recall
        One for each cache, in order.
    """
    capacity = max(len(text.tokens) for text in texts)
    total = len(caches) * sum(len(text.tokens) for text in texts)
    done, found = 0, []
    for label, factory in caches.items():
        session = model.start(capacity, factory, target)
        scored: list[tuple[Needle, float, NDArray[Any]]] = []
        for text in texts:
            scored += _scored(session, text, chunk)
            done += len(text.tokens)
            progress(done, total)
        found.append(_summed(label, scored))
    return found


def _scored(
    session: Session, text: Haystack, chunk: int
) -> list[tuple[Needle, float, NDArray[Any]]]:
    """Return the needles of a text, with their bits, and whether each of their tokens is the most probable one."""
    inputs, expected = text.tokens[:-1], text.tokens[1:]
    first = text.needles[0].begin - 1
    session.rewind()
    if first:
        session.prefill(inputs[:first], chunk=chunk)
    parts = [
        log_softmax(session.forward(inputs[i : i + chunk]))
        for i in range(first, len(inputs), chunk)
    ]
    log_p, expected = np.concatenate(parts), expected[first:]
    bits = -log_p[np.arange(len(expected)), expected] / math.log(2)
    right = log_p.argmax(axis=-1) == expected
    spans = [slice(n.begin - 1 - first, n.end - 1 - first) for n in text.needles]
    return [(n, float(bits[s].sum()), right[s]) for n, s in zip(text.needles, spans, strict=True)]


def _summed(label: str, scored: Sequence[tuple[Needle, float, NDArray[Any]]]) -> Recall:
    groups = [[right for n, _, right in scored if n.group == g] for g in range(len(DISTANCES))]
    return Recall(
        label,
        len(scored),
        sum(bits for _, bits, _ in scored) / sum(n.num_bytes for n, _, _ in scored),
        float(np.concatenate([right for _, _, right in scored]).mean()),
        tuple(float(np.concatenate(g).mean()) if g else math.nan for g in groups),
    )

"""The quality of cache kinds: bits per byte, KL divergence and top-1 agreement.

The texts are modules of the standard library that the bundled model never saw. They are cut into windows of the model's
whole context. Every window runs through the reference cache and all caches to judge, so all of them see the same
tokens.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.demo import BUNDLED_MODEL
from numkv.demo.cache import CacheChoice, CacheFactory
from numkv.demo.checkpoint import LayerWeights, ModelConfig, Progress, no_progress
from numkv.demo.model import PREFILL_CHUNK, Model, Session
from numkv.demo.tokenizer import decoded
from numkv.errors import NotSupported
from numkv.planning.keys import read_json

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Document:
    """A text to measure on.

    Attributes
    ----------
    name : str
        Name of the text.
    text : str
        The text.
    """

    name: str
    text: str


@dataclass(frozen=True)
class HeldOut:
    """The held-out modules in the running Python's versions.

    Attributes
    ----------
    documents : tuple of Document
        The modules that were found.
    python : str
        Version of Python whose modules are the reference.
    changed : tuple of str
        Modules whose text differs from the reference.
    missing : tuple of str
        Modules that this Python does not have.
    """

    documents: tuple[Document, ...]
    python: str
    changed: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def is_reference(self) -> bool:
        """Return whether all bytes equal the reference text."""
        return not self.changed and not self.missing

    def __str__(self) -> str:
        what = f"{len(self.documents)} held-out modules"
        if self.is_reference:
            return f"{what}, exactly those of Python {self.python}"
        note = f"{what}, not the reference text of Python {self.python}"
        if self.changed:
            note += f"; {len(self.changed)} differ"
        if self.missing:
            note += f"; missing: {', '.join(self.missing)}"
        return note


def held_out(listing: Path = BUNDLED_MODEL / "heldout.json", root: Path | None = None) -> HeldOut:
    """Find the held-out modules in the running Python's standard library.

    Parameters
    ----------
    listing : pathlib.Path
        The list of modules and their hashes.
    root : pathlib.Path, optional
        Folder of the standard library.

    Returns
    -------
    HeldOut
    """
    content = read_json(listing)
    folder = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    documents, changed, missing = [], [], []
    for entry in content["modules"]:
        name = entry["name"]
        try:
            data = (folder / name).read_bytes()
        except OSError:
            missing.append(name)
            continue
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            changed.append(name)
        documents.append(Document(name, data.decode()))
    return HeldOut(tuple(documents), content["python"], tuple(changed), tuple(missing))


@dataclass(frozen=True)
class Score:
    """The score of a cache.

    Attributes
    ----------
    label : str
        Name of the cache.
    num_tokens, num_bytes : int
        Predicted tokens and bytes of the text.
    bits_per_byte : float
        Cross entropy of the text in bits per byte, with this cache.
    kl_divergence : float
        Mean over tokens of the divergence of the predicted distribution from the reference's, in
        nats.
    agreement : float
        Share of tokens for which the most probable next token is the reference's.
    by_document : sequence of float
        `bits_per_byte` of each text that has any.
    """

    label: str
    num_tokens: int
    num_bytes: int
    bits_per_byte: float
    kl_divergence: float
    agreement: float
    by_document: Sequence[float] = ()


@dataclass
class _Sums:
    nats: list[float] = field(default_factory=list)  # by text
    divergence: float = 0.0
    agreed: int = 0


def evaluate(
    model: Model,
    documents: Sequence[Document],
    caches: Mapping[str, CacheFactory],
    *,
    context: int | None = None,
    windows: int | None = None,
    reference: CacheFactory | None = None,
    target: str = "cpu",
    chunk: int = PREFILL_CHUNK,
    progress: Progress = no_progress,
    enough: Callable[[], bool] = lambda: False,
) -> list[Score]:
    """Measure caches on texts.

    Windows start every half context. Each token is scored once, in the first window that contains it. So after the
    first window, every token is predicted from at least half a context.

    Parameters
    ----------
    model : Model
        The model.
    documents : sequence of Document
        The texts.
    caches : mapping of str to callable
        Factories of the caches by name, such as a `CacheChoice`.
    context : int, optional
        Tokens in a window; the model's whole context by default.
    windows : int, optional
        Most windows of each text, at even distances, without the first if there are others, because it has no context
        before it. By default all windows are measured.
    reference : callable, optional
        Factory of the reference cache; fp32 by default.
    target : str
        Target of all caches.
    chunk : int
        Tokens that are computed at once. It matters only for caches with a full-precision window: they quantise the
        tokens that leave it before the chunk's first queries.
    progress : callable, optional
        Called with the number of tokens done and their total.
    enough : callable, optional
        Called after each window; returns whether to skip the rest.

    Returns
    -------
    list of Score
        One for the reference, named ``"reference"``, then one for each cache in order.

    Raises
    ------
    ValueError
        If `context` or `windows` is out of range.
    NotSupported
        If no text has two tokens or more.
    """
    size = model.config.max_context if context is None else context
    if not 2 <= size <= model.config.max_context:
        raise ValueError(f"context: expected 2 to {model.config.max_context}, got {size}")
    if windows is not None and windows < 1:
        raise ValueError(f"windows: expected 1 or more, or None for all, got {windows}")
    texts = [np.array(model.tokenizer.encode(document.text)) for document in documents]
    chosen = [_some(list(_windows(len(tokens), size)), windows) for tokens in texts]
    factories = [reference or CacheChoice("fp32", target=target), *caches.values()]
    sessions = [model.start(size, factory, target) for factory in factories]
    sums = [_Sums() for _ in sessions]
    total = sum(end - begin for of_text in chosen for begin, end, _ in of_text)
    num_done = num_scored = 0
    sizes = []
    for document, tokens, of_text in zip(documents, texts, chosen, strict=True):
        for s in sums:
            s.nats.append(0.0)
        seen = []
        for begin, end, first in of_text:
            if num_done and enough():
                break
            seen.append((first, end))
            for session in sessions:
                session.rewind()
            for start in range(begin, end, chunk):
                stop = min(start + chunk, end)
                skip = max(first - start, 0)
                _score(sessions, sums, tokens[start : stop + 1], skip)
                num_scored += max(stop - start - skip, 0)
                num_done += stop - start
                progress(num_done, total)
        scored = [tokens[first + 1 : end + 1] for first, end in seen]
        whole = windows is None and len(seen) == len(of_text)
        sizes.append(_num_bytes(model, document, scored, whole))
    if num_scored == 0:
        raise NotSupported("expected a text of two tokens or more, got none")
    return [
        Score(
            label=label,
            num_tokens=num_scored,
            num_bytes=sum(sizes),
            bits_per_byte=sum(s.nats) / math.log(2) / sum(sizes),
            kl_divergence=s.divergence / num_scored,
            agreement=s.agreed / num_scored,
            by_document=tuple(
                nats / math.log(2) / n for nats, n in zip(s.nats, sizes, strict=True) if n
            ),
        )
        for label, s in zip(("reference", *caches), sums, strict=True)
    ]


def _some(windows: list[tuple[int, int, int]], most: int | None) -> list[tuple[int, int, int]]:
    """Return at most `most` windows, at even distances."""
    if most is None:
        return windows
    later = windows[1:] or windows
    count = min(most, len(later))
    return [later[(2 * i + 1) * len(later) // (2 * count)] for i in range(count)]


def _num_bytes(
    model: Model, document: Document, scored: Sequence[NDArray[np.int64]], whole: bool
) -> int:
    """Return the predicted bytes of a text."""
    if whole:
        return len(document.text.encode())
    return sum(len(decoded(model.tokenizer, tokens).encode()) for tokens in scored)


def _windows(num_tokens: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield windows ``[begin, end)`` of inputs, and the first input whose prediction is scored."""
    first = 0
    for begin in range(0, num_tokens - 1, size // 2):
        end = min(begin + size, num_tokens - 1)
        yield begin, end, first
        first = end
        if end == num_tokens - 1:
            return


def _score(
    sessions: list[Session], sums: list[_Sums], tokens: NDArray[np.int64], skip: int
) -> None:
    """Run all but the last of `tokens`, and score their predictions without the first `skip`."""
    inputs, targets = tokens[:-1], tokens[1 + skip :]
    expected: Array | None = None
    for session, total in zip(sessions, sums, strict=True):
        logits = session.forward(inputs)[skip:]
        if len(targets) == 0:
            continue
        log_p = log_softmax(logits)
        if expected is None:
            expected = log_p
        total.nats[-1] -= float(log_p[np.arange(len(targets)), targets].sum())
        total.divergence += float((np.exp(expected) * (expected - log_p)).sum())
        total.agreed += int((log_p.argmax(-1) == expected.argmax(-1)).sum())


def log_softmax(logits: Array) -> Array:
    """Return logarithms of probabilities, in float64.

    Parameters
    ----------
    logits : array (..., vocab_size)
        Scores.

    Returns
    -------
    float64 array (..., vocab_size)
    """
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


#: Factors of `with_outliers` in reports.
OUTLIER_FACTORS = (1, 16, 64)
#: Tokens of a window, and bytes of the text, for measurements with outliers.
OUTLIER_CONTEXT, OUTLIER_BYTES = 640, 2600


def with_outliers(model: Model, factor: int) -> Model:
    """Return an equivalent model with outlier channels in its keys, to compare storage kinds.

    Keys of many trained models have a few channels 10 to 100 times as large as the others, by biases (Qwen2 and 2.5) or
    by weights of norms. The bundled model has none, so it cannot detect kinds that fail on them. Here one RoPE pair of
    all keys is multiplied by a power of two, and that of all queries divided by it: scores stay equal, keys change.

    Parameters
    ----------
    model : Model
        A model.
    factor : int
        A power of two, so that no weight is rounded.

    Returns
    -------
    Model
        The changed model, with equal predictions over an fp32 cache.
    """
    scale = np.ones(model.config.head_dim, np.float32)
    scale[[model.config.head_dim // 2 - 3, -3]] = factor
    layers = tuple(_scaled(model.config, layer, scale) for layer in model.weights.layers)
    return Model(model.config, replace(model.weights, layers=layers), model.tokenizer)


def _scaled(config: ModelConfig, layer: LayerWeights, scale: np.ndarray) -> LayerWeights:
    if layer.q_norm is not None and layer.k_norm is not None:
        return replace(layer, q_norm=layer.q_norm / scale, k_norm=layer.k_norm * scale)
    heads = [np.tile(1 / scale, config.num_q_heads), np.tile(scale, config.num_kv_heads)]
    of_values = np.ones(config.num_kv_heads * config.head_dim, np.float32)
    return replace(layer, qkv=layer.qkv * np.concatenate([*heads, of_values])[:, None])


def beginning(document: Document) -> Document:
    """Return the beginning of a text, which is enough: kinds differ by far more than texts."""
    text = document.text.encode()[:OUTLIER_BYTES].decode(errors="ignore")
    return Document(document.name, text)

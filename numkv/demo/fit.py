"""Choose storage kinds for K and for V of each layer of a model, by their effect on its predictions.

Each kind of each side of each layer is tried alone, in a cache without other rounding. Its cost is the Kullback-Leibler
divergence of the next token's probabilities, in nats a token. Costs are assumed to add up. The search starts from the
fewest bytes. It always widens the layer that saves most divergence for a byte, until the budget is spent. The result is
measured as a whole, and compared with uniform kinds, on other text than that of the choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import numkv
from numkv.caches import LayerSpec, Profile
from numkv.demo.cache import CacheChoice, LayerCache
from numkv.demo.checkpoint import ModelConfig, Progress, no_progress
from numkv.demo.evaluate import Document, evaluate
from numkv.demo.model import Model
from numkv.kinds import kind

Layers = Sequence[LayerSpec]
#: Kinds that are tried by default, and those of keys by channel, for caches that support them.
K_KINDS, V_KINDS = ("bf16", "int8", "int4"), ("int8", "int4")
CHANNEL_KINDS = ("int8_channel", "int4_channel_fine", "int4_channel")
#: Number of caches that are measured together, because they share the reference: the sides of a layer.
_TOGETHER = 12


class Judge(Protocol):
    """A model and the texts on which kinds are tried."""

    @property
    def name(self) -> str:
        """Return the name of the model."""

    @property
    def layers(self) -> Layers:
        """Return the layers with rows, in the model's own dtype."""

    @property
    def takes_channels(self) -> bool:
        """Return whether all layers see more tokens than keys by channel store in full."""

    def divergences(self, candidates: Sequence[Layers], held_out: bool) -> list[float]:
        """Return the mean KL of predictions over each cache from those over `layers`, in nats a token."""

    def rows(self) -> list[tuple[Any, Any]]:
        """Return K and V ``(num_tokens, num_kv_heads, head_dim)`` of each layer, for the beginning of a text."""


@dataclass(frozen=True)
class Pair:
    """Storage kinds of K and of V in a layer.

    Attributes
    ----------
    kind, v_kind : str
        Kinds of K and of V.
    rotate : bool
        Whether rows are rotated first.
    """

    kind: str
    v_kind: str
    rotate: bool = False

    def __str__(self) -> str:
        words = self.kind if self.kind == self.v_kind else f"{self.kind}/{self.v_kind}"
        return f"{words}+rotate" if self.rotate else words

    @property
    def is_even(self) -> bool:
        """Return whether K and V have equal bits."""
        return kind(self.kind).of_rows == self.v_kind

    def spec(self, layer: LayerSpec) -> LayerSpec:
        """Return a layer with these kinds."""
        return replace(layer, kind=self.kind, v_kind=self.v_kind, rotate=self.rotate)


@dataclass(frozen=True)
class Judged:
    """The measurement of all layers together.

    Attributes
    ----------
    label : str
        Name of their kinds.
    profile : Profile
        The layers.
    divergence : float
        KL divergence on other text than that of the choice, in nats a token.
    """

    label: str
    profile: Profile
    divergence: float


@dataclass(frozen=True)
class Fit:
    """The result of `fit`.

    Attributes
    ----------
    chosen : Judged
        The best choice within the budget.
    kinds : tuple of Pair
        Its kinds of each layer.
    costs : tuple of dict
        For each layer, the divergence of each tried `Pair`.
    spreads : tuple of (float, float)
        For each layer, the spread of channels of K and of V: see `spread`.
    uniform : tuple of Judged
        Equal kinds in all layers, for each `Pair` with equal bits of K and V.
    budget : int
        Most bytes of a token.
    """

    chosen: Judged
    kinds: tuple[Pair, ...]
    costs: tuple[dict[Pair, float], ...]
    spreads: tuple[tuple[float, float], ...]
    uniform: tuple[Judged, ...]
    budget: int


def spread(rows: NDArray[Any]) -> float:
    """Return the ratio of the widest channel of rows ``(num_tokens, num_kv_heads, head_dim)`` to the median one.

    The width of a channel is its largest element; the head with the largest ratio counts. Far above 10, rows of 8 bits
    or fewer with one scale for all channels lose the small channels.
    """
    size = np.abs(rows).max(axis=0).astype(np.float64)
    middle = np.median(size, axis=-1)
    return float((size.max(axis=-1) / np.where(middle > 0, middle, 1)).max())


def pairs(of_k: Sequence[str] = K_KINDS, of_v: Sequence[str] = V_KINDS) -> list[Pair]:
    """Return the pairs of kinds of K and of V, also with rotation if both are quantised."""
    found = [Pair(k, v) for k in of_k for v in of_v]
    both = [pair for pair in found if kind(pair.kind).has_scales and kind(pair.v_kind).has_scales]
    return found + [replace(pair, rotate=True) for pair in both if not kind(pair.kind).group_tokens]


def fit(
    judge: Judge,
    budget: int,
    *,
    tried: Sequence[Pair] | None = None,
    progress: Progress = no_progress,
    report: Callable[[int, Mapping[Pair, float]], None] = lambda layer, costs: None,
) -> Fit:
    """Choose the storage kinds of each layer of a model.

    Parameters
    ----------
    judge : Judge
        The model and its texts.
    budget : int
        Most bytes of a token's rows in all layers, scales included. The newest tokens that keys by channel store in
        full are not counted.
    tried : sequence of Pair, optional
        The kinds to try in each layer; `pairs` by default.
    progress : callable, optional
        Called with the number of measurements done and their total.
    report : callable, optional
        Called with the number of each layer and the costs of its kinds, as soon as they are measured.

    Returns
    -------
    Fit

    Raises
    ------
    ValueError
        If no tried kind is within the budget.
    """
    layers = judge.layers
    tried = pairs() if tried is None else tried
    # Equal rotation in all layers, as in a `PagedKVCache`.
    alternatives = [[pair for pair in tried if pair.rotate == rotate] for rotate in (False, True)]
    alternatives = [of for of in alternatives if least_bytes(layers, of) <= budget]
    if not alternatives:
        raise ValueError(
            f"budget: expected at least {least_bytes(layers, tried)} bytes a token, which the smallest kinds take, got "
            f"{budget}"
        )
    sides = sorted(
        {(side, pair.rotate) for pair in tried for side in ((pair.kind, ""), ("", pair.v_kind))}
    )
    total = len(layers) * len(sides) + 3 + 2 * sum(pair.is_even for pair in tried)
    done = 0

    def measure(candidates: Sequence[Layers], held_out: bool) -> list[float]:
        nonlocal done
        found: list[float] = []
        for begin in range(0, len(candidates), _TOGETHER):
            found += judge.divergences(candidates[begin : begin + _TOGETHER], held_out)
            done += len(candidates[begin : begin + _TOGETHER])
            progress(done, total)
        return found

    costs: list[dict[Pair, float]] = []
    for i in range(len(layers)):
        alone = [_with_side(layers, i, k, v, rotate) for (k, v), rotate in sides]
        cost = dict(zip(sides, measure(alone, False), strict=True))
        summed = {
            pair: cost[(pair.kind, ""), pair.rotate] + cost[("", pair.v_kind), pair.rotate]
            for pair in tried
        }
        costs.append(summed)
        report(i, summed)
    fitting = [
        choose(layers, [{pair: cost[pair] for pair in of} for cost in costs], budget)
        for of in alternatives
    ]
    alike = [pair for pair in tried if pair.is_even]
    everywhere = [[pair.spec(layer) for layer in layers] for pair in alike]
    of_uniform = measure(everywhere, False)
    of_fitting = measure([_all(layers, chosen) for chosen in fitting], False)
    candidates = [(tuple(chosen), cost) for chosen, cost in zip(fitting, of_fitting, strict=True)]
    candidates += [
        ((pair,) * len(layers), cost) for pair, cost, made in zip(alike, of_uniform, everywhere, strict=True)
        if Profile(made).bytes_per_token <= budget
    ]  # fmt: skip
    best = min(candidates, key=lambda x: x[1])[0]
    of_held_out = measure([_all(layers, best), *everywhere], True)
    uniform = tuple(
        Judged(str(pair), Profile(made, judge.name), cost)
        for pair, made, cost in zip(alike, everywhere, of_held_out[1:], strict=True)
    )
    profile = Profile(_all(layers, best), judge.name)
    spreads = tuple((spread(k), spread(v)) for k, v in judge.rows())
    chosen = Judged("chosen", profile, of_held_out[0])
    return Fit(chosen, best, tuple(costs), spreads, uniform, budget)


def least_bytes(layers: Layers, tried: Sequence[Pair]) -> int:
    """Return the bytes of a token with the smallest of some kinds in each layer."""
    return sum(
        min((Profile([pair.spec(layer)]).bytes_per_token for pair in tried), default=2**62)
        for layer in layers
    )


def choose(layers: Layers, costs: Sequence[dict[Pair, float]], budget: int) -> list[Pair]:
    """Widen layers from the fewest bytes on, always the layer in which a byte saves most.

    Parameters
    ----------
    layers : sequence of LayerSpec
        The layers.
    costs : sequence of dict
        For each layer, the cost of each `Pair`.
    budget : int
        Most bytes of a token, at least those of the smallest kinds.

    Returns
    -------
    list of Pair
        One for each layer.
    """
    hulls = []
    for layer, of_layer in zip(layers, costs, strict=True):
        points = sorted(
            (Profile([pair.spec(layer)]).bytes_per_token, cost, str(pair), pair)
            for pair, cost in of_layer.items()
        )
        hull: list[tuple[int, float, Pair]] = []
        for size, cost, _, pair in points:
            if hull and (cost >= hull[-1][1] or size == hull[-1][0]):
                continue
            # Keep only the convex hull: leave out points that save less for a byte than the next one.
            while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], (size, cost)):
                hull.pop()
            hull.append((size, cost, pair))
        hulls.append(hull)
    at = [0] * len(hulls)
    used = sum(hull[0][0] for hull in hulls)
    # From the step that saves most for a byte; of a layer they come in order, as its hull is convex.
    steps = sorted(
        (-_slope(*pair), i, n, pair[1][0] - pair[0][0])
        for i, hull in enumerate(hulls)
        for n, pair in enumerate(itertools.pairwise(hull))
    )
    for _, i, n, more in steps:
        if at[i] == n and used + more <= budget:
            used, at[i] = used + more, n + 1
    return [hull[n][2] for hull, n in zip(hulls, at, strict=True)]


def _slope(a: Sequence[Any], b: Sequence[Any]) -> float:
    """Return the divergence saved for each byte from one point to the next."""
    return float((a[1] - b[1]) / (b[0] - a[0]))


def _all(layers: Layers, found: Sequence[Pair]) -> list[LayerSpec]:
    return [pair.spec(layer) for pair, layer in zip(found, layers, strict=True)]


def _with_side(layers: Layers, i: int, kind: str, v_kind: str, rotate: bool) -> list[LayerSpec]:
    """Return the layers in the model's own dtype, except for one side of one layer."""
    made = [replace(layer, rotate=rotate) for layer in layers]
    made[i] = replace(made[i], kind=kind or made[i].kind, v_kind=v_kind or made[i].v_kind)
    return made


class DemoJudge:
    """A model of `numkv.demo` and its texts, as a `Judge`.

    Parameters
    ----------
    model : Model
        The model.
    texts, held_out : sequence of Document
        Texts of the choice, and texts of its measurement.
    context : int
        Tokens in a window.
    windows : int, optional
        Most windows of each text.
    """

    name = "bundled"
    takes_channels = True

    def __init__(
        self, model: Model, texts: Sequence[Document], held_out: Sequence[Document], context: int,
        windows: int | None = None,
    ) -> None:  # fmt: skip
        self._model, self._texts = model, (texts, held_out)
        self._context, self._windows = context, windows
        config = model.config
        self.layers: Layers = [
            LayerSpec(config.num_kv_heads, config.head_dim, kind="fp32")
        ] * config.num_layers

    def divergences(self, candidates: Sequence[Layers], held_out: bool) -> list[float]:
        """See `Judge.divergences`."""
        caches = {str(i): partial(_cache_of, layers) for i, layers in enumerate(candidates)}
        scores = evaluate(
            self._model, self._texts[held_out], caches, context=self._context, windows=self._windows
        )  # fmt: skip
        return [score.kl_divergence for score in scores[1:]]

    def rows(self) -> list[tuple[Any, Any]]:
        """Return the rows of the first window; see `Judge.rows`."""
        ids = self._model.tokenizer.encode(self._texts[0][0].text)[: self._context]
        session = self._model.start(len(ids), CacheChoice("fp32"))
        session.forward(ids)
        of_layers: Any = session.batch.cache
        return [
            (layer.k[0].swapaxes(0, 1)[: len(ids)], layer.v[0].swapaxes(0, 1)[: len(ids)])
            for layer in of_layers.layers
        ]


def _cache_of(layers: Layers, config: ModelConfig, capacities: Sequence[int]) -> LayerCache:
    """Make the cache of one text whose layers have these kinds."""
    sizes = capacities[0], config.num_kv_heads, config.head_dim
    return LayerCache(
        [
            numkv.ContiguousLayer(*sizes, kind=x.kind, v_kind=x.v_kind, rotate=x.rotate)
            for x in layers
        ]
    )

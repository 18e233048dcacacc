"""Many requests to one model: `ContinuousBatch` beside `generate`, one after another and padded, and `generate_batch`.

A single request is also made by `numkv.transformers.use`.

Requests come all at once. Each has a part of its own, whose length is log-uniform, perhaps behind a beginning that all
have in common, and makes so many tokens. Random weights name no end, so each makes all of them.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers

from numkv.bench.contestants import Kinds
from numkv.bench.models import build, head_dim, num_kv_heads
from numkv.errors import NumkvError
from numkv.numbers import memory_of_machine
from numkv.transformers import ContinuousBatch, restore, use

BATCH, USE = "numkv {}, ContinuousBatch", "numkv {}, use"
ALONE, PADDED, OWN = "generate, one after another", "generate, padded batch", "generate_batch"


@dataclass(frozen=True)
class Load:
    """A workload of requests.

    Attributes
    ----------
    requests, shared, longest, new : int
        Number of requests, tokens of the common prefix, most tokens of an own part, new tokens of each.
    """

    requests: int
    shared: int
    longest: int
    new: int

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        """The same each time for a seed."""
        rng = np.random.default_rng(seed)
        least = min(64, self.longest)
        lengths = (
            np.exp(rng.uniform(np.log(least), np.log(self.longest), self.requests))
            .round()
            .astype(int)
        )
        begin = rng.integers(1, vocabulary, self.shared).tolist()
        return [begin + rng.integers(1, vocabulary, n).tolist() for n in lengths]


@dataclass(frozen=True)
class Served:
    """What a method took for a workload.

    Attributes
    ----------
    seconds : float
        From the first request to the last token.
    first : float
        Seconds from then to a request's first token, the median.
    nbytes : int
        Of the cache, at its peak; 0 where it is not known.
    tokens : list of list of int
        What each request made.
    """

    seconds: float
    first: float
    nbytes: int
    tokens: list[list[int]]

    @property
    def rate(self) -> float:
        """New tokens a second."""
        return sum(map(len, self.tokens)) / self.seconds


class LeftOut(Exception):
    """A method is not measured, for this reason."""


class _Late(Exception):
    """The time is over."""


def serve(
    model: Any,
    load: Load,
    kinds: Sequence[Kinds],
    seed: int,
    seconds: float,
    say: Callable[[str], None],
) -> Iterator[tuple[str, Served | LeftOut]]:
    """Serve a workload by every method.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.
    load : Load
        The workload.
    kinds : sequence of Kinds
        How numkv stores rows; each is measured.
    seed : int
        Of the prompts.
    seconds : float
        What takes longer is left out.
    say : callable
        Called with a line about each method that begins.

    Yields
    ------
    str
        The method.
    Served or LeftOut
        What it took, or why it was left out.
    """
    prompts = load.prompts(model.config.vocab_size, seed)
    say("kernels")  # which the first short request compiles, or reads from disk
    short = _methods(
        model, [prompts[0][:600]], replace(load, requests=1, new=2), kinds, seed, seconds
    )
    for method in short.values():
        with suppress(LeftOut):
            method()
    for name, method in _methods(model, prompts, load, kinds, seed, seconds).items():
        say(f"{load.requests} requests, {name}")
        try:
            yield name, method()
        except LeftOut as why:
            yield name, why


def _methods(
    model: Any, prompts: list[list[int]], load: Load, kinds: Sequence[Kinds], seed: int, seconds: float
) -> dict[str, Callable[[], Served]]:  # fmt: skip
    """Return what serves the prompts, by name."""
    methods: dict[str, Callable[[], Served]] = {}
    for of in kinds:
        methods[BATCH.format(of.label)] = partial(_batch, model, prompts, load, of, seconds)
        if load.requests == 1:
            methods[USE.format(of.label)] = partial(_used, model, prompts, load, of, seconds)
    methods[ALONE] = partial(_alone, model, prompts, load, seconds)
    if load.requests > 1:
        methods[PADDED] = partial(_padded, model, prompts, load, seconds)
        methods[OWN] = partial(_own, model, prompts, load, seed, seconds)
    return methods


def _batch(
    model: Any, prompts: list[list[int]], load: Load, kinds: Kinds, seconds: float
) -> Served:
    tokens = max(load.shared + load.longest, 512) + sum(len(x) + load.new for x in prompts)
    nbytes = min(_token_nbytes(model) * (tokens + 64 * 2 * len(prompts)), memory_of_machine() // 2)
    try:
        with ContinuousBatch(
            model, kinds.k_kind, v_kind=kinds.v_kind, rotate=kinds.rotate, max_nbytes=nbytes, max_running=len(prompts)
        ) as batch:  # fmt: skip
            begin = time.perf_counter()
            requests = [batch.submit(x, load.new) for x in prompts]
            firsts: dict[Any, float] = {}
            peak = 0
            for event in batch:
                now = time.perf_counter() - begin
                firsts.setdefault(event.request, now)
                used = batch.cache.num_blocks - batch.cache.num_free
                peak = max(peak, used * batch.cache.nbytes // batch.cache.num_blocks)
                if now > seconds:
                    raise LeftOut(f"not done in {seconds:.0f} s")
            took = time.perf_counter() - begin
            return Served(took, median(firsts.values()), peak, [x.result() for x in requests])
    except NumkvError as error:
        raise LeftOut(str(error)) from error


def _used(model: Any, prompts: list[list[int]], load: Load, kinds: Kinds, seconds: float) -> Served:
    """Serve one request after another by `generate` of a model that `use` has switched."""
    try:
        use(model, k_kind=kinds.k_kind, v_kind=kinds.v_kind, rotate=kinds.rotate)
    except NumkvError as error:
        raise LeftOut(str(error)) from error
    try:
        return _alone(model, prompts, load, seconds)
    finally:
        restore(model)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """End what takes longer before the next module of a model, within a prompt too."""
    end = time.perf_counter() + seconds

    def look(*_: Any) -> None:
        if time.perf_counter() > end:
            raise _Late

    hook = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        yield
    except _Late:
        raise LeftOut(f"not done in {seconds:.0f} s") from None
    finally:
        hook.remove()


class _Watch(transformers.StoppingCriteria):  # type: ignore[misc]
    """Notes when the first token is there."""

    first = 0.0

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.first = self.first or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _generated(model: Any, ids: Any, mask: Any, load: Load) -> tuple[list[list[int]], float, int]:
    """New tokens of a batch, when the first ones were there, and bytes of the cache."""
    watch = _Watch()
    found = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=load.new, min_new_tokens=load.new, do_sample=False,
        pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, stopping_criteria=[watch],
    )  # fmt: skip
    made = found.sequences[:, ids.shape[1] :].tolist()
    cache = found.past_key_values
    nbytes = getattr(cache, "nbytes", None) or sum(
        x.nbytes for layer in cache.layers for x in (layer.keys, layer.values)
    )
    return made, watch.first, nbytes


def _alone(model: Any, prompts: list[list[int]], load: Load, seconds: float) -> Served:
    begin, firsts, peak, made = time.perf_counter(), [], 0, []
    with _within(seconds):
        for prompt in prompts:
            ids = torch.tensor([prompt])
            tokens, first, nbytes = _generated(model, ids, torch.ones_like(ids), load)
            made += tokens
            firsts.append(first - begin)
            peak = max(peak, nbytes)
    return Served(time.perf_counter() - begin, median(firsts), peak, made)


def _padded(model: Any, prompts: list[list[int]], load: Load, seconds: float) -> Served:
    width = max(map(len, prompts))
    nbytes = len(prompts) * (width + load.new) * _token_nbytes(model)
    if 2 * nbytes > memory_of_machine() // 2:  # of which growing keeps two
        raise LeftOut(f"its cache would take {nbytes / 1e9:.1f} GB")
    ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    begin = time.perf_counter()
    with _within(seconds):
        made, first, nbytes = _generated(model, ids, mask, load)
    return Served(time.perf_counter() - begin, first - begin, nbytes, made)


def _own(model: Any, prompts: list[list[int]], load: Load, seed: int, seconds: float) -> Served:
    """In a process of its own, which can be ended."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(model.dtype, "fp32")
    arguments = (
        theirs,
        model.config.to_dict(),
        dtype,
        torch.get_num_threads(),
        prompts,
        load.new,
        seed,
    )
    child = context.Process(target=_serve_own, args=arguments, daemon=True)
    child.start()
    theirs.close()
    try:
        if not ours.poll(60):
            raise LeftOut("its process did not begin in 60 s")
        ours.recv()
        if not ours.poll(seconds):
            raise LeftOut(f"not done in {seconds:.0f} s")
        took, made = ours.recv()
    except EOFError:
        raise LeftOut("its process ended with an error") from None
    finally:
        child.kill()
        child.join()
    if isinstance(made, str):
        raise LeftOut(made)
    return Served(took, float("nan"), 0, made)


def _serve_own(
    pipe: Any, config: dict[str, Any], dtype: str, threads: int, prompts: Any, new: int, seed: int
) -> None:
    """Serve by `generate_batch` of transformers; sends a word when it begins, and what it took."""
    torch.set_num_threads(threads)
    model = build(transformers.AutoConfig.for_model(**config), dtype, seed)
    settings = transformers.GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    pipe.send("ready")
    begin = time.perf_counter()
    try:
        found = model.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False)
        made: Any = [x.generated_tokens for x in found.values()]
        if len(made) < len(prompts):
            made = f"answered {len(made)} of {len(prompts)} requests"
    except Exception as error:
        made = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    pipe.send((time.perf_counter() - begin, made))


def _token_nbytes(model: Any) -> int:
    """Bytes of a token's K and V, as the model computes them."""
    config = model.config.get_text_config(decoder=True)
    of_layer = 2 * num_kv_heads(config) * head_dim(config) * model.dtype.itemsize
    return int(config.num_hidden_layers * of_layer)

"""Many requests to one model: `ContinuousBatch`, `generate` (one after another, and padded) and `generate_batch`.

A single request is also made with `numkv.transformers.use`. All requests arrive at once. A prompt is an optional common
prefix and an own part of log-uniform length. Random weights never end a text, so all requests generate equally many
tokens.
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
ALONE, PADDED = "generate, one after another", "generate, padded batch"
GENERATE_BATCH = "generate_batch"


@dataclass(frozen=True)
class Workload:
    """A workload of requests.

    Attributes
    ----------
    requests, shared, longest, new : int
        Number of requests; tokens of the common prefix; most tokens of an own part; new tokens of each request.
    """

    requests: int
    shared: int
    longest: int
    new: int

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        """Return the prompts, which are equal for equal seeds."""
        rng = np.random.default_rng(seed)
        least = min(64, self.longest)
        lengths = np.exp(rng.uniform(np.log(least), np.log(self.longest), self.requests))
        begin = rng.integers(1, vocabulary, self.shared).tolist()
        return [begin + rng.integers(1, vocabulary, round(n)).tolist() for n in lengths]


@dataclass(frozen=True)
class Served:
    """The result of a workload with one method.

    Attributes
    ----------
    seconds : float
        Seconds from the first request to the last token.
    first : float
        Median over requests of the seconds to the first token.
    nbytes : int
        Peak bytes of the cache; 0 if unknown.
    tokens : list of list of int
        New tokens of each request.
    """

    seconds: float
    first: float
    nbytes: int
    tokens: list[list[int]]

    @property
    def rate(self) -> float:
        """Return new tokens a second."""
        return sum(map(len, self.tokens)) / self.seconds


class LeftOut(Exception):
    """A method was not measured; the message is the reason."""


def serve(
    model: Any,
    workload: Workload,
    kinds: Sequence[Kinds],
    seed: int,
    seconds: float,
    report: Callable[[str], None],
) -> Iterator[tuple[str, Served | LeftOut]]:
    """Serve a workload with each method.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.
    workload : Workload
        The workload.
    kinds : sequence of Kinds
        Storage kinds of numkv; each is measured.
    seed : int
        Seed of the prompts.
    seconds : float
        Time limit of a method.
    report : callable
        Called with the name of each method before it begins.

    Yields
    ------
    str
        Name of the method.
    Served or LeftOut
        Its result, or the reason why it was left out.
    """
    prompts = workload.prompts(model.config.vocab_size, seed)
    report("kernels")  # a short request compiles them, or loads them from disk
    short = _methods(
        model, [prompts[0][:600]], replace(workload, requests=1, new=2), kinds, seed, seconds
    )
    for method in short.values():
        with suppress(LeftOut):
            method()
    for name, method in _methods(model, prompts, workload, kinds, seed, seconds).items():
        report(f"{workload.requests} requests, {name}")
        try:
            yield name, method()
        except LeftOut as reason:
            yield name, reason


def _methods(
    model: Any, prompts: list[list[int]], workload: Workload, kinds: Sequence[Kinds], seed: int, seconds: float
) -> dict[str, Callable[[], Served]]:  # fmt: skip
    """Return the methods by name."""
    methods: dict[str, Callable[[], Served]] = {}
    for each in kinds:
        methods[BATCH.format(each.label)] = partial(_batch, model, prompts, workload, each, seconds)
        if workload.requests == 1:
            methods[USE.format(each.label)] = partial(_use, model, prompts, workload, each, seconds)
    methods[ALONE] = partial(_alone, model, prompts, workload, seconds)
    if workload.requests > 1:
        methods[PADDED] = partial(_padded, model, prompts, workload, seconds)
        methods[GENERATE_BATCH] = partial(_generate_batch, model, prompts, workload, seed, seconds)
    return methods


def _batch(
    model: Any, prompts: list[list[int]], workload: Workload, kinds: Kinds, seconds: float
) -> Served:
    tokens = max(workload.shared + workload.longest, 512) + sum(
        len(x) + workload.new for x in prompts
    )
    nbytes = min(_token_nbytes(model) * (tokens + 64 * 2 * len(prompts)), memory_of_machine() // 2)
    try:
        with ContinuousBatch(
            model, kinds.k_kind, v_kind=kinds.v_kind, rotate=kinds.rotate, max_nbytes=nbytes, max_running=len(prompts)
        ) as batch:  # fmt: skip
            begin = time.perf_counter()
            requests = [batch.submit(x, workload.new) for x in prompts]
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


def _use(
    model: Any, prompts: list[list[int]], workload: Workload, kinds: Kinds, seconds: float
) -> Served:
    """Serve one request after another by `generate` of a model after `use`."""
    try:
        use(model, k_kind=kinds.k_kind, v_kind=kinds.v_kind, rotate=kinds.rotate)
    except NumkvError as error:
        raise LeftOut(str(error)) from error
    try:
        return _alone(model, prompts, workload, seconds)
    finally:
        restore(model)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise `LeftOut` after some seconds, at the next call of any module, also within a prompt."""
    end = time.perf_counter() + seconds

    def check(*_: Any) -> None:
        if time.perf_counter() > end:
            raise LeftOut(f"not done in {seconds:.0f} s")

    hook = torch.nn.modules.module.register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


class _Watch(transformers.StoppingCriteria):  # type: ignore[misc]
    """Records the time of the first token."""

    first = 0.0

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.first = self.first or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def _generated(
    model: Any, ids: Any, mask: Any, workload: Workload
) -> tuple[list[list[int]], float, int]:
    """Return the new tokens of a batch, the time of the first one, and the bytes of the cache."""
    watch = _Watch()
    found = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=workload.new, min_new_tokens=workload.new, do_sample=False,
        pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, stopping_criteria=[watch],
    )  # fmt: skip
    generated = found.sequences[:, ids.shape[1] :].tolist()
    cache = found.past_key_values
    nbytes = getattr(cache, "nbytes", None) or sum(
        x.nbytes for layer in cache.layers for x in (layer.keys, layer.values)
    )
    return generated, watch.first, nbytes


def _alone(model: Any, prompts: list[list[int]], workload: Workload, seconds: float) -> Served:
    begin, firsts, peak, generated = time.perf_counter(), [], 0, []
    with _within(seconds):
        for prompt in prompts:
            ids = torch.tensor([prompt])
            tokens, first, nbytes = _generated(model, ids, torch.ones_like(ids), workload)
            generated += tokens
            firsts.append(first - begin)
            peak = max(peak, nbytes)
    return Served(time.perf_counter() - begin, median(firsts), peak, generated)


def _padded(model: Any, prompts: list[list[int]], workload: Workload, seconds: float) -> Served:
    width = max(map(len, prompts))
    nbytes = len(prompts) * (width + workload.new) * _token_nbytes(model)
    if 2 * nbytes > memory_of_machine() // 2:  # a growing cache is copied
        raise LeftOut(f"its cache would take {nbytes / 1e9:.1f} GB")
    ids, mask = torch.zeros(2, len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    begin = time.perf_counter()
    with _within(seconds):
        generated, first, nbytes = _generated(model, ids, mask, workload)
    return Served(time.perf_counter() - begin, first - begin, nbytes, generated)


def _generate_batch(
    model: Any, prompts: list[list[int]], workload: Workload, seed: int, seconds: float
) -> Served:
    """Serve by `generate_batch`, in a child process that can be killed at the time limit."""
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe(duplex=False)
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(model.dtype, "fp32")
    settings = model.config.to_dict(), dtype, seed, torch.get_num_threads()
    arguments = child_end, settings, prompts, workload.new
    child = context.Process(target=_serve_in_child, args=arguments, daemon=True)
    child.start()
    child_end.close()
    try:
        if not parent_end.poll(60):
            raise LeftOut("its process did not begin in 60 s")
        parent_end.recv()
        if not parent_end.poll(seconds):
            raise LeftOut(f"not done in {seconds:.0f} s")
        took, generated = parent_end.recv()
    except EOFError:
        raise LeftOut("its process ended with an error") from None
    finally:
        child.kill()
        child.join()
    if isinstance(generated, str):
        raise LeftOut(generated)
    return Served(took, float("nan"), 0, generated)


def _serve_in_child(
    pipe: Any, settings: tuple[dict[str, Any], str, int, int], prompts: Any, new: int
) -> None:
    """Serve by `generate_batch` of transformers; send a message at the beginning, then the seconds and the tokens.

    It gets a cache for all requests at once. By default it would take nearly all memory of the machine and fill it,
    which takes longer than most workloads.
    """
    config, dtype, seed, threads = settings
    torch.set_num_threads(threads)
    model = build(transformers.AutoConfig.for_model(**config), dtype, seed)
    options = transformers.GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # As many tokens a pass as `ContinuousBatch` takes.
    serving = transformers.ContinuousBatchingConfig(max_batch_tokens=512)
    size = getattr(serving, "page_size", None) or serving.block_size  # of older versions
    serving.num_blocks = sum(-(-(len(x) + new) // size) for x in prompts)
    pipe.send("ready")
    begin = time.perf_counter()
    try:
        found = model.generate_batch(
            prompts, options, continuous_batching_config=serving, progress_bar=False
        )
        generated: Any = [x.generated_tokens for x in found.values()]
        if len(generated) < len(prompts):
            generated = f"it answered only {len(generated)} of {len(prompts)} requests"
    except Exception as error:
        generated = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    pipe.send((time.perf_counter() - begin, generated))


def _token_nbytes(model: Any) -> int:
    """Return the bytes of a token's K and V in the model's dtype."""
    config = model.config.get_text_config(decoder=True)
    layer_nbytes = 2 * num_kv_heads(config) * head_dim(config) * model.dtype.itemsize
    return int(config.num_hidden_layers * layer_nbytes)

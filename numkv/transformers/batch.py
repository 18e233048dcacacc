"""Continuous batching: many requests through one model and one pool of blocks.

A pass of the model computes the next token of each running request, and pieces of prompts, all in one row of tokens.
`numkv.PagedKVCache` stores their K and V. Common prefixes of prompts are computed once and reused. If the pool is full,
the newest request is preempted: its blocks are released, and those not found later are computed again.

The life of a request: *waiting* until there is room, *running* while it has a sequence in the cache, *done*.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from numkv.access import Access, Busy, busy, writes
from numkv.caches import FullPrecision, Profile
from numkv.caches.paged.stored import BLOCK_SIZE
from numkv.errors import CacheFull, DimensionMismatch, NonFiniteInput, NotSupported, NumkvError
from numkv.interrupts import signals_deferred
from numkv.numbers import check_nbytes, check_size
from numkv.sparse.choice import check_counts
from numkv.store import PrefixStore
from numkv.torch import PagedKVCache
from numkv.transformers.cache import read_profile
from numkv.transformers.families import check_config
from numkv.transformers.forward_pass import Pass, layers_of_model, run_model
from numkv.transformers.internals import (
    attention_of,
    can_choose_attention,
    inner_model,
    makes_caches,
)
from numkv.transformers.request import BatchEvent, BatchRequest, prompt_of

# How often somebody who waits for a pass of another thread looks whether it has ended, in seconds.
_LOOK = 0.05


class BatchStats(NamedTuple):
    """Counts of a `ContinuousBatch`."""

    waiting: int
    """Requests that wait for room."""
    running: int
    """Requests that have tokens in the cache."""
    passes: int
    """Passes of the model."""
    prompt_tokens: int
    """Tokens of prompts that were computed, again after a preemption."""
    found_tokens: int
    """Tokens of prompts that were found in the cache or the store."""
    new_tokens: int
    """Tokens that were made."""
    preemptions: int
    """How often a request has given its blocks back."""


class _Part(NamedTuple):
    """What a pass takes of a request: tokens from `start` on."""

    request: BatchRequest
    seq: int
    start: int
    tokens: int
    is_sparse: bool
    """Whether its queries choose the blocks that they read."""


class ContinuousBatch:
    """Many requests at once through a model of transformers, each with the tokens that it would get alone.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder on the CPU, in eval mode. Its attention implementation becomes ``numkv``; `close` undoes it.
    kind, v_kind : str, optional
        Storage kinds of K and of V; as the model computes them if None. Kinds by channel are taken, too.
    rotate, full_precision
        See `numkv.LayerSpec`.
    profile : Profile or path, optional
        Kinds of each layer, from `numkv fit`, in place of these.
    max_nbytes : int or str
        Bytes of the pool, such as ``"4GiB"``: all that the requests keep.
    store : PrefixStore, optional
        Where prefixes are found that the pool has not, and kept past this process. Its mark has to name the model.
    block_size : int
        Tokens of a block.
    most_blocks : int, optional
        Blocks that a new token reads at most in layers that see all earlier tokens: those that it can attend to most.
        Prompts read all. See `numkv.Step.sparse_attention`.
    tokens_per_pass : int
        Tokens that a pass of the model takes at most, of prompts and of running requests together.
    max_running : int
        Requests that run at once.

    Raises
    ------
    NotSupported
        If the model stores more than K and V, or its results for a text would depend on the other texts. If
        `most_blocks` is given and no layer sees all earlier tokens.
    CacheFull, DimensionMismatch, UnsupportedDType, ValueError, TypeError
        If an argument is no such thing.

    Notes
    -----
    One thread at a time drives the batch: `step`, `run`, and iteration over the batch. Meanwhile others may `submit`,
    cancel requests, ask for `stats`, and wait for results.

    In an event loop passes run in a thread. Tasks that iterate over requests by ``async for`` share them, and
    ``async with`` closes the batch after the last one.

    Results do not depend on the other requests but for the rounding of the model's own linear layers, whose sums depend
    on how many rows they are given.

    Examples
    --------
    >>> import transformers
    >>> from numkv.transformers import ContinuousBatch
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    ...     num_key_value_heads=2, eos_token_id=None, pad_token_id=0)
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> with ContinuousBatch(model, kind="int8", max_nbytes="1MiB") as batch:
    ...     requests = [batch.submit(range(1, n), max_new_tokens=4) for n in (5, 9, 30)]
    ...     [len(request.result()) for request in requests]
    [4, 4, 4]
    """

    def __init__(
        self,
        model: Any,
        kind: Any = None,
        *,
        v_kind: Any = None,
        rotate: bool = False,
        full_precision: FullPrecision | None = None,
        profile: Profile | str | os.PathLike[str] | None = None,
        max_nbytes: int | str = "4GiB",
        store: PrefixStore | None = None,
        block_size: int = BLOCK_SIZE,
        most_blocks: int | None = None,
        tokens_per_pass: int = 512,
        max_running: int = 64,
    ) -> None:
        name = "ContinuousBatch"
        self._model = inner = inner_model(model)
        given = {
            "kind": kind, "v_kind": v_kind, "rotate": rotate or None, "full_precision": full_precision,
        }  # fmt: skip
        given = {key: x for key, x in given.items() if x is not None}
        profile = read_profile(profile, given)
        self._tokens_per_pass = check_size("tokens_per_pass", tokens_per_pass, 1)
        self._max_running = check_size("max_running", max_running, 1)
        nbytes = check_nbytes("max_nbytes", max_nbytes)
        config = inner.config.get_text_config(decoder=True)
        for part in (inner.config, config):
            check_config(part, name)
        if not (makes_caches(inner) and can_choose_attention(inner)):
            raise NotSupported(
                f"{name}: expected a model that generates text and whose attention can be chosen, got "
                f"{type(inner).__name__}"
            )
        self._before, self._dtype = attention_of(inner), inner.dtype
        inner.set_attn_implementation("numkv")
        try:
            self._is_as_it_was()
            specs, self._widen = layers_of_model(inner, given, profile, name)
            specs = [replace(x, key_bounds=most_blocks is not None) for x in specs]
            self.cache = PagedKVCache(
                layers=specs, max_nbytes=nbytes, block_size=block_size, store=store
            )
            self._sees_all = [x.window_left < 0 and x.chunk_size is None for x in specs]
            self._most_blocks = None if most_blocks is None else self._check_most(most_blocks)
        except BaseException:
            inner.set_attn_implementation(self._before)
            raise
        self._vocabulary = int(config.vocab_size)
        self._positions = getattr(config, "max_position_embeddings", None)
        self._access, self._submitting = Access(), threading.Lock()
        self._driver = 0  # the thread of the pass under way
        # The last pass of each event loop, which its tasks share while it is under way.
        self._in_loops: dict[object, asyncio.Future[list[BatchEvent]]] = {}
        self._new: list[BatchRequest] = []
        self._waiting: list[BatchRequest] = []
        # And the sequence of each, in the order in which they began.
        self._running: dict[BatchRequest, int] = {}
        self._numbers, self._is_closed = itertools.count(), False
        self._counts = dict.fromkeys(BatchStats._fields[2:], 0)

    def _check_most(self, most_blocks: Any) -> int:
        """Check how many blocks a token reads, among which are those of first tokens in full precision."""
        if not any(self._sees_all):
            raise NotSupported(
                "`most_blocks`: expected a model with layers that see all earlier tokens, got one whose layers all see "
                "a window or a chunk; leave it out"
            )
        in_full = [x.full_precision for x in self.cache.layers]
        first = max(0 if x is None else x.num_sink_tokens for x in in_full)
        return check_counts("most_blocks", most_blocks, 1, 1, -(-first // self.cache.block_size))[0]

    def __repr__(self) -> str:
        stats = self.stats()
        return f"ContinuousBatch(waiting={stats.waiting}, running={stats.running}, cache={self.cache!r})"

    # -- requests

    def submit(
        self,
        input_ids: Any,
        max_new_tokens: int | None = None,
        *,
        generation_config: Any = None,
        seed: int | None = None,
        tokenizer: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        **options: Any,
    ) -> BatchRequest:
        """Add a request; it begins with one of the next passes. Any thread may call this.

        Parameters
        ----------
        input_ids : tensor, array or sequence of int
            Token ids of the prompt.
        max_new_tokens : int, optional
            Tokens to make at most; if None as the generation config says, else 20.
        generation_config : transformers.GenerationConfig, optional
            The model's own if None.
        seed : int, optional
            What sampling begins with: the same seed gives the same tokens, whatever else runs. Anything if None.
        tokenizer : transformers.PreTrainedTokenizerBase, optional
            For `stop_strings`.
        logits_processor, stopping_criteria : list, optional
            Objects of transformers' classes, in addition to those of the generation config. Where one raises, this
            request alone fails.
        **options
            Of a generation config: `do_sample`, `temperature`, `top_p`, `repetition_penalty`, `stop_strings`, …

        Returns
        -------
        BatchRequest

        Raises
        ------
        CacheFull
            If the whole text could never fit into the pool.
        DimensionMismatch
            If the prompt is empty, or the whole text longer than the model's positions.
        NotSupported
            If several sequences or beams are asked for, or the model has changed.
        NumkvError
            If the batch is closed.
        TypeError, ValueError
            If an argument is no such thing.
        """
        self._refuse_closed("submit")
        self._is_as_it_was()
        ids = prompt_of(input_ids, self._vocabulary)
        if max_new_tokens is not None:
            options["max_new_tokens"] = check_size("max_new_tokens", max_new_tokens, 1)
        more = {
            "seed": seed, "tokenizer": tokenizer, "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
        }  # fmt: skip
        made = BatchRequest(
            self._advance, self._advance_in_loop, next(self._numbers), self._model, ids,
            generation_config, options, more,
        )  # fmt: skip
        placed = made.most_tokens - 1  # the last token is not read
        if self._positions is not None and placed > self._positions:
            raise DimensionMismatch(
                f"submit: expected a text within the model's {self._positions} positions, got a prompt of {len(ids)} "
                f"tokens and up to {made.most_tokens - len(ids)} more; make fewer, or shorten the prompt",
                expected=self._positions,
                actual=placed,
            )
        needed = self._blocks_for(placed, with_windows=True)
        if needed > self.cache.num_blocks:
            raise CacheFull(
                f"submit: expected a text that fits into the pool's {self.cache.num_blocks} blocks, got one of up to "
                f"{made.most_tokens} tokens, which take {needed}; make fewer tokens, or the batch with more max_nbytes"
            )
        with self._submitting:
            self._refuse_closed("submit")
            self._new.append(made)
        return made

    def _unfinished(self) -> list[BatchRequest]:
        return [request for request in self._requests() if not request.done]

    @property
    def has_requests(self) -> bool:
        """Whether there is something for `step` to do: requests that have not ended, or blocks of cancelled ones."""
        return bool(self._requests())

    def _requests(self) -> list[BatchRequest]:
        with self._submitting:
            return [*self._new, *self._waiting, *list(self._running)]

    def stats(self) -> BatchStats:
        """Counts of this moment.

        Returns
        -------
        BatchStats
        """
        unfinished = self._unfinished()
        running = sum(request in self._running for request in unfinished)
        return BatchStats(len(unfinished) - running, running, **self._counts)

    # -- driving

    @writes
    def step(self) -> list[BatchEvent]:
        """Run one pass of the model over what is next.

        Returns
        -------
        list of BatchEvent
            New tokens, and requests that have ended in this pass. Those that were cancelled have no event.

        Raises
        ------
        NumkvError
            If another thread drives the batch, or it is closed.
        NotSupported
            If the model has changed. The requests stay as they are.
        """
        self._refuse_closed("step")
        events: list[BatchEvent] = []
        self._driver = threading.get_ident()
        try:
            self._drop_ended()
            self._is_as_it_was()
            parts = self._next_parts(events)
            if parts:
                self._run(parts, events)
            self._drop_ended()
        finally:
            self._driver = 0
        return events

    def _advance(self) -> list[BatchEvent]:
        """Run one pass, or wait a moment for that of another thread."""
        if not self._access.writer:
            with contextlib.suppress(Busy):  # another thread was first
                return self.step()
        elif self._driver == threading.get_ident():
            raise busy(self, "step")  # it would wait for itself
        else:
            time.sleep(_LOOK)
        return []

    async def _advance_in_loop(self) -> list[BatchEvent]:
        """Run one pass in a thread, or await that of another task; it goes on where a task is cancelled."""
        loop = asyncio.get_running_loop()
        if (last := self._in_loops.get(loop)) is None or last.done():
            for ended in [x for x, done in self._in_loops.items() if done.done()]:
                self._in_loops.pop(ended, None)  # else it would keep its loop
            self._in_loops[loop] = last = loop.run_in_executor(None, self._advance)
        return await asyncio.shield(last)

    def run(self) -> None:
        """Run until every request has ended, those that are submitted meanwhile included."""
        while self.has_requests:
            self.step()

    def __iter__(self) -> Iterator[BatchEvent]:
        """Events until every request has ended."""
        while self.has_requests:
            yield from self.step()

    async def __aiter__(self) -> AsyncIterator[BatchEvent]:
        """Events until every request has ended."""
        while self.has_requests:
            for event in await self._advance_in_loop():
                yield event

    @writes
    def close(self) -> None:
        """Cancel what has not ended, and give the model its attention implementation back; more calls do nothing."""
        with self._submitting:
            if self._is_closed:
                return
            self._is_closed = True
        for request in self._unfinished():
            request.finish_reason = "cancelled"
        self._drop_ended()
        if attention_of(self._model) == "numkv":
            self._model.set_attn_implementation(self._before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while True:
            try:
                return self.close()
            except Busy:  # a pass of another thread
                if self._driver == threading.get_ident():
                    raise
                for request in self._unfinished():
                    request.cancel()
                time.sleep(_LOOK)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        loop = asyncio.get_running_loop()
        while (last := self._in_loops.get(loop)) is not None and not last.done():
            for request in self._unfinished():
                request.cancel()
            await asyncio.wait([last])
        self.close()

    def _refuse_closed(self, name: str) -> None:
        if self._is_closed:
            raise NumkvError(
                f"{name}: expected an open batch, got one that was closed; make another"
            )

    def _is_as_it_was(self) -> None:
        """Refuse a model that the cache's rows are not of, or that does not attend by numkv."""
        model, problem = self._model, None
        if attention_of(model) != "numkv":
            problem = f"attention implementation 'numkv', got {attention_of(model)!r}"
        elif model.training:
            problem = "a model in eval mode, got one in train mode; call model.eval()"
        elif model.device.type != "cpu":
            problem = f"a model on the CPU, got one on {model.device}"
        elif model.dtype != self._dtype:
            problem = f"weights in {self._dtype} as before, got {model.dtype}"
        if problem is not None:
            raise NotSupported(f"ContinuousBatch: expected {problem}")

    # -- what is next

    def _blocks_for(self, tokens: int, with_windows: bool = False) -> int:
        """Blocks that so many tokens of a text take at least, even if they are stored one by one.

        Without windows and chunks: those of layers that see everything.
        """
        size, needed = self.cache.block_size, 0
        # In one of the last block's places windows need most.
        at = np.arange(max(0, tokens - size), tokens)
        newest = np.maximum(at - 1, 0)
        layers = zip(self.cache.layers, self._sees_all, strict=True)
        alike = Counter((x.window_left, x.chunk_size) for x, all_ in layers if all_ or with_windows)
        for (window, chunk), count in alike.items():
            reach = newest % chunk if chunk else window if window >= 0 else tokens
            blocks = at // size - np.maximum(newest - reach, 0) // size + 1
            needed += -(-count // self.cache.layers_per_block) * blocks
        return int(np.max(needed))

    def _drop_ended(self) -> None:
        """Give back what requests keep that were cancelled."""
        with signals_deferred:
            with self._submitting:
                self._waiting = [x for x in (*self._waiting, *self._new) if not x.done]
                self._new.clear()
            for request in [x for x in self._running if x.done]:
                self._give_back(request)

    def _give_back(self, request: BatchRequest) -> None:
        """Remove a running request's sequence, with signals held back."""
        self.cache.remove(self._running.pop(request))

    def _next_parts(self, events: list[BatchEvent]) -> list[_Part]:
        """What the next pass takes: a token of each request that makes some, then pieces of prompts."""
        left = self._tokens_per_pass
        parts: list[_Part] = []
        for is_prompt in (False, True):
            for request, seq in self._running.items():
                start = self.cache.length(seq)
                todo = len(request.ids()) - start
                if (todo > 1) == is_prompt and left:
                    parts.append(self._part(request, start, left))
                    left -= parts[-1].tokens
        for request in list(self._waiting):
            if not left or len(self._running) >= self._max_running:
                break
            if self._waits_for_prefix(request):
                continue
            if not self._has_room(request):
                break
            found = self._begin(request, events)
            if found is not None:
                parts.append(self._part(request, found, left))
                left -= parts[-1].tokens
        return parts

    def _part(self, request: BatchRequest, start: int, left: int) -> _Part:
        """A request's next tokens; by their places, which no pass changes, they read sparsely or not."""
        end, sparse = len(request.ids()), False
        if self._most_blocks is not None:
            sparse = start >= request.prompt_len
            end = end if sparse else request.prompt_len
        return _Part(request, self._running[request], start, min(end - start, left), sparse)

    def _waits_for_prefix(self, request: BatchRequest) -> bool:
        """Return whether a running request is about to compute blocks that this one begins with."""
        for other, seq in self._running.items():
            shared = min(request.shared_len(other), len(request.ids()) - 1)
            if shared - self.cache.length(seq) >= self.cache.block_size:
                return True
        return False

    def _has_room(self, request: BatchRequest) -> bool:
        """Return whether a request may begin: alone always, with others only if they keep room to go on."""
        running = len(self._running)
        needed = self._blocks_for(len(request.ids())) + self._blocks_for(1) * (1 + running)
        return not running or needed <= self.cache.num_free

    def _begin(self, request: BatchRequest, events: list[BatchEvent]) -> int | None:
        """Add a sequence for a request; return the tokens that it has then, or None if it failed."""
        try:
            with signals_deferred:
                seq = self.cache.add(np.array(request.ids(), np.int64))
                with self._submitting:
                    self._waiting.remove(request)
                    self._running[request] = seq
        except CacheFull as error:
            self._end(request, "error", events, error)
            return None
        found = self.cache.cached_len(seq)
        if len(request.ids()) == request.prompt_len:
            request.cached_len = found
        self._counts["found_tokens"] += found
        return found

    # -- a pass

    def _run(self, parts: list[_Part], events: list[BatchEvent]) -> None:
        """A pass; where rows of one request cannot be stored, it alone fails."""
        try:
            parts, steps = self._reserve(parts, events)
            if parts:
                self._pass(parts, steps, events)
        except NonFiniteInput as error:
            if len(parts) == 1:
                self._end(parts[0].request, "error", events, error)
                return
            middle = len(parts) // 2
            for some in (parts[:middle], parts[middle:]):
                self._run([part for part in some if part.request in self._running], events)

    def _reserve(
        self, parts: list[_Part], events: list[BatchEvent]
    ) -> tuple[list[_Part], list[Any]]:
        """Room for the new tokens, of which the newest requests make some where there is none.

        Those that read sparsely come last, in a step of their own: see `Pass`.
        """
        while parts:
            dense = [x for x in parts if not x.is_sparse]
            sparse = [x for x in parts if x.is_sparse]
            try:
                steps = [
                    (self.cache.reserve([x.seq for x in some], [x.tokens for x in some]), most)
                    for some, most in ((dense, None), (sparse, self._most_blocks))
                    if some
                ]
                return dense + sparse, steps
            except CacheFull as error:
                self._roll_back()
                newest = list(self._running)[-1]
                is_alone = len(self._running) == 1
                if is_alone and parts[0].tokens > 1:  # windows keep less of a part
                    parts = [parts[0]._replace(tokens=parts[0].tokens // 2)]
                    continue
                if is_alone:
                    self._end(newest, "error", events, error)
                else:
                    with signals_deferred:
                        with self._submitting:  # it is always among the requests
                            self._waiting.insert(0, newest)
                        self._give_back(newest)
                    self._counts["preemptions"] += 1
                parts = [x for x in parts if x.request is not newest]
        return [], []

    def _roll_back(self) -> bool:
        """Roll open steps back; return whether there were any."""
        steps = self.cache.open_steps
        for step in steps:
            self.cache.rollback(step)
        return bool(steps)

    def _pass(self, parts: list[_Part], steps: list[Any], events: list[BatchEvent]) -> None:
        """Run the model and choose tokens; nothing has changed where that raises."""
        before = {part.request: part.request.generator_state() for part in parts}
        try:
            rows = np.concatenate([x.request.ids()[x.start : x.start + x.tokens] for x in parts])
            places = np.concatenate([np.arange(x.start, x.start + x.tokens) for x in parts])
            last = np.cumsum([x.tokens for x in parts]) - 1
            whole = [x.start + x.tokens == len(x.request.ids()) for x in parts]
            ids, positions, ends = map(torch.from_numpy, (rows, places, last[whole]))
            on = Pass(steps, self._widen, self._sees_all)
            logits = run_model(self._model, ids, positions, ends, on)
            makers = [part.request for part, ended in zip(parts, whole, strict=True) if ended]
            chosen = {x: _chosen(x, row) for x, row in zip(makers, logits, strict=True)}
            with signals_deferred:
                for step, _ in steps:
                    own, rows = np.split(rows, [step.num_tokens])
                    self.cache.commit(step, token_ids=own)
                    done, parts = parts[: len(step.sequences)], parts[len(step.sequences) :]
                    self._note(done, chosen, events)
                self._counts["passes"] += 1
        except BaseException:
            if self._roll_back():
                for part in parts:
                    part.request.set_generator_state(before[part.request])
            raise

    def _note(
        self, parts: list[_Part], chosen: dict[BatchRequest, Any], events: list[BatchEvent]
    ) -> None:
        """Record a step that has been committed."""
        self._counts["prompt_tokens"] += sum(
            min(x.start + x.tokens, x.request.prompt_len) - min(x.start, x.request.prompt_len) for x in parts
        )  # fmt: skip
        for request in (x.request for x in parts if x.request in chosen):
            if request.done:  # cancelled meanwhile
                continue
            token, reason, error = chosen[request]
            if token is not None:
                request.ids().append(token)
                self._counts["new_tokens"] += 1
            if reason is not None:
                self._end(request, reason, None, error)
            events.append(BatchEvent(request, token, reason is not None))

    def _end(
        self, request: BatchRequest, reason: str, events: list[BatchEvent] | None, error: Exception | None = None
    ) -> None:  # fmt: skip
        """End a request, and give back what it keeps."""
        with signals_deferred:
            request.error, request.finish_reason = error, reason
            if request in self._running:
                self._give_back(request)
            elif request in self._waiting:
                self._waiting.remove(request)
        if events is not None:
            events.append(BatchEvent(request, None, True))


def _chosen(request: BatchRequest, logits: Any) -> tuple[int | None, str | None, Exception | None]:
    """A request's next token, why it ends with that, if it does, and what a function of its own has raised."""
    try:
        with torch.inference_mode():
            token = request.choose(logits)
            return token, request.ended_by(token), None
    except Exception as error:
        return None, "error", error

"""Decode steps and prompts of a whole model, with contestants in turns."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from numkv.bench.contestants import ROOM, Contestant, Kinds, candidates, queries_of
from numkv.bench.models import head_dim, num_kv_heads, num_parameters
from numkv.bench.rounds import DYNAMIC, FLOOR, Agreement, Line, Measured, take_rounds
from numkv.errors import NotSupported

#: Steps by which logits are compared; they also warm up.
CHECKS = 4
#: Spread of scores: with it, a query at 32k tokens attends to some dozens of them, as in trained models.
SPREAD = 2.5
#: Contestants for prompts.
_OF_PROMPTS = ("dynamic", "static", "numkv", "floor")
#: Most weights of a model that is widened to fp32, because of its memory.
_WIDENED = 1_500_000_000


@dataclass
class Bench:
    """A model, and the settings of its measurement.

    Attributes
    ----------
    model : transformers.PreTrainedModel
        The model.
    wanted : list of str
        Contestants; see `candidates`.
    kinds : list of Kinds
        Storage kinds of numkv.
    batch, seed, rounds : int
        Number of sequences, seed of random numbers, and wanted number of rounds.
    probe : callable
        Measures the read bandwidth in bytes a second.
    report : callable
        Called with the name of each piece of work.
    count_rounds : callable
        Called with the number of rounds that count, that were left out, and that are wanted.
    enough : callable
        Called after each round; returns whether to stop.
    """

    model: Any
    wanted: list[str]
    kinds: list[Kinds]
    batch: int
    seed: int
    rounds: int
    probe: Callable[[], float]
    report: Callable[[str], None] = lambda what: None
    count_rounds: Callable[[int, int, int], None] = lambda done, left_out, wanted: None
    enough: Callable[[], bool] = lambda: False
    _spread: list[float] = field(default_factory=list)

    # -- decode

    def decode(self, context: int, deadline: float) -> Line:
        """Time steps at a context, until a deadline on `time.monotonic`."""
        gc.collect()  # caches of the last context
        self.report(f"{context:,} tokens: filling caches")
        room = -(-(context + 1) // ROOM) * ROOM
        contestants: dict[str, Contestant] = {}
        absent: dict[str, str] = {}
        for name, make in candidates(self.wanted, self.kinds, self.model, context, room):
            with _or_absent(name, absent, contestants):
                contestants[name] = make()
        self._fill(contestants, context, absent)
        _check_some(contestants, absent)
        ids = self._ids(CHECKS)
        expected = self._reference(context, ids)
        agreement: dict[str, Agreement] = {}
        for name, one in list(contestants.items()):
            self.report(f"{context:,} tokens: warming up {name}")
            with _or_absent(name, absent, contestants):
                found = [self._logits(one, ids[i]) for i in range(CHECKS)]
                if expected is None and name == DYNAMIC:
                    expected = found
                if expected is not None and name != FLOOR:
                    agreement[name] = _agreement(found, expected)
        _check_some(contestants, absent)
        read = {name: one.read_by_step(context) for name, one in contestants.items()}

        def turn(one: Contestant) -> float:
            one.enter()
            try:
                # Loads the code and counters of this contestant into caches.
                self._step(one, ids[0])
                one.restore()
                start = time.perf_counter()
                self._step(one, ids[1])
                return time.perf_counter() - start
            finally:
                one.restore()
                one.leave()

        sizes = {name: one.nbytes for name, one in contestants.items()}
        turns = {name: functools.partial(turn, one) for name, one in contestants.items()}
        measured = self._rounds(turns, deadline)
        line = Line(context, measured, self.batch, sizes=sizes, read=read, agreement=agreement)
        line.absent = absent | measured.lost
        return line

    def _fill(
        self, contestants: dict[str, Contestant], context: int, absent: dict[str, str]
    ) -> None:
        """Fill all caches with the same random rows, layer by layer."""
        for layer, k, v in self._rows(context):
            for name, one in list(contestants.items()):
                with _or_absent(name, absent, contestants):
                    one.store(layer, k, v)
        for one in contestants.values():
            one.keep()

    def _rows(self, context: int) -> Iterator[tuple[int, Any, Any]]:
        """Yield random keys and values of each layer with attention."""
        config = self.model.config
        heads, dim = num_kv_heads(config), head_dim(config)
        if not self._spread:
            self._spread = queries_of(self.model, self._ids(1)[0].expand(self.batch, 4))
        if len(self._spread) != config.num_hidden_layers:
            raise NotSupported(
                f"{config.model_type}: expected a model in which every layer attends by an attention function, got "
                f"{len(self._spread)} such layers of {config.num_hidden_layers}"
            )
        generator = torch.Generator().manual_seed(self.seed)
        dtype = self.model.dtype
        for layer in range(config.num_hidden_layers):
            shape = (self.batch, heads, context, dim)
            k = torch.randn(shape, generator=generator, dtype=dtype)
            v = torch.randn(shape, generator=generator, dtype=dtype)
            yield layer, k.mul_(SPREAD / self._spread[layer]), v

    def _ids(self, count: int) -> Any:
        generator = torch.Generator().manual_seed(self.seed)
        vocabulary = self.model.config.vocab_size
        return torch.randint(1, vocabulary, (count, self.batch, 1), generator=generator)

    def _step(self, one: Contestant, ids: Any, model: Any = None) -> Any:
        """Compute a step as ``generate`` does."""
        held = int(one.cache.get_seq_length())
        mask = torch.ones(self.batch, held + 1, dtype=torch.long)
        positions = torch.full((self.batch, 1), held)
        with torch.no_grad():
            return (model or self.model)(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=one.cache, use_cache=True
            ).logits  # fmt: skip

    def _logits(self, one: Contestant, ids: Any) -> Any:
        one.enter()
        try:
            return self._step(one, ids)[:, -1].float()
        finally:
            one.restore(exactly=True)
            one.leave()

    def _reference(self, context: int, ids: Any) -> list[Any] | None:
        """Return the logits of the same model in fp32 over the same rows; None if memory is short."""
        if num_parameters(self.model) > _WIDENED:
            return None
        self.report(f"{context:,} tokens: reference in fp32")
        wide = copy.deepcopy(self.model).float()
        try:
            wide.set_attn_implementation("sdpa")
        except ValueError:  # an unsupported model
            return None
        one = Contestant(wide, DynamicCache(config=wide.config))
        for layer, k, v in self._rows(context):
            one.store(layer, k.float(), v.float())
        one.keep()
        found = []
        for i in range(CHECKS):
            found.append(self._step(one, ids[i], wide)[:, -1])
            one.restore()
        del wide, one
        gc.collect()
        return found

    def _rounds(
        self, turns: Mapping[str, Callable[[], float]], deadline: float, **more: Any
    ) -> Measured:
        """Run rounds of all contestants, each in random order."""
        order = random.Random(self.seed)
        self.count_rounds(0, 0, self.rounds)
        return take_rounds(
            turns, self.probe, self.rounds, deadline, shuffled=lambda names: order.sample(names, len(names)),
            count_rounds=lambda done, left_out: self.count_rounds(done, left_out, self.rounds),
            enough=self.enough, **more,
        )  # fmt: skip

    # -- prompts

    def prefill(self, tokens: int, deadline: float, *, padded: bool = False) -> Line:
        """Time prompts of some length, each into an empty cache."""
        model = self.model
        batch = max(2, self.batch) if padded else self.batch
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(1, model.config.vocab_size, (batch, tokens), generator=generator)
        mask = torch.ones_like(ids)
        if padded:
            mask[1::2, : tokens - tokens // 2] = 0
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            arguments["logits_to_keep"] = 1
        wanted = [x for x in self.wanted if x in _OF_PROMPTS]
        made = dict(candidates(wanted, self.kinds, model, tokens, tokens + ROOM))
        expected: Any = None
        turns: dict[str, Callable[[], float]] = {}
        absent: dict[str, str] = {}
        agreement, sizes = {}, {}

        def read(make: Callable[[], Contestant]) -> tuple[Any, float, Contestant]:
            one = make()
            one.enter()
            with torch.no_grad():
                start = time.perf_counter()
                logits = model(past_key_values=one.cache, **arguments).logits
                return logits[:, -1].float(), time.perf_counter() - start, one

        for name, make in made.items():
            self.report(f"prompts of {tokens:,} tokens: warming up {name}")
            with _or_absent(name, absent, turns):
                logits, _, one = read(make)
                expected = logits if expected is None else expected
                if name != FLOOR:
                    agreement[name] = _agreement([logits], [expected])
                turns[name] = lambda make=make: read(make)[1]  # type: ignore[misc]
                sizes[name] = one.nbytes
                del one
        _check_some(turns, absent)
        measured = self._rounds(turns, deadline, fewest=2)
        line = Line(tokens, measured, batch, prompt=True, padded=padded, sizes=sizes)
        line.agreement, line.absent = agreement, absent | measured.lost
        return line


def _agreement(found: list[Any], expected: list[Any]) -> Agreement:
    pairs = list(zip(found, expected, strict=True))
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs)
    errors = torch.cat([(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in pairs])
    return Agreement(same, errors.numel(), float(errors.mean()))


def _check_some(contestants: dict[str, Any], absent: dict[str, str]) -> None:
    if not contestants:
        raise NotSupported(f"no contestant can run this model: {absent}")


@contextmanager
def _or_absent(name: str, absent: dict[str, str], contestants: dict[str, Any]) -> Iterator[None]:
    """Make a contestant absent if this context raises any error."""
    try:
        yield
    except Exception as error:
        absent[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        contestants.pop(name, None)

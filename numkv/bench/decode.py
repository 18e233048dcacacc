"""Decode steps of a whole model at some context, and prompts, contestants in turns."""

from __future__ import annotations

import copy
import gc
import inspect
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, DynamicCache, StaticCache

from numkv.bench.contestants import Contestant, Kinds, candidates, queries_of
from numkv.bench.models import num_kv_heads, num_parameters
from numkv.bench.results import DYNAMIC, FLOOR, STATIC, Agreement, Line
from numkv.bench.rounds import take_rounds
from numkv.errors import NotSupported
from numkv.transformers import NumkvCache

REFERENCE = "fp32 model and cache"
#: Steps by which logits are compared; they warm up, too.
CHECKS = 4
#: How far scores spread: a query at 32k tokens then attends to some dozens of them, as those of trained models do.
SPREAD = 2.5
#: A model of more weights is not widened to fp32, which would take too much memory.
_WIDENED = 1_500_000_000


@dataclass
class Bench:
    """A model, and how it is measured.

    Attributes
    ----------
    model : transformers.PreTrainedModel
        The model.
    wanted : list of str
        Contestants; see `candidates`.
    kinds : list of Kinds
        Storage kinds of numkv.
    batch, seed, rounds : int
        Sequences; what random numbers start from; rounds that are wanted.
    probe : callable
        Gives the bandwidth, bytes a second.
    say : callable
        Is told what is being done.
    told : callable
        Is told of rounds: counted, left out, wanted.
    """

    model: Any
    wanted: list[str]
    kinds: list[Kinds]
    batch: int
    seed: int
    rounds: int
    probe: Callable[[], float]
    say: Callable[[str], None] = lambda what: None
    told: Callable[[int, int, int], None] = lambda done, left_out, wanted: None
    _spread: list[float] = field(default_factory=list)

    # -- decode

    def decode(self, context: int, deadline: float) -> Line:
        """Time steps at a context, until a deadline on `time.monotonic`."""
        gc.collect()  # caches of the last context
        self.say(f"{context:,} tokens: filling caches")
        contestants, absent = self._made(candidates(self.wanted, self.kinds, self.model, context))
        self._fill(contestants, context, absent)
        _check_some(contestants, absent)
        ids = self._ids(CHECKS)
        expected = self._reference(context, ids)
        agreement: dict[str, Agreement] = {}
        for name, one in list(contestants.items()):
            self.say(f"{context:,} tokens: warming up {name}")
            try:
                found = [self._logits(one, ids[i]) for i in range(CHECKS)]
            except Exception as error:  # theirs, whatever it is
                absent[name] = _reason(error)
                del contestants[name]
                continue
            if expected is None and name == DYNAMIC:
                expected = found
            if expected is not None and name != FLOOR:
                agreement[name] = _agreement(found, expected)
        _check_some(contestants, absent)
        read = {name: one.read_by_step(context) for name, one in contestants.items()}

        def turn(one: Contestant) -> float:
            one.enter()
            try:
                self._step(one, ids[0])  # brings code and counters of this contestant near
                one.restore()
                start = time.perf_counter()
                self._step(one, ids[1])
                return time.perf_counter() - start
            finally:
                one.restore()
                one.leave()

        line = self._line(context, contestants, turn, deadline)
        line.read, line.agreement, line.absent = read, agreement, absent | line.measured.lost
        return line

    def _made(
        self, found: Iterator[tuple[str, Callable[[], Contestant]]]
    ) -> tuple[dict[str, Contestant], dict[str, str]]:
        contestants, absent = {}, {}
        for name, make in found:
            try:
                contestants[name] = make()
            except Exception as error:  # theirs, whatever it is
                absent[name] = _reason(error)
        return contestants, absent

    def _fill(
        self, contestants: dict[str, Contestant], context: int, absent: dict[str, str]
    ) -> None:
        """Give all of them the same random rows, a layer after the other."""
        for layer, k, v in self._rows(context):
            for name, one in list(contestants.items()):
                try:
                    one.store(layer, k, v)
                except Exception as error:  # theirs, whatever it is
                    absent[name] = _reason(error)
                    del contestants[name]
        for one in contestants.values():
            one.keep()

    def _rows(self, context: int) -> Iterator[tuple[int, Any, Any]]:
        """Random keys and values of each layer that has attention."""
        config = self.model.config
        heads, dim = num_kv_heads(config), _head_dim(config)
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
        """A step, as ``generate`` makes it."""
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
        """Logits of the same model in fp32 over the same rows; None where there is no room for it."""
        if num_parameters(self.model) > _WIDENED:
            return None
        self.say(f"{context:,} tokens: reference in fp32")
        wide = copy.deepcopy(self.model).float()
        try:
            wide.set_attn_implementation("sdpa")
        except ValueError:  # a model that it is not made for
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

    def _line(
        self,
        tokens: int,
        contestants: dict[str, Contestant],
        turn: Callable[[Contestant], float],
        deadline: float,
    ) -> Line:
        order = random.Random(self.seed)
        sizes = {name: one.nbytes for name, one in contestants.items()}
        self.told(0, 0, self.rounds)
        measured = take_rounds(
            {name: lambda one=one: turn(one) for name, one in contestants.items()},  # type: ignore[misc]
            self.probe,
            self.rounds,
            deadline,
            shuffled=lambda names: order.sample(names, len(names)),
            told=lambda done, left_out: self.told(done, left_out, self.rounds),
        )
        return Line(tokens, measured, self.batch, sizes=sizes)

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
        made = dict(self._empty_caches(tokens))
        expected: Any = None
        found, absent, agreement, sizes = {}, {}, {}, {}

        def read(name: str) -> tuple[Any, float, Any]:
            implementation, make = made[name]
            model.set_attn_implementation(implementation)
            cache = make()
            with torch.no_grad():
                start = time.perf_counter()
                logits = model(past_key_values=cache, **arguments).logits
                return logits[:, -1].float(), time.perf_counter() - start, cache

        for name in made:
            self.say(f"prompts of {tokens:,} tokens: warming up {name}")
            try:
                logits, _, cache = read(name)
            except Exception as error:  # theirs, whatever it is
                absent[name] = _reason(error)
                continue
            expected = logits if expected is None else expected
            if name != FLOOR:
                agreement[name] = _agreement([logits], [expected])
            found[name] = name
            sizes[name] = Contestant(model, cache).nbytes if name != FLOOR else 0
            if isinstance(cache, NumkvCache):
                sizes[name] = int(cache.nbytes)
            del cache
        _check_some(found, absent)
        order = random.Random(self.seed)
        self.told(0, 0, self.rounds)
        measured = take_rounds(
            {name: lambda name=name: read(name)[1] for name in found},  # type: ignore[misc]
            self.probe,
            self.rounds,
            deadline,
            fewest=2,
            shuffled=lambda names: order.sample(names, len(names)),
            told=lambda done, left_out: self.told(done, left_out, self.rounds),
        )
        line = Line(tokens, measured, batch, prompt=True, padded=padded, sizes=sizes)
        line.agreement, line.absent = agreement, absent | measured.lost
        return line

    def _empty_caches(self, tokens: int) -> Iterator[tuple[str, tuple[str, Callable[[], Cache]]]]:
        config = self.model.config
        if "dynamic" in self.wanted:
            yield DYNAMIC, ("sdpa", lambda: DynamicCache(config=config))
        if "static" in self.wanted:
            yield STATIC, ("sdpa", lambda: StaticCache(config=config, max_cache_len=tokens + 16))
        for kinds in self.kinds if "numkv" in self.wanted else []:

            def numkv(kinds: Kinds = kinds) -> Cache:
                return NumkvCache(
                    config, k_kind=kinds.k_kind, v_kind=kinds.v_kind, capacity=tokens + 16, rotate=kinds.rotate
                )  # fmt: skip

            yield f"numkv {kinds.label}", ("numkv", numkv)
        if "floor" in self.wanted:
            floor = next(iter(candidates(["floor"], [], self.model, tokens)))[1]
            yield FLOOR, (floor().implementation, lambda: floor().cache)


def _head_dim(config: Any) -> int:
    found = getattr(config, "head_dim", None)
    return int(found or config.hidden_size // config.num_attention_heads)


def _agreement(found: list[Any], expected: list[Any]) -> Agreement:
    pairs = list(zip(found, expected, strict=True))
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in pairs)
    errors = torch.cat([(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in pairs])
    return Agreement(same, errors.numel(), float(errors.mean()))


def _check_some(contestants: dict[str, Any], absent: dict[str, str]) -> None:
    if not contestants:
        raise NotSupported(f"no contestant can run this model: {absent}")


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:300]

"""Memory that runs out in calls of a `NumkvCache`, and arguments of every sort: nothing changes, or all of it."""

import copy
import functools
import operator
import random
import tempfile
import types
from pathlib import Path

import pytest
from fault_base import Subject, run_out

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.19")

from fuzz.hostile import REFUSED, SAME, VARIANTS, CallersOwn  # noqa: E402

import numkv  # noqa: E402
from numkv.transformers import ContinuousBatch, NumkvCache, mark_of, use  # noqa: E402
from numkv.transformers.attention import attention  # noqa: E402
from numkv.transformers.masks import plan_of_mask  # noqa: E402

HEADS, Q_HEADS, DIM = 2, 4, 16
CONFIG = transformers.LlamaConfig(
    vocab_size=32, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=Q_HEADS,
    num_key_value_heads=HEADS, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
MODULE = types.SimpleNamespace(training=False, layer_idx=0)


def attend(cache, columns, layers=(0, 1)):
    """A pass through some layers; the last output."""
    past, batch = cache.get_seq_length(), max(2, cache._batch())
    generator = torch.Generator().manual_seed(past)
    plan = plan_of_mask(batch, columns, past + columns, past)
    for layer in layers:
        q, k, v = (
            torch.randn(batch, n, columns, DIM, generator=generator)
            for n in (Q_HEADS, HEADS, HEADS)
        )
        found = attention(MODULE, q, *cache.update(k, v, layer), plan)[0]
    return found.numpy()


def filled(options):
    cache = NumkvCache(CONFIG, max_nbytes="1MiB", **options)
    cache.activate_past_recording()
    for columns in (250, 1):
        attend(cache, columns)
    return cache


def see(cache):
    found = []
    for layer in cache.layers:
        at = layer.metadata
        tokens = [x.words[b].tobytes() for _, x in layer.pool.stored for b in at.table[at.held()]]
        ring = (
            None if layer.ring is None else (layer.ring.end.tolist(), layer.ring.pool.k.tobytes())
        )
        found.append((at.columns, at.lengths.tolist(), at.first.tolist(), tokens, ring))
    return found


def saved(cache):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache"
        numkv.save(path, cache, mark="m")
        try:
            again = numkv.load(path, mark="m")
        except numkv.NumkvError as error:
            raise MemoryError(str(error)) from error
        return path.read_bytes(), repr(see(again))


def make_room(cache):
    """What the first layer of a pass does before it stores rows."""
    past = cache.get_seq_length()
    plan_of_mask(2, 30, past + 30, past).step(cache.layers[0])


CALLS = {
    "a pass makes room": make_room,
    "beams part": (lambda it: it.reorder_cache(torch.tensor([1, 1])), make_room),
    "crop": lambda it: it.crop(-7),
    "reorder_cache": lambda it: it.reorder_cache(torch.tensor([1, 1])),
    "batch_repeat_interleave": lambda it: it.batch_repeat_interleave(3),
    "batch_select_indices": lambda it: it.batch_select_indices(torch.tensor([False, True])),
    "reset": lambda it: it.reset(),
    "copy.deepcopy": lambda it: see(copy.deepcopy(it)),
    "save and load": saved,
}  # fmt: skip
KINDS = [
    {"kind": "int8"}, {"kind": "int8_channel"}, {"kind": "int8", "full_precision": numkv.FullPrecision(5, 3)},
]  # fmt: skip


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_nothing_changes_where_memory_runs_out(request, monkeypatch, options, call):
    subject = Subject(functools.partial(filled, options), see, CALLS, NumkvCache)
    every, most = (4, 600) if call != "save and load" else (61, 3000)
    every = 1 if request.config.getoption("nightly") else every
    run_out(monkeypatch, subject, call, f"{options}: {call}", every, most)


def test_a_mark_where_memory_runs_out(monkeypatch):
    subject = Subject(
        lambda: transformers.LlamaForCausalLM(CONFIG), lambda it: None, {"mark_of": lambda it: len(mark_of(it))}, None
    )  # fmt: skip
    run_out(monkeypatch, subject, "mark_of", "mark_of", 1)


def test_numbers_of_every_sort():
    """Taken as `ContinuousBatch` takes them, or refused with the argument's name."""
    rng = random.Random(1)
    model = transformers.LlamaForCausalLM(CONFIG).eval()
    taken = refused = 0
    variants = [x for x in VARIANTS["size"] if x.__name__ != "none"]
    for _ in range(300):
        hostile = rng.choice(variants)(7, rng)
        found = []
        reserves = isinstance(hostile.value, int) and hostile.value > 2**30
        for make in (NumkvCache, use, ContinuousBatch)[: 2 if reserves else 3]:
            given = {"max_nbytes": hostile.value}
            try:
                made = make(CONFIG if make is NumkvCache else model, **given)
                if make is ContinuousBatch:
                    made.close()
                found.append(None)
            except CallersOwn:
                found.append("the caller's own")
            except (TypeError, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
        assert len(set(found)) == 1, (hostile.value, found)
        taken += found[0] is None
        refused += found[0] is not None
    assert taken > 10
    assert refused > 100


def test_numbers_of_blocks_of_every_sort():
    """Taken by a batch if they are integers from 2 on, or refused by name, with the model as it was."""
    rng = random.Random(2)
    model = transformers.LlamaForCausalLM(CONFIG).eval()
    before, taken = model.config._attn_implementation, 0
    variants = [x for x in VARIANTS["size"] if x.__name__ != "none"]
    for i in range(300):
        hostile = rng.choice(variants)(i % 7, rng)
        number = hostile.value if hostile.plain is SAME else hostile.plain
        good = number is not REFUSED and 2 <= operator.index(number) < 2**63
        try:
            batch = ContinuousBatch(model, max_nbytes="1MiB", most_blocks=hostile.value)
            assert good
            assert batch.submit([3, 4, 5], 2).result()
            batch.close()
            taken += 1
        except CallersOwn:
            assert hostile.plain is REFUSED
        except (TypeError, ValueError) as error:
            said = str(error)
            assert (good, "`most_blocks`" in said) == (False, True), said
        assert model.config._attn_implementation == before
    assert 10 < taken < 200


@pytest.mark.parametrize("value", [None, 1, "model", [], torch.nn.Linear(2, 2), NumkvCache(CONFIG)])
def test_marks_of_what_is_no_model(value):
    with pytest.raises(TypeError, match=r"expected a transformers\.PreTrainedModel"):
        mark_of(value)

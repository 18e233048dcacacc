"""Passes of few tokens go through one compiled call, and give what the ordinary way gives, bit by bit."""

import copy
import pickle
import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from decoder_models import make, prompts  # noqa: E402
from transformers import masking_utils as masking  # noqa: E402

from numkv.errors import NonFiniteInput, NotSupported  # noqa: E402
from numkv.transformers import NumkvCache  # noqa: E402
from numkv.transformers.attention import at_once, attention  # noqa: E402
from numkv.transformers.masks import plan_of_mask  # noqa: E402

HEADS, Q_HEADS, DIM = 2, 4, 16
CONFIG = transformers.LlamaConfig(num_hidden_layers=2)
SLIDING = transformers.MistralConfig(num_hidden_layers=2, sliding_window=8)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(7)


def tensors(generator, columns, batch=2, dtype=torch.float32):
    shapes = (Q_HEADS, HEADS, HEADS)
    return [torch.randn(batch, n, columns, DIM, generator=generator).to(dtype) for n in shapes]


def attend(cache, layer, q, k, v, plan=None, **options):
    if plan is None:
        past, columns = cache.layers[layer].get_seq_length(), q.shape[2]
        reach = cache.layers[layer].reach
        window = {}
        if reach >= 0:
            window["mask_function"] = masking.sliding_window_causal_mask_function(reach + 1)
        plan = plan_of_mask(len(q), columns, past + columns, past, **window)
    module = types.SimpleNamespace(training=False, layer_idx=layer)
    return attention(module, q, *cache.update(k, v, layer), plan, **options)[0]


@pytest.mark.parametrize("config", [CONFIG, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("fp32", torch.float32), ("int8", torch.bfloat16), ("bf16", torch.bfloat16)],
    ids=str,
)
def test_both_ways_give_the_same(generator, monkeypatch, config, kind, dtype):
    """Past the end of a block, over copied blocks, and with options that change between passes."""
    caches = [NumkvCache(config, kind) for _ in range(2)]
    sinks = torch.randn(Q_HEADS, generator=generator)
    with_sinks = [{"s_aux": sinks}] * 4
    options = [{}, {}, {"scaling": 0.5}, {"softcap": 3.0, "scaling": 0.2}, *with_sinks, {}]
    calls = 0
    for number, columns in enumerate([250, 1, 1, 1, 3, 1, 1, 1, 1]):
        q, k, v = tensors(generator, columns, dtype=dtype)
        if number == 5:
            for cache in caches:
                cache.reorder_cache(torch.tensor([1, 1]))
        if number == 7:
            sinks += 1  # in place, as an optimiser does
        asked = options[number]
        found = []
        for cache, way in zip(caches, (at_once, lambda *_: None), strict=True):
            monkeypatch.setattr("numkv.transformers.attention.at_once", way)
            with torch.inference_mode(number < 6):
                found.append([attend(cache, layer, q, k, v, **asked) for layer in (0, 1)])
            if cache is caches[0] and number:
                assert cache.layers[1].bound is not None
                assert cache.layers[1].bound.group.after is cache.layers[1].metadata
                calls += 1
        for a, b in zip(*found, strict=True):
            assert a.dtype == dtype
            assert torch.equal(a, b)
    assert calls == 8
    assert caches[1].layers[1].bound is None


def test_copies_do_not_share_what_is_bound(generator):
    """Addresses belong to one cache: copies, and what is left of a cache, go on with buffers of their own."""
    cache = NumkvCache(CONFIG, "fp32")
    for columns in (5, 1):
        rows = tensors(generator, columns)
        for layer in (0, 1):
            attend(cache, layer, *rows)
    copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), copy.copy(cache)]
    assert all(layer.bound is None for each in copies[:2] for layer in each.layers)
    steps = [tensors(generator, 1) for _ in range(3)]
    found = []
    for each in copies:
        found.append([attend(each, layer, *rows) for rows in steps for layer in (0, 1)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_rows_that_cannot_be_quantised(generator):
    cache = NumkvCache(CONFIG, "int8")
    attend(cache, 0, *tensors(generator, 4))
    attend(cache, 0, *tensors(generator, 1))
    q, k, v = tensors(generator, 1)
    bad = k.clone()
    bad[1, 1, 0, 3] = torch.inf
    with pytest.raises(NonFiniteInput):
        attend(cache, 0, q, bad, v)
    assert cache.get_seq_length() == 5
    other = copy.deepcopy(cache)
    assert torch.equal(attend(cache, 0, q, k, v), attend(other, 0, q, k, v))


def test_tensors_that_are_not_as_they_were(generator):
    """Another dtype, device, class or number of heads in the middle of a sequence."""
    cache = NumkvCache(CONFIG, "fp32")
    for columns in (4, 1):
        attend(cache, 0, *tensors(generator, columns))
    rows = tensors(generator, 1)
    expected = attend(copy.deepcopy(cache), 0, *rows)
    half = [x.bfloat16() for x in rows]
    found = attend(copy.deepcopy(cache), 0, *half)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() < 0.05
    lazy = torch.complex(torch.zeros_like(rows[0]), -rows[0]).conj().imag
    assert lazy.is_neg()
    assert torch.allclose(attend(copy.deepcopy(cache), 0, lazy, *rows[1:]), expected)
    for wrong in (
        rows[0].to("meta"),
        rows[0][:, :3],
        rows[0][..., :8],
        rows[0].double().to(torch.int64),
    ):
        with pytest.raises((NotSupported, ValueError, TypeError)):
            attend(cache, 0, wrong, *rows[1:])
    assert cache.get_seq_length() == 5
    with torch.device("meta"):  # the default for new tensors
        assert torch.equal(attend(cache, 0, *rows), expected)


def test_a_pass_that_calls_a_layer_twice(generator):
    cache = NumkvCache(CONFIG, "fp32")
    attend(cache, 0, *tensors(generator, 4))
    rows, plan = tensors(generator, 1), plan_of_mask(2, 1, 5, 4)
    attend(cache, 0, *rows, plan)
    with pytest.raises(NotSupported, match="with 4 tokens"):
        attend(cache, 0, *rows, plan)


def test_decoding_is_bound():
    """In a model: a padded batch, and beams that part from each other."""
    for options in ({}, {"num_beams": 3}):
        model = make("gemma3")
        model.set_attn_implementation("numkv")
        cache = NumkvCache(model.config, "fp32")
        given = prompts([13, 6])
        model.generate(**given, max_new_tokens=8, do_sample=False, past_key_values=cache, **options)
        last = [layer.bound.group for layer in cache.layers]
        # After beams are put in order once more the metadata are new ones.
        assert options or all(
            group.after is layer.metadata for group, layer in zip(last, cache.layers, strict=True)
        )
        assert len(set(map(id, last))) == 2  # sliding layers, and full ones

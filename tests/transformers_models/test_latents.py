"""Models with latent attention over a `NumkvCache`: a row a token, and the tokens of transformers' own cache."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from decoder_models import make, prompts  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import numkv.transformers  # noqa: E402
from numkv.errors import NotSupported  # noqa: E402
from numkv.transformers import NumkvCache  # noqa: E402


@pytest.fixture(scope="module")
def model():
    return make("deepseek_v3")


def generated(model, cache, **options):
    return model.generate(
        **prompts([9, 4]), max_new_tokens=8, do_sample=False, past_key_values=cache, **options
    )


@pytest.fixture(scope="module")
def expected(model):
    model.set_attn_implementation("eager")
    return generated(model, DynamicCache(config=model.config))


@pytest.mark.parametrize("how", ["use", "beams", "chunks", "copies"])
def test_ways_to_generate(model, expected, how):
    if how == "use":
        numkv.transformers.use(model, kind="fp32")
        found = model.generate(**prompts([9, 4]), max_new_tokens=8, do_sample=False)
        numkv.transformers.restore(model)
        assert torch.equal(found, expected)
        return
    options = {"beams": {"num_beams": 3}, "chunks": {"prefill_chunk_size": 4}}.get(how, {})
    model.set_attn_implementation("eager")
    want = generated(model, DynamicCache(config=model.config), **options)
    model.set_attn_implementation("numkv")
    cache = NumkvCache(model.config, "fp32")
    assert torch.equal(generated(model, cache, **options), want)
    if how == "copies":
        ids = {
            "input_ids": want[:, -1:],
            "attention_mask": torch.ones(2, want.shape[1], dtype=torch.long),
        }
        ids["attention_mask"][1, :5] = 0
        with torch.no_grad():
            copies = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
            logits = [model(**ids, past_key_values=x).logits for x in (cache, *copies)]
            cache.crop(-1)
            logits.append(model(**ids, past_key_values=cache).logits)
        assert all(torch.equal(logits[0], x) for x in logits[1:])


def test_what_is_stored(model):
    """A row of 32 + 8 numbers a token and layer; quantised ones say nearly the same."""
    model.set_attn_implementation("numkv")
    inputs, found = prompts([24]), {}
    for kind in ("fp32", "bf16", "int8"):
        cache = NumkvCache(model.config, kind, capacity=256)
        with torch.no_grad():
            found[kind] = model(**inputs, past_key_values=cache).logits
        of_row = {"fp32": 160, "bf16": 80, "int8": 44}[kind]
        assert cache.nbytes == len(cache.layers) * 256 * of_row
    scale = found["fp32"].abs().max()
    for kind in ("bf16", "int8"):
        assert 0 < (found[kind] - found["fp32"]).abs().mean() < 0.02 * scale  # experts may change


def test_bf16_models(model):
    """Weights and activations in bfloat16: as near to fp32 as transformers' own cache, where experts stay the same."""
    half, inputs = make("deepseek_v3", torch.bfloat16), prompts([16])
    with torch.no_grad():
        model.set_attn_implementation("eager")
        exact = make("deepseek_v3", torch.bfloat16).float()
        exact.set_attn_implementation("eager")
        want = exact(**inputs).logits
        half.set_attn_implementation("eager")
        own = (half(**inputs).logits - want).abs().median()
        half.set_attn_implementation("numkv")
        found = half(**inputs, past_key_values=NumkvCache(half.config)).logits
    assert (found - want).abs().median() < 1.5 * own


def test_what_is_refused(model):
    for options in (
        {"rotate": True},
        {"kind": "int8", "full_precision": numkv.FullPrecision(4)},
        {"kind": "bf16", "v_kind": "int8"},
    ):
        with pytest.raises(NotSupported, match="latent"):
            NumkvCache(model.config, **options)
    cache = NumkvCache(model.config)
    x = torch.ones(1, 1, 2, 32)
    rows, keys = cache.update(x, torch.ones(1, 1, 2, 8), 0)
    for code in (lambda: rows + 1, lambda: torch.cat([rows, keys], -1), lambda: rows.sum()):
        with pytest.raises(NotSupported, match="attention function"):
            code()
    linear = torch.nn.functional.linear
    with pytest.raises(NotSupported, match="without a bias"):
        linear(rows, torch.ones(16, 32), torch.ones(16))
    linear(rows, torch.ones(16, 32))
    with pytest.raises(NotSupported, match="one product"):
        linear(rows, torch.ones(16, 32))
    assert cache.get_seq_length() == 0

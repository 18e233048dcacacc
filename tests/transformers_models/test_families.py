"""Decoders of many families generate the same tokens over a `NumkvCache` as over transformers' own cache."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from decoder_models import FAMILIES, make, prompts  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from numkv.transformers import NumkvCache  # noqa: E402

QUICK = ("llama", "gemma2", "gpt_oss", "llama4", "gemma4", "lfm2", "falcon_h1", "deepseek_v3")


def generated(model, new_tokens, cache):
    found = model.generate(
        **prompts([13, 5, 9]), max_new_tokens=new_tokens, do_sample=False, past_key_values=cache,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


def check_family(family, new_tokens):
    """Greedily, from a ragged batch that is padded on the left; in fp32, where tokens can be compared."""
    model = make(family)
    model.set_attn_implementation("eager")
    expected, logits = generated(model, new_tokens, DynamicCache(config=model.config))
    best = logits.topk(2, -1).values
    assert (best[..., 0] - best[..., 1]).min() > 1e-3  # else tokens say nothing
    model.set_attn_implementation("numkv")
    found, own = generated(model, new_tokens, NumkvCache(model.config, "fp32"))
    assert torch.equal(found, expected)
    assert (own - logits).abs().max() < 1e-5 * logits.abs().max()


@pytest.mark.parametrize("family", QUICK)
def test_a_family_generates_what_it_does_with_transformers_own_cache(family):
    check_family(family, 12)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_does_so_for_48_tokens(family):
    check_family(family, 48)

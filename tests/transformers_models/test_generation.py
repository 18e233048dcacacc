"""Every way of `generate` gives the same tokens over a `NumkvCache` as over transformers' own cache."""

import copy

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from decoder_models import make, prompts  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from numkv.transformers import NumkvCache  # noqa: E402

GREEDY = {"do_sample": False, "max_new_tokens": 16}


def beams(model, cache):
    return model.generate(**prompts([19]), num_beams=4, past_key_values=cache, **GREEDY)


def beams_of_a_padded_batch(model, cache):
    return model.generate(**prompts([13, 6]), num_beams=3, past_key_values=cache, **GREEDY)


def prompt_lookup(model, cache):
    ids = prompts([5])["input_ids"].repeat(1, 4)
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), prompt_lookup_num_tokens=3,
        past_key_values=cache, **GREEDY,
    )  # fmt: skip


def assisted(model, cache):
    helper = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in helper.parameters():
            weight += 0.003 * torch.randn(weight.shape, generator=generator)
    return model.generate(**prompts([19]), assistant_model=helper, past_key_values=cache, **GREEDY)


def sampling(model, cache):
    torch.manual_seed(3)
    return model.generate(
        **prompts([13, 6]), do_sample=True, num_return_sequences=3, max_new_tokens=16, past_key_values=cache
    )  # fmt: skip


def chat(model, cache):
    given = prompts([13, 5, 9])
    ids, mask = given["input_ids"], given["attention_mask"]
    for turn in range(3):
        out = model.generate(
            input_ids=ids, attention_mask=mask, past_key_values=cache, do_sample=False, max_new_tokens=7
        )  # fmt: skip
        ids = torch.cat([out, prompts([4, 4, 4], seed=turn + 7)["input_ids"]], 1)
        more = torch.ones(3, ids.shape[1] - mask.shape[1], dtype=mask.dtype)
        mask = torch.cat([mask, more], 1)
    return ids


def prefill_in_chunks(model, cache):
    return model.generate(
        **prompts([13, 5, 9]), prefill_chunk_size=4, past_key_values=cache, **GREEDY
    )


WAYS = (
    beams, beams_of_a_padded_batch, prompt_lookup, assisted, sampling, chat, prefill_in_chunks,
)  # fmt: skip


def check_way(family, way):
    model = make(family)
    model.set_attn_implementation("eager")
    expected = way(model, DynamicCache(config=model.config))
    model.set_attn_implementation("numkv")
    assert torch.equal(way(model, NumkvCache(model.config, "fp32")), expected)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_ways_to_generate(family, way):
    check_way(family, way)


def test_beams_share_the_blocks_of_their_prompt():
    model = make("llama")
    model.set_attn_implementation("numkv")
    cache = NumkvCache(model.config, "fp32")
    model.generate(
        **prompts([600]), num_beams=4, past_key_values=cache, max_length=620, do_sample=False
    )
    metadata = cache.layers[0].metadata
    assert metadata.batch == 4
    assert len(set(metadata.table[:, :2].flat)) == 2  # two full blocks of 256
    assert metadata.used <= 2 + 4  # and a last one each


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("family", ["mistral_sliding", "llama4", "lfm2", "gemma4", "gpt_oss"])
def test_ways_to_generate_with_other_layers(family, way):
    check_way(family, way)


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "jamba", "zamba2"])
@pytest.mark.parametrize("way", [beams, beams_of_a_padded_batch, sampling, chat, prefill_in_chunks])
def test_ways_to_generate_with_recurrent_layers(family, way):
    """transformers itself refuses the others."""
    check_way(family, way)


@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "llama4"])
def test_padding_on_the_right(family):
    """Each sequence goes on as it does alone; transformers' own sliding layers count padding as tokens."""
    lengths = [13, 5, 9]
    given = prompts(lengths, "right")
    model = make(family)
    model.set_attn_implementation("eager")
    alone = [
        model.generate(ids[None, :n], max_new_tokens=12, do_sample=False)[0, n:]
        for ids, n in zip(given["input_ids"], lengths, strict=True)
    ]
    model.set_attn_implementation("numkv")
    cache, mask = NumkvCache(model.config, "fp32"), given["attention_mask"]
    with torch.no_grad():
        logits = model(**given, past_key_values=cache).logits
        tokens = [logits[torch.arange(3), torch.tensor(lengths) - 1].argmax(-1)]
        for step in range(11):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=mask.dtype)], 1)
            logits = model(
                input_ids=tokens[-1][:, None], attention_mask=mask, past_key_values=cache,
                position_ids=torch.tensor(lengths)[:, None] + step,
            ).logits  # fmt: skip
            tokens.append(logits[:, -1].argmax(-1))
    assert torch.equal(torch.stack(tokens, 1), torch.stack(alone))

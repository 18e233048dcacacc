"""What people do with caches beside `generate`: prompts kept for later, threads, errors half-way, other dtypes."""

import copy
import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from decoder_models import make, prompts  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import numkv.transformers as on_transformers  # noqa: E402
from numkv.errors import NotSupported  # noqa: E402
from numkv.transformers import NumkvCache  # noqa: E402

GREEDY = {"do_sample": False, "max_new_tokens": 8}


@pytest.fixture
def model():
    made = make("gemma3")
    made.set_attn_implementation("numkv")
    return made


def test_a_prompt_that_is_computed_once(model):
    """As transformers' documentation has it: its cache is copied for each text that begins with it."""
    start, ends = prompts([17])["input_ids"], [prompts([n], seed=n)["input_ids"] for n in (3, 6)]
    with torch.no_grad():
        kept = model(start, past_key_values=NumkvCache(model.config, "fp32")).past_key_values
    for end in [*ends, ends[0]]:
        whole = torch.cat([start, end], 1)
        model.set_attn_implementation("eager")
        expected = model.generate(whole, **GREEDY)
        model.set_attn_implementation("numkv")
        found = model.generate(whole, past_key_values=copy.deepcopy(kept), **GREEDY)
        assert torch.equal(found, expected)
    assert kept.get_seq_length() == 17


def test_threads_with_a_cache_each(model):
    """One model; each thread goes on with its own sequences."""
    given = [prompts([11 + n, 5], seed=n) for n in range(4)]
    expected = [
        model.generate(**each, past_key_values=NumkvCache(model.config, "fp32"), **GREEDY)
        for each in given
    ]
    found = [None] * 4

    def run(n):
        for _ in range(3):
            cache = NumkvCache(model.config, "fp32")
            found[n] = model.generate(**given[n], past_key_values=cache, **GREEDY)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, found, expected))


def test_a_chat_after_an_error(model):
    """The pass that failed is refused to be gone on with; a copy from before it goes on."""
    cache, given = NumkvCache(model.config, "fp32"), prompts([12])
    first = model.generate(**given, past_key_values=cache, **GREEDY)
    longer = torch.cat([first, prompts([4], seed=3)["input_ids"]], 1)
    expected = model.generate(longer, past_key_values=copy.deepcopy(cache), **GREEDY)
    before, count = copy.deepcopy(cache), [0]

    def fail(*_):
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt

    broken = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model.generate(longer, past_key_values=cache, **GREEDY)
    broken.remove()
    with torch.no_grad(), pytest.raises(NotSupported, match=r"reset\(\)"):
        model(longer[:, -1:], past_key_values=cache)
    assert torch.equal(model.generate(longer, past_key_values=before, **GREEDY), expected)
    cache.reset()
    assert torch.equal(model.generate(**given, past_key_values=cache, **GREEDY), first)


def test_a_model_that_is_converted_in_between(model):
    """Rows of another dtype go on in the kind that the cache has."""
    cache, given = NumkvCache(model.config), prompts([14])
    token = torch.full((1, 1), 5)
    with torch.no_grad():
        model(**given, past_key_values=cache)
        expected = model(token, past_key_values=copy.deepcopy(cache)).logits
        for dtype in (torch.float16, torch.bfloat16):
            found = model.to(dtype)(token, past_key_values=copy.deepcopy(cache)).logits
            assert found.dtype == dtype
            assert (found.float() - expected).abs().max() < 0.05 * expected.abs().max()


def test_caches_that_generate_chooses_itself():
    """After `use`: another implementation of the cache by name, several beams a prompt, and both at once."""
    model, given = make("gemma3"), prompts([13, 6])
    several = {"num_beams": 4, "num_return_sequences": 2}
    model.set_attn_implementation("eager")
    expected, of_beams = (
        model.generate(**given, **GREEDY),
        model.generate(**given, **GREEDY, **several),
    )
    on_transformers.use(model, "fp32")
    for name in (None, "dynamic", "static"):
        found = model.generate(
            **given, **GREEDY, cache_implementation=name, disable_compile=True, return_dict_in_generate=True
        )  # fmt: skip
        assert torch.equal(found.sequences, expected)
        assert (type(found.past_key_values) is NumkvCache) == (name != "static")
    assert torch.equal(model.generate(**given, **GREEDY, **several), of_beams)
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(
            **given, **GREEDY, cache_implementation="static", past_key_values=NumkvCache(model.config)
        )  # fmt: skip
    on_transformers.restore(model)


def test_sequences_that_move_between_batches(model):
    """Finished ones leave; the others go on as they would have."""
    given = prompts([13, 6, 9])
    cache = NumkvCache(model.config, "fp32")
    mask = torch.cat([given["attention_mask"], torch.ones(3, 2, dtype=torch.long)], 1)
    tokens = torch.tensor([[5], [6], [7]])
    with torch.no_grad():
        model(**given, past_key_values=cache)
        model(tokens, attention_mask=mask[:, :-1], past_key_values=cache)
        cache.batch_select_indices(torch.tensor([False, True, True]))
        found = model(tokens[1:], attention_mask=mask[1:], past_key_values=cache).logits
        ids = torch.cat([given["input_ids"][1:], tokens[1:]], 1)
        model.set_attn_implementation("eager")
        model(
            ids,
            attention_mask=mask[1:, :-1],
            past_key_values=(other := DynamicCache(config=model.config)),
        )
        expected = model(tokens[1:], attention_mask=mask[1:], past_key_values=other).logits
    assert torch.allclose(found, expected, atol=1e-4)

"""What a `NumkvCache` holds, in which kinds and in how much memory, and a model that is switched to it."""

import copy
import io
import pickle
import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from decoder_models import make, prompts  # noqa: E402
from transformers import DynamicCache  # noqa: E402

import numkv  # noqa: E402
import numkv.transformers as on_transformers  # noqa: E402
from numkv.transformers import NumkvCache  # noqa: E402
from numkv.transformers.attention import attention  # noqa: E402
from numkv.transformers.masks import plan_of_mask  # noqa: E402

GREEDY = {"do_sample": False, "max_new_tokens": 12}


def on_numkv(family, **changes):
    model = make(family, **changes)
    model.set_attn_implementation("numkv")
    return model


def logits_of(model, cache, given):
    with torch.no_grad():
        return model(**given, past_key_values=cache).logits


# Of the largest logit; what a kind keeps of rows says the order, int8 127 steps, int4 7.
@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"kind": "fp32"}, 1e-5),
        ({"kind": "bf16"}, 4e-2),
        ({"kind": "int8"}, 6e-2),
        ({"kind": "int8", "rotate": True}, 6e-2),
        ({"k_kind": "int8", "v_kind": "bf16"}, 6e-2),
    ],
    ids=str,
)
def test_kinds(options, most):
    """A long prompt and one token, against fp32 and transformers' own cache and attention."""
    model, given = make("gemma2"), prompts([40, 23])
    token = {
        "input_ids": torch.full((2, 1), 7),
        "attention_mask": torch.cat([given["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1),
    }  # fmt: skip
    caches = DynamicCache(config=model.config), NumkvCache(model.config, **options)
    found = []
    for implementation, cache in zip(("eager", "numkv"), caches, strict=True):
        model.set_attn_implementation(implementation)
        first = logits_of(model, cache, given)[given["attention_mask"].bool()]
        found.append(torch.cat([first, logits_of(model, cache, token)[:, 0]]))
    expected, own = found
    error = (own - expected).abs().max() / expected.abs().max()
    assert error < most
    if options != {"kind": "fp32"}:
        assert error > 1e-5  # they are stored as asked for


def test_a_model_in_bfloat16():
    """Stored as it computes; no further from fp32 than PyTorch's own attention."""
    exact, given = make("llama"), prompts([30, 11])
    mask = given["attention_mask"].bool()
    with torch.no_grad():
        expected = exact(**given).logits[mask]
    model = make("llama", dtype=torch.bfloat16)
    errors = {}
    for implementation in ("sdpa", "numkv"):
        model.set_attn_implementation(implementation)
        cache = (
            NumkvCache(model.config)
            if implementation == "numkv"
            else DynamicCache(config=model.config)
        )
        found = logits_of(model, cache, given)[mask].float()
        errors[implementation] = (found - expected).square().mean()
    assert cache.layers[0].pool.k_kind.name == "bf16"
    assert errors["numkv"] < 1.2 * errors["sdpa"]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)], ids=str)
def test_rows_of_any_strides(order):
    """The attention function alone, against PyTorch's; V wider than K."""
    generator = torch.Generator().manual_seed(1)

    def made(*shape):
        given = torch.randn([shape[i] for i in order], generator=generator)
        return given.permute([order.index(i) for i in range(4)])

    module = types.SimpleNamespace(training=False, layer_idx=0)
    cache = NumkvCache(transformers.LlamaConfig(num_hidden_layers=1), "fp32")
    keys, values = made(2, 2, 0, 16), made(2, 2, 0, 24)
    for columns in (5, 1, 3):
        query, k, v = made(2, 4, columns, 16), made(2, 2, columns, 16), made(2, 2, columns, 24)
        past = cache.get_seq_length()
        plan = plan_of_mask(2, columns, past + columns, past)
        found, _ = attention(module, query, *cache.update(k, v, 0), plan, scaling=0.3)
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        seen = torch.ones(columns, past + columns, dtype=torch.bool).tril(past)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=seen, scale=0.3, enable_gqa=True
        )
        assert torch.allclose(found, expected.transpose(1, 2), atol=1e-5)


def test_padding_is_not_stored():
    model = on_numkv("llama")
    cache = NumkvCache(model.config, "fp32")
    logits_of(model, cache, prompts([300, 3, 2, 1]))
    assert cache.get_seq_length() == 300
    assert cache.layers[0].metadata.num_blocks == 2 + 3  # of 256 tokens
    assert cache.nbytes == 4 * 5 * 256 * 2 * 2 * 16 * 4


def test_room_grows_by_doubling_and_is_reserved():
    model = on_numkv("llama")
    growing, reserved = (NumkvCache(model.config, "fp32", capacity=n) for n in (None, 600))
    sizes = []
    for cache in (growing, reserved):
        logits_of(model, cache, prompts([240]))
        sizes.append([cache.layers[0].metadata.num_blocks])
        for _ in range(3):
            logits_of(model, cache, {"input_ids": torch.full((1, 120), 5)})
            sizes[-1].append(cache.layers[0].metadata.num_blocks)
    assert sizes == [[1, 2, 2, 4], [3, 3, 3, 3]]


def test_the_memory_of_sliding_layers_is_bounded():
    model = on_numkv("mistral_sliding", sliding_window=40)
    cache = NumkvCache(model.config, "fp32")
    logits_of(model, cache, prompts([500]))
    sizes = {cache.nbytes}
    for _ in range(120):
        logits_of(model, cache, {"input_ids": torch.full((1, 1), 5)})
        sizes.add(cache.nbytes)
    of_a_token = 4 * 2 * 2 * 16 * 4
    assert max(sizes) <= 2 * 6 * 16 * of_a_token
    assert cache.get_seq_length() == 620


def test_copies_go_their_own_way():
    model = on_numkv("gemma3")
    cache, given = NumkvCache(model.config, "int8"), prompts([20, 9])
    logits_of(model, cache, given)
    mask = torch.cat([given["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    token, other = ({"input_ids": torch.full((2, 1), n), "attention_mask": mask} for n in (5, 6))
    caches = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache]
    logits_of(model, caches[0], other)
    logits_of(model, caches[0], {**other, "attention_mask": torch.cat([mask, mask[:, :1] | 1], 1)})
    found = [logits_of(model, x, token) for x in caches[1:]]
    assert torch.equal(*found)


def test_a_copy_can_be_pickled_after_the_original_has_changed():
    """Copies share metadata, which have results of the original's crops and orders by then."""
    model, given = on_numkv("llama"), prompts([20, 9])
    cache = NumkvCache(model.config, "int8")
    logits_of(model, cache, given)
    copies = [copy.deepcopy(cache) for _ in range(2)]
    cache.crop(-2)
    copies[0].reorder_cache(torch.tensor([1, 0]))
    again = pickle.loads(pickle.dumps(copies[1]))
    again.reorder_cache(torch.tensor([1, 0]))
    mask = torch.cat([given["attention_mask"].flip(0), torch.ones(2, 1, dtype=torch.long)], 1)
    token = {"input_ids": torch.full((2, 1), 5), "attention_mask": mask}
    found = [logits_of(model, x, token) for x in (copies[0], again)]
    assert torch.equal(*found)


def test_what_is_in_it_is_said_and_drawn():
    """By `repr`, `numkv.show` and notebooks; blocks that sequences share are drawn so."""
    model, given = on_numkv("gemma3"), prompts([20, 9, 14])
    cache = NumkvCache(model.config, "fp32", capacity=600)
    layers = len(cache)
    assert (
        repr(cache) == f"NumkvCache(seq_len=0, batch=0, num_layers={layers}, kind=fp32, nbytes=0)"
    )
    assert repr(NumkvCache(model.config)).endswith("kind=the model's, nbytes=0)")
    assert shown(cache) == f"NumkvCache: fp32, {layers} layers, cpu, 0 B\n"
    logits_of(model, cache, given)
    said = f"NumkvCache(seq_len=20, batch=3, num_layers={layers}, kind=fp32, nbytes={cache.nbytes})"
    assert repr(cache) == said
    text = shown(cache)
    full = next(layer for layer in cache.layers if not layer.is_sliding)
    assert f"{full.metadata.num_blocks}, 256 tokens each\n" in text
    assert "earlier tokens" in text
    assert [line.split()[:2] for line in text.splitlines() if line[0] in "012"] == [
        ["0", "20"], ["1", "9"], ["2", "14"],
    ]  # fmt: skip
    assert "shared" not in text
    cache.batch_select_indices(torch.tensor([0, 0]))
    assert "▓···" in shown(cache)
    assert cache._repr_html_().count("shared") > 1
    mixed = NumkvCache(model.config, k_kind="int8", v_kind="bf16", rotate=True)
    assert "kind=int8/bf16, rotated, " in repr(mixed)
    with pytest.raises(TypeError, match=r"^NumkvCache\(\) .*'dtype'; did you mean `kind`"):
        NumkvCache(model.config, dtype="int8")


def shown(cache):
    stream = io.StringIO()
    numkv.show(cache, file=stream)
    return stream.getvalue()


def test_sequences_selected_and_repeated():
    model, given = on_numkv("gemma3"), prompts([20, 9, 14])
    token = torch.tensor([[5], [6], [7]])
    mask = torch.cat([given["attention_mask"], torch.ones(3, 1, dtype=torch.long)], 1)
    rows = torch.tensor([2, 2, 0])
    for change in ("batch_select_indices", "reorder_cache"):
        whole, part = (NumkvCache(model.config, "fp32") for _ in range(2))
        for cache in (whole, part):
            logits_of(model, cache, given)
        getattr(part, change)(rows)
        expected = logits_of(model, whole, {"input_ids": token, "attention_mask": mask})[rows]
        found = logits_of(model, part, {"input_ids": token[rows], "attention_mask": mask[rows]})
        assert torch.equal(found, expected)
    part.batch_repeat_interleave(2)
    assert part.layers[0].metadata.batch == 6
    part.batch_select_indices(torch.tensor([True, False] * 3))
    assert part.layers[0].metadata.batch == 3


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "int8_channel"}, {"kind": "int8", "full_precision": numkv.FullPrecision(5, 3)}],
    ids=str,
)
def test_no_sequence_is_selected(options):
    """As in transformers; what is left can be copied, and reset for another batch."""
    model, given = on_numkv("llama"), prompts([20, 9])
    cache = NumkvCache(model.config, max_nbytes="16MiB", **options)
    expected = logits_of(model, cache, given)
    cache.batch_select_indices(torch.tensor([False, False]))
    cache.reorder_cache(torch.tensor([], dtype=torch.long))
    cache.batch_repeat_interleave(3)
    assert cache.layers[0].metadata.batch == 0
    for each in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        each.crop(-1)
        each.reset()
        assert torch.equal(logits_of(model, each, given), expected)


@pytest.mark.parametrize("order", [[-1, 1], [2], [0, 1, 5], [0, -3]], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int8_channel"])
def test_sequences_that_are_not_there(kind, order):
    """A negative number counts from no end: two sequences would write to one block."""
    model, given = on_numkv("llama"), prompts([20, 9])
    cache, other = (NumkvCache(model.config, kind) for _ in range(2))
    for each in (cache, other):
        logits_of(model, each, given)
    with pytest.raises(IndexError, match=r"`beam_idx`: expected numbers .* in \[0, 2\), got"):
        cache.reorder_cache(torch.tensor(order))
    mask = torch.cat([given["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    again = {"input_ids": torch.tensor([[5], [6]]), "attention_mask": mask}
    assert torch.equal(logits_of(model, cache, again), logits_of(model, other, again))


def test_crop_and_reset():
    model = on_numkv("gemma3")
    cache, given = NumkvCache(model.config, "fp32"), prompts([30])
    cache.activate_past_recording()
    expected = logits_of(model, cache, given)
    cache.crop(-12)
    assert cache.get_seq_length() == 18
    again = {"input_ids": given["input_ids"][:, 18:]}
    assert torch.allclose(logits_of(model, cache, again), expected[:, 18:], atol=1e-4)
    cache.crop(0)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(logits_of(model, cache, given), expected)
    assert logits_of(model, NumkvCache(model.config), prompts([3, 2])).shape[0] == 2
    cache.reset()
    assert logits_of(model, cache, prompts([3, 2])).shape[0] == 2  # a batch of another size


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral_sliding"])
def test_without_a_numkv_cache_a_model_is_what_it_was(family):
    """Forward, gradients in training, and generation over transformers' own cache."""
    model, given = make(family), prompts([13, 5])
    mask = given["attention_mask"].bool()
    found = {}
    for implementation in ("eager", "numkv"):
        model.set_attn_implementation(implementation)
        model.train().zero_grad()
        logits = model(**given, use_cache=False).logits[mask]
        logits.square().mean().backward()
        gradient = model.get_input_embeddings().weight.grad.clone()
        tokens = model.eval().generate(
            **given, past_key_values=DynamicCache(config=model.config), **GREEDY
        )
        found[implementation] = logits.detach(), gradient, tokens
    for own, expected in zip(found["numkv"], found["eager"], strict=True):
        assert torch.allclose(own, expected, rtol=1e-3, atol=1e-4 * expected.abs().max())


def test_use_and_restore():
    model = make("qwen2_sliding")
    before = model.config._attn_implementation
    given = prompts([13, 5])
    expected = model.generate(**given, **GREEDY)
    assert on_transformers.use(model, "fp32") is model
    found = model.generate(**given, **GREEDY, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    assert type(found.past_key_values) is NumkvCache
    full = found.past_key_values.layers[0]
    # One block for each sequence: what generate may make is reserved.
    assert full.metadata.num_blocks == 2
    again = model.generate(**given, **GREEDY, use_cache=False)
    assert torch.equal(again, expected)
    twin = copy.deepcopy(model)
    assert twin._prepare_cache_for_generation.args[0] is twin
    given_one = model.generate(
        **given, **GREEDY, past_key_values=DynamicCache(config=model.config), return_dict_in_generate=True
    )  # fmt: skip
    assert type(given_one.past_key_values) is DynamicCache
    on_transformers.use(model, "int8")
    assert on_transformers.restore(model) is model
    assert model.config._attn_implementation == before
    after = model.generate(**given, **GREEDY, return_dict_in_generate=True)
    assert type(after.past_key_values) is DynamicCache
    assert torch.equal(after.sequences, expected)
    on_transformers.restore(model)


def test_a_helper_that_is_switched_too():
    model, given = make("mistral_sliding"), prompts([19])
    expected = model.generate(**given, **GREEDY)
    helper = on_transformers.use(copy.deepcopy(model), "int8")
    on_transformers.use(model, "fp32")
    found = model.generate(**given, **GREEDY, assistant_model=helper)
    assert torch.equal(found, expected)

"""What would not be right is refused, and by whom, and nothing has changed afterwards."""

import copy
import pickle
import sys
import threading
import tomllib
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from decoder_models import make, prompts  # noqa: E402
from transformers import masking_utils  # noqa: E402

import numkv.transformers as on_transformers  # noqa: E402
from numkv.errors import (  # noqa: E402
    DimensionMismatch,
    NonFiniteInput,
    NotSupported,
    NumkvError,
    UnsupportedDType,
)
from numkv.transformers import NumkvCache  # noqa: E402


@pytest.fixture
def model():
    made = make("llama")
    made.set_attn_implementation("numkv")
    return made


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (transformers.DeepseekV32Config(), "latent"),
        (transformers.FalconConfig(alibi=True), "ALiBi"),
        (transformers.BloomConfig(), "ALiBi"),
        (transformers.T5Config(), "cross attention"),
        (transformers.MambaConfig(num_hidden_layers=2), "has none"),
        (transformers.FalconConfig(alibi=False), "reads K and V"),
        (transformers.DiffLlamaConfig(), "reads K and V"),
        (transformers.DogeConfig(), "reads K and V"),
        (transformers.JetMoeConfig(), "reads K and V"),
        (transformers.MoshiConfig(), "do not show"),
        (transformers.BertConfig(), "both directions"),
        (transformers.BltConfig(), "describes its layers"),
        (transformers.MllamaConfig(), "cross attention to images"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_models_that_would_not_be_right(config, said):
    with pytest.raises(NotSupported, match=said):
        NumkvCache(config)


def test_layers_that_would_not_be_right():
    config = transformers.LlamaConfig(num_hidden_layers=2)
    config.layer_types = ["full_attention", "indexed_attention"]
    with pytest.raises(NotSupported, match="'indexed_attention' for layer 1"):
        NumkvCache(config)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kind": "fp7"}, UnsupportedDType),
        ({"kind": "int8", "k_kind": "int8", "v_kind": "int4"}, ValueError),
        ({"capacity": -1}, DimensionMismatch),
        ({"capacity": 2.5}, TypeError),
        ({"rotate": "no"}, TypeError),
    ],
)
def test_options(options, error):
    with pytest.raises(error):
        NumkvCache(transformers.LlamaConfig(), **options)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_implementation(model, implementation):
    model.set_attn_implementation(implementation)
    cache = NumkvCache(model.config)
    with torch.no_grad(), pytest.raises(NotSupported, match=r"set_attn_implementation\('numkv'\)"):
        model(**prompts([5]), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_gradients(model):
    with pytest.raises(NotSupported, match="without gradients"):
        model(**prompts([5]), past_key_values=NumkvCache(model.config))


def test_dropout():
    model = make("llama", attention_dropout=0.5).train()
    model.set_attn_implementation("numkv")
    with torch.no_grad(), pytest.raises(NotSupported, match="dropout"):
        model(**prompts([5]), past_key_values=NumkvCache(model.config))


def test_a_mask_with_four_axes(model):
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    with torch.no_grad(), pytest.raises(NotSupported, match="two-dimensional"):
        model(
            prompts([5])["input_ids"], attention_mask=mask, past_key_values=NumkvCache(model.config)
        )


def test_a_mask_with_a_pattern_of_its_own(model, monkeypatch):
    from transformers.models.llama import modeling_llama

    def first_two_for_all(*args, **kwargs):
        more = {"or_mask_function": lambda b, h, q, k: k < 2}
        return masking_utils.create_causal_mask(*args, **kwargs, **more)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", first_two_for_all)
    cache = NumkvCache(model.config)
    with torch.no_grad():
        with pytest.raises(NotSupported, match="pattern of its own"):
            model(**prompts([5]), past_key_values=cache)
        assert cache.get_seq_length() == 0
        found = model(
            **prompts([5])
        ).logits  # without a cache it is as right as transformers makes it
        model.set_attn_implementation("eager")
        assert torch.allclose(found, model(**prompts([5])).logits, atol=1e-4)


def test_masks_that_do_not_fit_what_is_in_the_cache(model):
    cache, given = NumkvCache(model.config), prompts([7, 4])
    one = torch.ones(2, 1, dtype=torch.long)
    with torch.no_grad():
        model(**given, past_key_values=cache)
        with pytest.raises(DimensionMismatch, match="not the new ones alone"):
            model(one, attention_mask=one, past_key_values=cache)
        with pytest.raises(NotSupported, match="same zeros"):
            model(one, attention_mask=torch.ones(2, 8, dtype=torch.long), past_key_values=cache)
        with pytest.raises(NotSupported, match="got None"):
            model(one, past_key_values=cache)
        with pytest.raises(DimensionMismatch, match="batch of 2"):
            model(one[:1], past_key_values=cache)
        assert cache.get_seq_length() == 7
        mask = torch.cat([given["attention_mask"], one], 1)
        model(one, attention_mask=mask, past_key_values=cache)


def test_numbers_that_cannot_be_quantised(model):
    cache = NumkvCache(model.config, "int8")
    embeds = torch.full((1, 3, 64), torch.nan)
    with torch.no_grad(), pytest.raises(NonFiniteInput):
        model(inputs_embeds=embeds, past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_pass_that_failed_half_way(model):
    """Its first layers are ahead of the others: that is told, not computed with."""
    cache = NumkvCache(model.config)
    broken = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            model(**prompts([5]), past_key_values=cache)
        broken.remove()
        with pytest.raises(NotSupported, match=r"reset\(\)"):
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
        cache.reset()
        model(**prompts([5]), past_key_values=cache)


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_pass_that_failed_where_windows_begin(failing, first):
    """Full layers and sliding ones have masks of their own, each of which fits what its layers have."""
    model = make("qwen2_sliding")
    model.set_attn_implementation("numkv")
    cache, token = NumkvCache(model.config), torch.ones(1, 1, dtype=torch.long)
    assert [x.is_sliding for x in cache.layers] == [False, False, True, True]
    with torch.no_grad():
        if first:
            model(**prompts([first]), past_key_values=cache)
        broken = model.model.layers[failing].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(token, past_key_values=cache)
        broken.remove()
        for _ in range(2):
            with pytest.raises(NotSupported, match=r"reset\(\)"):
                model(token, past_key_values=cache)
        cache.reset()
        found = model(**prompts([5]), past_key_values=cache).logits
        assert torch.equal(
            found, model(**prompts([5]), past_key_values=NumkvCache(model.config)).logits
        )


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral_sliding", "deepseek_v3"])
def test_a_model_with_more_layers_than_the_cache(family):
    """Before any layer stores a token, in an empty cache and in one that a smaller model has filled."""
    deep, small = make(family), make(family, num_hidden_layers=2)
    for each in (deep, small):
        each.set_attn_implementation("numkv")
    cache, token = NumkvCache(small.config), torch.ones(1, 1, dtype=torch.long)
    with torch.no_grad():
        for empty in (True, False):
            before = cache.get_seq_length()
            for each in (cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
                with pytest.raises(
                    DimensionMismatch, match=r"at most 2 layers, .* got one of [34]"
                ):
                    deep(token, past_key_values=each)
                assert [x.get_seq_length() for x in each.layers] == [before] * 2
            found = small(token, past_key_values=cache).logits
            if empty:
                assert torch.equal(
                    found, small(token, past_key_values=NumkvCache(small.config)).logits
                )
    rows = torch.zeros(1, 2, 1, 16)
    with pytest.raises(DimensionMismatch, match=r"at most 2 layers, .* got one of 3"):
        cache.update(rows, rows, 2)


def test_two_threads(model, monkeypatch):
    """The second thread on a cache is told so: between two layers of the first one's pass, and within one."""
    cache, token, said = NumkvCache(model.config), torch.ones(1, 1, dtype=torch.long), []

    def run():
        with torch.no_grad(), pytest.raises(NumkvError) as error:
            model(token, past_key_values=cache)
        said.append(str(error.value))

    def in_between(*given):
        hook.remove()
        monkeypatch.undo()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return at_once(*given) if len(given) == 6 else None

    at_once = on_transformers.attention.at_once
    with torch.no_grad():
        model(**prompts([5]), past_key_values=cache)
        hook = model.model.layers[2].register_forward_pre_hook(in_between)
        with pytest.raises(NotSupported, match="reset"):
            for _ in range(2):
                model(token, past_key_values=cache)
        cache.reset()
        model(**prompts([5]), past_key_values=cache)
        monkeypatch.setattr(on_transformers.attention, "at_once", in_between)
        model(token, past_key_values=cache)
    assert "another thread uses this cache" in said[0]
    assert "another thread" in said[1]


def test_attention_weights(model):
    with (
        torch.no_grad(),
        pytest.raises((NotSupported, ValueError), match=r"output_attentions|eager"),
    ):
        model(**prompts([5]), past_key_values=NumkvCache(model.config), output_attentions=True)


def test_crops_that_cannot_be_right():
    model = make("mistral_sliding")
    model.set_attn_implementation("numkv")
    cache = NumkvCache(model.config)
    with torch.no_grad():
        model(**prompts([15]), past_key_values=cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="minus the number"):
        cache.crop(2)
    with pytest.raises(TypeError, match="expected an integer"):
        cache.crop(-2.5)
    assert cache.get_seq_length() == 15


def test_use_leaves_a_model_that_it_refuses_as_it_was():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    model = transformers.BloomForCausalLM(config)
    before = model.config._attn_implementation
    with pytest.raises(NotSupported, match="ALiBi"):
        on_transformers.use(model)
    assert model.config._attn_implementation == before


def test_a_model_with_attention_of_its_own():
    config = transformers.GPTJConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=2, rotary_dim=8)
    with pytest.raises(NotSupported, match="GPTJForCausalLM, which has its own"):
        on_transformers.use(transformers.GPTJForCausalLM(config))


def test_compiled_models(model):
    """A graph that breaks at attention gives the same; one that may not break is refused by PyTorch."""
    given = prompts([6])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        found = compiled(**given, past_key_values=NumkvCache(model.config)).logits
        expected = model(**given, past_key_values=NumkvCache(model.config)).logits
    assert torch.equal(found, expected)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.Unsupported):
        whole(**given, past_key_values=NumkvCache(model.config))
    torch._dynamo.reset()


def test_offloading_is_not_there(model):
    cache = NumkvCache(model.config)
    with pytest.raises(NotSupported, match="offload"):
        cache.layers[0].offload()


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_a_layer_does_not_change_without_the_others(family):
    """Not even its linear state, which transformers' own methods change."""
    model = make(family)
    model.set_attn_implementation("numkv")
    cache, expected = NumkvCache(model.config), NumkvCache(model.config)
    ids = torch.arange(2, 9)[None]
    with torch.no_grad():
        first, _ = (model(ids, past_key_values=x).logits for x in (cache, expected))
        for call in (
            lambda x: x.reset(), lambda x: x.crop(-1), lambda x: x.reorder_cache(torch.tensor([0])),
        ):  # fmt: skip
            for layer in cache.layers:
                with pytest.raises(NotSupported, match="all layers"):
                    call(layer)
        found, wanted = (model(ids, past_key_values=x).logits for x in (cache, expected))
        assert torch.equal(found, wanted)
        cache.reset()
        assert torch.equal(model(ids, past_key_values=cache).logits, first)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (None, r"not installed; try pip install \"numkv\[transformers\]\""),
        ("4.57.1", r"needs transformers>=5\.19,<5\.24, .*, got 4\.57\.1; try pip"),
        ("5.18.9", r"needs transformers>=5\.19,<5\.24"),
        ("5.24.0", r"needs transformers>=5\.19,<5\.24"),
        ("5.23.9", r"was made for transformers 5\.23"),
    ],
)
def test_versions_that_it_was_not_made_for(monkeypatch, found, said):
    """The module says so when it is imported; here its source is run beside another transformers."""
    other = None
    if found is not None:
        other = types.ModuleType("transformers")
        other.__version__ = found
    monkeypatch.setitem(sys.modules, "transformers", other)
    with pytest.raises(ImportError, match=said):
        import_again()


def test_a_pytorch_that_it_was_not_made_for(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1+cpu")
    with pytest.raises(ImportError, match=r"needs torch>=2\.8, .*, got 2\.7\.1\+cpu"):
        import_again()


def test_versions_are_those_of_the_project_file():
    path = Path(on_transformers.__file__)
    extras = tomllib.loads((path.parents[2] / "pyproject.toml").read_text())["project"]
    for what in extras["optional-dependencies"]["transformers"]:
        assert f'"{what}"' in path.read_text()


def import_again():
    path = Path(on_transformers.__file__)
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "elsewhere"})

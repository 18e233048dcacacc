"""`use` acts on the model whose `generate` runs, however it is wrapped, copied or kept; what is no model is refused."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.19")

from decoder_models import make, prompts  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from numkv.errors import NotSupported  # noqa: E402
from numkv.transformers import NumkvCache, restore, use  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT


def cache_of(model):
    found = model.generate(
        **prompts([9]), max_new_tokens=3, do_sample=False, return_dict_in_generate=True
    )
    return found.past_key_values


def is_on_numkv(model, kind):
    cache = cache_of(model)
    return type(cache) is NumkvCache and cache.layers[0].storage == kind


def with_peft(config, **options):
    peft = pytest.importorskip("peft")
    given = {"target_modules": ["q_proj"], **options} if config == "LoraConfig" else options
    return peft.get_peft_model(make("llama"), getattr(peft, config)(**given))


WRAPPERS = {
    "compiled": lambda: torch.compile(make("llama"), backend="eager"),
    "LoRA": lambda: with_peft("LoraConfig", task_type="CAUSAL_LM"),
    "LoRA without a task": lambda: with_peft("LoraConfig"),
    "LoRA, compiled": lambda: torch.compile(with_peft("LoraConfig"), backend="eager"),
    "a tuner of PEFT": lambda: with_peft("LoraConfig").base_model,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers(wrapper):
    model = WRAPPERS[wrapper]()
    assert use(model, "fp32") is model
    assert is_on_numkv(model, "fp32")
    if hasattr(model, "merge_and_unload"):
        assert is_on_numkv(model.merge_and_unload(), "fp32")
    restore(model)
    assert type(cache_of(model)) is DynamicCache


def test_copies_and_pickles_stay_switched():
    model = use(make("llama"), "int8")
    kept = pickle.dumps(model)
    for again in (copy.deepcopy(model), pickle.loads(kept), pickle.loads(kept)):
        assert is_on_numkv(again, "int8")
        restore(again)
        assert type(cache_of(again)) is DynamicCache
    assert is_on_numkv(model, "int8")


@pytest.mark.slow
def test_a_pickle_in_another_process(tmp_path):
    (tmp_path / "model").write_bytes(pickle.dumps(use(make("llama"), "int8")))
    code = (
        "import pickle, torch; model = pickle.load(open('model', 'rb'));"
        "found = model.generate(torch.ones(1, 4, dtype=int), max_new_tokens=2, return_dict_in_generate=True);"
        "print(type(found.past_key_values).__name__, found.past_key_values.layers[0].storage)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["NumkvCache", "int8"]


def test_a_model_within_a_model():
    """BLIP-2 has a `generate` of its own, which calls that of its language model."""
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    config = transformers.Blip2Config(
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        qformer_config={**sizes, "encoder_hidden_size": 16, "vocab_size": 64},
        text_config=make("opt").config.to_dict(), num_query_tokens=2, image_token_index=63,
    )  # fmt: skip
    model = use(transformers.Blip2ForConditionalGeneration(config).eval(), "fp32")
    seen = []
    model.language_model.register_forward_pre_hook(
        lambda _, args, named: seen.append(type(named["past_key_values"])), with_kwargs=True
    )
    ids = torch.tensor([[63, 63, 5, 6]])
    model.generate(torch.zeros(1, 3, 8, 8), input_ids=ids, max_new_tokens=3, do_sample=False)
    assert set(seen) == {NumkvCache}


def test_prompt_learning():
    """Prompts are tokens; the prefixes of prefix tuning are K and V that PEFT puts into a cache of its own."""
    options = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
    prompted = use(with_peft("PromptTuningConfig", **options), "fp32")
    with pytest.warns(UserWarning, match="Position ids"):
        assert is_on_numkv(prompted, "fp32")
    with pytest.raises(NotSupported, match="prefix tuning"):
        cache_of(use(with_peft("PrefixTuningConfig", **options)))


@pytest.mark.parametrize(
    "thing",
    [
        "gpt2",
        None,
        transformers.LlamaConfig(),
        torch.nn.Linear(2, 2),
        transformers.LlamaForCausalLM,
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_what_is_no_model(thing):
    for function in (use, restore):
        with pytest.raises(TypeError, match=r"expected a transformers\.PreTrainedModel.*, got "):
            function(thing)


def test_a_model_in_data_parallel():
    with pytest.raises(TypeError, match="got DataParallel; pass the model itself"):
        use(torch.nn.DataParallel(make("llama")))
    with pytest.raises(TypeError, match=r"got str; pass model\.config"):
        NumkvCache("gpt2")


def test_another_attention_implementation_after_use():
    """The model then attends otherwise, over transformers' cache, and says so."""
    model = use(make("llama"))
    model.set_attn_implementation("eager")
    with pytest.warns(UserWarning, match=r"implementation is 'eager' by now.*call `use` again"):
        assert type(cache_of(model)) is DynamicCache
    assert is_on_numkv(use(model, "int8"), "int8")


def test_caches_of_a_fixed_size():
    """Their masks are made before the model runs."""
    model, given = make("llama"), prompts([9, 5])
    options = {"do_sample": False, "max_new_tokens": 6}
    expected = model.generate(**given, **options)
    use(model)
    static = transformers.StaticCache(config=model.config, max_cache_len=40)
    for way in ({"cache_implementation": "static"}, {"past_key_values": static}):
        assert torch.equal(model.generate(**given, **options, **way), expected)


def test_an_assistant_that_exits_early():
    """For it transformers makes the config say fewer layers, and leaves the list of their types."""
    model, given = make("qwen2"), prompts([9])
    expected = model.generate(**given, do_sample=False, max_new_tokens=8)
    found = use(model, "fp32").generate(
        **given, do_sample=False, max_new_tokens=8, assistant_early_exit=2
    )
    assert torch.equal(found, expected)


def test_autocast():
    """K, which leaves RoPE in float32, is stored as V is, and read as PyTorch's own attention reads it."""
    model, given = make("llama"), prompts([9, 4])
    mask = given["attention_mask"].bool()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(**given).logits[mask]
        cache = NumkvCache(use(model).config)
        found = model(**given, past_key_values=cache).logits[mask]
    assert cache.layers[0].storage == "bf16"
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()

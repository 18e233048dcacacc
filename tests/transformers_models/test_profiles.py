"""Kinds by layer in models of transformers, and `numkv fit` on one whose keys have biases."""

import copy
import pickle

import pytest

import numkv

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from decoder_models import make  # noqa: E402

import numkv.transformers  # noqa: E402
from numkv.cli import main  # noqa: E402
from numkv.errors import DimensionMismatch, NotSupported, NumkvError  # noqa: E402
from numkv.transformers import NumkvCache  # noqa: E402

IDS = torch.arange(1, 30)[None]


def model_of(layers=3):
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config).eval()


def profile_of(*kinds, heads=2, dim=16):
    return numkv.Profile(
        [numkv.LayerSpec(heads, dim, kind=k, v_kind=v, rotate=r) for k, v, r in kinds]
    )


MIXED = profile_of(("int8", "int4", False), ("bf16", "int8", False), ("int4", "int4", True))


def logits(model, **options):
    cache = NumkvCache(model.config, **options)
    with torch.no_grad():
        first = model(IDS[:, :20], past_key_values=cache).logits
        return cache, torch.cat([first, model(IDS[:, 20:], past_key_values=cache).logits], 1)


def test_each_layer_has_its_kinds(tmp_path):
    """A profile of one kind gives the bits of that kind; of several, each layer stores its own."""
    model = numkv.transformers.use(model_of())
    for kind, rotate in (("int8", False), ("int4", True)):
        same = profile_of(*[(kind, kind, rotate)] * 3)
        _, expected = logits(model, kind=kind, rotate=rotate)
        assert torch.equal(logits(model, profile=same)[1], expected)
    MIXED.save(tmp_path / "p")
    cache, found = logits(model, profile=str(tmp_path / "p"))
    stored = [layer.storage for layer in cache.layers]
    assert stored == ["int8/int4", "bf16/int8", "int4, rotated"]
    assert all(name in repr(cache) for name in stored)
    assert torch.isfinite(found).all()
    assert torch.equal(logits(model, profile=MIXED)[1], found)


def test_copies_keep_them():
    model = numkv.transformers.use(model_of())
    cache, _ = logits(model, profile=MIXED)
    for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert [x.storage for x in again.layers] == [x.storage for x in cache.layers]
        assert len({id(x.options.shared) for x in again.layers}) == 1
        with torch.no_grad():
            next_of = [
                model(IDS[:, :1], past_key_values=copy.deepcopy(x)).logits for x in (cache, again)
            ]
        assert torch.equal(*next_of)


def test_text_is_generated_by_one(tmp_path):
    MIXED.save(tmp_path / "p")
    model = numkv.transformers.use(model_of(), profile=tmp_path / "p")
    (tmp_path / "p").unlink()  # it has been read
    found = model.generate(IDS, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    assert [x.storage for x in found.past_key_values.layers] == [
        "int8/int4",
        "bf16/int8",
        "int4, rotated",
    ]
    assert found.sequences.shape == (1, 35)


@pytest.mark.parametrize("other", [{"kind": "int8"}, {"v_kind": "int8"}, {"rotate": True},
                                   {"kind": "int8", "full_precision": numkv.FullPrecision(4)}])  # fmt: skip
def test_nothing_else_is_said_beside_it(other):
    with pytest.raises(TypeError, match="`profile`: expected None beside"):
        NumkvCache(model_of().config, profile=MIXED, **other)


def test_another_model(tmp_path):
    model = numkv.transformers.use(model_of())
    with pytest.raises(DimensionMismatch, match="3 layers, got one of 1"):
        NumkvCache(model.config, profile=profile_of(("int8", "int8", False)))
    for wrong in ({"dim": 32}, {"heads": 1}):
        cache = NumkvCache(
            model.config, profile=profile_of(*[("int8", "int8", False)] * 3, **wrong)
        )
        with (
            torch.no_grad(),
            pytest.raises(DimensionMismatch, match="has 2 kv heads and rows of 16"),
        ):
            model(IDS, past_key_values=cache)
    with pytest.raises(TypeError, match=r"numkv\.Profile"):
        NumkvCache(model.config, profile=3)
    (tmp_path / "p").write_text("{}")
    with pytest.raises(NumkvError, match="expected a profile"):
        numkv.transformers.use(model_of(), profile=tmp_path / "p")
    latent = make("deepseek_v3").config
    with pytest.raises(NotSupported, match="profile"):
        NumkvCache(latent, profile=MIXED)


def test_fit_sees_biases_of_keys(tmp_path, capsys):
    """Random weights with biases in `k_proj` of two layers: named as outliers, and the choice fits the budget."""
    model, folder, profile = model_of(), tmp_path / "model", tmp_path / "p"
    with torch.no_grad():
        for layer in model.model.layers[:2]:
            layer.self_attn.k_proj.bias[[5, 13]] = 60.0
    model.save_pretrained(folder)
    options = ["--context", "64", "--windows", "1", "--out", str(profile), "--budget", "int8"]
    assert main(["fit", str(folder), *options]) == 0
    printed = capsys.readouterr().out
    assert "2 of 3 layers have outlier channels" in printed
    assert "has no tokenizer" in printed
    found = numkv.Profile.load(profile)
    assert len(found) == 3
    assert found.bytes_per_token <= 3 * 2 * 2 * (16 + 4)
    fitted = numkv.transformers.use(
        transformers.AutoModelForCausalLM.from_pretrained(folder), profile=profile
    )
    assert fitted.generate(IDS, max_new_tokens=2, do_sample=False).shape == (1, 31)

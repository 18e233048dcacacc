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
    with pytest.raises(TypeError, match="`profile`: expected None with"):
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
            pytest.raises(DimensionMismatch, match="of 2 kv heads and rows of 16"),
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


@pytest.mark.parametrize("budget", ["int8_channel", "int4_channel"])
def test_fit_chooses_keys_by_channel(tmp_path, capsys, budget):
    """Where biases in `k_proj` make outlier channels, by default; the budget holds all layers in that kind."""
    model, folder, profile = model_of(), tmp_path / "model", tmp_path / "p"
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 20
            layer.self_attn.k_proj.weight *= 20
            layer.self_attn.k_proj.bias[[5, 13]] = 400.0
    model.save_pretrained(folder)
    options = ["--context", "256", "--windows", "1", "--out", str(profile), "--budget", budget]
    assert main(["fit", str(folder), *options]) == 0
    assert "3 of 3 layers have outlier channels" in capsys.readouterr().out
    found = numkv.Profile.load(profile)
    assert [layer.kind.scales_per for layer in found] == ["channel"] * 3
    fitted = numkv.transformers.use(model, profile=profile)
    assert fitted.generate(IDS, max_new_tokens=50, do_sample=False).shape == (1, 79)


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


def with_biases(layers=2, size=30.0):
    model = model_of()
    with torch.no_grad():
        for layer in model.model.layers[:layers]:
            layer.self_attn.k_proj.bias[[5, 13]] = size
            layer.self_attn.q_proj.weight *= 20
    return model


def test_a_broken_tolerance_is_told_once():
    """The layers are named, and the kind that keeps it; another text, a copy and a fresh cache say nothing more."""
    model = numkv.transformers.use(with_biases(), kind="int4", tolerance=0.2)
    said = r"keys in int4 change scores by .*, more than tolerance=0.2, in layers 0, 1 of 3; kind='int8'.* reduces it"
    with pytest.warns(UserWarning, match=said):
        model.generate(IDS, max_new_tokens=3, do_sample=False)
    model.generate(IDS, max_new_tokens=3, do_sample=False)  # warnings are errors in tests
    copy.deepcopy(model).generate(IDS, max_new_tokens=3, do_sample=False)


def test_the_estimate_is_that_of_a_layer():
    """What is told is `key_error` of the same keys and queries, of a batch's first text, without its padding."""
    model = numkv.transformers.use(with_biases(3), kind="int8", tolerance=1e-9)
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), IDS[:, :20]], 1).repeat(2, 1)
    mask = (torch.arange(24) >= 4).long().repeat(2, 1)
    with pytest.warns(UserWarning, match="change scores by") as found:
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=1,
            do_sample=False,
            return_dict_in_generate=True,
        )
    said = float(str(found[0].message).split("change scores by ")[1].split(",")[0])
    worst = 0.0
    layers = out.past_key_values.layers
    alone = numkv.transformers.use(with_biases(3), kind="fp32")
    cache = NumkvCache(alone.config, kind="fp32")
    taken = []

    def keep(module, args, kwargs, result):
        taken.append(result)

    hooks = [
        x.self_attn.q_proj.register_forward_hook(keep, with_kwargs=True) for x in alone.model.layers
    ]
    with torch.no_grad():
        alone(IDS[:, :20], past_key_values=cache)
    for hook in hooks:
        hook.remove()
    for layer, q, exact in zip(layers, taken, cache.layers, strict=True):
        # RoPE keeps the length of a pair, and of int8 all elements of a row share a scale: the queries' norms count.
        keys = exact.pool.k.swapaxes(0, 1).reshape(2, -1, 16)[:, :20]
        scale = abs(keys).max(-1) / 127
        norms = q[0, -8:].reshape(8, 2, 2, 16).double().norm(dim=-1).numpy()
        error = norms * ((scale.astype(float) ** 2).mean(-1) / 12)[:, None] ** 0.5 * 16**-0.5
        worst = max(worst, float(error.max()))
        assert layer.storage == "int8"
    assert said == pytest.approx(worst, rel=0.05)


def test_a_tolerance_that_is_kept_is_silent():
    model = numkv.transformers.use(model_of(), kind="int8", rotate=True, tolerance=1.0)
    model.generate(IDS, max_new_tokens=3, do_sample=False)


def test_where_no_kind_of_8_bits_keeps_it():
    model = numkv.transformers.use(with_biases(), kind="int8", tolerance=1e-6)
    with pytest.warns(UserWarning, match=r"8 bits exceed it too: pass k_kind='bf16'"):
        model.generate(IDS, max_new_tokens=1, do_sample=False)


WRONG = [
    (0, ValueError),
    (-1.0, ValueError),
    (float("nan"), ValueError),
    (float("inf"), ValueError),
]


@pytest.mark.parametrize(("tolerance", "error"), [*WRONG, ("1", TypeError), (True, TypeError)])
def test_what_a_tolerance_is(tolerance, error):
    with pytest.raises(error, match="`tolerance`"):
        numkv.transformers.use(model_of(), kind="int8", tolerance=tolerance)


def test_a_tolerance_needs_quantised_keys():
    for options in ({}, {"kind": "bf16"}, {"k_kind": "bf16", "v_kind": "int8"}, {"profile": MIXED}):
        model = model_of()
        with pytest.raises(
            NotSupported, match="`tolerance`: expected None for keys that are not quantised"
        ):
            numkv.transformers.use(model, tolerance=0.5, **options)
        assert model.config._attn_implementation == "sdpa"

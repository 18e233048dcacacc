"""`numkv.save` and `load` of a `NumkvCache`: the same bits go on, and nothing of another model does."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.19")

from decoder_models import make, prompts  # noqa: E402
from file_surgery import File, changed, places  # noqa: E402

import numkv  # noqa: E402
from numkv.cli import main  # noqa: E402
from numkv.transformers import NumkvCache, mark_of  # noqa: E402

CHILD = """
import sys
import numkv
path, ids = sys.argv[1], eval(sys.argv[2])
try:
    numkv.load(path)
except numkv.NotSupported as error:
    assert "import numkv.transformers before" in str(error), error
else:
    raise SystemExit("it knew the class")
import torch
import numkv.transformers
from decoder_models import make
model = make("llama")
model.set_attn_implementation("numkv")
cache = numkv.load(path, mark=numkv.transformers.mark_of(model))
found = model.generate(torch.tensor([ids]), past_key_values=cache, max_new_tokens=20, do_sample=False)
print(found[0].tolist())
"""


def on_numkv(family, **changes):
    model = make(family, **changes)
    model.set_attn_implementation("numkv")
    return model


def filled(family="llama", lengths=(300, 90, 7), new=10, **options):
    """A model, a cache that has generated, and the ids and mask to go on with."""
    model, given = on_numkv(family), prompts(list(lengths))
    cache = NumkvCache(model.config, **options)
    ids = model.generate(**given, past_key_values=cache, max_new_tokens=new, do_sample=False)
    more = torch.ones(len(lengths), new + 1, dtype=torch.long)
    given["attention_mask"] = torch.cat([given["attention_mask"], more], 1)
    given["input_ids"] = torch.cat([ids, torch.full((len(lengths), 1), 7)], 1)
    return model, cache, given


def goes_on(model, cache, given, **options):
    found = model.generate(
        **given, past_key_values=cache, max_new_tokens=30, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "cache"
    model, cache, _ = filled(lengths=(30, 9), kind="int8")
    numkv.save(path, cache, mark=mark_of(model))
    return path, mark_of(model)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}), ("llama", {"kind": "int8", "capacity": 1000}), ("gemma2", {"kind": "int4", "rotate": True}),
        ("gemma2", {"k_kind": "fp8_e4m3", "v_kind": "code6"}), ("llama", {"kind": "int8_channel"}),
        ("llama", {"kind": "int8", "full_precision": numkv.FullPrecision(5, 3)}), ("deepseek_v3", {"kind": "int8"}),
        ("llama", {"kind": "int4_channel", "full_precision": numkv.FullPrecision(64, 3)}),
    ],
    ids=str,
)  # fmt: skip
def test_the_same_bits_go_on(tmp_path, family, options):
    model, cache, given = filled(family, **options)
    numkv.save(tmp_path / "cache", cache, mark=mark_of(model))
    again = numkv.load(tmp_path / "cache", mark=mark_of(make(family)))
    assert type(again) is NumkvCache
    numkv.save(tmp_path / "twice", again, mark=mark_of(model))
    assert (tmp_path / "cache").read_bytes() == (tmp_path / "twice").read_bytes()
    for found, expected in zip(
        goes_on(model, again, given), goes_on(model, cache, given), strict=True
    ):
        assert torch.equal(found, expected)
    again.reset()
    assert again.get_seq_length() == 0
    assert len(goes_on(model, again, prompts([5]))[0][0]) == 35


def test_beams_share_blocks_in_a_file(tmp_path):
    model, cache, given = filled(lengths=(300,))
    one = tmp_path / "one"
    numkv.save(one, cache, mark="m")
    cache.batch_repeat_interleave(8)
    numkv.save(tmp_path / "eight", cache, mark="m")
    assert (tmp_path / "eight").stat().st_size < 1.1 * one.stat().st_size
    again = numkv.load(tmp_path / "eight", mark="m")
    given = {name: x.repeat(8, 1) for name, x in given.items()}
    given["input_ids"][:, -1] = torch.arange(8)  # which part
    found, expected = goes_on(model, again, given)[0], goes_on(model, cache, given)[0]
    assert torch.equal(found, expected)


def test_an_empty_cache_and_a_crop(tmp_path):
    model, cache, given = filled(lengths=(300,), kind="int8_channel")
    numkv.save(tmp_path / "cache", NumkvCache(model.config, "int4"), mark="m")
    assert "kind=int4" in repr(numkv.load(tmp_path / "cache", mark="m"))
    numkv.save(tmp_path / "cache", cache, mark="m")
    again = numkv.load(tmp_path / "cache", mark="m")
    for each in (cache, again):
        each.crop(-100)
    given = {name: x[:, :211] for name, x in given.items()}
    assert torch.equal(goes_on(model, again, given)[0], goes_on(model, cache, given)[0])


def test_another_process(tmp_path):
    model, cache, given = filled(lengths=(40,), kind="int8")
    numkv.save(tmp_path / "prompt.numkv", cache, mark=mark_of(model))
    ids = given["input_ids"][0].tolist()
    arguments = [sys.executable, "-c", CHILD, str(tmp_path / "prompt.numkv"), str(ids)]
    folder = Path(__file__).resolve().parents[1]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = model.generate(**given, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert eval(done.stdout.splitlines()[-1]) == expected[0].tolist()


def test_other_models_are_refused_by_name(saved):
    path, mark = saved
    other = make("llama")
    with torch.no_grad():
        other.model.layers[2].self_attn.k_proj.weight[:] *= 1.001
    for made, what in (
        (mark_of(other), r"\(weights differ\)"), (mark_of(make("qwen3")), "model, .*weights differ"),
        (mark_of(make("llama", dtype=torch.bfloat16)), "dtype, weights differ"),
        (mark_of(make("llama", rope_parameters={"rope_type": "default", "rope_theta": 7.0})), r"\(rope differ\)"),
        (mark_of(make("llama", num_hidden_layers=3)), "layers, weights differ"),
        (mark | {"adapter": "mine"}, r"\(adapter differ\)"), ("mine", "got one marked"),
    ):  # fmt: skip
        with pytest.raises(numkv.NotSupported, match=what):
            numkv.load(path, mark=made)
    cache = numkv.load(path, mark=mark)
    for call in (lambda: numkv.save(path, cache), lambda: numkv.load(path)):
        with pytest.raises(TypeError, match=r"pass numkv\.transformers\.mark_of\(model\)$"):
            call()
    with pytest.raises(numkv.NotSupported, match="at most 100 bytes"):
        numkv.load(path, mark=mark, max_nbytes=100)
    with torch.device("meta"):
        nowhere = transformers.LlamaForCausalLM(make("llama").config)
    with pytest.raises(numkv.NotSupported, match="expected weights in memory"):
        mark_of(nowhere)
    with pytest.raises(TypeError, match=re.escape("expected a transformers.PreTrainedModel")):
        mark_of(None)


def test_the_command_draws_it(saved, capsys):
    """In a process that has not imported numkv.transformers, too; a file's own mark is no question here."""
    path, mark = saved
    cache = numkv.load(path, mark=mark)
    arguments = [sys.executable, "-m", "numkv", "show", str(path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"NumkvCache: int8, {len(cache)} layers" in done.stdout
    assert "2 of 2, 256 tokens each" in done.stdout
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out.rstrip("\n") == done.stdout.rstrip("\n")


def test_an_emptied_cache_and_its_budget(tmp_path):
    model, cache, _ = filled(lengths=(30,), kind="int8", max_nbytes="1MiB")
    cache.reset()
    numkv.save(tmp_path / "cache", cache, mark="m")
    again = numkv.load(tmp_path / "cache", mark="m")
    assert (again.max_nbytes, again.nbytes, again.get_seq_length()) == (2**20, 0, 0)
    assert len(goes_on(model, again, prompts([5]))[0][0]) == 35


def test_states_of_transformers_are_refused(tmp_path):
    cache = NumkvCache(make("qwen3_next").config)
    with pytest.raises(numkv.NotSupported, match="states are transformers' own; pickle this cache"):
        numkv.save(tmp_path / "cache", cache, mark="m")
    assert not list(tmp_path.iterdir())


def test_a_damaged_header_is_refused_or_harmless(saved, tmp_path):
    """Each entry takes other values, with right checksums: it is refused, or a cache that can be used comes back."""
    path, mark = saved
    file, bad = File.read(path), tmp_path / "bad"
    names = ("options", "tokens", "layers")
    refused = tried = 0
    for place in [p for p in places(file.fields) if p and p[0] in names]:
        for value in (None, -2, 2**31 - 1, 3, "x", [], {}, True):
            File(changed(file.fields, place, value), file.tensors).write(bad)
            tried += 1
            try:
                found = numkv.load(bad, mark=mark)
            except numkv.NotSupported:
                refused += 1
                continue
            repr(found)
            for layer in found.layers:
                assert layer.metadata is None or layer.metadata.num_blocks == len(layer.pool.k)
    assert tried > 300
    assert refused > 0.8 * tried


@pytest.mark.parametrize("value", [-1, 7, 2**31 - 1])
def test_tables_that_lead_astray_are_refused(saved, tmp_path, value):
    path, mark = saved
    file = File.read(path)
    for name in [x for x in file.tensors if x.startswith(("table", "valid"))]:
        for i in range(file.tensors[name].size):
            file = File.read(path)
            flat = file.tensors[name].reshape(-1)
            flat[i] = np.array(value).astype(flat.dtype)
            file.write(tmp_path / "bad")
            with pytest.raises(numkv.NotSupported):
                numkv.load(tmp_path / "bad", mark=mark)

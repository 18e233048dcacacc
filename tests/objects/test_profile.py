"""Kinds of layers in a file: what is written is what is read, and nothing else is taken for it."""

import json

import pytest

import numkv
from numkv.errors import NumkvError

LAYERS = [
    numkv.LayerSpec(2, 64, kind="int8", v_kind="int4", rotate=True),
    numkv.LayerSpec(4, 32, head_dim_v=64, kind="bf16", rotate=True, window_left=7),
    numkv.LayerSpec(2, 64, kind="int4", full_precision=numkv.FullPrecision(8, 2, "bf16"), chunk_size=16),
    numkv.LayerSpec(states=[((3, 4), "float32"), ((5,), "bfloat16")]),
    numkv.LayerSpec(shares=0),
    numkv.LayerSpec(1, 16, kind="fp32", key_bounds=True, states=[((2,), "int8")]),
]  # fmt: skip


def test_what_is_saved_is_loaded(tmp_path):
    profile = numkv.Profile(LAYERS, "a model")
    profile.save(tmp_path / "p")
    found = numkv.Profile.load(str(tmp_path / "p"))
    assert found == profile
    assert list(found) == LAYERS
    assert (found.model, len(found), found[1]) == ("a model", 6, LAYERS[1])
    assert hash(found) == hash(profile)
    assert found != numkv.Profile(LAYERS[:1])


def test_bytes_of_a_token():
    """Scales counted: int8 has 4 bytes a row, int4 one of 2 bytes for 32 elements."""
    expected = 2 * (64 + 4 + 32 + 2 * 2) + 4 * 2 * (32 + 64)
    assert numkv.Profile(LAYERS[:2]).bytes_per_token == expected
    assert numkv.Profile(LAYERS[3:5]).bytes_per_token == 0


def test_a_cache_takes_it(rng):
    profile = numkv.Profile(LAYERS[:2])
    cache = numkv.PagedKVCache(layers=profile, num_blocks=4)
    assert [(x.kind.name, x.v_kind.name) for x in cache.layers] == [
        ("int8", "int4"),
        ("bf16", "bf16"),
    ]


@pytest.mark.parametrize("at", ["model", "layers", "kind", "sha256"])
def test_a_change_is_found(tmp_path, at):
    path = tmp_path / "p"
    numkv.Profile(LAYERS[:1], "mine").save(path)
    content = json.loads(path.read_text())
    if at == "kind":
        content["layers"][0]["kind"] = "int4"
    elif at == "layers":
        content["layers"] *= 2
    else:
        content[at] = "other"
    path.write_text(json.dumps(content))
    with pytest.raises(NumkvError, match="checksum"):
        numkv.Profile.load(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '"numkv profile"', "{}", '{"format": "numkv profile"}', "\x00\xff", "[" * 99_999],
)  # fmt: skip
def test_what_is_no_profile(tmp_path, text):
    (tmp_path / "p").write_bytes(text.encode("latin1"))
    with pytest.raises(NumkvError, match="expected a profile of version 1"):
        numkv.Profile.load(tmp_path / "p")


def test_a_newer_version(tmp_path):
    path = tmp_path / "p"
    numkv.Profile(LAYERS).save(path)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(NumkvError, match="version 2"):
        numkv.Profile.load(path)


def test_a_kind_that_is_not_known(tmp_path, monkeypatch):
    """A profile of a later numkv of the same version of the format."""
    path = tmp_path / "p"
    monkeypatch.setattr("numkv.caches.profile._name", lambda x: "int3")
    numkv.Profile(LAYERS[:1]).save(path)
    with pytest.raises(NumkvError, match="int3"):
        numkv.Profile.load(path)


@pytest.mark.parametrize(
    ("given", "error"), [((), ValueError), (["int8"], TypeError), ([None], TypeError)]
)
def test_what_layers_are(given, error):
    with pytest.raises(error, match="LayerSpec"):
        numkv.Profile(given)

"""Damaged and crafted files: refused with the path and the reason, before anything has been taken."""

import gc
import json
import os
import threading
import zlib

import numpy as np
import pytest
from file_surgery import File, changed, places
from layer_lists import paged_kv_cache
from saved_caches import CACHES, HEADS, layer, paged_cache

import numkv

MOST = 1 << 24  # bytes that a crafted header may ask for here
SOME = [
    "KVCache int8 residual", "PagedKVCache windows", "CausalCache fp8", "sequences",
    *(pytest.param(name, marks=pytest.mark.nightly) for name in (
        "PagedLayer int8", "PagedKVCache fp8", "EncoderCache int8", "WrapperCache", "MultiHeadCompressor sketch",
    )),
]  # fmt: skip


@pytest.fixture(scope="module", params=SOME)
def saved(request, tmp_path_factory):
    """A file of each sort."""
    path = tmp_path_factory.mktemp("files") / "saved"
    if request.param == "sequences":
        cache = paged_cache("cpu", kind="int8", windows=[-1, 4])
        numkv.save(path, [cache.swap_out(seq) for seq in cache.sequences], mark="m")
    else:
        numkv.save(path, CACHES[request.param]("cpu"), mark="m")
    return path


def refused(path):
    """Whether a file is refused as it should be: by an error of numkv's that names the path."""
    why = ""
    try:
        loaded = numkv.load(path, max_nbytes=MOST)
    except numkv.NumkvError as error:
        why = str(error)
    if why:
        assert "`path`" in why
        assert str(path) in why
    elif hasattr(loaded, "check"):
        loaded.check()
    return bool(why)


def opened():
    gc.collect()
    return np.array([len(os.listdir("/proc/self/fd")), threading.active_count()])


def test_a_file_that_ends_early_or_late_is_refused(request, saved, tmp_path):
    data, bad = saved.read_bytes(), tmp_path / "bad"
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    ends = {start + n for entry in header.values() for n in entry.get("data_offsets", [0])}
    lengths = {0, 1, 7, 8, 9, 10, start // 2, start - 1, start, *ends, *(n - 1 for n in ends)}
    before = opened()
    every = 1 if request.config.getoption("nightly") else 3
    for n in sorted(lengths - {len(data)})[zlib.crc32(data) % every :: every]:
        bad.write_bytes(data[:n])
        assert refused(bad), n
    for more in (b"\0", b"\0" * 64):
        bad.write_bytes(data + more)
        assert refused(bad)
    assert (opened() <= before).all()  # threads of earlier tests may have ended meanwhile
    bad.write_bytes(data)
    assert not refused(bad)


def test_a_flipped_bit_is_found_wherever_it_is(saved, tmp_path, rng):
    data, bad = saved.read_bytes(), tmp_path / "bad"
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    at = [*range(8), *rng.choice(np.arange(8, start), 40, replace=False).tolist()]
    for entry in header.values():
        begin, end = entry.get("data_offsets", (0, 0))
        at += [start + begin, start + (begin + end) // 2, start + end - 1] if end > begin else []
    for i in at:
        for bit in range(8) if i < 8 else (int(rng.integers(8)),):
            wrong = bytearray(data)
            wrong[i] ^= 1 << bit
            bad.write_bytes(wrong)
            assert refused(bad), (i, bit)


def flip_header(path, bits):
    """Load a file with each of some bits of each byte of its header flipped."""
    data, bad = path.read_bytes(), path.with_name("flipped")
    with open(bad, "wb+", buffering=0) as file:
        file.write(data)
        assert not refused(bad)
        for i in range(8 + int.from_bytes(data[:8], "little")):
            for bit in bits:
                os.pwrite(file.fileno(), bytes([data[i] ^ 1 << bit]), i)
                assert refused(bad), (i, bit, data[i - 20 : i + 20])
            os.pwrite(file.fileno(), data[i : i + 1], i)


def test_a_header_of_empty_arrays_has_no_bit_to_spare(tmp_path):
    """Their shapes could be any, if nothing compared them. This bit makes another digit of each digit."""
    cache = paged_kv_cache(1, 1, 8, num_blocks=4, block_size=4, v_kind="latent")
    numkv.save(tmp_path / "saved", cache.swap_out(cache.add()))
    flip_header(tmp_path / "saved", [0])


@pytest.mark.nightly
def test_no_header_has_a_bit_to_spare(saved):
    flip_header(saved, range(8))


@pytest.mark.parametrize("version", [1, 2, 4])
def test_another_version_is_refused_by_its_number(tmp_path, version):
    numkv.save(tmp_path / "file", CACHES["KVCache fp32"]("cpu"))
    file = File.read(tmp_path / "file")
    file.fields["version"] = version
    file.write(tmp_path / "file")
    with pytest.raises(
        numkv.NotSupported, match=f"expected a file of numkv's format 3, got format {version}"
    ):
        numkv.load(tmp_path / "file")


def test_sizes_of_states_are_checked(tmp_path):
    """With states none that hold nothing; without them, none at all."""
    shapes = {0: [((4,), "float32")]}
    for states, wrong in (
        (
            {"states": shapes, "state_slots": numkv.StateSlots(2)},
            {"num_states": [0, 2**31, None], "checkpoint_every": [0, 5]},
        ),
        ({}, {"num_states": [1], "checkpoint_every": [4]}),
    ):  # fmt: skip
        cache = paged_kv_cache(1, 1, 8, num_blocks=4, block_size=4, kind="fp32", **states)
        seq = cache.add()
        step = cache.reserve([seq], [1])
        step.append(0, *np.ones((2, 1, 1, 8), np.float32))
        if states:
            step.write_state(0, np.ones((1, 4), np.float32))
        cache.commit(step)
        numkv.save(tmp_path / "good", cache)
        assert len(numkv.load(tmp_path / "good").sequences) == 1
        for name, values in wrong.items():
            for value in values:
                file = File.read(tmp_path / "good")
                file.fields[name] = value
                file.write(tmp_path / "bad")
                assert refused(tmp_path / "bad"), (name, value)


VALUES = [
    None, True, -1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**63, 2**70, 1.5, "", "x", "int8", "fp8_e4m3", [], [1], {},
    {"is": "rope"},
]  # fmt: skip


@pytest.mark.parametrize("tries", [2, pytest.param(len(VALUES), marks=pytest.mark.nightly)])
def test_a_header_that_claims_anything_else_is_refused_or_true(saved, tmp_path, rng, tries):
    """Every entry of the header with sorts of values, under right checksums."""
    file, bad = File.read(saved), tmp_path / "bad"
    fields, count = file.fields, {True: 0, False: 0}
    for place in places(fields):
        if place[:1] == ("crc32",):
            continue
        for i in rng.choice(len(VALUES), tries, replace=False):
            value = VALUES[i]
            file.fields = changed(fields, place, value)
            file.write(bad)
            count[refused(bad)] += 1
        if place and isinstance(place[-1], str):
            parent = place[:-1]
            missing = changed(
                fields, parent, lambda x, key=place[-1]: {k: v for k, v in x.items() if k != key}
            )
            file.fields = missing
            file.write(bad)
            count[refused(bad)] += 1
    assert count[True] > 2 * count[False]


def test_tensors_of_another_shape_dtype_or_name_are_refused(saved, tmp_path):
    bad = tmp_path / "bad"
    for name in File.read(saved).tensors:
        for change in (
            lambda x: x.reshape(-1)[:-1], lambda x: x[..., None], lambda x: x.astype("f8"), lambda x: None,
        ):  # fmt: skip
            file = File.read(saved)
            if not (file.tensors[name].size and file.tensors[name].ndim):
                continue
            x = change(file.tensors.pop(name))
            if x is not None:
                file.tensors[name] = x
            file.write(bad)
            assert refused(bad), name
        file = File.read(saved)
        file.tensors[name + "x"] = file.tensors.pop(name)
        file.write(bad)
        assert refused(bad), name
    file = File.read(saved)
    file.tensors["more"] = np.zeros(3, "f4")
    file.write(bad)
    assert refused(bad)


@pytest.mark.parametrize(
    "value", [np.nan, *(pytest.param(x, marks=pytest.mark.nightly) for x in (np.inf, -1.0))]
)
def test_scales_that_are_none_are_refused(saved, tmp_path, value):
    names = [x for x in File.read(saved).tensors if "scale" in x or "residual" in x]
    for name in names:
        file = File.read(saved)
        x = file.tensors[name]
        if not x.size:
            continue
        flat = x.reshape(-1)
        flat[len(flat) // 2] = value if x.dtype == "f4" else np.array([value], "f4").view("u2")[1]
        file.write(tmp_path / "bad")
        assert refused(tmp_path / "bad"), name


# ---------------------------------------------------------------- the format


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


def ours(text):
    """Metadata with the right checksum."""
    return {"numkv": text, "numkv_crc32": f"{zlib.crc32(text.encode()):08x}"}


HEADERS = {
    "not JSON": b"{" + b"x" * 100,
    "no object": b"[" + b" " * 100 + b"]",
    "not UTF-8": b'{"\xff\xfe": 1}' + b" " * 50,
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000,
    "an endless string": b'{"' + b'\\"' * 50_000,
    "NaN": b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}',
    "a name twice": json.dumps({"a": entry()}).encode()[:-1] + b', "a": ' + json.dumps(entry()).encode() + b"}",
    "an endless number": b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}',
    "an entry that is none": {"a": 1},
    "no dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "a dtype that is none": {"a": entry(dtype="F31")},
    "a dtype that is a list": {"a": entry(dtype=["F32"])},
    "a negative size": {"a": entry(shape=[-2])},
    "a fraction": {"a": entry(shape=[2.0])},
    "a truth value": {"a": entry(shape=[True, 2])},
    "a huge size": {"a": entry(shape=[2**62, 2])},
    "many huge sizes": {"a": entry(shape=[2**61] * 5000)},
    "offsets that fall": {"a": entry(data_offsets=[8, 0])},
    "negative offsets": {"a": entry(data_offsets=[-8, 0])},
    "three offsets": {"a": entry(data_offsets=[0, 4, 8])},
    "offsets beyond the file": {"a": entry(data_offsets=[8, 16])},
    "tensors one over the other": {"a": entry(), "b": entry(shape=[1], data_offsets=[4, 8])},
    "a gap": {"a": entry(shape=[1], data_offsets=[4, 8])},
    "metadata that is no object": {"__metadata__": [], "a": entry()},
    "metadata that is no text": {"__metadata__": {"numkv": 3}, "a": entry()},
    "no header of ours": {"__metadata__": {"format": "pt"}, "a": entry()},
    "ours is no JSON": {"__metadata__": ours("{"), "a": entry()},
    "ours is no object": {"__metadata__": ours("[]"), "a": entry()},
    "ours has no version": {"__metadata__": ours("{}"), "a": entry()},
    "ours is deep": {"__metadata__": ours("[" * 50_000), "a": entry()},
    "ours has a strange version": {"__metadata__": ours('{"version": [3]}'), "a": entry()},
    "ours has no checksum": {"__metadata__": {"numkv": '{"version": 3, "crc32": {"a": "00000000"}}'}, "a": entry()},
    "a tensor has no checksum": {"__metadata__": ours('{"version": 3, "crc32": {}}'), "a": entry()},
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_is_none_is_refused(tmp_path, name):
    File({}, {"a": np.zeros(2, "f4")}).write(tmp_path / "bad", HEADERS[name])
    assert refused(tmp_path / "bad")
    with pytest.raises(numkv.NotSupported):
        numkv.files.load_sequences(tmp_path / "bad")


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1, 100_000_001])
def test_a_header_of_another_length_is_refused(tmp_path, length):
    (tmp_path / "bad").write_bytes(length.to_bytes(8, "little") + b'{"a": 1}' * 20)
    assert refused(tmp_path / "bad")


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for bad in (tmp_path / "pipe", tmp_path):
        with pytest.raises((numkv.NotSupported, IsADirectoryError)):
            numkv.load(bad)
    with pytest.raises(FileNotFoundError):
        numkv.load(tmp_path / "nothing")
    assert refused(tmp_path / "pipe")


# ---------------------------------------------------------------- books that contradict themselves


def changes(name, **tensors):
    """Changes of a saved cache's tables, each of which must be refused."""
    return [(name, tensor, change) for tensor, them in tensors.items() for change in them]


BOOKS = [
    *changes(
        "CausalCache int8",
        cells=[lambda x: x[::-1], lambda x: x + 1000, lambda x: x - 1, lambda x: x * 0],
        positions=[lambda x: x - 1, lambda x: x[::-1]],
        sequences=[lambda x: x * 0, lambda x: x - 100],
        lengths=[lambda x: x + 1, lambda x: x[::-1] * 0, lambda x: np.where(x == x[0], 2**62, x)],
        lists=[lambda x: x + 1, lambda x: x * 0, lambda x: x[::-1], lambda x: x - 1],
    ),
    *changes(
        "PagedKVCache windows",
        **{
            "0.table.0": [lambda x: x * 0, lambda x: x + 100, lambda x: x * 0 - 1, lambda x: x - 2],
            "1.table.1": [lambda x: x * 0 - 1, lambda x: x + 50],
            "0.tokens": [lambda x: np.append(x, x), lambda x: x[:-1]],
        },
    ),
    *changes("CausalCache fp8", **{"set_k_scale.0": [lambda x: x * 0, lambda x: x * np.nan]}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "tensor", "change"), BOOKS)
def test_books_that_contradict_themselves_are_refused(tmp_path, name, tensor, change):
    numkv.save(tmp_path / "good", CACHES[name]("cpu"))
    file = File.read(tmp_path / "good")
    file.tensors[tensor] = np.ascontiguousarray(
        change(file.tensors[tensor]), file.tensors[tensor].dtype
    )
    file.write(tmp_path / "bad")
    assert refused(tmp_path / "bad")


def test_blocks_of_a_pool_are_given_back(tmp_path):
    """Whenever the load is refused: by the checksum at the end, too."""
    numkv.save(tmp_path / "good", layer(numkv.PagedLayer, "cpu", kind="int8"))
    pool = numkv.PagedPool(9, 4, HEADS, 32, kind="int8")
    data = bytearray((tmp_path / "good").read_bytes())
    data[-1] ^= 1
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(numkv.NotSupported, match="checksum"):
        numkv.load(tmp_path / "bad", pool=pool)
    file = File.read(tmp_path / "good")
    file.tensors["k_scale.0"][0, 0] = np.nan
    file.write(tmp_path / "bad")
    with pytest.raises(numkv.NotSupported, match="NaN"):
        numkv.load(tmp_path / "bad", pool=pool)
    assert pool.blocks.num_free == 9
    pool.check()
    numkv.load(tmp_path / "good", pool=pool)
    assert pool.blocks.num_free == 5


def test_rows_that_no_cache_has_are_refused(tmp_path):
    """Latents that are rotated, and a layer with a window and with chunks."""
    latents = numkv.ContiguousLayer(9, 1, 8, kind="int8", v_kind="latent")
    paged = paged_kv_cache(1, 1, 8, num_blocks=4, block_size=4, v_kind="latent")
    mixed = paged_kv_cache(2, [1, 2], 8, num_blocks=4, block_size=4, windows=[-1, 4])
    for cache, place, value in (
        (latents, ("rotation",), 0), (paged, ("geometry", 4), 0), (mixed, ("geometry", 5, 1, 1), 2),
        (paged.swap_out(paged.add()), ("geometry", 4), 0),
    ):  # fmt: skip
        numkv.save(tmp_path / "good", cache)
        file = File.read(tmp_path / "good")
        file.fields = changed(file.fields, place, value)
        file.write(tmp_path / "bad")
        numkv.load(tmp_path / "good")
        assert refused(tmp_path / "bad"), place


def test_codes_of_another_codebook_are_refused(tmp_path):
    numkv.save(tmp_path / "good", CACHES["HeadCompressor"]("cpu"))
    file = File.read(tmp_path / "good")
    file.fields["seed"] = "1"
    file.write(tmp_path / "bad")
    with pytest.raises(numkv.NotSupported, match="rotation"):
        numkv.load(tmp_path / "bad")


def test_the_checksum_is_the_crc_of_the_tensor(tmp_path):
    numkv.save(tmp_path / "file", CACHES["KVCache fp32"]("cpu"))
    file = File.read(tmp_path / "file")
    for name, x in file.tensors.items():
        assert file.fields["crc32"][name] == f"{zlib.crc32(x.tobytes()):08x}"

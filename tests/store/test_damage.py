"""Objects that are not as they were written: none is ever found, and each is written anew."""

import numpy as np
import pytest
from stored_prefixes import cache, check_rows, prompt, started, store_in

from numkv.store.folder import _MOST_VIEWS, Folder
from numkv.store.objects import DamagedObject, ForeignObject, Layout, crc32_of

IDENTITY, CONTENT = b'{"mark":"m"}', 100
NAME, TOKENS = bytes(range(32)), np.arange(4, dtype="<i4").tobytes()


def written(folder):
    of = cache(store_in(folder))
    started(of, prompt(1, 9))
    of.store.flush()
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_every_byte_of_an_object_counts():
    layout = Layout(IDENTITY, 4, CONTENT)
    content = np.arange(CONTENT, dtype=np.uint8)
    header = layout.make_header(NAME, TOKENS, crc32_of([content]))
    assert layout.check_header(header, NAME, TOKENS) == crc32_of([content])
    for at in range(len(header)):
        for bit in (1, 128):
            bad = bytearray(header)
            bad[at] ^= bit
            try:
                crc = layout.check_header(bad, NAME, TOKENS)
            except DamagedObject:
                continue
            assert crc != crc32_of([content]), at
    for name, tokens in ((NAME[::-1], TOKENS), (NAME, TOKENS[::-1])):
        with pytest.raises(DamagedObject, match="another block"):
            layout.check_header(header, name, tokens)
    with pytest.raises(ForeignObject):
        Layout(b'{"mark":"n"}', 4, CONTENT).check_header(header, NAME, TOKENS)


DAMAGES = {
    "the first byte": lambda x: _flipped(x, 0),
    "the name": lambda x: _flipped(x, 40),
    "the checksum": lambda x: _flipped(x, 65),
    "the identity": lambda x: _flipped(x, 90),
    "the first byte of the content": lambda x: _flipped(x, len(x) - 1024),
    "the last byte": lambda x: _flipped(x, len(x) - 1),
    "zeros": lambda x: bytes(len(x)),
    "zeros at the end": lambda x: x[:-100] + bytes(100),
    "nothing": lambda x: b"",
    "a byte less": lambda x: x[:-1],
    "half": lambda x: x[: len(x) // 2],
    "a byte more": lambda x: x + b"\0",
}


def _flipped(x, at):
    return x[:at] + bytes([x[at] ^ 16]) + x[at + 1 :]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_object_is_a_miss_and_is_written_anew(tmp_path, damage):
    paths = written(tmp_path)
    whole = [path.read_bytes() for path in paths]
    for path, x in zip(paths, whole, strict=True):
        path.write_bytes(DAMAGES[damage](x))
    of = cache(store_in(tmp_path))
    seq, found = started(of, prompt(1, 9))
    assert found == 0
    check_rows(of, seq, prompt(1, 9))
    same_size = len(DAMAGES[damage](whole[0])) == len(whole[0])
    assert of.store.stats().damaged == 2 * same_size  # others are not even read
    of.store.flush()
    assert [path.read_bytes() for path in paths] == whole
    assert started(cache(store_in(tmp_path)), prompt(1, 9))[1] == 8


@pytest.mark.nightly
def test_no_byte_can_be_flipped_unseen(tmp_path):
    path, other = written(tmp_path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(_flipped(whole, at))
        of = cache(store_in(tmp_path))
        found = of.cached_len(of.add(prompt(1, 9)))
        assert found in (0, 4), at
        assert of.store.stats().damaged == 1, at
        assert of.store.flush() == 0  # by then it is deleted
        path.write_bytes(whole)


def test_objects_that_were_exchanged_are_damage(tmp_path):
    a, b = written(tmp_path)
    x, y = a.read_bytes(), b.read_bytes()
    a.write_bytes(y), b.write_bytes(x)
    of = cache(store_in(tmp_path))
    assert started(of, prompt(1, 9))[1] == 0
    assert of.store.stats().damaged == 2


def test_scales_that_are_none_are_damage(tmp_path):
    """Rows that were stored unchecked."""
    of = cache(store_in(tmp_path), kind="int8")
    seq = of.add(prompt(1, 9))
    step = of.reserve([seq], 9)
    rows = np.full((9, 2, 8), np.inf, np.float32)
    for layer in range(2):
        step.append(layer, rows, rows, check_finite=False)
    of.commit(step, token_ids=prompt(1, 9))
    of.store.flush()
    other = cache(store_in(tmp_path), kind="int8")
    assert other.cached_len(other.add(prompt(1, 9))) == 0
    assert other.store.stats().damaged == 2


def test_objects_of_more_parts_than_one_call_takes(tmp_path, monkeypatch):
    """And where the system gives less than it is asked for."""
    parts = [np.full(3, i % 251, np.uint8) for i in range(_MOST_VIEWS + 500)]
    folder, found, nbytes = Folder(str(tmp_path), False), [], 3 * len(parts)
    folder.write("a/b/c", parts, 1.0)

    class Jobs:
        keys = ("a/b/c",)
        nbytes = 3 * len(parts)
        check = staticmethod(lambda i, views: found.append(views))

        def views(self, i):
            return [np.zeros(3, np.uint8) for _ in parts]

    def read():
        (error,) = folder.read(Jobs())
        if error is not None:
            raise error
        return found.pop()

    assert np.array_equal(read(), parts)
    from numkv.store import folder as module

    preadv = module.os.preadv
    monkeypatch.setattr(
        module.os, "preadv", lambda d, views, at: preadv(d, views[: max(1, len(views) // 2)], at)
    )
    assert np.array_equal(read(), parts)
    with open(tmp_path / "a/b/c", "ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedObject, match="longer"):
        read()
    with open(tmp_path / "a/b/c", "r+b") as file:
        file.truncate(nbytes - 1)
    with pytest.raises(DamagedObject, match="cut off"):
        read()

"""What `PrefixStore` takes and refuses."""

import pytest
from stored_prefixes import cache

import numkv
from numkv.store import PrefixStore


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (TypeError, "place", {"place": 3}),
        (ValueError, "place", {"place": ""}),
        (ValueError, "place", {"place": "a\0b"}),
        (TypeError, "mark", {"mark": None}),
        (TypeError, "mark", {"mark": 3}),
        (TypeError, "mark", {"mark": {"a": []}}),
        (ValueError, "mark", {"mark": {"a": float("nan")}}),
        (ValueError, "mark", {"mark": "\ud800"}),
        (TypeError, "rope", {"rope": 1e6}),
        (numkv.DimensionMismatch, "max_nbytes", {"max_nbytes": 0}),
        (numkv.DimensionMismatch, "host_nbytes", {"host_nbytes": -1}),
        (TypeError, "max_nbytes", {"max_nbytes": 1.5}),
        (TypeError, "durable", {"durable": "yes"}),
        (TypeError, "file_system", {"file_system": object()}),
        (TypeError, "on_event", {"on_event": 3}),
    ],
)
def test_what_is_refused(tmp_path, error, match, options):
    given = {"place": tmp_path, "mark": "a"} | options
    with pytest.raises(error, match=f"`{match}`"):
        PrefixStore(given.pop("place"), **given)


def test_timeouts(tmp_path):
    store = PrefixStore(tmp_path, mark="a")
    for bad, error in ((-1, ValueError), ("x", TypeError), (float("nan"), ValueError)):
        for call in (store.flush, store.close):
            with pytest.raises(error, match="`timeout`"):
                call(bad)
    assert store.flush(0) == store.close(5) == 0


def test_a_cache_takes_a_store_and_nothing_else(tmp_path):
    for bad in (tmp_path, "folder", PrefixStore, object()):
        with pytest.raises(TypeError, match="`store`"):
            cache(bad)
    store = PrefixStore(tmp_path / "new", mark={"model": "a", "base": 1e6}, rope="plain")
    assert cache(store).store is store
    assert cache(None).store is None
    assert not (tmp_path / "new").exists()
    assert (store.mark, store.rope, store.max_nbytes) == (
        {"model": "a", "base": 1e6},
        "plain",
        None,
    )
    assert store.place == str(tmp_path / "new")
    assert store.stats().hit_rate == 0


def test_a_place_that_cannot_be_written_to(tmp_path):
    from stored_prefixes import prompt, started

    (tmp_path / "file").write_text("")
    of = cache(PrefixStore(tmp_path / "file", mark="a"))
    started(of, prompt(1))
    assert of.store.flush() == 5
    assert "NotADirectory" in of.store.stats().last_error

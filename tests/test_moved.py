"""Modules that 0.1 documented can still be imported under their names, with a warning."""

import importlib
import sys

import pytest

import numkv
from numkv._moved import MOVED


@pytest.fixture(params=sorted(MOVED))
def old(request, monkeypatch):
    """An old name that nobody has imported yet."""
    monkeypatch.delitem(sys.modules, f"numkv.{request.param}", raising=False)
    vars(numkv).pop(request.param, None)
    yield request.param
    vars(numkv).pop(request.param, None)


def test_what_0_1_documented_is_in_the_list():
    documented = {"eviction", "paging", "prefix", "residual", "rotation", "structs"}
    assert documented <= MOVED.keys()


def test_an_old_name_is_imported_with_a_warning_that_says_the_new_one(old):
    with pytest.warns(DeprecationWarning, match=f"numkv.{old} is now part of {MOVED[old]}"):
        module = importlib.import_module(f"numkv.{old}")
    new = importlib.import_module(MOVED[old])
    assert new.__all__
    assert all(getattr(module, name) is getattr(new, name) for name in new.__all__)


def test_an_old_name_is_an_attribute_of_the_package(old):
    with pytest.warns(DeprecationWarning, match=MOVED[old]) as caught:
        module = getattr(numkv, old)
    assert caught[0].filename == __file__
    assert module.__all__ == importlib.import_module(MOVED[old]).__all__


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        numkv.nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("numkv.nothing")


@pytest.mark.parametrize("name", ["load_sequences", "save_sequences"])
def test_a_name_of_a_package_is_found_where_it_was(name):
    with pytest.warns(
        DeprecationWarning, match=f"numkv.caches.{name} is now numkv.files.{name}"
    ) as caught:
        found = getattr(numkv.caches, name)
    assert caught[0].filename == __file__
    assert found is getattr(numkv.files, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        numkv.caches.nothing  # noqa: B018


def test_what_users_called_is_where_they_called_it(recwarn):
    functions = {
        "eviction": ["first_and_recent", "heavy_hitters", "max_pool", "seen_by_recent"],
        "files": ["load_sequences", "save_sequences"],
        "paging": ["block_table_to_csr", "csr_to_block_table", "slot_mapping"],
        "prefix": ["block_digests", "root_digest", "token_ids"],
        "rotation": ["Rotation"],
        "residual": ["Residual"],
        "structs": ["cells_struct", "host_struct", "layer_struct"],
        "block_pool": ["BlockPool", "MissReason", "PoolStats"],
    }
    for module, names in functions.items():
        assert all(hasattr(getattr(numkv, module), name) for name in names), module
    assert {w.category for w in recwarn.list} == {DeprecationWarning}

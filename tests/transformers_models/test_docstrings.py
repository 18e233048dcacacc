"""The examples of docstrings run; the code of docs/transformers.md does in `tests/site`."""

import doctest
import importlib

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")


def test_examples():
    found = doctest.testmod(importlib.import_module("numkv.transformers.cache"))
    assert found.attempted > 0
    assert found.failed == 0

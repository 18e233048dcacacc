"""The examples of docstrings run; the code of docs/transformers.md does in `tests/site`."""

import doctest
import importlib

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")


@pytest.mark.parametrize("module", ["cache", "models"])
def test_examples(module):
    found = doctest.testmod(importlib.import_module(f"numkv.transformers.{module}"))
    assert found.attempted > 0
    assert found.failed == 0

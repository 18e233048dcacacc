"""docs/transformers.md is true: its Python blocks run, as do the examples of docstrings."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "transformers.md"


def test_the_blocks_of_the_page_run():
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    assert names["output"].shape == (1, 16)


@pytest.mark.parametrize("module", ["cache", "models"])
def test_examples(module):
    found = doctest.testmod(importlib.import_module(f"numkv.transformers.{module}"))
    assert found.attempted > 0
    assert found.failed == 0

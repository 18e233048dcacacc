"""The page's examples run."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ray.md"


def test_the_examples_of_the_page_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(names["text"].batch.cache.runs(names["text"].seq)) >= 1

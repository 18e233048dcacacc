"""The code in docs/mixed_layers.md runs, and what it asserts holds."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "mixed_layers.md"


def test_the_page_runs():
    found = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert found
    for block in found:
        exec(compile(block, str(PAGE), "exec"), {})

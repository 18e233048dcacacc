"""The code in docs/store.md runs, and what it asserts holds."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "store.md"


def test_the_code_on_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert blocks
    for code in blocks:
        exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})

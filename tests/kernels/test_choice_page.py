"""The code in docs/sparse.md runs, and what it asserts holds."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "sparse.md"


def test_the_code_on_the_page_runs():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 2
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {"__name__": "page"})

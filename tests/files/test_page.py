"""docs/files.md lists the tensors of every class; its example runs in `tests/site`."""

import re
from pathlib import Path

from safetensors.numpy import load_file
from saved_caches import CACHES

import numkv

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "files.md").read_text()


def test_tensors_are_those_that_the_page_lists(tmp_path):
    named = {re.sub(r"<\w+>", "N", x) for x in re.findall(r"`([\w.<>]+)`", PAGE)}
    for name, make in CACHES.items():
        numkv.save(tmp_path / "file", make("cpu"))
        for tensor in load_file(tmp_path / "file"):
            own = re.sub(r"^\d+\.", "", tensor) if name == "WrapperCache" else tensor
            assert re.sub(r"\b\d+\b", "N", own) in named or "_scale." in own, (name, tensor)

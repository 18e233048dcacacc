"""Attention as it is compiled for a 64-bit ARM: what its hot loops are made of. `tools/on_arm.sh` runs it, emulated."""

import collections
import re

import assembly
import neon
import pytest

llvm = pytest.importorskip("llvmlite.binding")

#: What multiplies and adds rows of a kind, four at once, and what makes floats of them.
PRODUCTS = {
    "fp32": (r"fmla\s+v\d+\.4s", None),
    "fp16": (r"fmla\s+v\d+\.4s", r"fcvtl2?\s"),
    "bf16": (r"fmla\s+v\d+\.4s", r"(u?shll2?|zip[12]|uzp[12]|tbl)\s"),
    "int8": (r"(smlal2?|smull2?|mla)\s+v\d+\.4s", r"sshll2?\s"),
    "int4": (r"fmla\s+v\d+\.4s", r"[su]cvtf\s+v\d+\.4s"),
    "code6": (r"(smlal2?|smull2?|mla)\s+v\d+\.4s", r"(sshll2?|tbl)\s"),
    "code4": (r"(smlal2?|smull2?|mla)\s+v\d+\.4s", r"(sshll2?|tbl)\s"),
}
ONE_FLOAT = re.compile(r"^f(madd|msub|mul|add)\s+[sdh]\d+")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder with LLVM and assembly of each kind."""
    try:
        llvm.initialize_all_targets()
        llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    except RuntimeError:
        pytest.skip("this llvmlite has no code generator for ARM")
    folder = tmp_path_factory.mktemp("neon")
    process = neon.start(folder, PRODUCTS)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("rows", neon.ROWS)
def test_hot_loops(compiled, kind, rows):
    text = (compiled / f"{kind}.{rows}.s").read_text()
    assert not re.search(r"llvm\.x86\.|asm .*vfm", (compiled / f"{kind}.{rows}.ll").read_text())
    (name,) = set(re.findall(r"^(_ZN5numkv\w*make_rows\w*):$", text, re.M))
    blocks = assembly.of_assembly(text, name)
    products, widening = PRODUCTS[kind]
    loops = [blocks.lines(loop) for loop in blocks.innermost()]
    hot = [lines for lines in loops if any(re.match(products, line) for line in lines)]
    assert len(hot) >= 2  # scores and sums
    for lines in hot:
        assert not assembly.calls(lines), assembly.calls(lines)
        assert not [line for line in lines if ONE_FLOAT.match(line)]
    found = collections.Counter(line.split()[0] for lines in hot for line in lines)
    assert found["prfm"] >= 1, found
    if widening and rows == 1:  # of more, rows may have been widened before
        assert any(re.match(widening, line) for lines in hot for line in lines), found

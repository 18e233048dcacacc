"""Machine code made without a driver, and taken by another machine: here by processes on the stub driver."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from processes import PATIENCE
from ptx_on_cuda import device  # noqa: F401 - the stub driver, before anything asks for one

import numkv
from numkv.cli import main
from numkv.kernels.builder import cache_stats
from numkv.kernels.cuda import carried, launches, merge

ROOT = Path(__file__).resolve().parents[2]
CC = (8, 0)
# No stub driver: what a machine without a GPU has.
EXPORT = f"""
import sys, pathlib, numpy as np
from numkv.kernels.cuda import carried
with carried.elsewhere({CC}) as kernels:
    import numkv
    here = numkv.targets.get("cuda")
    rows, lse = (here.asarray(np.ones(n, np.float32)) for n in ((4, 2, 30), (4, 2)))
    for _ in range(3):
        numkv.merge_states(rows, lse, rows, lse)
    assert here.to_host(rows).shape == (4, 2, 30)
print(carried.write(pathlib.Path(sys.argv[1]), kernels, {CC}))
"""
STUB = """
import os, sys
from tools.cuda import stub_driver
driver = stub_driver.load()
from numkv.cli import main
from numkv.kernels.cuda import launches
"""


def python(code, *args, cache, **more):
    env = {
        "PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}", "NUMBA_CACHE_DIR": f"{cache}", "NUMBA_ENABLE_CUDASIM": "0",
        "HOME": f"{cache}", **more,
    }  # fmt: skip
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=PATIENCE, check=False
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    run = python(EXPORT, folder / "kernels.zip", cache=folder / "cache")
    assert run.stdout == "1\n", run.stderr
    return folder / "kernels.zip"


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """The kernel of the file, in a process and a disk cache that have not seen it."""
    from numba.core import config

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))  # which Numba may read anew
    found = merge._merge("fp32", False)
    return launches.Kernel(found._factory, found._args, found.signature, 8, launches.THREADS)


def loads(kernel):
    """Whether a kernel's machine code comes from disk."""
    before = cache_stats()
    entry, code = kernel.machine_code(launches.architecture(CC))
    assert entry
    assert code
    return cache_stats()["hits"] > before["hits"]


def test_another_machine_takes_it(exported, kernel, monkeypatch):
    """One with other versions of the toolchain, which its names on disk have in them."""
    monkeypatch.setattr(launches, "_toolchain", lambda: ("another",))
    assert not kernel_files(kernel)
    assert carried.take(exported, CC) == 1
    assert loads(kernel)
    _, code = kernel.machine_code(launches.architecture(CC))
    assert code.startswith(b"\x7fELF")


def kernel_files(kernel):
    path = launches.kept_as(kernel._factory, kernel.parts(launches.architecture(CC)))
    return list(path.parent.glob("*")) if path.parent.exists() else []


def changed(exported, there, **contents):
    """A copy with other contents."""
    with zipfile.ZipFile(exported) as old, zipfile.ZipFile(there, "w") as new:
        before = json.loads(old.read("contents.json"))
        new.writestr("contents.json", json.dumps({**before, **contents}))
        new.writestr("0.cubin", old.read("0.cubin"))
    return there


def rows(exported, **change):
    with zipfile.ZipFile(exported) as old:
        (row,) = json.loads(old.read("contents.json"))["kernels"]
    return [{**row, **change}]


REFUSED = {
    "another version": lambda x: {"sources": "0" * 64},
    "of another version": lambda x: {"format": 2},
    "for sm_80, this machine's GPU, got one for sm_90a": lambda x: {"architecture": "sm_90a"},
    "checksums are wrong": lambda x: {"kernels": rows(x, digest="0" * 64)},
    "damaged one": lambda x: {"kernels": None},
    "damaged": lambda x: {"kernels": rows(x) * 2},
    "checksums": lambda x: {"kernels": rows(x, parts=["numkv.kernels.cuda.merge", "_merge"])},
    "os.system, which": lambda x: {"kernels": rows(x, parts=["os", "system", "", "", "", ""])},
    "merge.nothing, which": lambda x: {
        "kernels": rows(x, parts=["numkv.kernels.cuda.merge", "nothing", *"abcd"])
    },
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_does_not_belong_here_is_refused_by_name(exported, kernel, tmp_path, why):
    file = changed(exported, tmp_path / "wrong.zip", **REFUSED[why](exported))
    with pytest.raises(numkv.NumkvError, match=why) as error:
        carried.take(file, CC)
    assert str(file) in str(error.value)
    assert not kernel_files(kernel)


def test_after_a_refusal_kernels_are_compiled_as_usual(exported, kernel, tmp_path):
    with pytest.raises(numkv.NumkvError, match="another version"):
        carried.take(changed(exported, tmp_path / "wrong.zip", sources=""), CC)
    assert not loads(kernel)
    assert loads(kernel)


def test_every_damaged_byte_is_noticed(exported, kernel, tmp_path):
    """Or matters to nobody, as the time in a header: then what is taken is right."""
    whole, file = exported.read_bytes(), tmp_path / "damaged.zip"
    for cut in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(numkv.NumkvError, match="damaged"):
            carried.take(file, CC)
    assert not kernel_files(kernel)
    with zipfile.ZipFile(exported) as archive:
        right = archive.read("0.cubin")
    for at in range(0, len(whole), max(1, len(whole) // 300)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x41
        file.write_bytes(damaged)
        refused = str(file)
        try:
            carried.take(file, CC)
        except numkv.NumkvError as error:
            refused = str(error)
        else:
            assert kernel.machine_code(launches.architecture(CC))[1] == right
        assert str(file) in refused


def test_the_command_names_what_it_refuses(exported, tmp_path, capsys):
    assert main(["warmup", "--load", str(exported)]) == 2
    assert "for sm_90a, this machine's GPU, got one for sm_80" in capsys.readouterr().err
    assert main(["warmup", "--load", str(tmp_path / "none.zip")]) == 2
    assert "none.zip: no such file" in capsys.readouterr().err
    assert main(["warmup", "--export", str(tmp_path / "a")]) == 2
    assert "go together" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sm_33", "90", "", "compute_90"])
def test_architectures_have_names(name, tmp_path, capsys):
    assert main(["warmup", "--export", str(tmp_path / "a"), "--arch", name]) == 2
    assert "sm_80" in capsys.readouterr().err
    assert carried.capability("sm_90") == carried.capability("sm_90a") == (9, 0)


def test_a_process_that_has_used_cuda_does_not_pretend(tmp_path, capsys):
    numkv.targets.get("cuda").empty((1,), "f4")
    assert main(["warmup", "--export", str(tmp_path / "a"), "--arch", "sm_80"]) == 2
    assert "has not used CUDA" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.nightly
def test_nothing_is_compiled_after_a_load(tmp_path):
    """From the command on a machine without a driver to a GPU's driver that is handed its machine code."""
    options = ["--kind", "int8", "--dtype", "bf16", "--head-dim", "64"]
    file, cache = tmp_path / "k.zip", tmp_path / "a"
    run = python(
        "from numkv.cli import main; import sys; sys.exit(main(sys.argv[1:]))",
        "warmup", "--export", file, "--arch", "sm_90", "--processes", 2, *options, cache=cache,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    check = (
        STUB + "assert main(sys.argv[1:4]) == 0\n"
        "assert 0 == main(['warmup', '--target', 'cuda', *sys.argv[4:]])\n"
    )
    run = python(
        check, "warmup", "--load", file, *options, cache=tmp_path / "b", NUMKV_PROGRESS="1"
    )
    assert f"{file}: 8 kernels" in run.stdout, run.stderr
    assert ", 8 there already" in run.stdout
    assert "for CUDA" not in run.stderr  # the host's bookkeeping is compiled

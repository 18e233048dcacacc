"""The command line: text, tables, and errors that are one line."""

import functools
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from demo_models import SIZES, cells, run, write_checkpoint

import numkv
from numkv.cli import cache, generate, info, main, screen
from numkv.cli.output import Progress, Size, styled, table
from numkv.demo.evaluate import Document
from numkv.demo.tokenizer import ByteTokenizer
from numkv.drawing.picture import format_bytes
from numkv.kernels import disk_cache


@pytest.fixture(autouse=True, scope="module")
def one_threading_layer():
    """Each `numkv info` would compile a loop of its own, to see Numba's threading layer; here the first one does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(info, "_threading_layer", functools.cache(info._threading_layer))
        yield


# ---------------------------------------------------------------- generating


def test_the_bundled_model_continues_the_default_prompt(capsys):
    output = run(capsys, "--tokens", 24)
    assert output.startswith(generate.DEFAULT_PROMPT)
    assert cells(output, "fp16")[1] == "2,560"
    assert cells(output, "fp32")[-2:] == ["reference", "reference"]
    assert "24 generated" in output
    assert "\N{REPLACEMENT CHARACTER}" not in output


def test_text_and_table(tiny, capsys):
    options = ("--model", tiny, "--prompt", "def f(", "--tokens", 8)
    output = run(capsys, *options, "--kind", "bf16", "fp64", "int8/fp16", "--temperature", 0)
    assert output.startswith("def f(")
    labels = [line.split()[0] for line in output.splitlines() if "MiB" in line or "KiB" in line]
    assert labels == ["bf16", "fp64", "int8/fp16", "fp32"]
    # 2 layers of 2 heads of 8 elements, K and V; room for 1 + 6 + 8 tokens
    assert cells(output, "bf16")[1:4] == ["128", "1.88", "KiB"]
    assert cells(output, "int8/fp16")[1] == "112"  # with a scale for each of K's rows
    assert cells(output, "fp64")[6:8] == ["100.0", "%"]
    assert float(cells(output, "fp64")[-1]) < 1e-4
    assert 1e-7 < float(cells(output, "bf16")[-1]) < 0.1


def test_int8_beside_fp32(tiny, capsys):
    options = ("--model", tiny, "--prompt", "def f(", "--tokens", 8, "--temperature", 0)
    output = run(capsys, *options, "--kind", "int8", "int8/fp16")
    # 2 layers of 2 heads, K and V: 8 codes and a scale of 4 bytes, or 8 elements of 2 bytes
    assert cells(output, "int8")[1] == f"{2 * 2 * 2 * 12}"
    assert cells(output, "int8/fp16")[1] == f"{2 * 2 * (12 + 16)}"
    assert 1e-5 < float(cells(output, "int8")[-1]) < 0.2
    assert cells(output, "fp32")[-2:] == ["reference", "reference"]


@pytest.mark.parametrize("size", [1, 4, 100])
def test_block_size(tiny, capsys, size):
    options = ("--model", tiny, "--prompt", "def f(", "--tokens", 9, "--temperature", 0)
    contiguous = run(capsys, *options)
    output = run(capsys, *options, "--block-size", size)
    assert output.split("cache")[0] == contiguous.split("cache")[0]
    assert "room for 16" in contiguous
    # a start token, 6 of the prompt and 8 of those generated: the last one is not computed
    blocks = -(-15 // size)
    assert f"15 tokens are stored, in {blocks} blocks of {size};" in output
    assert f"{blocks * size - 15} of {blocks * size} slots are empty" in output
    assert cells(output, "fp16")[1] == cells(contiguous, "fp16")[1] == "128"


def test_several_files_are_one_batch(tiny, tmp_path, capsys):
    prompts = {"a.py": "import os\nimport sys\nx = 1\n", "b.py": "import os\nimport sys\ndef f("}
    files = []
    for name, text in prompts.items():
        (tmp_path / name).write_text(text)
        files += ["--file", tmp_path / name]
    options = ("--model", tiny, "--tokens", 12, "--temperature", 0, "--kind", "int8")
    output = run(capsys, *options, *files)
    for name, text in prompts.items():
        alone = run(capsys, *options, "--file", tmp_path / name, "--block-size", 16)
        assert alone.startswith(text)
        assert f"==> {tmp_path / name} <==\n{alone.split('cache')[0]}" in output
    assert cells(output, "int8")[1] == "96"
    assert "56 tokens read, 24 generated." in output
    # 22 tokens are the same, of which a block of 16 can be shared
    assert "62 tokens are stored, in 5 blocks of 16; 18 of 80 slots are empty." in output
    assert (
        "The texts have 78 tokens: a common beginning is stored once (shared blocks: 1)" in output
    )
    assert "saves 1.50 KiB with int8 (21 %)" in output


def test_several_prompts(tiny, capsys):
    options = ("--model", tiny, "--tokens", 3, "--temperature", 0, "--block-size", 2)
    output = run(capsys, *options, "--prompt", "a", "--prompt", "bcd")
    assert output.startswith("==> prompt 1 <==\na")
    assert "\n\n==> prompt 2 <==\nbcd" in output
    assert "The texts have no block in common." in output


def test_a_text_at_the_end_of_the_context_leaves_the_others_alone(tiny, capsys):
    options = ("--model", tiny, "--tokens", 30, "--temperature", 0)
    output = run(capsys, *options, "--prompt", "x" * 60, "--prompt", "y")
    assert "63 tokens read, 33 generated." in output
    assert "1 of the texts reached the end of the model's context, 64." in output
    alone = run(capsys, *options, "--prompt", "x" * 60)
    assert "61 tokens read, 3 generated, room for 64." in alone
    assert "The text reached the end of the model's context, 64." in alone
    assert main([str(x) for x in (*options, "--prompt", "y", "--prompt", "x" * 70)]) == 2
    message = "numkv: prompt 2: 71 tokens leave no room to go on in the model's context of 64\n"
    assert capsys.readouterr().err == message


def test_the_screen_shows_one_text_at_a_time(capsys):
    texts = [Document("a", "A\n"), Document("b", "1\n2\n"), Document("c", "C\n")]
    shown = screen.Screen(ByteTokenizer(), texts)

    def new():
        return capsys.readouterr().out

    assert new() == "==> a <==\nA\n"
    shown.show(1, ord("x"))
    shown.show(2, ord("y"))
    assert new() == ""
    shown.show(0, ord("z"))
    assert new() == "z"
    shown.show(2, None)
    shown.show(0, None)
    assert new() == "\n\n==> b <==\n1\n2\nx"
    shown.show(1, ord("w"))
    assert new() == "w"
    shown.show(1, None)
    assert new() == "\n\n==> c <==\nC\ny\n\n"


def test_fp32_alone_is_the_reference(tiny, capsys):
    output = run(capsys, "--model", tiny, "--prompt", "x", "--tokens", 4, "--kind", "fp32")
    assert cells(output, "fp32")[-2:] == ["reference", "reference"]


def test_cuda(tiny, capsys):
    options = ("--model", tiny, "--tokens", 2, "--kind", "fp32", "--temperature", 0)
    for prompts in (["--prompt", "x"], ["--prompt", "x", "--prompt", "x"]):
        output = run(capsys, *options, *prompts, "--target", "cuda")
        assert output.split("cache")[0] == run(capsys, *options, *prompts).split("cache")[0]


def test_seed(tiny, capsys):
    def text(seed):
        options = ("--model", tiny, "--prompt", "x", "--tokens", 30, "--temperature", 2)
        return run(capsys, *options, "--seed", seed).split("cache")[0]

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_file_and_long_prompts(tiny, tmp_path, capsys):
    path = tmp_path / "prompt.txt"
    path.write_text("".join(f"{i}\n" for i in range(23)))
    output = run(capsys, "--model", tiny, "--file", path, "--tokens", 1)
    assert output.startswith("[… 3 lines]\n3\n4\n")
    assert cells(output, "fp16")[5] == "-"  # one token needs no decoding step


def test_control_characters_are_shown_as_a_sign(capsys):
    screen.show("a\x1b[2Jb\tc\n\x00")
    assert capsys.readouterr().out == "a\ufffd[2Jb\tc\n\ufffd"


# ---------------------------------------------------------------- other commands


def test_info(capsys):
    output = run(capsys, "info")
    facts = dict(line.split(maxsplit=1) for line in output.splitlines())
    assert facts["numkv"].startswith(numkv.__version__)
    for name in ("python", "numpy", "numba", "llvmlite", "cpu", "threads", "targets", "kinds"):
        assert name in facts
    assert "threading layer" in output
    assert "bits" in next(line for line in output.splitlines() if line.startswith("vector width"))


def test_eval(tiny, tmp_path, capsys):
    path = tmp_path / "text.py"
    path.write_text("import os\n" * 5)
    options = ("eval", "--model", tiny, "--context", 16)
    output = run(capsys, *options, "--file", path, "--kind", "fp32", "fp64", "bf16", "int8")
    assert cells(output, "fp32")[2:] == ["+0.00000", "reference", "reference"]
    assert cells(output, "fp64")[-2:] == ["100.00", "%"]
    assert 0 < float(cells(output, "bf16")[3]) < 1e-2
    assert 0 < float(cells(output, "int8")[3]) < 1e-2
    assert f"{path}: 50 bytes in windows of 16 tokens" in output


def test_eval_of_held_out_modules(tiny, capsys, monkeypatch):
    from numkv.cli import evaluate
    from numkv.demo.evaluate import Document, HeldOut

    found = HeldOut(
        (Document("a.py", "import b"), Document("b.py", "x = 1")), "3.11.7", ("a.py",), ()
    )
    monkeypatch.setattr(evaluate, "held_out", lambda: found)
    output = run(capsys, "eval", "--model", tiny, "--modules", "b")
    assert "b of 2 held-out modules, not the reference text of Python 3.11.7; 1 differ" in output
    assert "5 bytes" in output
    assert main(["eval", "--model", str(tiny), "--modules", "c"]) == 2
    assert "expected some of a, b; got c" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["info"], ["plan"], ["eval"], ["accuracy"], ["cache"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("usage: numkv")
    assert max(map(len, output.splitlines())) <= 100


def test_python_m_numkv():
    command = [sys.executable, "-m", "numkv", "plan", "--layers", "1", "--kv-heads", "1"]
    done = subprocess.run([*command, "--head-dim", "8"], capture_output=True, text=True, check=True)
    assert cells(done.stdout, "fp16")[1] == "32"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "numkv: plan needs --config, or --layers, --kv-heads and --head-dim\n"


# ---------------------------------------------------------------- the cache of kernels


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Folders where kernels may lie, one of them with kernels of these sources, of others, and half written ones."""
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for module in (cache, info):
        monkeypatch.setattr(module, "places", lambda: folders)
    folders[1].mkdir()
    head = disk_cache._MAGIC + disk_cache.source_digest().encode()
    name = "make_append-" + "0123456789abcdef" * 2
    contents = {
        f"{name}.kernel": head + b"x" * 400,
        f"{name[:-1]}0.kernel": head[:-1] + b"-" + b"y" * 100,
        f"{name[:-1]}1.kernel": b"",
        f".{name}.kernel.abc12.partial": b"half",
    }
    others = ["notes.kernel", f"{name}.kernel.bak", f"{name}.nbi", "module.cpython-311.pyc"]
    for path, content in contents.items():
        (folders[1] / path).write_bytes(content)
    for path in others:
        (folders[1] / path).write_text("not a kernel")
    (folders[1] / f"{name[:-1]}2.kernel").mkdir()
    (folders[1] / f"{name[:-1]}3.kernel").symlink_to(folders[1] / others[0])
    return folders[1], set(contents), {*others, f"{name[:-1]}2.kernel", f"{name[:-1]}3.kernel"}


def left(folder):
    return {path.name for path in folder.iterdir()}


def test_cache_says_what_there_is(kernels, capsys):
    folder, names, _ = kernels
    before = left(folder)
    output = run(capsys, "cache")
    size = sum((folder / name).lstat().st_size for name in names)
    assert cells(output, str(folder)) == [str(folder), "4", *format_bytes(size).split(), "3"]
    assert cells(output, "all") == ["all", "4", *format_bytes(size).split(), "3"]
    assert "belong to other versions" in output
    assert left(folder) == before
    assert f"4 kernels, {format_bytes(size)}" in run(capsys, "info")


def test_clear_removes_kernels_and_nothing_else(kernels, capsys):
    folder, names, others = kernels
    size = format_bytes(sum((folder / name).stat().st_size for name in names))
    output = run(capsys, "cache", "--clear")
    assert output == f"{folder}: 4 kernels removed, {size}\n4 kernels removed, {size}\n"
    assert left(folder) == others
    assert run(capsys, "cache", "--clear") == "0 kernels removed, 0 B\n"
    assert run(capsys, "cache").startswith("no kernels on disk")


def test_clear_of_stale_kernels_leaves_todays(kernels, capsys):
    folder, names, others = kernels
    output = run(capsys, "cache", "--clear", "--stale")
    assert "3 kernels removed" in output
    (kept,) = left(folder) - others
    assert kept in names
    assert not disk_cache.is_stale(folder / kept)
    assert main(["cache", "--stale"]) == 2
    assert capsys.readouterr().err.startswith("numkv: --stale goes with --clear")


def test_clear_goes_on_where_a_file_cannot_be_removed(kernels, capsys, monkeypatch):
    folder, names, others = kernels
    unlink = type(folder).unlink
    stuck = min(names)

    def fails(path, missing_ok=False):
        if path.name == stuck:
            raise PermissionError(13, "Permission denied", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(type(folder), "unlink", fails)
    assert main(["cache", "--clear"]) == 2
    captured = capsys.readouterr()
    assert "3 kernels removed" in captured.out
    assert captured.err.startswith("numkv: 1 kernels cannot be removed; the first: ")
    assert stuck in captured.err
    assert left(folder) == others | {stuck}


def test_a_folder_that_others_can_write_is_told(kernels, capsys):
    folder = kernels[0]
    for open_to, mode, words in (
        (folder, 0o777, "is writable by everyone"),
        (folder.parent, 0o777, f"{folder.parent} is writable by everyone"),
        (folder.parent, 0o1777, None),
    ):
        before = open_to.stat().st_mode & 0o7777
        open_to.chmod(mode)
        try:
            for command in ("cache", "info"):
                output = run(capsys, command)
                assert (words or "can run code in processes") in output or words is None
                assert (words is None) != ("can run code in processes that load kernels" in output)
        finally:
            open_to.chmod(before)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives a folder away, as root"
)
def test_a_folder_of_another_user_is_told(kernels, capsys):
    folder = kernels[0]
    os.chown(folder, 65534, 65534)
    assert f"{folder} belongs to another user" in run(capsys, "cache")
    os.chown(folder, 0, 12345)
    folder.chmod(0o775)
    assert "is writable by a group (12345)" in run(capsys, "cache")
    folder.chmod(0o755)
    assert "warning" not in run(capsys, "cache")


OWN_FOLDER = """
import sys
from pathlib import Path
import numpy as np
from numkv.cli import cache, main
from numkv.kernels import validate

def kernels():
    return sorted(own.rglob("*.kernel"))

own = Path(sys.argv[1])
main(["cache"])
assert not own.exists(), "made for nothing"
assert validate.check_lengths(np.array([1]), np.array([0, 1]), 1, 4, True)[0] == validate.FINE
made = kernels()
print(f"made {len(made)} in {made[0].parent}")
main(["cache"])
# Those beside the sources are not this test's: only what is in its own folder is cleared here.
places = cache.places
cache.places = lambda: [place for place in places() if place.is_relative_to(own)]
main(["cache", "--clear"])
assert not kernels(), "not cleared"
"""


@pytest.mark.slow
def test_cache_of_a_process_with_a_folder_of_its_own(tmp_path):
    """Kernels in NUMBA_CACHE_DIR are found there, and cleared; a folder that does not exist is not made."""
    own = str(tmp_path / "kernels")
    done = subprocess.run(
        [sys.executable, "-c", OWN_FOLDER, own], capture_output=True, text=True, check=False,
        env=os.environ | {"NUMBA_CACHE_DIR": own, "NUMKV_PROGRESS": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, printed = done.stdout.split("made ", 1)
    first, after = printed.split("\n", 1)
    number, place = first.split(" in ")
    assert int(number) > 0
    assert place not in before
    assert cells(after, place)[0] == place
    assert f"{number} kernels removed" in after


@pytest.mark.skipif(os.name != "posix", reason="closes streams as a shell does")
@pytest.mark.parametrize(
    ("arguments", "closed", "status", "printed"),
    [
        (["plan", "--layers", "1", "--kv-heads", "1", "--head-dim", "8"], ">&-", 0, ""),
        pytest.param(["cache"], ">&- 2>&-", 0, "", marks=pytest.mark.slow),
        pytest.param(
            ["--nonsense"], ">&-", 2, "numkv: unrecognized arguments: --nonsense (see numkv --help)\n",
            marks=pytest.mark.slow,
        ),
        pytest.param(["--nonsense"], "2>&-", 2, "", marks=pytest.mark.slow),
        pytest.param(["--nonsense"], "<&- >&- 2>&-", 2, "", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_closed_streams(arguments, closed, status, printed):
    """What cannot be printed is lost, and nothing else: no traceback, the same status."""
    command = f"{shlex.join([sys.executable, '-m', 'numkv', *arguments])} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", printed)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense (see numkv --help)"),
        (["--kind", "fp17"], "expected one of fp64, fp32, fp16, bf16"),
        (["--kind", "fp16/"], "expected one of fp64"),
        (["--tokens", "0"], "argument --tokens: expected an integer of 1 or more, got '0'"),
        (["--temperature", "nan"], "argument --temperature: expected 0 or more, got 'nan'"),
        (["--target", "tpu"], "argument --target: invalid choice: 'tpu'"),
        (["--block-size", "0"], "argument --block-size: expected an integer of 1 or more, got '0'"),
        (
            ["--kind", "int8/int7"],
            "expected one of fp64, fp32, fp16, bf16, fp8_e4m3, fp8_e5m2, int8",
        ),
        (["--prompt", "a", "--file", "b"], "not allowed with argument"),
        (["--file", "/nowhere/prompt.txt"], "/nowhere/prompt.txt: no such file or directory"),
        (["--model", "/nowhere"], "/nowhere/config.json: no such file or directory"),
        (["--prompt", "x" * 3000], "leave no room to go on in the model's context of 2,048"),
        (["--prompt", "\udce4"], "--prompt: not UTF-8 text"),
        (["plan", "--context", "9" * 400, "--nodes", "2"], "expected an integer of 1 or more"),
        (["plan", "--latency", "9" * 400 + "s"], "expected a time such as 300us"),
        (["plan", "--memory", "lots"], "expected a size such as 8GiB or 500MB, got 'lots'"),
        (["plan", "--config", "/nowhere"], "/nowhere: no such file or directory"),
        (["plan", "--layers", "2"], "plan needs --config, or"),
        (
            ["plan", "--layers", str(10**10)],
            "expected an integer of 1 to 100,000, got '10000000000'",
        ),
        (["fit", "--out", "/nowhere/x"], "--out: expected a file in a folder that exists"),
        (["fit", "--out", "/"], "--out: expected a file in a folder that exists, got /"),
        (["eval", "--file", "/nowhere"], "/nowhere: no such file or directory"),
        (["eval", "--context", "1"], "expected an integer of 2 or more"),
        (["eval", "--context", "4096"], "--context 4,096: the model has 2,048"),
        (["eval", "--modules", "nonsense"], "--modules: expected some of "),
    ],
)
def test_errors_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("numkv: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("options", [["--export", "x", "--arch", "sm_90"], ["--load", "x"]])
def test_kernels_for_another_machine_need_a_package(options, capsys, monkeypatch):
    monkeypatch.setattr("numkv.cli.cache.is_installed", lambda package: False)
    assert main(["warmup", *options]) == 2
    assert "need numba-cuda, which is not installed" in capsys.readouterr().err


def test_no_cuda_is_one_line(capsys, monkeypatch):
    def refuse(name):
        raise numkv.NotSupported(f"no {name}; install a driver")

    monkeypatch.setattr(numkv.targets, "get", refuse)
    assert main(["--target", "cuda"]) == 2
    assert capsys.readouterr().err == "numkv: no cuda; install a driver\n"
    assert "cpu; no cuda (no cuda)" in run(capsys, "info")


def test_bad_files_are_errors(tiny, tmp_path, capsys):
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    assert main(["--file", str(latin)]) == 2
    assert "not UTF-8 text" in capsys.readouterr().err
    assert main(["eval", "--file", str(latin)]) == 2
    assert "not UTF-8 text" in capsys.readouterr().err
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert main(["eval", "--file", str(empty)]) == 2
    assert "no text to evaluate" in capsys.readouterr().err
    config = {**SIZES, "model_type": "qwen3", "bos_token_id": None}
    write_checkpoint(tmp_path, **config)
    assert main(["--model", str(tmp_path), "--file", str(empty)]) == 2
    assert "the prompt is empty" in capsys.readouterr().err
    mla = tmp_path / "mla.json"
    mla.write_text(json.dumps({**config, "kv_lora_rank": 512}))
    assert main(["plan", "--config", str(mla)]) == 0
    capsys.readouterr()
    mla.write_text(json.dumps({**config, "num_hidden_layers": "many"}))
    assert main(["plan", "--config", str(mla)]) == 2
    assert "num_hidden_layers: expected a positive integer, got 'many'" in capsys.readouterr().err


@pytest.mark.parametrize("said", ["", "Unable to allocate 373. GiB"])
def test_too_little_memory_is_one_line(said, capsys, monkeypatch):
    def refuse(*_):
        raise MemoryError(*filter(None, [said]))

    monkeypatch.setattr(generate.Model, "load", refuse)
    assert main([]) == 2
    assert capsys.readouterr().err == f"numkv: {said or 'not enough memory'}\n"


def test_interrupt(capsys, monkeypatch):
    def interrupted(text):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate.Model, "load", lambda *_: interrupted(""))
    assert main([]) == 130
    assert "interrupted" in capsys.readouterr().err


# ---------------------------------------------------------------- what is printed


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30), ("1.5 MiB", 1536 * 1024), ("500MB", 500_000_000), ("2k", 2000),
        ("640", 640), ("3B", 3), ("1tib", 2**40),
    ],
)  # fmt: skip
def test_parse_bytes(text, size):
    assert Size.parse(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 XB", "1e9", "9" * 400])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="not a size"):
        Size.parse(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (640, "640 B"), (1024, "1 KiB"), (1500, "1.46 KiB"), (8 * 2**30, "8 GiB"),
        (123 * 2**20 + 1, "123 MiB"), (45 * 2**20 + 2**19, "45.5 MiB"), (2**60, "1024 PiB"),
    ],
)  # fmt: skip
def test_format_bytes(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (999, "999 B"),
        (1000, "1 kB"),
        (1_500_000, "1.50 MB"),
        (45_600_000, "45.6 MB"),
        (10**11, "100 GB"),
    ],
)
def test_format_bytes_in_powers_of_1000(size, text):
    assert format_bytes(size, decimal=True) == text


def test_table():
    assert table(["a", "bb"], [["ccc", "1"]]) == "a    bb\n---  --\nccc   1"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_progress(stream, monkeypatch):
    with Progress("short work", stream):
        pass
    assert stream.getvalue() == ""
    monkeypatch.setattr(Progress, "DELAY", 0.01)
    with Progress("long work", stream) as progress:
        progress.update(1, 4)
        deadline = time.monotonic() + 300
        while "25 %" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    drawn = re.findall(r"long work…  25 %  \d+ s", stream.getvalue())
    assert drawn
    if stream.isatty():
        assert stream.getvalue().endswith("\r" + " " * len(drawn[-1]) + "\r")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plna"], "did you mean `plan`?"),
        (["--tokes", "5"], "unrecognized arguments: --tokes; did you mean `--tokens`?"),
        (["stream", "--kep=3"], "unrecognized arguments: --kep; did you mean `--keep`?"),
        (["info", "--entirely-else"], "unrecognized arguments: --entirely-else (see numkv info --help)"),
        (["--target", "gpu"], "invalid choice: 'gpu'"),
        (["--prompt", "--flag x", "--target", "gpu"], "invalid choice: 'gpu'"),  # the prompt is taken
        (["show", "--", "--there-is-none.kv"], "no such file or directory"),
    ],
)  # fmt: skip
def test_what_may_have_been_meant(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_help_begins_with_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert text.index("usage:") < text.index("\ncommands:") < text.index("options:")
    assert text.index("options:") < text.index("examples:")


def test_colours_are_for_terminals_that_want_some(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert styled("a", "1", Terminal()) == "\x1b[1ma\x1b[0m"
    assert styled("a", "1", io.StringIO()) == "a"
    monkeypatch.setenv("TERM", "dumb")
    assert styled("a", "1", Terminal()) == "a"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("a", "1", Terminal()) == "a"


def test_long_work_says_how_much_is_left(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(Progress, "DELAY", 0.01)
    monkeypatch.setattr(Progress, "FORECAST", 0.0)
    with Progress("long work", stream) as progress:
        progress.update(1, 4)
        time.sleep(0.2)
    assert re.match(r"long work…  25 %  0 s, about \d s left\n", stream.getvalue())


def test_eval_that_is_stopped_shows_what_it_has(tmp_path, capsys, monkeypatch):
    """Ctrl-C ends it after a window: two of three are left out, and the table says so."""
    write_checkpoint(tmp_path / "tiny", max_position_embeddings=16)
    path = tmp_path / "text.py"
    path.write_text("import os\n" * 4)
    options = ["eval", "--model", str(tmp_path / "tiny"), "--file", str(path), "--kind", "int8"]
    before = signal.getsignal(signal.SIGINT)
    whole = run(capsys, *options)
    update = Progress.update

    def once(progress, done, total):
        if progress.what == "evaluating" and done == 16:
            signal.raise_signal(signal.SIGINT)
        update(progress, done, total)

    monkeypatch.setattr(Progress, "update", once)
    assert main(options) == 0
    captured = capsys.readouterr()
    assert "stopping after this window; once more to stop at once" in captured.err
    assert "40 bytes in windows" in whole
    assert f"stopped early; of {path}: 16 bytes in windows" in captured.out
    assert len(captured.out.splitlines()) == len(whole.splitlines())
    assert signal.getsignal(signal.SIGINT) is before

"""The steps of a worker of `tools.gpu_day.day`: each is reported before it begins and when it has ended.

    python -m tools.gpu_day.steps probe|cases|interop|time|profile [--from N] ...

A step prints ``{"begin": …, "number": …}`` and then its result: so `day` knows the step at which a process hung or
died. A kernel that accesses bad memory ends the process, as CUDA refuses all later calls.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import re
import sys
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.gpu_day import lines as of_lines
from tools.gpu_day import timing
from tools.gpu_day.lines import LINES, PEERS

ROOT = Path(__file__).resolve().parents[2]
Steps = dict[str, Callable[[], object]]
PACKAGES = (
    "numba", "numba-cuda", "llvmlite", "numpy", "cuda-core", "cuda-bindings", "nvidia-nvjitlink", "torch",
    "flashinfer-python",
)  # fmt: skip
#: Cases whose kernels differ much between kinds.
BY_KIND = ("attention", "prefill", "prefill_codes")
#: Largest relative error of a row of 16-bit floats against float64 or another library.
CLOSE = 4e-3


def report(**what: object) -> None:
    """Print a line of JSON, which `day` reads."""
    print(json.dumps(what), flush=True)


def go(steps: Steps, start: int) -> None:
    """Do the steps from number `start` on."""
    for number, (name, step) in enumerate(steps.items()):
        if number < start:
            continue
        report(begin=name, number=number)
        began = time.perf_counter()
        try:
            what = step()
            ok = not isinstance(what, dict) or what.get("off", 0.0) <= what.get("bound", 0.0)
        except Exception as error:
            what, ok = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}", False
        report(name=name, ok=ok, what=what, seconds=round(time.perf_counter() - began, 3))
        if not ok and "start a new process" in str(what):
            sys.exit(3)
    report(done=True)


# ---------------------------------------------------------------- right


@functools.cache
def cases() -> dict[str, Any]:
    """Return the tests' cases: small calls of every kernel, with their oracles."""
    sys.path.insert(0, str(ROOT / "tests"))
    import ptx_cases

    return ptx_cases.cases()


def of_cases(only: str, share: str, families: bool) -> Steps:
    """Return a share of the cases; with `families`, only the first case of each family of kernels."""
    chosen = dict.fromkeys(name for name in cases() if re.search(only, name))
    if families:
        first: dict[object, str] = {}
        for name in chosen:
            what = name.partition("[")[0]
            kinds = re.findall(r"bf16|int8|int4|fp32", name) if what in BY_KIND else []
            first.setdefault((what, *kinds[:1]), name)
        chosen = dict.fromkeys(first.values())
    index, of = map(int, share.split("/"))
    names = list(chosen)[index::of]
    return {name: partial(case, name) for name in names}


def case(name: str) -> None:
    """Run a case, with the same random numbers in every run."""
    cases()[name].run(np.random.default_rng(zlib.crc32(name.encode())))


def probe() -> Steps:
    """Return the steps that show whether anything works."""
    small = cases()
    first = ("append[bf16, int8", "attention[h8.2-d64-n70.129, fp16", "prefill[h2.1-d64")
    names = [next(name for name in small if name.startswith(start)) for start in first]
    steps: Steps = {"versions": versions, "device": device}
    return steps | {name: partial(case, name) for name in names} | {"torch": tensors}


def versions() -> dict[str, str]:
    """Return the versions of the installed packages."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def device() -> dict[str, Any]:
    """Return the name, capability and memory of the device."""
    from numba import cuda

    here = cuda.get_current_device()
    free, total = cuda.current_context().get_memory_info()
    name = here.name.decode() if isinstance(here.name, bytes) else str(here.name)
    return {"name": name, "capability": here.compute_capability, "free": free, "memory": total}


# ---------------------------------------------------------------- with torch and others


class Paged:
    """Tensors of paged decode: K and V of sequences of given lengths, in a pool of blocks of 16 tokens."""

    def __init__(
        self, length: int, seqs: int = 1, heads: int = 2, group: int = 4, dim: int = 128
    ) -> None:
        import torch

        make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        per = -(-length // 16)
        self.q = make(seqs, heads * group, dim)
        self.k, self.v = make(seqs * per, heads, 16, dim), make(seqs * per, heads, 16, dim)
        self.table = torch.arange(seqs * per, device="cuda", dtype=torch.int32).reshape(seqs, per)
        self.lens = torch.full((seqs,), length, device="cuda", dtype=torch.int32)
        self.rows = make(seqs, heads, dim)
        last = self.table[:, (length - 1) // 16].long() * 16 + (length - 1) % 16
        self.slots, self.length, self.group = last, length, group

    def append(self) -> None:
        """Write the last token."""
        import numkv

        numkv.paged_append(self.rows, self.rows, self.k, self.v, self.slots)

    def attend(self, out: Any = None) -> Any:
        """Return numkv's result."""
        import numkv

        more = {} if out is None else {"out": out}
        return numkv.paged_decode_attention(self.q, self.k, self.v, self.table, self.lens, **more)

    def theirs(self) -> Any:
        """Return PyTorch's result, in float32."""
        import torch

        seqs, heads = self.q.shape[0], self.k.shape[1]
        k, v = (
            x[self.table.long()]
            .transpose(1, 2)
            .reshape(seqs, heads, -1, x.shape[-1])[:, :, : self.length]
            .float()
            for x in (self.k, self.v)
        )
        found = torch.nn.functional.scaled_dot_product_attention(
            self.q[:, :, None].float(), k, v, enable_gqa=True
        )
        return found[:, :, 0]

    def check(self, ours: Any) -> float:
        """Return the error of a result against PyTorch's; raise if it is too large."""
        import torch

        ours, theirs = torch.from_dlpack(ours).float(), self.theirs()
        error = float(((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max())
        if not error < CLOSE:
            raise ValueError(f"expected an error below {CLOSE} beside torch, got {error}")
        return error


def tensors() -> float:
    """Call attention with tensors and check the tensor that it returns."""
    import torch

    call = Paged(600, 3)
    call.append()
    out = torch.empty_like(call.q)
    call.attend(out)
    return call.check(out)


def side_stream() -> float:
    """Append and attend on a stream of PyTorch's."""
    import torch

    call, stream = Paged(8000), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call.append()
        out = call.attend()
    torch.cuda.current_stream().wait_stream(stream)
    return call.check(out)


def two_streams() -> float:
    """Make two calls at once on two streams; each needs scratch memory of its own."""
    import torch

    calls, streams = [Paged(9000) for _ in range(2)], [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[Any] = [None, None]
    for _ in range(20):
        for i in (0, 1):
            with torch.cuda.stream(streams[i]):
                found[i] = calls[i].attend()
    torch.cuda.synchronize()
    return max(call.check(out) for call, out in zip(calls, found, strict=True))


def torch_graph() -> float:
    """Capture append and attention in a graph of PyTorch's, and replay it with other numbers."""
    import torch

    call = Paged(5000, 2)
    out = torch.empty_like(call.q)
    call.append()
    call.attend(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.append()
        call.attend(out)
    worst = 0.0
    for _ in range(3):
        call.rows.copy_(torch.randn_like(call.rows))
        call.q.copy_(torch.randn_like(call.q))
        graph.replay()
        torch.cuda.synchronize()
        worst = max(worst, call.check(out))
    return worst


def step_graph() -> float:
    """Capture steps of a `PagedKVCache` in buffers once, and replay them for sequences of other lengths."""
    import torch

    import numkv

    layers, heads, dim, seqs = 2, 2, 128, 3
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    cache = numkv.PagedKVCache(
        layers, heads, dim, num_blocks=256, block_size=16, kind="bf16", target="cuda"
    )
    ids, stream = [], torch.cuda.Stream()
    for n in (70, 333, 5):
        ids.append(cache.add())
        step = cache.reserve([ids[-1]], [n])
        for layer in range(layers):
            step.append(layer, make(n, heads, dim), make(n, heads, dim))
        cache.commit(step)
    k, q = make(seqs, heads, dim), make(seqs, 4 * heads, dim)
    out = [torch.empty_like(q) for _ in range(layers)]
    torch.cuda.synchronize()

    def all_layers(step: Any) -> None:
        for layer in range(layers):
            step.append(layer, k, k)
            step.attention(layer, q, out=out[layer])

    with torch.cuda.stream(stream), numkv.on_stream(stream):
        buffers = cache.step_buffers(num_seqs=seqs, max_length=2000)
        for _ in range(2):
            step = cache.reserve(ids, 1, into=buffers)
            all_layers(step)
            cache.rollback(step)
        graph, step = torch.cuda.CUDAGraph(), cache.reserve(ids, 1, into=buffers)
        with torch.cuda.graph(graph, stream=stream):
            all_layers(step)
        cache.rollback(step)
        worst = 0.0
        for _ in range(3):
            step = cache.reserve(ids, 1, into=buffers)
            graph.replay()
            step.mark_written()
            stream.synchronize()
            replayed = [x.clone() for x in out]
            all_layers(step)
            stream.synchronize()
            worst = max(
                [worst, *(float((a - b).abs().max()) for a, b in zip(out, replayed, strict=True))]
            )
            cache.commit(step)
    if worst:
        raise ValueError(
            f"expected a replay's bits to be those of calls, got a difference of {worst}"
        )
    return worst


def other_libraries() -> str:
    """Use CuPy's arrays, if it is installed."""
    import cupy

    import numkv

    rows, lse = cupy.ones((4, 2, 64), "f4"), cupy.zeros((4, 2), "f4")
    out, _ = numkv.merge_states(rows, lse, 3 * rows, lse)
    found = cupy.from_dlpack(out)
    if not bool(cupy.allclose(found, 2)):
        raise ValueError(f"expected 2 everywhere, got {found[0, 0, :4]}")
    return cupy.__version__


def reports_nan() -> str:
    """Quantise a row with a NaN: a later call raises."""
    import torch

    import numkv

    layer = numkv.PagedLayer(8, 16, 2, 128, kind="int8", target="cuda")
    rows = torch.randn(4, 2, 128, device="cuda")
    rows[2, 1, 5] = float("nan")
    layer.append(rows, rows)
    torch.cuda.synchronize()
    try:
        layer.append(rows, rows)
    except numkv.NonFiniteInput as error:
        return str(error)
    raise ValueError("expected NonFiniteInput, got nothing")


def large_pool(scale: float) -> str:
    """Write and read the end of a pool that needs more than 32 bits of addresses."""
    import torch

    import numkv

    blocks = max(4, int(scale * 70e9) // (2 * 8 * 16 * 128 * 2))
    k, v = (torch.empty(blocks, 8, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rows = torch.randn(32, 8, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange((blocks - 2) * 16, blocks * 16, device="cuda")
    numkv.paged_append(rows, rows, k, v, slots)
    q = torch.randn(1, 32, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.tensor([[blocks - 2, blocks - 1]], device="cuda", dtype=torch.int32)
    lens = torch.tensor([32], device="cuda", dtype=torch.int32)
    out = torch.from_dlpack(numkv.paged_decode_attention(q, k, v, table, lens)).float()
    heads = rows.float().transpose(0, 1)[None]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q[:, :, None].float(), heads, heads, enable_gqa=True
    )[:, :, 0]
    error = float((out - theirs).norm() / theirs.norm())
    if not error < CLOSE:
        raise ValueError(
            f"expected an error below {CLOSE} at the end of {blocks} blocks, got {error}"
        )
    return f"{blocks} blocks, error {error:.1e}"


def long_sequence(scale: float) -> float:
    """Attend over a sequence of 131,072 tokens."""
    call = Paged(max(20, int(131_072 * scale)))
    call.append()
    return call.check(call.attend())


def interop(scale: float) -> Steps:
    """Return the steps that use PyTorch and CuPy."""
    return {
        "tensors": tensors, "a side stream": side_stream, "two streams": two_streams, "a graph of torch's": torch_graph,
        "steps in a graph": step_graph, "CuPy": other_libraries, "NaN": reports_nan,
        "131,072 tokens": partial(long_sequence, scale), "a pool of 70 GB": partial(large_pool, scale),
    }  # fmt: skip


# ---------------------------------------------------------------- times


def times(name: str, only: str, seconds: float, cold: int) -> Steps:
    """Return the steps that time a contestant's lines, by calls and graph replays; numkv's begin with the bandwidth."""
    chosen = [line for line in LINES if re.search(only, line.name)]
    steps: Steps = {}
    if name == "numkv":
        steps["copy"] = partial(timing.copy_bandwidth, seconds, min(cold * 2, 1 << 30))
        return steps | {x.name: partial(timing.ours, x, seconds, cold) for x in chosen}
    peer = PEERS[name]
    chosen = [x for x in chosen if x.what in ("decode", "prefill") and x.kind in peer.kinds]
    return {x.name: partial(timing.theirs, peer, x, seconds, cold) for x in chosen}


def profile(only: str, cold: int) -> Steps:
    """Return steps that launch each line a few times, for a profiler."""
    chosen = [line for line in LINES if re.search(only, line.name)]
    return {x.name: partial(_once, x, cold) for x in chosen}


def _once(line: of_lines.Line, cold: int) -> int:
    from numba import cuda

    calls = of_lines.numkv_calls(line, cold).calls
    for call in calls[:2]:
        call()
    cuda.synchronize()
    return len(calls[:2])


def main(arguments: list[str] | None = None) -> None:
    """Do the steps of the group that the arguments name."""
    parse = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parse.add_argument("group", choices=["probe", "cases", "interop", "time", "profile"])
    parse.add_argument("--from", type=int, default=0, dest="start", metavar="N")
    parse.add_argument("--only", default="")
    parse.add_argument("--share", default="0/1")
    parse.add_argument("--families", action="store_true")
    parse.add_argument("--scale", type=float, default=1.0)
    parse.add_argument("--contestant", default="numkv")
    parse.add_argument("--lines", default="")
    parse.add_argument("--seconds", type=float, default=0.3)
    parse.add_argument("--cold", type=int, default=of_lines.COLD)
    parse.add_argument("--split", type=int, help="least tokens of a split, in place of numkv's")
    given = parse.parse_args(arguments)
    if given.split:
        from numkv.kernels.cuda.attention import items

        items.LEAST_SPLIT = given.split  # read by the first call
    groups: dict[str, Callable[[], Steps]] = {
        "probe": probe,
        "cases": lambda: of_cases(given.only, given.share, given.families),
        "interop": lambda: interop(given.scale),
        "time": lambda: times(given.contestant, given.lines, given.seconds, given.cold),
        "profile": lambda: profile(given.lines, given.cold),
    }
    go(groups[given.group](), given.start)


if __name__ == "__main__":
    main()

"""Compile ahead of time: fill the disk cache with the kernels that a program will ask for."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numkv.arrays import AnyArray
from numkv.attention.contiguous import merge_states
from numkv.attention.paged import paged_decode_attention, paged_prefill_attention
from numkv.caches.contiguous_layer import ContiguousLayer
from numkv.caches.layer_spec import FullPrecision
from numkv.caches.paged_layer import PagedLayer
from numkv.errors import DimensionMismatch, UnsupportedDType
from numkv.kernels.builder import cache_stats
from numkv.kinds import Kind, kind, kinds_of
from numkv.numbers import check_flag, check_size
from numkv.storage.buffer import source_dtypes
from numkv.targets import get
from numkv.writing.fused_write import QKMode
from numkv.writing.paged import paged_append

#: Q heads of a kv head that bring out kernels for more query rows of an item: on CUDA, and on the CPU, where the last
#: number is one of many rows.
_Q_HEADS = {True: (2, 4, 8, 32), False: (4, 8)}

#: Query rows that take attention on tensor cores to its kernel for many.
_PROMPT = 192

Kinds = str | Kind | tuple[str | Kind, str | Kind]


class _Plan(NamedTuple):
    """The checked arguments: the kernels to compile."""

    kinds: list[tuple[Kind, Kind]]
    sources: list[Kind]
    head_dim: int
    rotate: bool
    residual: bool

    @classmethod
    def of(
        cls, kinds: Any, dtypes: Any = ("fp32",), head_dim: int = 128, rotate: Any = False, residual: Any = False
    ) -> _Plan:  # fmt: skip
        """What `warmup` is given."""
        rotate, residual = check_flag("rotate", rotate), check_flag("residual", residual)
        head_dim = check_size("head_dim", head_dim, 2)
        if head_dim % 2:
            raise DimensionMismatch(f"`head_dim`: expected an even number, got {head_dim}")
        sources = [kind(name) for name in _listed("dtypes", dtypes)]
        for source in sources:
            if not source.is_query:
                raise UnsupportedDType(
                    f"`dtypes`: expected kinds that queries can be of (fp64, fp32, fp16, bf16), got {source}"
                )
        chosen = [_pair(choice) for choice in _listed("kinds", kinds)]
        return cls(chosen, sources, head_dim, rotate, residual)

    def parts(self) -> list[str]:
        """It in parts that can be compiled apart, as arguments in Python."""
        rest = f"head_dim={self.head_dim}, rotate={self.rotate}, residual={self.residual}"
        return [
            f"[{(of_k.name, of_v.name)!r}], dtypes=[{source.name!r}], {rest}"
            for of_k, of_v in self.kinds
            for source in self.sources
        ]

    def run(self, target: str) -> None:
        """Call what needs the kernels."""
        for of_k, of_v in self.kinds:
            options: list[dict[str, Any]] = [{}]
            if self.rotate:
                options.append({"rotate": True})
            if self.residual and (of_k.has_scales or of_v.has_scales):
                options.append({"rotate": self.rotate, "full_precision": FullPrecision(1)})
            for more in options:
                _run(of_k, of_v, self.sources, target, self.head_dim, more)


def warmup(
    kinds: Iterable[Kinds] = ("fp16",),
    *,
    dtypes: Iterable[str | Kind] = ("fp32",),
    target: str = "cpu",
    head_dim: int = 128,
    rotate: bool | None = False,
    residual: bool | None = False,
    processes: int = 1,
) -> dict[str, int]:
    """Load or compile the kernels that write to caches of some kinds and attend to them.

    Kernels serve every GQA group and block size, those of the CPU every head dim, too.

    Parameters
    ----------
    kinds : iterable of str, Kind or pair of them
        Storage kinds; a pair, as a tuple, is the kind of K and that of V. A single name or kind will do.
    dtypes : iterable of str or Kind
        Float kinds of new rows and queries, in addition to the cache's own. A single one will do.
    target : str
        Where the kernels run. On CUDA for the device that is current, whose compute capability they are made for;
        kernels for more query rows of an item, and for prompts, are included.
    head_dim : int
        Elements of a row of K and of V. On CUDA attention on tensor cores has a kernel for each.
    rotate : bool
        Whether caches with ``rotate=True`` are included.
    residual : bool
        Whether quantised caches with `full_precision` are included.
    processes : int
        How many processes compile, each for other kinds and dtypes, before this one loads what they have put on disk.
        With 1 this process does all of it.

    Returns
    -------
    dict
        Kernels that this call loaded from the disk (``"hits"``) and compiled (``"misses"``).

    Raises
    ------
    UnsupportedDType, ValueError
        If there is no such kind, or `dtypes` has one that queries cannot be of.
    TypeError
        If an argument is nothing of what it should be.
    DimensionMismatch
        If `processes` is below 1, or `head_dim` not a positive even number.
    NotSupported
        If the target is not available here.

    Examples
    --------
    >>> import numkv
    >>> sorted(numkv.warmup(["fp16"]))
    ['hits', 'misses']
    """
    plan = _Plan.of(kinds, dtypes, head_dim, rotate, residual)
    processes = check_size("processes", processes, 1, _MOST_PROCESSES)
    get(target)
    if processes > 1:
        calls = (f"numkv.warmup({part}, target={target!r})" for part in plan.parts())
        compile_apart((f"import numkv; {call}" for call in calls), processes)
    before = cache_stats()
    plan.run(target)
    after = cache_stats()
    return {name: after[name] - before[name] for name in after}


def export(
    path: Path, architecture: str, kinds: Iterable[Kinds], *, processes: int = 1, **options: Any
) -> int:
    """Write the machine code of kernels for CUDA to a file, for another machine; this one needs no GPU.

    It makes this process one that can use CUDA for nothing else. `numkv.kernels.cuda.carried.take` reads such files.

    Parameters
    ----------
    path : Path or None
        The file; None only keeps kernels on this machine's disk, where a later export finds them.
    architecture : str
        What the other machine's GPU is, such as ``"sm_90"``.
    kinds, **options
        As `warmup` takes them.
    processes : int
        How many processes compile.

    Returns
    -------
    int
        How many kernels the file holds.

    Raises
    ------
    NumkvError
        As `warmup`; or if there is no such architecture, or this process has used CUDA.
    OSError
        If the file cannot be written.
    """
    from numkv.kernels.cuda import carried

    plan, cc = _Plan.of(kinds, **options), carried.capability(architecture)
    processes = check_size("processes", processes, 1, _MOST_PROCESSES)
    if processes > 1:
        code = f"from numkv.compile_ahead import export; export(None, {architecture!r}, "
        compile_apart((f"{code}{part})" for part in plan.parts()), processes)
    with carried.elsewhere(cc) as kernels:
        plan.run("cuda")
    return carried.write(path, kernels, cc)


_MOST_PROCESSES = 1024


def compile_apart(jobs: Iterable[str], processes: int) -> None:
    """Run pieces of Python in processes of their own, for the kernels that they leave on disk.

    Parameters
    ----------
    jobs : iterable of str
        Code; it finds the modules that this process finds. What fails is left to who needs its kernels.
    processes : int
        How many run at once.
    """
    import subprocess  # these take a while to import, and few come here
    from concurrent.futures import ThreadPoolExecutor

    def run(job: str) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; {job}"
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    with ThreadPoolExecutor(max(1, processes)) as pool:
        list(pool.map(run, jobs))


def _listed(name: str, given: Any) -> list[Any]:
    """The items of an argument that is an iterable, or one item itself."""
    if isinstance(given, (str, Kind)):
        return [given]
    try:
        return list(given)
    except TypeError:
        raise TypeError(f"`{name}`: expected kinds, got {type(given).__name__}") from None


def _pair(choice: Any) -> tuple[Kind, Kind]:
    """Return the kinds of K and of V."""
    if not isinstance(choice, tuple):
        return kinds_of(choice, None, None)
    if len(choice) != 2:
        raise ValueError(
            f"`kinds`: expected pairs, the kinds of K and of V, got {len(choice)} of them"
        )
    return kinds_of(choice[0], None, choice[1])


def _run(
    k_kind: Kind, v_kind: Kind, sources: list[Kind], target: str, dim: int, options: dict[str, Any]
) -> None:
    """Call every operation once, on one token; on two where one of them leaves the window."""
    place = get(target)
    kinds: dict[str, Any] = {"kind": k_kind, "v_kind": v_kind, "target": target, **options}

    def ones(dtype: Any, *shape: int) -> AnyArray:
        return place.asarray(np.ones(shape, dtype))

    table, weight = ones(np.float32, 4, dim // 2), ones(np.float32, dim)
    accepted = set(source_dtypes(k_kind)) & set(source_dtypes(v_kind))
    own = [k_kind] if k_kind is v_kind and k_kind.is_query else []
    for source in dict.fromkeys([*own, *sources]):
        if source.dtype not in accepted:
            continue
        rows, qkv = ones(source.dtype, 1, 1, dim), ones(source.dtype, 1, 3 * dim)
        paged = PagedLayer(2, 2, 1, dim, **kinds)
        for layer in (ContiguousLayer(4, 1, dim, **kinds), paged):
            layer.append(rows, rows)
            for mode in QKMode:
                tables: dict[str, Any] = {} if mode is QKMode.COPY else {"cos": table, "sin": table}
                layer.truncate(1)
                q = layer.write(
                    qkv, num_q_heads=1, qk_mode=mode, q_norm_weight=weight, k_norm_weight=weight,
                    **tables,
                )  # fmt: skip
            layer.decode_attention(q)
            if layer.spec.full_precision:
                two = ones(source.dtype, 2, 1, dim)
                layer.append(two, two)  # the first of which is quantised at once
                for heads in _Q_HEADS[place.values_on_host]:  # of tokens in full precision, too
                    layer.decode_attention(ones(source.dtype, 1, heads, dim))
        scales = {"k_scale": paged.k_scale} if k_kind.has_scales else {}
        if v_kind.has_scales:
            scales["v_scale"] = paged.v_scale
        slots = place.asarray(np.zeros(1, np.int64))
        paged_append(rows, rows, paged.k, paged.v, slots, **scales)
        # Kernels of large calls, and of K and V of two kinds.
        pool = paged.pool.pool
        checked = pool.check_rows(rows, rows, check_finite=True)
        pool.append(*checked, place.index(paged.block_table, np.int32), 0)
        pool.scatter(*checked, slots)
        # On the CPU, several sequences with long tables are planned by a kernel of its own, and splits are merged.
        two, blocks = ones(source.dtype, 2, 1, dim), np.zeros((2, 1024), np.int32)
        lens = np.array([1, 2048 if target == "cpu" else 1])
        paged_decode_attention(
            two, paged.k, paged.v, place.asarray(blocks), place.asarray(lens), **scales
        )
        lse = ones(np.float32, 1, 1)
        merge_states(rows, lse, rows, lse)
        cap = 9.0 if place.values_on_host else 0.0
        for heads in _Q_HEADS[place.values_on_host]:
            q = ones(source.dtype, 2, heads, dim)
            paged_decode_attention(
                q, paged.k, paged.v, place.asarray(blocks), place.asarray(lens), logits_soft_cap=cap, **scales
            )  # fmt: skip
        # On the CPU one kernel does all, in the simulator too.
        if place.values_on_host or not place.repeats():
            continue
        prompt, starts = ones(source.dtype, _PROMPT, 1, dim), np.array([0, _PROMPT])
        paged_prefill_attention(
            prompt, paged.k, paged.v, place.asarray(blocks[:1]), place.asarray(starts[1:]), place.asarray(starts),
            **scales,
        )  # fmt: skip

"""`save` and `load`: every cache, and sequences, in files."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from numkv import targets
from numkv._version import __version__
from numkv.access import unchanged
from numkv.caches.contiguous_layer import ContiguousLayer
from numkv.caches.kv_cache import KVCache
from numkv.caches.multi.causal import CausalCache
from numkv.caches.multi.encoder import EncoderCache
from numkv.caches.multi.wrapper import WrapperCache
from numkv.caches.paged.cache import PagedKVCache
from numkv.caches.paged.saved import Sequences
from numkv.caches.paged.swap import SwappedSequence
from numkv.caches.paged_layer import PagedLayer
from numkv.caches.paged_pool import PagedPool
from numkv.checks import Mark, check_mark
from numkv.compression.compressor import HeadCompressor, MultiHeadCompressor
from numkv.compression.paged import PagedCompressor
from numkv.errors import NotSupported, NumkvError
from numkv.files.container import Container, opened, write
from numkv.numbers import memory_of_machine
from numkv.snapshots.fields import Damaged, Foreign, expect
from numkv.snapshots.saved import Saved
from numkv.snapshots.snapshot import Options, Snapshot

_ONE, _MANY = "SwappedSequence", "sequences"
_WITH_SHIFT: tuple[Any, ...] = (CausalCache, WrapperCache)
_CACHES: tuple[Any, ...] = (
    KVCache, ContiguousLayer, PagedLayer, PagedKVCache, *_WITH_SHIFT, EncoderCache, HeadCompressor, MultiHeadCompressor,
    PagedCompressor,
)  # fmt: skip
#: Classes of savable objects by name; see `numkv.snapshots.snapshot`.
_CLASSES = {x.__name__: x for x in _CACHES} | {_ONE: Sequences, _MANY: Sequences}
#: Of rooms above, which put their classes there when they are imported.
_ELSEWHERE = {"NumkvCache": "numkv.transformers"}
_Class = TypeVar("_Class", bound=type)


def savable(cls: _Class) -> _Class:
    """Make `save` and `load` accept a class with the methods of `numkv.snapshots.snapshot`.

    If its ``needs_mark`` is true, both require a mark.
    """
    _CLASSES[cls.__name__] = cls
    return cls


def save(path: str | os.PathLike[str], cache: Any, *, mark: Mark | None = None) -> None:
    """Save a cache or sequences to a file; `load` restores them bit for bit.

    The file is safetensors with a checksum of each tensor: see docs/files.md. Tokens are saved, not the room for more.
    An existing file is replaced when the new one is complete and fsynced. So a crash or a full disk leaves the old
    file.

    Parameters
    ----------
    path : path-like
        The file.
    cache : KVCache, ContiguousLayer, PagedLayer, PagedKVCache, CausalCache, \
EncoderCache, WrapperCache, HeadCompressor, MultiHeadCompressor, PagedCompressor, NumkvCache, SwappedSequence or \
sequence of SwappedSequence
        The object to save, which does not change. A `PagedKVCache` saves its sequences, without pins and without
        prefixes of removed sequences. A multi-sequence cache saves its cells, without a pass that has begun.
    mark : str or mapping, optional
        Compared by `load`: the model, its revision, its RoPE, and everything else that decides these rows; a text, or
        texts, numbers and None by name. A `numkv.transformers.NumkvCache` needs one, such as that of
        `numkv.transformers.mark_of`.

    Raises
    ------
    NonFiniteInput
        On CUDA, if rows that were quantised held NaN or infinity: truncate, or remove them, first.
    NumkvError
        If the cache is being changed, was changed meanwhile, has an open step, is closed, or holds NaN in its scales.
    OSError
        The system's error, if the file cannot be written; the old file is untouched.
    NotSupported
        If `path` is not a file, or a `NumkvCache` has layers with states of transformers' own.
    TypeError
        If `cache` or `mark` has another type.

    Notes
    -----
    While a cache is saved, other threads may attend to it. They may also append to a `KVCache`, a layer or a
    compressor; the new tokens are not in the file. A change of saved rows is an error in one of the two threads. This
    includes any change of the other caches, and of caches with tokens in full precision.

    Examples
    --------
    >>> import numpy as np, numkv, tempfile
    >>> cache = numkv.KVCache(num_layers=1, num_kv_heads=2, head_dim=8, kind="int8")
    >>> cache.append(0, np.ones((5, 2, 8), np.float32), np.ones((5, 2, 8), np.float32))
    >>> cache.advance(5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     numkv.save(f"{folder}/prompt.numkv", cache, mark={"model": "mine", "rope_theta": 1e6})
    ...     again = numkv.load(f"{folder}/prompt.numkv", mark={"model": "mine", "rope_theta": 1e6})
    >>> len(again), bool((again.k(0) == cache.k(0)).all())
    (5, True)
    """
    path, checked = _check_path(path), check_mark("mark", mark)
    place, own = getattr(cache, "__runs_on__", lambda: (targets.get("cpu"), None))()
    with place.on(own):
        _save(path, checked, cache)


def _save(path: str, checked: Any, cache: Any) -> None:
    """See `save`; on its stream."""
    name = type(cache).__name__
    if isinstance(cache, SwappedSequence):
        cache, name = Sequences([cache]), _ONE
    elif isinstance(cache, Sequence):
        cache, name = Sequences(cache), _MANY
    elif _CLASSES.get(name) is not type(cache):
        raise TypeError(
            f"`cache`: expected one of numkv's caches or sequences of PagedKVCache.swap_out, got {name}; pass one of "
            "these"
        )
    _check_marked(type(cache), checked)
    snapshot: Snapshot = cache.__snapshot__()
    header = {"class": name, "numkv": __version__, "mark": checked}
    with unchanged(snapshot.held):
        write(path, header | snapshot.saved.entries(), snapshot.all_tensors())


def load(
    path: str | os.PathLike[str],
    *,
    target: str | None = None,
    mark: Mark | None = None,
    shift: Any = None,
    pool: PagedPool | None = None,
    max_nbytes: int | None = None,
) -> Any:
    """Load a file that `save` wrote.

    The file is not trusted: sizes are compared with the file, and bounded, before anything is allocated, and all is
    compared with its checksum. Checksums detect damage, not malice.

    Parameters
    ----------
    path : path-like
        The file.
    target : {"cpu", "cuda"}, optional
        Target of the cache: by default that of `pool`, or ``"cpu"``. A file stores no target.
    mark : str or mapping, optional
        The mark that the file must have. None accepts any mark, except for a `NumkvCache`.
    shift : callable, optional
        The key shift of a cache of cells; see `CausalCache`. A file stores only the angles of a `rope_shift`. A
        `WrapperCache` accepts one for all children, or a sequence with one for each.
    pool : PagedPool, optional
        The pool of a `PagedLayer`; without it the layer owns one.
    max_nbytes : int, optional
        Most memory of the cache, room for more tokens included. By default the memory of the machine is the bound.

    Returns
    -------
    object
        An object of the saved class: a cache, a `SwappedSequence`, or a list of these.

    Raises
    ------
    NotSupported
        If it is no such file, damaged, of another version or mark, too large, or contradicts itself. If its class is of
        `numkv.transformers`, which is not imported, or an option does not suit the class. The message states the
        reason, and `pool` is unchanged.
    CacheFull
        If `pool` has too few blocks.
    DimensionMismatch
        If `pool` is of another geometry.
    NumkvError
        If there is not enough memory.
    OSError
        The system's error, if the file cannot be read.
    TypeError
        If an argument has another type.
    """
    path, checked = _check_path(path), check_mark("mark", mark)
    most = _check_bytes(max_nbytes)
    if pool is not None and not isinstance(pool, PagedPool):
        raise TypeError(f"`pool`: expected a PagedPool, got {type(pool).__name__}")
    place = targets.get("cpu" if target is None else target)
    if pool is not None:
        place = targets.get(pool.target)
        if target not in (None, pool.target):
            raise NotSupported(
                f"`target`: expected the pool's, {pool.target}, got {target}; leave it out"
            )
    with place.on():
        return _load(path, checked, most, Options(place, shift, pool), target)


def _load(
    path: str, checked: Any, most: int, options: Options, target: str | None = None, only: Sequence[str] = ()
) -> Any:  # fmt: skip
    """See `load`; on its stream."""
    shift, pool = options.shift, options.pool
    with _reading(path) as file:
        name = file.fields.text("class")
        _compare_marks(path, file, checked)
        if only and name not in only:
            raise NotSupported(
                f"`path`: expected sequences, got a {name} in {path}; use numkv.load"
            )
        cls: Any = _CLASSES.get(name)
        if cls is None and name in _ELSEWHERE:
            raise NotSupported(
                f"`path`: expected a class that is imported, got a {name} in {path}; import {_ELSEWHERE[name]} before"
            )
        if cls is None:
            raise Damaged(f"it stores a {name}, which is no cache")
        _check_marked(cls, checked)
        if cls is not PagedLayer:
            _refuse(name, "pool", pool)
        if cls not in _WITH_SHIFT:
            _refuse(name, "shift", shift)
        if cls is Sequences:
            _refuse(name, "target", target)
        saved: Saved = cls.__saved__.read(file.fields)
        for tensor, spec in saved.specs().items():
            file.take(tensor, spec)
        file.all_taken()
        nbytes = saved.nbytes if pool is None else 0  # the memory of a given pool exists already
        if nbytes > most:
            raise NotSupported(
                f"`path`: expected a cache of at most {most} bytes, got one of {nbytes} in {path}; "
                "pass a larger max_nbytes"
            )
        made = cls.__restore__(saved, file, options)
        file.verify()
        if name == _ONE:
            expect(len(made.sequences) == 1, f"{len(made.sequences)} sequences, and not one")
            return made.sequences[0]
        return made.sequences if name == _MANY else made


def written_in(path: str | os.PathLike[str]) -> Any:
    """Import the room of the class that a file names, and return the mark that the file has."""
    with _reading(_check_path(path)) as file:
        importlib.import_module(_ELSEWHERE.get(file.fields.text("class"), "numkv"))
        return file.fields.get("mark")


def save_sequences(
    path: str | os.PathLike[str], sequences: Sequence[SwappedSequence], *, mark: Mark | None = None
) -> None:
    """Save sequences of a `PagedKVCache`: `save` for a list of them.

    Parameters
    ----------
    path : path-like
        The file; an existing one is replaced when the new one is complete.
    sequences : sequence of SwappedSequence
        One or more, of one geometry; see `PagedKVCache.swap_out`.
    mark : str or mapping, optional
        See `save`.

    Raises
    ------
    NumkvError
        If there are none, they do not have one geometry, or one contradicts itself.
    OSError
        The system's error; the old file is untouched.
    """
    save(path, list(sequences), mark=mark)


def load_sequences(
    path: str | os.PathLike[str], *, mark: Mark | None = None
) -> list[SwappedSequence]:
    """Load sequences of a `PagedKVCache`.

    Parameters
    ----------
    path : path-like
        A file of `save_sequences`, or of `save` with one sequence or several.
    mark : str or mapping, optional
        See `load`.

    Returns
    -------
    list of SwappedSequence
        For `PagedKVCache.swap_in`.

    Raises
    ------
    NotSupported
        If it is no such file, damaged, of another version or mark, or contradicts itself.
    OSError
        The system's error, if the file cannot be read.
    """
    path, checked = _check_path(path), check_mark("mark", mark)
    options = Options(targets.get("cpu"), None, None)
    found = _load(path, checked, sys.maxsize, options, only=(_ONE, _MANY))
    return [found] if isinstance(found, SwappedSequence) else found


@contextlib.contextmanager
def _reading(path: str) -> Iterator[Container]:
    """Open a file; errors name its path."""
    try:
        with opened(path) as file:
            yield file
    except Foreign as error:
        raise NotSupported(f"`path`: {error}, in {path}") from error
    except Damaged as error:
        raise NotSupported(
            f"`path`: expected a file of numkv.save, got a damaged one in {path}: {error}; save it anew"
        ) from error
    except RecursionError as error:
        raise NotSupported(f"`path`: expected a flat header, got a deeper one in {path}") from error
    except MemoryError as error:
        raise NumkvError(f"`path`: there is not enough memory to load {path}") from error


def _check_path(path: Any) -> str:
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise TypeError(f"`path`: expected a path, got {type(path).__name__}") from None
    if "\0" in name:
        raise ValueError(f"`path`: expected a path, got one with a null character, {name!r}")
    return name


def _compare_marks(path: str, file: Container, mark: Any) -> None:
    if mark is None:
        return
    found = file.fields.get("mark")
    if found == mark:
        return
    what = ""
    if isinstance(found, dict) and isinstance(mark, dict):
        both = found.keys() | mark.keys()
        names = sorted(x for x in both if found.get(x, both) != mark.get(x, both))
        what = f" ({', '.join(names)} differ)"
    raise NotSupported(
        f"`mark`: expected a file marked {mark!r}, got one marked {found!r} in {path}{what}; "
        "it is of another model"
    )


def _check_marked(cls: Any, mark: Any) -> None:
    """Require a mark for classes that need one."""
    if mark is None and getattr(cls, "needs_mark", False):
        raise TypeError(
            f"`mark`: expected the mark of a model, without which a {cls.__name__} would go to any of the same shapes, "
            "got None; pass numkv.transformers.mark_of(model)"
        )


def _check_bytes(max_nbytes: Any) -> int:
    if max_nbytes is None:
        return memory_of_machine()
    if isinstance(max_nbytes, bool) or not isinstance(max_nbytes, int) or max_nbytes < 0:
        raise TypeError(f"`max_nbytes`: expected an integer from 0 up, got {max_nbytes!r}")
    return max_nbytes


def _refuse(name: str, option: str, value: Any) -> None:
    """Reject an option that a class does not use."""
    if value is not None:
        raise NotSupported(f"`{option}`: expected none for a {name}, got {value!r}; leave it out")

"""What the families of caches say to `numkv.save` and `numkv.load`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numkv import targets
from numkv.files.container import Container, Tensor
from numkv.files.fields import Fields, expect
from numkv.kinds import Kind
from numkv.storage.hadamard import Rotation
from numkv.storage.pool import Pool
from numkv.targets.base import Target


class Saved(NamedTuple):
    """What a cache is in a file.

    Attributes
    ----------
    fields : dict
        Entries of the header.
    tensors : list of Tensor
        Its tensors.
    held : list of (object, bool)
        What nobody may change meanwhile, and whether new tokens would change it; see `held`.
    """

    fields: dict[str, Any]
    tensors: list[Tensor]
    held: list[tuple[Any, bool]]


class Options(NamedTuple):
    """The arguments of `numkv.load` that say what a cache is to be made with.

    Attributes
    ----------
    target : str or None
        Name of the target.
    shift : object
        The shift, or what holds one for each child.
    pool : PagedPool or None
        Where a layer takes its blocks from.
    """

    target: str | None
    shift: Any
    pool: Any

    @property
    def place(self) -> Target:
        """Where the cache goes."""
        return targets.get("cpu" if self.target is None else self.target)


class Plan(NamedTuple):
    """How a cache is made from a file whose header has been checked.

    Attributes
    ----------
    nbytes : int
        Bytes that it takes.
    build : callable
        Allocates the cache and reads its content; what it has taken of others it gives back after an error.
    """

    nbytes: int
    build: Callable[[Container], Any]


def kind_fields(pool: Pool) -> dict[str, Any]:
    """What the header says of storage."""
    rotation = pool.k_rotation
    return {
        "k_kind": pool.k_kind.name,
        "v_kind": pool.v_storage,
        "rotation": None if rotation is None else rotation.seed,
    }


def read_kinds(fields: Fields) -> tuple[Kind, Kind]:
    """The kinds of K and of V."""
    return fields.kind("k_kind"), fields.kind("v_kind")


def read_rotation(fields: Fields) -> bool:
    """Whether rows are rotated; the seed has to be the one that caches have."""
    seed = fields.optional("rotation")
    expect(seed is None or seed == Rotation(1).seed, f"rows are rotated by seed {seed}")
    return seed is not None

"""What the families of caches say to `numkv.save` and `numkv.load`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numkv.files.container import Container
from numkv.kinds import Kind
from numkv.snapshots.fields import Fields, expect
from numkv.snapshots.snapshot import Spec, Tensor
from numkv.storage.hadamard import Rotation
from numkv.storage.pool import Pool


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


def tensor_of(name: str, dtype: Any, shape: Any, pieces: Any) -> Tensor:
    """A tensor that is written only."""
    return Tensor(name, Spec(dtype, shape), pieces, pieces)


class Plan(NamedTuple):
    """How a cache is made from a file whose header has been checked."""

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

"""Which storage kinds the layers of one model take, in a file: what `numkv fit` chooses and caches are made by."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from numkv.caches.layer_spec import FullPrecision, LayerSpec
from numkv.errors import NumkvError
from numkv.kinds import Kind
from numkv.replace import replacing, write_all

_FORMAT, _VERSION = "numkv profile", 1
_MOST_BYTES = 16 * 2**20
_USUAL = LayerSpec()


class Profile:
    """How each layer of a model stores K and V.

    Parameters
    ----------
    layers : iterable of LayerSpec
        The layers that have rows, from the first to the last.
    model : str
        The model's name, for people.

    Attributes
    ----------
    layers : tuple of LayerSpec
        The layers.
    model : str
        The model's name.

    Raises
    ------
    TypeError
        If a layer is no `LayerSpec`.
    ValueError
        If there is none.

    Notes
    -----
    It goes where layers go: ``PagedKVCache(layers=profile, …)``, ``NumkvCache(config, profile=profile)``,
    ``numkv plan --profile``. A profile holds for the checkpoint that it was measured on: another one of the same shape
    may have other outlier channels.

    Examples
    --------
    >>> import numkv
    >>> profile = numkv.Profile([numkv.LayerSpec(2, 64, kind="int8", v_kind="int4")] * 4, "mine")
    >>> numkv.PagedKVCache(layers=profile, num_blocks=8).num_layers
    4
    """

    def __init__(self, layers: Iterable[LayerSpec], model: str = "") -> None:
        self.layers = tuple(layers)
        self.model = str(model)
        for i, layer in enumerate(self.layers):
            if not isinstance(layer, LayerSpec):
                raise TypeError(
                    f"`layers[{i}]`: expected a numkv.LayerSpec, got {type(layer).__name__}"
                )
        if not self.layers:
            raise ValueError("`layers`: expected a numkv.LayerSpec for each layer, got none")

    def __repr__(self) -> str:
        kinds = list(dict.fromkeys(f"{x.kind}/{x.v_kind}" for x in self.layers))
        return f"Profile({self.model!r}, {len(self.layers)} layers, {', '.join(kinds)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and self.layers == other.layers

    def __hash__(self) -> int:
        return hash(self.layers)

    def __iter__(self) -> Iterator[LayerSpec]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerSpec:
        return self.layers[layer]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's rows in all layers in their storage kinds, scales included."""
        total = 0
        for layer in self.layers:
            if layer.num_kv_heads is not None:
                assert layer.head_dim is not None
                assert layer.head_dim_v is not None
                assert isinstance(layer.kind, Kind)
                row = layer.kind.row_bytes(layer.head_dim)
                if isinstance(layer.v_kind, Kind):
                    row += layer.v_kind.row_bytes(layer.head_dim_v)
                total += layer.num_kv_heads * row
        return total

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to a file of JSON, which it replaces.

        Parameters
        ----------
        path : path-like
            The file.
        """
        content = {"model": self.model, "layers": [_plain(layer) for layer in self.layers]}
        head = {"format": _FORMAT, "version": _VERSION, "sha256": _digest(content)}
        text = json.dumps({**head, **content}, indent=1) + "\n"
        with replacing(path) as file:
            write_all(file, [memoryview(text.encode())])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read a profile that `save` wrote.

        Parameters
        ----------
        path : path-like
            The file.

        Returns
        -------
        Profile

        Raises
        ------
        NumkvError
            If it is no profile, a newer one, or a damaged one.
        OSError
            If it cannot be read.
        """
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        try:
            found = json.loads(data)
            head = found["format"], found["version"]
            content = {"model": found["model"], "layers": found["layers"]}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _unreadable(path, "something else") from None
        if head != (_FORMAT, _VERSION):
            raise _unreadable(path, f"{head[0]} of version {head[1]}")
        if found.get("sha256") != _digest(content):
            raise _unreadable(path, "one whose checksum does not fit: it was changed or damaged")
        try:
            return cls([_layer(x) for x in content["layers"]], content["model"])
        except (NumkvError, TypeError, ValueError, AttributeError) as error:
            raise _unreadable(path, f"one that this numkv does not understand ({error})") from error


def _unreadable(path: Any, got: str) -> NumkvError:
    return NumkvError(
        f"{os.fspath(path)}: expected a profile of version {_VERSION}, as `numkv fit` writes it, got {got}; fit again"
    )


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _plain(layer: LayerSpec) -> dict[str, Any]:
    """Return a layer's attributes that differ from the defaults, as JSON."""
    given = {f.name: getattr(layer, f.name) for f in fields(layer)}
    kept = layer.full_precision
    if kept is not None:
        given["full_precision"] = {f.name: _name(getattr(kept, f.name)) for f in fields(kept)}
    given["states"] = [[list(shape), dtype] for shape, dtype in layer.states]
    given |= {"kind": _name(layer.kind), "v_kind": _name(layer.v_kind)}
    always = "num_kv_heads", "head_dim", "kind", "v_kind"
    return {k: x for k, x in given.items() if k in always or x not in (getattr(_USUAL, k), [])}


def _name(x: Any) -> Any:
    return x.name if isinstance(x, Kind) else x


def _layer(given: dict[str, Any]) -> LayerSpec:
    kept = given.get("full_precision")
    if kept is not None:
        given = given | {"full_precision": FullPrecision(**kept)}
    return LayerSpec(**given)

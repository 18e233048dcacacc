"""``numkv plan``: what a token costs, and how many tokens fit."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from numkv.cli.output import UsageError, format_bytes, table
from numkv.demo.cache import CacheChoice
from numkv.demo.config import read_json
from numkv.errors import NotSupported
from numkv.kinds import kinds

__all__ = ["DEFAULT_MEMORY", "CacheSizes", "parse_bytes", "run", "sizes_from_config"]

# Entries of a config.json by which some layers cache less than all tokens, or nothing at all.
_SAVING = (
    "sliding_window",
    "attention_chunk_size",
    "num_kv_shared_layers",
    "full_attention_interval",
    "attn_layer_period",
)

DEFAULT_MEMORY = 8 * 1024**3

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgtp])(i?))?b?", re.IGNORECASE)


@dataclass(frozen=True)
class CacheSizes:
    """What the size of a model's cache depends on.

    Attributes
    ----------
    num_layers, num_kv_heads, head_dim, head_dim_v : int
        Layers with a cache, and the sizes of one.
    unequal : str
        What the file says of layers that cache less than all tokens, which the sizes leave out; "" if nothing.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    unequal: str = ""

    def bytes_per_token(self, choice: CacheChoice) -> int:
        """Bytes that a token costs in all layers.

        Parameters
        ----------
        choice : CacheChoice
            Kinds of K and V.

        Returns
        -------
        int
        """
        return self.num_layers * choice.bytes_per_token(
            self.num_kv_heads, self.head_dim, self.head_dim_v
        )


def parse_bytes(text: str) -> int:
    """Read a size: ``8GiB`` is 8 · 1024³ bytes, ``8GB`` 8 · 1000³, a bare number bytes.

    Parameters
    ----------
    text : str
        A number and a unit, in any case.

    Returns
    -------
    int

    Raises
    ------
    ValueError
        If it is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 8GiB")
    number, prefix, binary = match.groups()
    power = " kmgtp".index((prefix or " ").lower())
    return int(Fraction(number) * (1024 if binary else 1000) ** power)


def sizes_from_config(path: Path) -> CacheSizes:
    """Read the sizes from a ``config.json`` of any model whose layers all keep K and V heads.

    Parameters
    ----------
    path : pathlib.Path
        The file, or the folder it is in.

    Returns
    -------
    CacheSizes

    Raises
    ------
    NotSupported
        If the model keeps something else than K and V of every head.
    UsageError
        If the file does not say.
    """
    path = path / "config.json" if path.is_dir() else path
    content = read_json(path)
    content = content.get("text_config", content)  # models that also see or hear
    if content.get("kv_lora_rank"):
        raise NotSupported(f"{path}: this model caches compressed latents, not K and V heads")
    num_q_heads = _entry(path, content, "num_attention_heads")
    head_dim = content.get("head_dim") or _entry(path, content, "hidden_size") // num_q_heads
    return CacheSizes(
        num_layers=_entry(path, content, "num_hidden_layers"),
        num_kv_heads=content.get("num_key_value_heads") or num_q_heads,
        head_dim=head_dim,
        head_dim_v=content.get("v_head_dim") or head_dim,
        unequal=_unequal_layers(content),
    )


def _unequal_layers(content: dict[str, Any]) -> str:
    """What a config says of layers that cache less than all tokens."""
    said = [f"{key} {content[key]}" for key in _SAVING if content.get(key)]
    if content.get("use_sliding_window") is False:
        said = [what for what in said if not what.startswith("sliding_window")]
    types = content.get("layer_types")
    if isinstance(types, list):
        others = [name for name in map(str, types) if name != "full_attention"]
        said += [f"{others.count(name)} layers of {name}" for name in sorted(set(others))]
    return ", ".join(said)


def _entry(path: Path, content: dict[str, Any], key: str) -> int:
    value = content.get(key)
    if not isinstance(value, int) or value <= 0:
        raise UsageError(f"{path}: {key}: expected a positive integer, got {value!r}")
    return value


def run(arguments: argparse.Namespace) -> None:
    """Print the plan.

    Parameters
    ----------
    arguments : argparse.Namespace
        The options.
    """
    sizes = _sizes(arguments)
    memory = arguments.memory
    header = ["cache", "bytes/token/layer", "bytes/token", f"tokens in {format_bytes(memory)}"]
    if arguments.tokens is not None:
        header.append(f"memory for {arguments.tokens:,} tokens")
    rows = []
    choices = _choices(arguments, sizes)
    for choice in choices:
        cost = sizes.bytes_per_token(choice)
        row = [choice.label, f"{cost // sizes.num_layers:,}", f"{cost:,}", f"{memory // cost:,}"]
        if arguments.tokens is not None:
            row.append(format_bytes(cost * arguments.tokens))
        rows.append(row)
    dims = f"{sizes.head_dim}"
    if sizes.head_dim_v != sizes.head_dim:
        dims += f" (values {sizes.head_dim_v})"
    print(f"{sizes.num_layers} layers of {sizes.num_kv_heads} key/value heads of {dims}\n")
    print(table(header, rows))
    listed = {name for choice in choices for name in choice.label.split("/")}
    if "int8" in listed:
        print("The scales of int8 are counted: 4 bytes for each key and each value of a head.")
    if "int4" in listed:
        print("Those of int4 are: 2 bytes for each 32 elements.")
    if sizes.unequal:
        print(
            f"This model says {sizes.unequal}: some of its layers keep less than all tokens. They are counted like "
            "the others, so this is more than it takes."
        )


def _choices(arguments: argparse.Namespace, sizes: CacheSizes) -> list[CacheChoice]:
    """The kinds to list: those that were asked for, else all that can store such rows."""
    if arguments.kind is not None:
        asked: list[CacheChoice] = arguments.kind
        return asked
    dims = (sizes.head_dim, sizes.head_dim_v)
    fitting = [k for k in kinds() if not any(dim % k.elements_per_word for dim in dims)]
    return [CacheChoice.parse(k.name) for k in fitting]


def _sizes(arguments: argparse.Namespace) -> CacheSizes:
    """The sizes in the file, overruled by those on the command line."""
    given = (arguments.layers, arguments.kv_heads, arguments.head_dim)
    if arguments.config is not None:
        found = sizes_from_config(arguments.config)
    elif None in given:
        raise UsageError("plan needs --config, or --layers, --kv-heads and --head-dim")
    else:
        found = CacheSizes(*given, head_dim_v=arguments.head_dim)
    head_dim_v = arguments.head_dim_v or arguments.head_dim or found.head_dim_v
    return CacheSizes(
        arguments.layers or found.num_layers,
        arguments.kv_heads or found.num_kv_heads,
        arguments.head_dim or found.head_dim,
        head_dim_v,
        found.unequal,
    )

"""What blocks have to agree in before one may stand for the other: all that decides their bytes beside the tokens."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from typing import Any

from numkv.blocks.prefix import FORMAT_VERSION as NAMES_VERSION
from numkv.store.objects import FORMAT_VERSION


def identity_text(mark: Any, rope: Any, fields: dict[str, Any]) -> bytes:
    """The identity of blocks as JSON, always the same for the same facts.

    Parameters
    ----------
    mark, rope : str, dict or None
        What the user says of the model and of its RoPE.
    fields : dict
        Sizes, kinds, windows and scales of the cache, for JSON.
    """
    facts = {
        "format": FORMAT_VERSION,
        "names": NAMES_VERSION,
        "bytes": sys.byteorder,
        "mark": mark,
        "rope": rope,
        **fields,
    }
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def folder_of(identity: bytes) -> str:
    """Name of the folder that holds objects of an identity."""
    return sha256(identity).hexdigest()[:32]

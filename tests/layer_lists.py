"""Make a `PagedKVCache` whose layers differ little: shared attributes are given once, others listed by layer."""

import numkv

#: Attributes of a `LayerSpec` that may be given once for all layers, and those listed by layer.
_OF_LAYERS = (
    "head_dim_v", "kind", "k_kind", "v_kind", "rotate", "full_precision", "key_bounds", "windows", "chunks", "shares",
    "states",
)  # fmt: skip


def specs(
    num_layers, num_kv_heads, head_dim, *, windows=None, chunks=None, shares=None, states=None, k_kind=None,
    kind="fp16", v_kind=None, **alike,
):  # fmt: skip
    """Make a `LayerSpec` for each layer.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        As of a `PagedKVCache`; heads may be a list, with None for layers without rows.
    windows, chunks : list, optional
        `window_left` and `chunk_size` of each layer.
    shares, states : dict, optional
        Attributes of some layers, by number.
    k_kind, kind, v_kind : str
        As of a `KVCache`.
    **alike
        Attributes of all layers.
    """
    alike |= {"kind": k_kind or kind, "v_kind": v_kind or (kind if k_kind else None)}
    found = []
    for layer in range(num_layers):
        own = {"states": (states or {}).get(layer, ())}
        heads = num_kv_heads[layer] if isinstance(num_kv_heads, list) else num_kv_heads
        if layer in (shares or {}):
            found.append(numkv.LayerSpec(shares=shares[layer], **own))
        elif heads is None:
            found.append(numkv.LayerSpec(**own))
        else:
            window = -1 if windows is None else windows[layer]
            chunk = None if chunks is None else chunks[layer]
            own |= alike | {"window_left": window, "chunk_size": chunk}
            found.append(numkv.LayerSpec(heads, head_dim, **own))
    return found


def in_full(window, num_sink_tokens=0, kind=None):
    """Return the argument that asks for a number of tokens in full precision: None for none."""
    return numkv.FullPrecision(window, num_sink_tokens, kind) if window or num_sink_tokens else None


def paged_kv_cache(num_layers, num_kv_heads, head_dim, *, cls=numkv.PagedKVCache, **options):
    """Make the cache; options of `specs` are for layers."""
    own = {name: options.pop(name) for name in _OF_LAYERS if name in options}
    return cls(layers=specs(num_layers, num_kv_heads, head_dim, **own), **options)


def described(cache):
    """Return the `LayerSpec` of a layer or pool, or of a cache's first layer."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        return cache.spec
    return layers[min(layers)] if isinstance(layers, dict) else layers[0]

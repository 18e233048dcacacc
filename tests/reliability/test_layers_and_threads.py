"""One hash on every threading layer and every number of threads: attention, mass, append, write and merge.

A layer is chosen once in a process, so each has one of its own, with more threads than this machine has cores. Sizes
are those where work is shared out and where sequences are split.
"""

import json

import processes
import pytest

#: Numbers of threads: one, two, and more than there are cores.
THREADS = [1, 2, 8]
FEW = ["fp32", "int8"]
KINDS = ["fp32", "fp16", "bf16", "int8", "int4"]
# Around one split of the KV range, two, and three; and a length of every remainder of a tile.
LENGTHS = [1023, 1024, 1025, 2047, 2048, 2049, 3100, 5000]

SCRIPT = """
import hashlib
import numba
found = {}

def note(name, *arrays):
    sha = hashlib.sha256()
    for x in arrays:
        sha.update(np.ascontiguousarray(x).tobytes())
    found.setdefault(name, []).append(sha.hexdigest()[:16])

def once(kind, lengths):
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.standard_normal(shape, dtype=np.float32)
    heads, group, dim, block = 4, 4, 64, 16
    # Rows of a size at which threads share them: appended, fused, taken over.
    pool = numkv.PagedPool(2 * (max(lengths) // block + 2), block, heads, dim, kind=kind)
    layer = numkv.PagedLayer(pool.blocks.num_blocks // 2, block, heads, dim, pool=pool)
    new = draw(2, max(lengths), heads, dim)
    layer.append(new[0], new[1])
    scales = {} if not numkv.kind(kind).has_scales else {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
    note(f"{kind} append", layer.k, layer.v, *scales.values())
    qkv, table = draw(500, (heads * group + 2 * heads) * dim), draw(500, dim // 2)
    q = layer.pool and numkv.PagedLayer(40, block, heads, dim, pool=pool).write(
        qkv, num_q_heads=heads * group, qk_mode=1, cos=np.cos(table), sin=np.sin(table),
        q_norm_weight=np.ones(dim, np.float32), k_norm_weight=np.ones(dim, np.float32))
    note(f"{kind} write", q, layer.k, layer.v, *scales.values())
    for n in sorted(lengths, reverse=True):
        layer.truncate(n)
        q = draw(1, heads * group, dim)
        out, lse = layer.decode_attention(q, return_lse=True)
        note(f"{kind} decode of {n}", out, lse)
        note(f"{kind} mass of {n}", layer.attention_weights(q))
    n = min(lengths)
    q = draw(70, heads * group, dim)
    out, lse = numkv.paged_prefill_attention(
        q, layer.k, layer.v, layer.block_table[None].copy(), [n], [0, 70], return_lse=True, **scales)
    note(f"{kind} prefill", out, lse)
    note(f"{kind} merge", *numkv.merge_states(out, lse, out[::-1].copy(), lse))
    q = draw(5, heads * group, dim)  # a batch: another sequence beside it
    out = numkv.paged_decode_attention(
        q, layer.k, layer.v, np.repeat(layer.block_table[None], 5, 0), [n, 1, 17, 300, n - 1], **scales)
    note(f"{kind} batch", out)
    rows = draw(2, 1, heads, 4000, dim)
    cache = np.zeros((2, 1, heads, 4001, dim), np.float32)
    numkv.append(rows[0], rows[1], cache[0], cache[1], np.array([1]))
    note("append of a batch", cache)

for threads in THREADS:
    numba.set_num_threads(threads)
    for kind in KINDS:
        once(kind, LENGTHS)
assert numba.threading_layer() == os.environ["NUMBA_THREADING_LAYER"]
print(json.dumps(found))
"""


def hashes(layer, kinds, lengths):
    """Hashes of a layer, by what was computed, for each number of threads."""
    given = f"THREADS, KINDS, LENGTHS = {THREADS}, {kinds}, {lengths}\n"
    return processes.run(given + SCRIPT, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="8")


def check(kinds, lengths):
    found = {layer: hashes(layer, kinds, lengths) for layer in processes.LAYERS}
    names = {name for of_layer in found.values() for name in of_layer}
    assert len(names) > 4 * len(kinds)
    for name in names:
        different = {h for of_layer in found.values() for h in of_layer[name]}
        assert len(different) == 1, json.dumps({n: x[name] for n, x in found.items()})


@pytest.mark.slow
def test_layers_and_threads_agree():
    check(FEW, [1025, 3100])


@pytest.mark.nightly
def test_layers_and_threads_agree_on_every_kind():
    check(KINDS, LENGTHS)

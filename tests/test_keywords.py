"""What messages say where a call gets an argument by a name of another library, or by a name with a mistake."""

import inspect
import re

import numpy as np
import pytest

import numkv
from numkv.blocks import BlockPool
from numkv.keywords import _NAMES, explain, meant
from numkv.ray import ShardedKVCache
from numkv.store import PrefixStore

SIZES = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 8}
Q = np.ones((1, 4, 8), np.float32)
K = np.ones((1, 2, 16, 8), np.float32)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dtype", '`kind`, such as kind="fp16"'),
        ("num_heads", "`num_kv_heads`, the heads of K and V"),
        ("n_heads", "`num_kv_heads`"),
        ("capacity", "`max_seq_len`"),
        ("max_len", "`max_seq_len`"),
        ("sliding_window", "`window_left` of `decode_attention`: sliding_window - 1"),
        ("device", '`target`: "cpu" or "cuda"'),
        ("head_dims_v", "`head_dim_v`"),  # a slip
    ],
)
def test_a_cache_says_what_was_meant(name, said):
    with pytest.raises(
        TypeError, match=rf"^KVCache\(\) got an unexpected keyword .*'{name}'"
    ) as caught:
        numkv.KVCache(**SIZES, **{name: 4})
    assert f"; did you mean {said}" in str(caught.value)


@pytest.mark.parametrize(
    ("cls", "name", "said"),
    [
        (numkv.ContiguousLayer, "max_seq_len", "`capacity`"),
        (numkv.PagedLayer, "page_size", "`block_size`"),
        (numkv.PagedPool, "num_pages", "`num_blocks`"),
        (numkv.PagedKVCache, "max_len", "`num_blocks`, of `block_size` tokens each"),
        (numkv.PagedKVCache, "kv_heads", "`num_kv_heads`"),
        (numkv.HeadCompressor, "capacit", ""),
        (numkv.CausalCache, "window_size", "`window_left`, earlier tokens"),
        (BlockPool, "page_size", "`block_size`"),
        (PrefixStore, "max_bytes", "`max_nbytes`"),
        (ShardedKVCache, "kv_heads", "`num_kv_heads`"),
    ],
)
def test_other_objects_do_too(cls, name, said):
    """Also where another argument is missing, which Python says first of calls that take further names."""
    with pytest.raises(TypeError) as caught:
        cls(**{name: 4})
    message = str(caught.value)
    assert message.startswith(f"{cls.__name__}() ")
    assert name in message
    assert (f"; did you mean {said}" in message) == bool(said)


def test_a_paged_cache_that_lacks_nothing():
    with pytest.raises(TypeError, match="'dtype'; did you mean `kind`"):
        numkv.PagedKVCache(**SIZES, num_blocks=4, dtype="int8")


def test_methods_say_it_too():
    cache = numkv.KVCache(**SIZES)
    with pytest.raises(TypeError, match=r"^KVCache\.advance\(\) got an unexpected .*'tokens'$"):
        cache.advance(tokens=3)
    with pytest.raises(
        TypeError, match=r"^CausalCache\.init\(\) got .*'dtype'; did you mean `kind`"
    ):
        numkv.CausalCache().init(dtype="fp16")
    layer = numkv.ContiguousLayer(16, 2, 8)
    with pytest.raises(
        TypeError, match=r"^ContiguousLayer\.compact\(\) .*; did you mean `shift`\?"
    ):
        layer.compact([], shifts=None)
    paged = numkv.PagedKVCache(**SIZES, num_blocks=4)
    with pytest.raises(TypeError, match=r"^PagedKVCache\.commit\(\) .*did you mean `token_ids`\?"):
        paged.commit(paged.reserve([paged.add()], [1]), input_ids=[1])
    pool = BlockPool(2, 2)
    with pytest.raises(TypeError, match=r"^BlockPool\.release\(\) .*'id'; did you mean `ids`\?"):
        pool.release(id=[0])
    with pytest.raises(TypeError, match=r"^BlockPool\.ref_count\(\) .*; did you mean `ids`\?"):
        pool.ref_count(id=[0])
    for call in (layer.append, layer.write):
        with pytest.raises(
            TypeError, match=r"^ContiguousLayer\.\w+\(\) .*; did you mean `check_finite`\?"
        ):
            call(check_finit=True)


def test_binding_and_other_rare_calls_do():
    paged = numkv.PagedKVCache(**SIZES, num_blocks=4)
    for bind in (numkv.ContiguousLayer(16, 2, 8).bind, numkv.KVCache(**SIZES).bind, paged.bind):
        with pytest.raises(
            TypeError, match=r"bind\(\) got .*'softmax_scale'; did you mean `sm_scale`"
        ):
            bind(4, softmax_scale=1.0)
    with pytest.raises(TypeError, match=r"^`scale`: .*; did you mean `sm_scale`"):
        numkv.attention_weights(Q, K, [5], scale=1.0)


def test_calls_that_write_a_token_leave_it_to_python():
    """As `docs/errors.md` says: a look at names would cost each of them something."""
    for call in (numkv.append, numkv.paged_append, numkv.paged_write):
        with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'dtype'$"):
            call(dtype="int8")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("scale", "; did you mean `sm_scale`, which"),
        ("softcap", "; did you mean `logits_soft_cap`?"),
        ("attn_mask", "; did you mean `mask`, a bit"),
        ("sinkz", "; did you mean `sinks`?"),
        (
            "zzz",
            "; options are alibi_slopes, causal, logits_soft_cap, mask, ranges, sinks, sm_scale",
        ),
        ("sliding_window", "; pass window_left=sliding_window - 1"),
    ],
)
def test_attention_does_too(name, said):
    with pytest.raises(TypeError, match=re.escape(said)):
        numkv.decode_attention(Q, K, K, [5], **{name: 1})


def test_signatures_are_those_of_the_classes():
    assert "max_seq_len" in inspect.signature(numkv.KVCache).parameters
    assert "max_nbytes" in inspect.signature(numkv.PagedKVCache).parameters


def test_errors_of_what_is_called_inside_stay_as_they_are():
    def inner(a):
        return a

    def outer():
        inner(b=1)

    for error in (TypeError("x"), TypeError(), TypeError(3), numkv.UnsupportedDType("x")):
        before = error.args
        explain(error, outer, {"dtype"}, "outer")
        assert error.args == before
    with pytest.raises(TypeError) as caught:
        outer()
    before = caught.value.args
    explain(caught.value, outer, {"b"}, "outer")
    assert caught.value.args == before


def test_every_name_leads_to_an_argument_that_there_is():
    """Of some public class or function."""
    taken = set()
    for name in numkv.__all__:
        value = getattr(numkv, name)
        own = [value] if inspect.isfunction(value) else []
        if inspect.isclass(value):
            own = [f for _, f in inspect.getmembers(value, inspect.isfunction)]
        taken |= {p for f in own for p in inspect.signature(f).parameters}
    taken |= set(inspect.signature(numkv.PagedKVCache).parameters) | set(
        numkv.AttentionOptions.__annotations__
    )
    for meanings in _NAMES.values():
        assert meanings.keys() <= taken
    assert meant("dtype", ["sm_scale"]) == ""
    assert meant("kinds", ["kind", "target"]) == "; did you mean `kind`?"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: numkv.decode_attention(Q, K, K, x), r"`seq_lens`: .* \(1,\), got the one number"),
        (lambda x: numkv.decode_attention(x, K, K, [5]), r"`q`: .*, got \w+; pass an array$"),
        (lambda x: numkv.decode_attention(Q, K, x, [5]), r"`v`: .*, got \w+; pass an array$"),
        (lambda x: numkv.ContiguousLayer(16, 2, 8).append(x, x), r"`k`: .*, got \w+; pass an array$"),
        (lambda x: numkv.paged_decode_attention(Q, K, K, x, [5]),
         r"`block_table`: .* \(1, max_blocks\), got the one number .*; pass a list of integers for each sequence$"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("number", [5, 5.0, True], ids=str)
def test_one_number_where_an_array_is_wanted(call, said, number):
    with pytest.raises(numkv.UnsupportedDType, match=said):
        call(number)


def test_what_to_write_for_one_number():
    with pytest.raises(numkv.UnsupportedDType, match=r"; pass \[5\]$"):
        numkv.decode_attention(Q, K, K, 5)
    with pytest.raises(numkv.UnsupportedDType, match=r"; pass a list of integers$"):
        numkv.decode_attention(Q, K, K, True)
    with pytest.raises(
        numkv.UnsupportedDType, match=r"got NoneType; this argument cannot be left out$"
    ):
        numkv.decode_attention(Q, K, K, None)
    with pytest.raises(numkv.DimensionMismatch, match=r"pass \[block_table\]$"):
        numkv.paged_decode_attention(Q, K, K, [0, 1], [5])


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((1, 3, 8), r"got 3; the cache was made with so many kv heads.*the model's num_kv_heads$"),
        ((4, 5, 8), r"got 5; q is \(tokens, q heads, dim\).*pass q.swapaxes\(0, 1\)$"),
    ],
)
def test_q_heads_of_a_cache(shape, said):
    """Who has passed queries only reads nothing of keys and values."""
    layer = numkv.ContiguousLayer(16, 2, 8)
    layer.append(np.ones((9, 2, 8), np.float32), np.ones((9, 2, 8), np.float32))
    with pytest.raises(numkv.DimensionMismatch, match=said):
        layer.decode_attention(np.ones(shape, np.float32))
    with pytest.raises(
        numkv.DimensionMismatch, match="check that `k` and `v` have their heads before"
    ):
        numkv.decode_attention(np.ones((1, 3, 8), np.float32), K, K, [5])
    with pytest.raises(
        numkv.DimensionMismatch, match="check that the pools have their heads before"
    ):
        numkv.paged_decode_attention(np.ones((1, 3, 8), np.float32), K, K, [[0]], [5])

"""`WrapperCache`: several caches, one for each type of layer, that do everything together or not at all."""

import naive_cells
import numpy as np
import pytest
from cell_problems import Pair, draw, plus, plus_one

import numkv

F32 = np.float32
TYPES = [0, 1, 0]


def numbers(values):
    """Rows of tokens that are numbers."""
    return np.array(values, F32).reshape(-1, 1, 1)


def cells(sizes, shifts=(None, None), **told):
    """The oracle of a sliding window and a causal cache."""
    sliding = naive_cells.Cells(*sizes, **({"window": 1} | told), shift=shifts[0])
    return sliding, naive_cells.Cells(*sizes, shift=shifts[1], padding=told.get("padding", 1))


def make(target, sizes=(1, 16, 16), shifts=(False, False), switch=False, **config):
    """A sliding window of 1 and a causal cache, layers 0 and 2 of the first and 1 of the second."""
    children = [
        numkv.CausalCache(window_left=1, shift=plus(target) if shifts[0] else None),
        numkv.CausalCache(shift=plus(target) if shifts[1] else None),
    ]
    cache = numkv.WrapperCache(*children, **({} if switch else {"layer_types": TYPES}))
    if config:
        cache.set_config(numkv.CacheConfig(**config))
    cache.init("fp32", *sizes, target)
    oracles = cells(
        sizes, [plus_one if s else None for s in shifts], padding=config.get("padding", 1)
    )
    return Pair(
        cache, *oracles, target=target, types=TYPES, switch=switch,
        mask_dtype=config.get("mask_dtype", "fp32"), permuted_v=config.get("permuted_v", False),
    )  # fmt: skip


def forward(pair, positions, sequences, values=None):
    """A pass with numbers, all layers of it."""
    if not pair.start_forward(positions, sequences):
        return False
    for layer in range(3):
        rows = numbers(positions if values is None else values) + 10 * layer
        pair.put(layer, rows, rows)
    return True


def shows(pair, layer, values, mask):
    k, _, got = pair.check(layer)
    assert draw(got) == mask
    assert (k[:, 0, 0] - 10 * layer).tolist() == values


@pytest.mark.parametrize("switch", [False, True], ids=["layer_types", "set_layer_type"])
def test_each_layer_has_its_own_cache(target, switch):
    pair = make(target, switch=switch)
    assert forward(pair, [0, 1, 2, 3], [0] * 4)
    assert forward(pair, [4, 5], [0, 0])
    for layer in (0, 2):
        shows(pair, layer, [4, 5, 2, 3], "0xx0 / 00xx")
    shows(pair, 1, [0, 1, 2, 3, 4, 5], "00000x / 000000")


@pytest.mark.parametrize("switch", [False, True])
def test_attention(target, rng, switch):
    pair = make(target, switch=switch)
    for positions in ([0, 1, 2], [3]):
        assert forward(pair, positions, [0] * len(positions))
        for layer in range(3):
            pair.attends(layer, rng.standard_normal((len(positions), 2, 1), F32))


def test_the_layer_type_is_of_the_pass(target, to):
    children = (
        numkv.CausalCache(window_left=1),
        numkv.CausalCache(),
        numkv.CausalCache(chunk_size=2),
    )
    cache = numkv.WrapperCache(*children)
    assert cache.underlying_cache is children[0]
    cache.init("fp32", 1, 4, 4, target)
    for i in (2, 0, 1):
        cache.set_layer_type(i)
        assert cache.underlying_cache is children[i]
    cache.start_forward(numkv.Batch([0], [0]))
    assert cache.underlying_cache is children[0]
    cache.set_layer_type(1)
    cache.put(7, to(numbers([3])), to(numbers([3])))
    children[1].get(7)
    with pytest.raises(IndexError):
        children[0].get(7)
    with pytest.raises(numkv.CacheFull):
        cache.start_forward(numkv.Batch([1, 2, 3, 4], [0] * 4))
    assert cache.underlying_cache is children[1]
    for bad in (-1, 3, 100):
        with pytest.raises(IndexError):
            cache.set_layer_type(bad)
    assert cache.underlying_cache is children[1]


def test_children_are_arguments_each():
    with pytest.raises(
        TypeError, match=r"`caches`: .*got list; pass a list as WrapperCache\(\*caches\)"
    ):
        numkv.WrapperCache([numkv.CausalCache(), numkv.CausalCache()])


def test_layer_types_out_of_range(target, to):
    for bad in ([0, 2], [-1]):
        with pytest.raises(IndexError, match="layer_types"):
            numkv.WrapperCache(numkv.CausalCache(), numkv.CausalCache(), layer_types=bad)
    pair = make(target)
    assert forward(pair, [0], [0])
    rows, q = to(numbers([1])), to(np.ones((1, 1, 1), F32))
    for layer in (-1, 3):
        for call in (
            lambda layer=layer: pair.cache.put(layer, rows, rows),
            lambda layer=layer: pair.cache.get(layer),
            lambda layer=layer: pair.cache.decode_attention(layer, q),
        ):
            with pair.refused(IndexError):
                call()


def test_configuration_goes_to_every_child(target):
    pair = make(target, (1, 6, 6), padding=4, mask_dtype="fp16", permuted_v=True)
    assert forward(pair, [0, 1], [0, 0])
    shows(pair, 0, [0, 1, 0, 0], "0xxx / 00xx")
    k, v, mask = pair.check(1)
    assert len(k) == len(v) == mask.shape[1] == 4


def test_except_is_the_childs(target):
    pair = make(target)
    assert forward(pair, [0, 1], [0, 0])
    pair.set_causal(1, [0])
    shows(pair, 1, [0, 1], "00 / 00")
    shows(pair, 0, [0, 1], "0x / 00")


def test_reserve(target):
    pair = make(target, (1, 4, 2))
    assert pair.start_forward([0, 1], [0, 0], reserve=True)
    for layer in range(3):
        pair.put(layer, numbers([8, 9]), numbers([8, 9]))
        k, v, mask = pair.check(layer)
        assert not k.any()
        assert not v.any()
        assert draw(mask) == " / ".join(["x" * len(k)] * 2)


def test_all_must_be_able_to_resume(target):
    pair = make(target)
    assert forward(pair, [0, 1, 2, 3], [0] * 4)
    assert pair.cache.can_resume(0, 4) is True
    assert forward(pair, [4], [0])
    assert [pair.cache.can_resume(0, p) for p in (2, 3, 4, 5, 6)] == [
        False,
        False,
        True,
        True,
        False,
    ]
    assert pair.model.children[1].can_resume(0, 2)


# ---------------------------------------------------------------- all or nothing


@pytest.mark.parametrize("switch", [False, True])
def test_a_full_child_leaves_all_as_they_were(target, switch):
    """The sliding window would have had room, after an eviction that must not have happened."""
    pair = make(target, (1, 4, 2), switch=switch)
    assert forward(pair, [0, 1], [0, 0])
    assert forward(pair, [2, 3], [0, 0])
    assert pair.model.children[0].positions_of(0) == [1, 2, 3]
    assert not forward(pair, [4], [0])
    shows(pair, 0, [2, 1, 3], "00x / 0x0")
    pair.probe()
    assert pair.change("remove", 0, 3)
    assert forward(pair, [3], [0])
    pair.probe()


def test_the_first_child_may_be_the_full_one(target):
    pair = make(target, (1, 16, 2))
    assert forward(pair, [0, 1], [0, 0])
    assert not forward(pair, [2, 3, 4, 5], [0] * 4)
    pair.probe()


@pytest.mark.parametrize("shifts", [(True, False), (False, True), (False, False)])
def test_a_child_without_a_shift(target, shifts):
    """Keys of the other do not move either."""
    pair = make(target, shifts=shifts)
    assert forward(pair, [0, 1, 2], [0] * 3)
    assert not pair.change("remove", 0, 0, 1)
    pair.probe()
    assert pair.change("remove", 0, 2, 9)
    pair.probe()


def test_a_child_whose_shift_fails(target):
    def fails(layer, keys, offsets):
        raise ZeroDivisionError

    for shifts in ((plus(target), fails), (fails, plus(target))):
        cache = numkv.WrapperCache(
            *(numkv.CausalCache(shift) for shift in shifts), layer_types=[0, 1, 0]
        )
        cache.init("fp32", 1, 8, 8, target)
        oracles = [naive_cells.Cells(1, 8, 8, shift=plus_one) for _ in shifts]
        pair = Pair(cache, *oracles, target=target, types=TYPES)
        assert forward(pair, [0, 1, 2], [0] * 3)
        with pair.refused(ZeroDivisionError):
            cache.remove(0, 0, 1)
        pair.probe()


def test_both_move(target):
    pair = make(target, shifts=(True, True))
    assert forward(pair, [0, 1, 2, 3], [0] * 4)
    assert pair.change("remove", 0, 1, 2)
    pair.probe()
    assert forward(pair, [3], [0])
    pair.probe()


def test_a_hole_that_only_one_child_has(target):
    """What the window let go of needs no shift where nothing is left to move."""
    pair = make(target, (2, 16, 2))
    for p in range(5):
        assert forward(pair, [p], [0])
    assert pair.change("copy_prefix", 0, 1, 5)
    assert pair.change("remove", 1, 5, 9)
    assert not pair.change("remove", 0, 0, 1)
    pair.probe()


def test_copies_go_to_every_child(target):
    pair = make(target, (2, 16, 4))
    assert forward(pair, [0, 1, 2, 3], [0] * 4)
    assert pair.change("copy_prefix", 0, 1, 3)
    pair.probe()
    assert forward(pair, [3, 4], [1, 0])
    pair.probe()


def test_a_child_that_copies_nothing(target, to):
    """An encoder cannot; the causal cache beside it does not either."""
    causal = numkv.CausalCache()
    for children in ((causal, numkv.EncoderCache()), (numkv.EncoderCache(), numkv.CausalCache())):
        cache = numkv.WrapperCache(*children)
        cache.init("fp32", 1, 8, 8, target)
        which = [isinstance(c, numkv.CausalCache) for c in children].index(True)
        pair = Pair(children[which], naive_cells.Cells(1, 8, 8), target=target)
        pair.model.start_forward([0, 1], [0, 0])
        cache.start_forward(numkv.Batch([0, 1], [0, 0]))
        pair.put(0, numbers([1, 2]), numbers([1, 2]))
        pair.passing = True
        with pair.refused(numkv.NotSupported):
            cache.copy_prefix(0, 1, 2)
        pair.probe()


def test_an_encoder_beside_a_full_child(target, to, host):
    """It keeps the position of what it holds."""
    encoder, causal = numkv.EncoderCache(), numkv.CausalCache()
    cache = numkv.WrapperCache(encoder, causal)
    cache.init("fp32", 1, 2, 2, target)
    cache.start_forward(numkv.Batch([0, 1], [0, 0], [1]))
    cache.put(0, to(numbers([1, 2, 3])), to(numbers([1, 2, 3])))
    assert encoder.encoder_cached
    with pytest.raises(numkv.CacheFull):
        cache.start_forward(numkv.Batch([2], [0], [0]))
    cache.put(0, to(numbers([4, 5, 6])), to(numbers([4, 5, 6])))  # of the pass that is still on
    cache.remove(0, 2, 3)
    assert encoder.encoder_cached
    cache.remove(0, 1, 2)
    assert not encoder.encoder_cached


def test_a_failed_init_leaves_no_child_initialised(target):
    """An encoder is for one sequence."""
    children = numkv.CausalCache(), numkv.EncoderCache()
    cache = numkv.WrapperCache(*children)
    with pytest.raises(numkv.NumkvError):
        cache.init("fp32", 2, 8, 8, target)
    with pytest.raises(numkv.NumkvError):
        children[0].start_forward(numkv.Batch([0], [0]))
    cache.init("fp32", 1, 8, 8, target)
    cache.start_forward(numkv.Batch([0], [0]))


def test_a_failed_configuration_configures_no_child():
    children = numkv.CausalCache(), numkv.CausalCache()
    children[1].set_config(numkv.CacheConfig(padding=2))
    cache = numkv.WrapperCache(*children)
    with pytest.raises(numkv.NumkvError):
        cache.set_config(numkv.CacheConfig(padding=4))
    children[0].set_config(numkv.CacheConfig(padding=8))


def test_bad_calls_change_no_child(target):
    pair = make(target, shifts=(True, True))
    assert forward(pair, [0, 1, 2], [0] * 3)
    for call, error in (
        (lambda: pair.cache.remove(0, 2, 1), ValueError),
        (lambda: pair.cache.remove(-1, 0), IndexError),
        (lambda: pair.cache.copy_prefix(-1, 0, 1), IndexError),
        (lambda: pair.cache.copy_prefix(0, -1, 1), IndexError),
        (lambda: pair.cache.can_resume(-1, 0), IndexError),
        (lambda: pair.cache.start_forward(numkv.Batch([3], [-1])), IndexError),
        (lambda: pair.cache.start_forward(numkv.Batch([3], [0], [1])), IndexError),
    ):
        with pair.refused(error):
            call()
    pair.probe()


# ---------------------------------------------------------------- life


def test_before_init_and_after_close(target, to):
    children = numkv.CausalCache(window_left=1), numkv.CausalCache()
    rows = to(numbers([1]))
    with numkv.WrapperCache(*children) as cache:
        with pytest.raises(numkv.NumkvError):
            cache.start_forward(numkv.Batch([0], [0]))
        cache.init("fp32", 1, 4, 4, target)
        for call in (lambda: cache.put(0, rows, rows), lambda: cache.get(0)):
            with pytest.raises(numkv.NumkvError):
                call()
        cache.start_forward(numkv.Batch([0], [0]))
        with pytest.raises(numkv.NumkvError):
            cache.set_config(numkv.CacheConfig())
    for closed in (cache, *children):
        with pytest.raises(numkv.NumkvError, match="close"):
            closed.start_forward(numkv.Batch([0], [0]))
        with pytest.raises(numkv.NumkvError, match="close"):
            closed.remove(0, 0)


def test_repr_says_what_it_is(target):
    text = repr(make(target).cache)
    assert text.startswith("WrapperCache(")
    for part in ("window_left=1", "CausalCache", target):
        assert part in text

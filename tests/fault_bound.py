"""Bound calls in the test of memory that runs out; see `fault_subjects`."""

from fault_base import Q_HEADS, queries, rows


def bind(it):
    """Bind a cache, or a layer."""
    return repr(it.bind(Q_HEADS))


def of_cache(level):
    """Calls of a `KVCache`; `level` advances it past all its rows."""

    def bound(cache):
        level(cache)
        cache.bound = cache.bind(Q_HEADS)

    def begun(cache):
        bound(cache)
        cache.begun = cache.bound.begin(1)

    return {
        "begin a bound step": (bound, lambda c: c.bound.begin(1)),
        "a bound call": (begun, lambda c: c.begun(1, queries(1), *rows(1, 7))),
    }


def _bind(layer):
    layer.bound = layer.bind(Q_HEADS)


OF_LAYER = {"a bound call": (_bind, lambda c: c.bound(queries(1), *rows(1, 7)))}


def _begin(cache):
    cache.begun = cache.bind(Q_HEADS).begin(cache.step)


OF_STEP = {"a bound call": (_begin, lambda c: c.begun(1, queries(5), *rows(5, 9)))}

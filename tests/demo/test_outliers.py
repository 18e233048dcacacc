"""Judges of kinds where keys have outlier channels: a model that computes the same with them, and random rows."""

import naive
import numpy as np
import outlier_keys
import pytest
from demo_models import TOKENS, write_checkpoint

import numkv
from numkv.demo import accuracy
from numkv.demo.cache import LayerCache, parse_cache
from numkv.demo.evaluate import (
    OUTLIER_BYTES,
    OUTLIER_CONTEXT,
    OUTLIER_FACTORS,
    beginning,
    evaluate,
    held_out,
    with_outliers,
)
from numkv.demo.model import Model

#: KL divergence from fp32 in nats a token on the bundled model, by factor: what a prototype in NumPy found.
DIVERGENCE = {
    "int8": (3.0e-5, 9.7e-4, 1.5e-2),
    "int8+rotate": (2.1e-5, 7.7e-5, 5.3e-4),
    "int4": (3.3e-3, 1.2e-1, 1.14),
    "int4+rotate": (2.0e-3, 1.2e-2, 9.9e-2),
}
#: Errors of attention: keys in a kind, values in int8.
ERRORS = {
    ("int8", False): {"none": 0.014, "low": 0.185, "random": 0.142, "high": 0.137, "student": 0.044, "growing": 0.015},
    ("int8", True): {"none": 0.014, "low": 0.085, "random": 0.072, "high": 0.053, "student": 0.010, "growing": 0.015},
    ("int4", False): {"none": 0.145, "low": 1.87, "random": 1.07, "high": 0.884, "student": 0.299, "growing": 0.150},
    ("int4", True): {"none": 0.140, "low": 1.08, "random": 0.772, "high": 0.601, "student": 0.107, "growing": 0.165},
}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_predictions_are_the_same(tmp_path, family):
    """Over fp32 to the last bit but those of sums, though keys differ."""
    write_checkpoint(tmp_path, family)
    model = Model.load(tmp_path)
    plain = model.start(16)
    expected = plain.forward(TOKENS)
    for factor in OUTLIER_FACTORS[1:]:
        wide = with_outliers(model, factor).start(16)
        np.testing.assert_allclose(wide.forward(TOKENS), expected, atol=1e-5)
        keys = [
            np.abs(np.asarray(x.batch.cache.layers[1].k[0, :, : len(TOKENS)])).max((0, 1))
            for x in (plain, wide)
        ]
        np.testing.assert_allclose(keys[1][[1, 5]], factor * keys[0][[1, 5]], rtol=1e-4)
        others = [0, 2, 3, 4, 6, 7]
        np.testing.assert_allclose(keys[1][others], keys[0][others], rtol=1e-4)


def test_the_beginning_of_a_text():
    (text,) = (beginning(x) for x in held_out().documents if x.name == "csv.py")
    assert len(text.text.encode()) == OUTLIER_BYTES


@pytest.mark.nightly
@pytest.mark.kernels
def test_kinds_on_the_bundled_model():
    """As a prototype in NumPy found, on the same text."""
    found = held_out()
    if "csv.py" in (*found.changed, *found.missing):
        pytest.skip("this Python's csv.py is another text")
    model = Model.load()
    text = [beginning(x) for x in found.documents if x.name == "csv.py"]
    caches = {label: parse_cache(label) for label in DIVERGENCE}
    for i, factor in enumerate(OUTLIER_FACTORS):
        scores = evaluate(
            with_outliers(model, factor), text, caches, context=OUTLIER_CONTEXT, chunk=64
        )
        assert scores[0].bits_per_byte == pytest.approx(1.4313, abs=1e-4)
        for score in scores[1:]:
            assert score.kl_divergence == pytest.approx(DIVERGENCE[score.label][i], rel=0.75)
    worst = {score.label: score.kl_divergence for score in scores}
    assert worst["int8"] > 300 * DIVERGENCE["int8"][0]
    assert worst["int4"] > 300 * DIVERGENCE["int4"][0]


def attended(k, v, q, kind, rotate):
    """Attention of numkv over stored rows, where all queries see all keys."""
    cache = numkv.KVCache(
        1, outlier_keys.HEADS, outlier_keys.DIM, k_kind=kind, v_kind="int8", max_seq_len=len(k), rotate=rotate
    )  # fmt: skip
    cache.append(0, *(x.astype(np.float32) for x in (k, v)))
    q = q.astype(np.float32)
    # One query at a time, as decode does: each sees all.
    return np.concatenate([cache.decode_attention(0, one[None]) for one in q])


def check_rows(kind, rotate, rows):
    if rows in ("student", "growing"):
        k, v, q = outlier_keys.without_rope(rows)
    else:
        k, v, q = outlier_keys.biased(50, 100 if rows != "none" else 0, rows)
    out = attended(k, v, q[::8], kind, rotate)
    found = outlier_keys.error(out, outlier_keys.attention(k, v, q[::8]))
    assert found == pytest.approx(ERRORS[kind, rotate][rows], rel=0.25)


@pytest.mark.parametrize(("kind", "rotate"), [("int8", False), ("int4", True)])
def test_kinds_on_rows_with_a_slow_bias(kind, rotate):
    check_rows(kind, rotate, "low")


@pytest.mark.nightly
@pytest.mark.parametrize("rows", ["none", "low", "random", "high", "student", "growing"])
@pytest.mark.parametrize(("kind", "rotate"), ERRORS)
def test_kinds_on_random_rows(kind, rotate, rows):
    check_rows(kind, rotate, rows)


#: Keys by channel: what errors have to stay below, with queries of whole groups on (section 4 of the judges' recipes).
BELOW = {
    "int8_channel": {
        "none": 0.016, "low": 0.016, "random": 0.026, "high": 0.046, "student": 0.012, "growing": 0.017,
    },
    "int4_channel_fine": {
        "none": 0.20, "low": 0.20, "random": 0.13, "high": 0.13, "student": 0.09, "growing": 0.22,
    },
    "int4_channel": {"none": 0.21, "low": 0.21, "random": 0.40, "high": 0.60, "student": 0.11, "growing": 0.23},
}  # fmt: skip


def check_channels(kind, rows, target="cpu", tokens=2048, every=1, **options):
    """All keys are codes: queries come after a whole group, and see what is before it."""
    if rows in ("student", "growing"):
        k, v, q = outlier_keys.without_rope(rows, tokens=tokens, **options)
    else:
        high = 100 if rows != "none" else 0
        k, v, q = outlier_keys.biased(50, high, rows, tokens=tokens, **options)
    k, v, q = (x.astype(np.float32) for x in (k, v, q[::every]))
    spec = numkv.LayerSpec(outlier_keys.HEADS, outlier_keys.DIM, kind=kind, v_kind="int8")
    cache = numkv.PagedKVCache(
        layers=[spec], num_blocks=tokens // 16 + 9, block_size=64, target=target
    )
    place = numkv.targets.get(target)
    seq = cache.add()
    step = cache.reserve([seq], [tokens])
    step.append(0, *map(place.asarray, (k, v)))
    cache.commit(step)
    step = cache.reserve([seq], [len(q)])
    step.append(0, *(place.asarray(x[: len(q)]) for x in (k, v)))
    out = step.attention(
        0, place.asarray(q), ranges=place.asarray(np.array([[0, tokens]] * len(q)))
    )
    found = outlier_keys.error(
        place.to_host(out), outlier_keys.attention(*map(np.float64, (k, v, q)))
    )
    assert found < BELOW[kind][rows]


@pytest.mark.kernels
@pytest.mark.parametrize("kind", BELOW)
def test_keys_by_channel_stand_a_slow_bias(kind):
    check_channels(kind, "low")


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("rows", ["none", "low", "random", "high", "student", "growing"])
@pytest.mark.parametrize("kind", BELOW)
def test_keys_by_channel(kind, rows, seed):
    check_channels(kind, rows, seed=seed)


@pytest.mark.nightly
@pytest.mark.kernels
@pytest.mark.parametrize("kind", BELOW)
def test_keys_by_channel_on_cuda(kind):
    """A sample of the same rows, on the kernels that a simulator runs."""
    check_channels(kind, "low", target="cuda", tokens=192, every=16)


@pytest.mark.nightly
@pytest.mark.kernels
@pytest.mark.parametrize("theta", [1e6, 1e4])
@pytest.mark.parametrize("kind", BELOW)
def test_keys_by_channel_far_on(kind, theta):
    """Scales are those of 64 tokens, so they do not go stale where slow channels have moved on."""
    check_channels(kind, "low", tokens=32768, theta=theta)


def check_on_the_bundled_model(make, most, chunk):
    """Whatever the factor: scaling a channel changes no code. `most` are a divergence and bits per byte of kinds."""
    found = held_out()
    if "csv.py" in (*found.changed, *found.missing):
        pytest.skip("this Python's csv.py is another text")
    model = Model.load()
    text = [beginning(x) for x in found.documents if x.name == "csv.py"]
    caches, found = {kind: make(kind) for kind in most}, {}
    for factor in OUTLIER_FACTORS:
        wide = with_outliers(model, factor)
        reference, *scores = evaluate(wide, text, caches, context=OUTLIER_CONTEXT, chunk=chunk)
        for score in scores:
            kl, bits = most[score.label]
            assert score.kl_divergence < kl
            assert abs(score.bits_per_byte - reference.bits_per_byte) < bits
            first = found.setdefault(score.label, score.kl_divergence)
            # Which channels have a second code depends on the factor.
            if not numkv.kind(score.label).fine_channels:
                assert score.kl_divergence == pytest.approx(first, rel=0.05)


@pytest.mark.nightly
@pytest.mark.kernels
def test_keys_by_channel_on_the_bundled_model():
    """As they are stored: a token's own group in full."""

    def paged(kind):
        def make(config, capacities):
            spec = numkv.LayerSpec(config.num_kv_heads, config.head_dim, kind=kind, v_kind="int8")
            blocks = 12 * sum(-(-n // 64) for n in capacities)
            return numkv.PagedKVCache(
                layers=[spec] * config.num_layers, num_blocks=blocks, block_size=64
            )

        return make

    most = {
        "int8_channel": (1.6e-5, 0.002),
        "int4_channel_fine": (1.1e-3, 0.008),
        "int4_channel": (1.8e-3, 0.006),
    }
    check_on_the_bundled_model(paged, most, 64)


class AllCodes:
    """A layer in fp32 whose rows are what codes say, those of a token's own group, too: no cache reads so."""

    def __init__(self, config, capacity, kind):
        sizes = config.num_kv_heads, config.head_dim
        self._layer, self._kind = numkv.ContiguousLayer(capacity, *sizes, kind="fp32"), kind
        self.truncate, self.decode_attention = self._layer.truncate, self._layer.decode_attention

    @property
    def seq_len(self):
        return self._layer.seq_len

    def write(self, qkv, **options):
        assert not self.seq_len  # a window at once
        q, some = self._layer.write(qkv, **options), naive.CHANNEL_TOKENS
        k, v = (np.array(x[0, :, : self.seq_len]) for x in (self._layer.k, self._layer.v))
        for begin in range(0, self.seq_len, some):
            group = np.s_[:, begin : begin + some]
            words, shared = naive.channel_group(k[group], self._kind)
            k[group] = naive.channel_values(words, shared[..., None, :], self._kind)
        v = naive.int8_dequantise(*naive.int8_quantise(v)).astype(np.float32)
        self.truncate(0)
        self._layer.append(*(np.ascontiguousarray(x.swapaxes(0, 1)) for x in (k, v)))
        return q


@pytest.mark.nightly
@pytest.mark.kernels
def test_all_keys_as_codes_on_the_bundled_model():
    """Without tokens in full, and with int8 values: what codes by channel cost alone."""

    def coded(kind):
        return lambda config, capacities: LayerCache(
            [AllCodes(config, *capacities, kind) for _ in range(config.num_layers)]
        )

    most = {
        "int8_channel": (3e-5, 0.002),
        "int4_channel_fine": (2.4e-3, 0.008),
        "int4_channel": (5e-3, 0.006),
    }
    check_on_the_bundled_model(coded, most, OUTLIER_CONTEXT)


@pytest.mark.parametrize("name", ["slow bias", "fast bias", "heavy tails"])
def test_rows_of_the_report(name):
    rows = accuracy.ROWS[name](256)
    plain, rotated = (
        accuracy.relative_error(
            accuracy.attended(parse_cache(label), rows),
            accuracy.exact_attention(rows.k, rows.v, rows.q),
        )
        for label in ("int8", "int8+rotate")
    )
    assert plain > 0.025  # three times what it is on Gaussian rows
    assert rotated < plain
    wide = np.abs(rows.k).mean(0)
    if name != "heavy tails":
        half = wide[:, :64] + wide[:, 64:]  # of pairs, which turn
        assert ((half > 40).sum(1) == 4).all()

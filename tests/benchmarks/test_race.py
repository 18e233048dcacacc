"""How contestants of `python -m perf` take turns, and what they compute. No clock matters."""

from types import SimpleNamespace

import ml_dtypes
import naive
import numpy as np
import pytest

import numkv
from numkv.bench.rounds import EVERY
from perf import __main__ as program
from perf import against, race, worker, workers
from perf.peers import (
    INT8_BESIDE,
    PAGED,
    CannotRun,
    Contestant,
    apart,
    nbytes,
    numkv_,
    numpy_,
    padded_layers,
    pieces_of,
    refuse,
    same_widths,
    stacked,
)
from perf.shapes import (
    COLD,
    MOST_LAYERS,
    PLAIN,
    SHAPES,
    Decode,
    Prefill,
    Shape,
    cold_layers,
)

TINY = Shape(2, 4, 2, 8, 32)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Blocks that tiny shapes fill."""
    monkeypatch.setattr(numkv_, "BLOCK_SIZE", 16)


@pytest.fixture
def decode(rng):
    return Decode(TINY, rng)


# ------------------------------------------------------------------ rounds


class Turns:
    """A contestant whose calls take `cost`; it is lost after so many turns."""

    def __init__(self, cost, last=1000):
        self.cost, self.left = cost, last

    def turn(self, seconds):
        if not self.left:
            raise workers.Died("died of old age")
        self.left -= 1
        return [self.cost] * max(1, round(seconds / self.cost))


def test_race(rng, monkeypatch):
    monkeypatch.setattr(race, "beside", lambda pids: SimpleNamespace(of_others=lambda: 0.02))
    contestants = {"quick": Turns(0.01), "slow": Turns(1.0), "dies": Turns(0.01, last=3)}
    result = race.race(contestants, 2.0, lambda: 1000.0, rng, race.ROUNDS, [])
    assert result.seconds("quick") == 0.01
    assert result.seconds("slow") == 1
    assert result.ratio("quick", "slow").middle == pytest.approx(100)
    assert race.share(result, "quick", 100) == pytest.approx(10)
    assert [x.probe for x in result.rounds] == [1000.0] * race.ROUNDS
    # A slow contestant sits out, but has a turn in every fourth round.
    assert sum("slow" in x.seconds for x in result.rounds) == race.ROUNDS / EVERY
    assert sum("quick" in x.seconds for x in result.rounds) == race.ROUNDS
    assert result.lost == {"dies": "Died: died of old age"}


@pytest.mark.parametrize(
    ("seconds", "rounds"), [(2.0, 20), (1.0, 20), (0.5, 10), (0.25, 5), (1e-3, 5)]
)
def test_short_races_have_fewer_rounds(seconds, rounds):
    assert race.rounds_of(seconds) == rounds


# ------------------------------------------------------------------ turns


@pytest.mark.parametrize(
    ("cost", "layers", "settled"),
    [
        (0.01, 2, 3),  # until 0.03 s are over
        (0.01, 7, 7),  # until all layers have been touched
        (0.2, 7, 3),  # or half a second has passed
    ],
)
def test_a_turn_settles_first(cost, layers, settled):
    clock, seen = SimpleNamespace(now=0.0), []

    def run(i):
        seen.append(i)
        clock.now += cost

    times, following = worker.turn(run, layers, 1, 0.1, clock=lambda: clock.now)
    assert times == pytest.approx([cost] * len(times))
    assert len(seen) == settled + len(times)
    assert seen == [(1 + n) % layers for n in range(len(seen))]
    assert following == (1 + len(seen)) % layers


def test_a_turn_ends_when_threads_sleep(monkeypatch):
    clock, used = SimpleNamespace(now=0.0), SimpleNamespace(now=0.0)

    def sleep(seconds):
        clock.now += seconds
        if clock.now < 0.05:
            used.now += seconds  # something still spins

    monkeypatch.setattr(worker.time, "sleep", sleep)
    clocks = {"clock": lambda: clock.now, "used": lambda: used.now}
    assert worker.fall_asleep(step=0.01, **clocks) == pytest.approx(0.04, abs=0.011)
    assert clock.now < 0.08


# ------------------------------------------------------------------ rows, layers, bytes


def test_decode_problem(decode):
    lens = np.full(TINY.batch, TINY.length)
    out, _ = naive.attention(decode.q, decode.k, decode.v, lens)
    assert np.allclose(decode.expected, out, rtol=1e-12)
    assert decode.error(decode.expected) == 0
    assert decode.error(2 * decode.expected) == pytest.approx(1)
    with pytest.raises(ValueError, match="expected a result"):
        decode.error(decode.expected[0])


UNEQUAL = {
    "lengths": Shape(3, 4, 2, 8, 64, lengths=(17, 64, 1)),
    "queries": Shape(2, 4, 2, 8, 32, queries=3),
    "widths": Shape(2, 4, 1, 8, 32, v_dim=4),
    "all": Shape(3, 4, 2, 8, 48, 6, 4, (33, 4, 48)),
}


def padded(rows, room):
    """A list of ``(heads, tokens, dim)`` as one array; NaN past the ends."""
    out = np.full((len(rows), rows[0].shape[0], room, rows[0].shape[2]), np.nan)
    for to, x in zip(out, rows, strict=True):
        to[:, : x.shape[1]] = x
    return out


@pytest.mark.parametrize("name", UNEQUAL)
def test_problems_of_unequal_shape(rng, name):
    shape = UNEQUAL[name]
    problem = Decode(shape, rng)
    k, v = (padded(list(x), shape.length) for x in (problem.k, problem.v))
    q = problem.q.reshape(-1, shape.q_heads, shape.dim)
    starts = np.arange(shape.batch + 1) * shape.queries
    out, _ = naive.attention(q, k, v, np.array(shape.lens), starts)
    assert problem.expected.shape == (*problem.q.shape[:-1], shape.dim_v)
    assert np.allclose(problem.expected.reshape(out.shape), out, rtol=1e-12)
    assert problem.expected.flags.writeable


@pytest.mark.parametrize("name", UNEQUAL)
@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_contestants_attend_to_unequal_shapes(rng, kind, name):
    shape = UNEQUAL[name]
    problem = Decode(shape, rng)
    of = numkv.kind(kind)
    widths = (shape.dim, shape.dim_v)
    plain = sum(shape.lens) * sum(of.bytes_per_token(shape.kv_heads, w) // 2 for w in widths)
    blocks = sum(-(-n // numkv_.BLOCK_SIZE) for n in shape.lens)
    makers = {**numkv_.decode(kind), "numpy": numpy_.decode(kind)[""]}
    for form, make in makers.items():
        contestant, error = worker.checked(make, problem, kind)
        assert contestant.bytes == plain + 4 * blocks * (form == PAGED)
        assert 0 < error < 0.02


@pytest.mark.parametrize("kind", ["int4", "code4"])
def test_a_race_of_four_bits_has_int8_beside(kind):
    assert INT8_BESIDE in numkv_.decode(kind)
    assert not any("int8" in line.name for line in against.every_line() if line.kind == kind)


def test_rooms_and_pieces():
    rows = [np.full((2, n, 3), n, np.float32) for n in (1, 4)]
    (stack,) = padded_layers([rows], 5)
    assert stack.shape == (MOST_LAYERS, 2, 2, 5, 3)
    assert stack.ctypes.data % 64 == 0
    assert (stack[:, 0, :, :1] == 1).all()
    assert (stack[:, 1, :, :4] == 4).all()
    assert not stack[:, 0, :, 1:].any()
    layers = pieces_of(rows, rows)
    assert [[x.shape for x in piece] for piece in layers[0]] == [
        [(1, 2, 1, 3)] * 2,
        [(1, 2, 4, 3)] * 2,
    ]
    dense = np.ones((3, 2, 4, 3), np.float32)
    assert [x.shape for x in pieces_of(dense, dense)[5][0]] == [dense.shape] * 2
    assert nbytes(rows, dense) == 4 * (6 + 24 + 72)


def test_shapes():
    lengths = SHAPES["K"].lens
    assert len(lengths) == SHAPES["K"].batch == 64
    assert min(lengths) >= 16
    assert max(lengths) <= SHAPES["K"].length
    assert np.median(lengths) < 1000 < np.mean(lengths)  # logarithms are uniform
    assert (lengths[0], sum(lengths)) == (550, 94311)  # whatever the machine
    assert "".join(PLAIN) == "ABCDEFGHI"
    assert str(SHAPES["A"]) == "(1, 32, 8, 128, 32768)"
    assert str(UNEQUAL["all"]) == "(3, 4, 2, 8, 48, 4 to 48 tokens, rows of V 6, 4 queries)"


def test_libraries_of_one_width(rng):
    same_widths(Decode(TINY, rng))
    with pytest.raises(CannotRun, match="one width"):
        same_widths(Decode(UNEQUAL["widths"], rng))


@pytest.mark.parametrize("dims", [(), (1,), (3, 5)])
def test_small_arrays_lie_apart(dims):
    x = np.full(dims, 7, np.float32)
    copy = apart(x)
    np.testing.assert_array_equal(copy, x)
    assert copy.shape == dims
    assert copy.dtype == x.dtype
    room = copy.base
    while room.base is not None:
        room = room.base
    before = copy.ctypes.data - room.ctypes.data
    assert copy.ctypes.data % 64 == 0
    assert before >= 128
    assert room.nbytes - before - copy.nbytes >= 128


def test_layers_come_from_memory():
    assert cold_layers(1) == MOST_LAYERS
    assert cold_layers(COLD) == cold_layers(3 * COLD) == 1
    size = COLD // 10 + 1
    assert cold_layers(size) * size >= COLD > (cold_layers(size) - 1) * size
    stack = stacked(np.arange(6, dtype=np.int16).reshape(2, 3), 4)
    assert stack.ctypes.data % 64 == 0
    assert stack.tolist() == [[[0, 1, 2], [3, 4, 5]]] * 4


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16", "int8"])
def test_contestants_count_their_bytes(decode, kind):
    tokens = TINY.batch * TINY.length
    plain = tokens * numkv.kind(kind).bytes_per_token(TINY.kv_heads, TINY.dim)
    table = tokens // numkv_.BLOCK_SIZE * 4
    expected = {"": plain, "paged by 128": plain + table}
    for form, make in numkv_.decode(kind).items():
        contestant, error = worker.checked(make, decode, kind)
        assert contestant.bytes == expected[form]
        of_head = numkv_.BLOCK_SIZE * TINY.dim * numkv.kind(kind).word.itemsize
        assert contestant.pieces == ((of_head, TINY.kv_heads * of_head) if form else ())
        assert contestant.layers == MOST_LAYERS
        assert 0 < error < 0.02
    contestant, error = worker.checked(numpy_.decode(kind)[""], decode, kind)
    assert contestant.bytes == plain
    assert 0 < error < 0.02


def test_prefill(rng):
    problem = Prefill(Shape(1, 4, 2, 8, 24), rng)
    out, _ = naive.attention(problem.q[0], problem.k, problem.v, [24], [0, 24])
    assert np.allclose(problem.expected[0], out, rtol=1e-12)
    assert problem.flops == 4 * 4 * 8 * sum(range(1, 25))
    contestant, error = worker.checked(numkv_.prefill("fp32")[""], problem, "fp32")
    assert contestant.run(1).dtype == np.float32
    assert error < 1e-6
    make = numkv_.prefill("bf16")[""]
    assert make(problem).run(0).dtype == ml_dtypes.bfloat16


def test_wrong_results_do_not_run(decode):
    def wrong_in_the_last_layer(problem):
        results = [problem.expected, problem.expected, 1.1 * problem.expected]
        return Contestant(lambda i: i, lambda i: results[i], 3, 1)

    with pytest.raises(CannotRun, match=r"wrong result, its relative error is 1\.0e-01"):
        worker.checked(wrong_in_the_last_layer, decode, "fp32")


def test_what_cannot_run_says_why(decode, rng):
    def broken(problem):
        raise RuntimeError("from a.cpp:1\n\n  no such kernel\n")

    forms = {"x": broken, "y": refuse("why")}
    commands = worker.Commands(SimpleNamespace(NAME="Peer", decode=lambda kind: forms))
    commands.problem(list(TINY), False, 0)
    made = {form: commands.make("fp32", form)["reason"] for form in commands.forms("fp32")}
    assert made == {"x": "RuntimeError: no such kernel", "y": "why"}

    library = SimpleNamespace(name="Peer", peer="peer", pid=0, contestants=lambda kind: made)
    probe = SimpleNamespace(ask=lambda _: 1.0, pid=0)
    how = program.Measured(0.01, 1.0, probe, rng)
    line = program.measure([library], "F", "fp32", how)
    assert [(r.name, r.reason) for r in line.rows] == [
        ("Peer x", "RuntimeError: no such kernel"),
        ("Peer y", "why"),
    ]
    assert line.ran == []
    assert line.ours is line.best_peer is None

    def gone(kind):
        raise workers.Died("died of SIGKILL")

    library.contestants = gone
    (row,) = program.measure([library], "F", "fp32", how).rows
    assert (row.name, row.reason) == ("Peer", "died of SIGKILL")


def test_a_coarse_format_may_have_a_larger_error(decode):
    def coarse(problem):
        return Contestant(lambda i: i, lambda i: 1.1 * problem.expected, 1, 1, largest_error=0.2)

    assert worker.checked(coarse, decode, "int8")[1] == pytest.approx(0.1)

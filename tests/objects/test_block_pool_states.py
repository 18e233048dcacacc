"""`BlockPool` against a model, over any order of calls."""

import numpy as np
from block_books import SIZE, state_of, unchanged
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from profiles import machine

import numkv
from numkv.blocks.pool import BlockPool
from numkv.blocks.prefix import block_digests
from numkv.blocks.records import MissReason

WIDTH = 8  # blocks in the machine's pools


def contents():
    """Names and tokens: many begin their search at the same place, and two have one name."""
    names = np.zeros((12, 32), np.uint8)
    names[:, 0] = [1, 1, 1, 1, 15, 15, 15, 0, 0, 9, 9, 9]
    names[:, 9] = range(12)
    names[11] = names[10]
    tokens = np.arange(12 * SIZE, dtype=np.int32).reshape(12, SIZE)
    return names, tokens


NAMES, TOKENS = contents()
NAME_OF = [bytes(name) for name in NAMES]


class Refused(Exception):
    """The model's own word for a call that must change nothing."""


class Model:
    """What a pool is, in dictionaries and lists."""

    def __init__(self, n):
        self.refs = dict.fromkeys(range(n), 0)
        self.pins = dict.fromkeys(range(n), 0)
        self.content = {}  # block: number of its content
        self.free = list(range(n))[::-1]  # a stack
        self.lru = []  # oldest first
        self.gone = {}  # names that were evicted and not stored again: the last for each home in the table

    def named(self, name):
        return next((b for b, c in self.content.items() if NAME_OF[c] == name), None)

    def holder(self, c):
        """The block with content `c`, or why there is none."""
        block = self.named(NAME_OF[c])
        if block is None:
            return MissReason.EVICTED if NAME_OF[c] in self.gone.values() else MissReason.ABSENT
        return block if self.content[block] == c else MissReason.TOKENS_DIFFER

    def shelve(self, ids):
        for b in ids:
            if not self.refs[b] and b not in self.content and b not in self.free:
                self.free.append(b)
        for b in reversed(ids):
            idle = not self.refs[b] and not self.pins[b] and b in self.content
            if idle and b not in self.lru:
                self.lru.append(b)

    def unshelve(self, b):
        if b in self.lru:
            self.lru.remove(b)

    def allocate(self, n):
        if n > len(self.free) + len(self.lru):
            raise Refused
        ids = []
        for _ in range(n):
            if self.free:
                block = self.free.pop()
            else:
                block = self.lru.pop(0)
                name = NAME_OF[self.content.pop(block)]
                self.gone[name[0] % (2 * WIDTH)] = name
            self.refs[block] = 1
            ids.append(block)
        return ids

    def allocate_ids(self, ids):
        if len(set(ids)) < len(ids) or any(self.refs[b] or self.pins[b] for b in ids):
            raise Refused
        for b in ids:
            if b in self.free:
                self.free.remove(b)
            else:
                self.lru.remove(b)
                name = NAME_OF[self.content.pop(b)]
                self.gone[name[0] % (2 * WIDTH)] = name
            self.refs[b] = 1
        return ids

    def release(self, ids):
        if any(ids.count(b) > self.refs[b] for b in ids):
            raise Refused
        for b in ids:
            self.refs[b] -= 1
        self.shelve(ids)

    def acquire(self, ids):
        if any(not self.refs[b] and b not in self.content for b in ids):
            raise Refused
        for b in ids:
            self.unshelve(b)
            self.refs[b] += 1

    def pin(self, ids):
        if any(b not in self.content for b in ids):
            raise Refused
        for b in ids:
            self.unshelve(b)
            self.pins[b] += 1

    def unpin(self, ids):
        if any(ids.count(b) > self.pins[b] for b in ids):
            raise Refused
        for b in ids:
            self.pins[b] -= 1
        self.shelve(ids)

    def register(self, ids, cs):
        if len(set(ids)) < len(ids) or any(
            not self.refs[b] or self.content.get(b, c) != c for b, c in zip(ids, cs, strict=True)
        ):
            raise Refused
        holders = []
        for b, c in zip(ids, cs, strict=True):
            holder = self.named(NAME_OF[c])
            if holder is None:
                self.content[b] = c
                home = NAME_OF[c][0] % (2 * WIDTH)
                if self.gone.get(home) == NAME_OF[c]:
                    del self.gone[home]
            same = holder is not None and self.content[holder] == c
            holders.append(holder if same else b)
        return holders

    def forget(self, ids):
        if any(self.pins[b] for b in ids):
            raise Refused
        for b in ids:
            self.unshelve(b)
            self.content.pop(b, None)
        self.shelve(ids)


IDS = st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=4)
CONTENTS = st.lists(st.integers(0, len(NAMES) - 1), min_size=1, max_size=4)
CALLS = st.sampled_from(["release"] * 4 + ["unpin"] * 2 + ["acquire", "pin", "forget"])


class PoolModel(RuleBasedStateMachine):
    """Any calls in any order do to a pool what they do to the model, or nothing at all."""

    @initialize()
    def begin(self):
        self.pool, self.model = BlockPool(WIDTH, SIZE), Model(WIDTH)
        self.running = []

    def both(self, name, args, model_args=None):
        """Make a call on both; returns what the pool and the model returned."""
        before = state_of(self.pool)
        try:
            want = getattr(self.model, name)(*(model_args or args))
        except Refused:
            error = numkv.CacheFull if name == "allocate" else numkv.NumkvError
            try:
                getattr(self.pool, name)(*args)
            except error:
                assert unchanged(self.pool, before)
                return None, None
            raise AssertionError(f"{name} was not refused") from None
        return getattr(self.pool, name)(*args), want

    @rule(cs=CONTENTS)
    def begin_sequence(self, cs):
        """What a cache does with a new prompt: use what is there, fill the rest, make it findable."""
        found = self.lookup(cs)
        self.both("acquire", (found,))
        ids, want = self.both("allocate", (len(cs) - len(found),))
        if ids is None:
            self.both("release", (found,))
            return
        assert ids.tolist() == want
        self.running.append([*found, *want])
        self.register_these(self.running[-1], cs)

    @precondition(lambda self: self.running)
    @rule(i=st.integers(0, 9))
    def end_sequence(self, i):
        self.both("release", (self.running.pop(i % len(self.running)),))

    @rule(cs=CONTENTS)
    def look(self, cs):
        self.lookup(cs)

    @rule(n=st.sampled_from([1, 1, 1, 2, 3, WIDTH + 1]))
    def allocate(self, n):
        ids, want = self.both("allocate", (n,))
        assert ids is None or ids.tolist() == want

    @rule(ids=IDS)
    def allocate_ids(self, ids):
        got, want = self.both("allocate_ids", (ids,))
        assert got is None or got.tolist() == want

    @rule(ids=IDS, name=CALLS)
    def by_ids(self, ids, name):
        self.both(name, (ids,))

    @rule(
        picks=st.lists(st.integers(0, 4 * WIDTH), min_size=1, max_size=6),
        name=CALLS,
    )
    def by_likely_ids(self, picks, name):
        """Ids that will do."""
        model = self.model
        likely = {
            "release": [b for b in model.refs for _ in range(model.refs[b])],
            "acquire": [b for b in model.refs if model.refs[b] or b in model.content],
            "pin": list(model.content),
            "unpin": [b for b in model.pins for _ in range(model.pins[b])],
            "forget": [b for b in model.content if not model.pins[b]],
        }[name]
        self.both(name, ([likely.pop(i % len(likely)) for i in picks if likely],))

    def register_these(self, ids, cs):
        holders, want = self.both("register", (ids, NAMES[cs], TOKENS[cs]), (ids, cs))
        assert holders is None or holders.tolist() == want

    @rule(cs=CONTENTS, first=st.integers(0, WIDTH))
    def register(self, cs, first):
        """Blocks in use."""
        ids = [b for b in self.model.refs if self.model.refs[b]]
        ids = (ids[first:] + ids[:first])[: len(cs)]
        self.register_these(ids, cs[: len(ids)])

    @rule(ids=IDS, cs=CONTENTS)
    def register_anything(self, ids, cs):
        n = min(len(ids), len(cs))
        self.register_these(ids[:n], cs[:n])

    def lookup(self, cs):
        want, reason = [], None
        for c in cs:
            holder = self.model.holder(c)
            if isinstance(holder, MissReason):
                reason = holder
                break
            want.append(holder)
        before = state_of(self.pool)[:-1]
        assert self.pool.lookup(NAMES[cs], TOKENS[cs]).tolist() == want
        assert self.pool.miss_reason is reason
        assert all(map(np.array_equal, before, state_of(self.pool)[:-1]))
        return want

    @invariant()
    def same(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        pool, model = self.pool, self.model
        blocks_ = range(WIDTH)
        assert pool.ref_count(blocks_).tolist() == list(model.refs.values())
        assert pool.is_cached(blocks_).tolist() == [b in model.content for b in blocks_]
        assert pool.num_free == len(model.free) + len(model.lru)
        every = range(len(NAMES))
        holders = [model.holder(c) for c in every]
        want = [-1 if isinstance(h, MissReason) else h for h in holders]
        assert pool.find(NAMES, TOKENS).tolist() == want
        stats = pool.stats()
        assert stats.used == sum(map(bool, model.refs.values()))
        assert stats.cached == len(model.content)
        assert stats.evictable == len(model.lru)
        assert stats.pinned == sum(map(bool, model.pins.values()))


TestPoolModel = machine(PoolModel)


def test_a_long_random_walk(rng):
    """The machine's steps, thousands of them, in a row: deeper into the states than hypothesis goes."""
    machine = PoolModel()
    machine.begin()

    def some(high, most=4):
        return rng.integers(0, high, rng.integers(1, most + 1)).tolist()

    for _ in range(4000):
        name = str(rng.choice(["release"] * 4 + ["unpin"] * 2 + ["acquire", "pin", "forget"]))
        match int(rng.integers(11)):
            case 0 | 1 | 2:
                machine.begin_sequence(cs=some(len(NAMES)))
            case 3 | 4 if machine.running:
                machine.end_sequence(i=int(rng.integers(10)))
            case 5:
                machine.allocate(n=int(rng.choice([1, 2, WIDTH + 1])))
            case 6:
                machine.register(cs=some(len(NAMES)), first=int(rng.integers(WIDTH)))
            case 10:
                idle = [b for b, n in machine.model.refs.items() if not n]
                machine.allocate_ids(
                    ids=[idle[i % len(idle)] for i in some(WIDTH)] if idle else [0]
                )
            case 7:
                machine.by_ids(ids=some(WIDTH), name=name)
            case _:
                machine.by_likely_ids(picks=some(4 * WIDTH, 6), name=name)
        machine.same()
    stats = machine.pool.stats()
    assert stats.evictions > 300
    assert stats.hits > 300
    assert stats.stores > 300


def test_a_long_random_life(rng):
    """Sequences come and go in a pool that is too small for them; at the end nothing is left over."""
    pool, size = BlockPool(200, SIZE), SIZE
    running = []
    for _ in range(1500):
        if running and rng.random() < 0.5:
            pool.release(running.pop(rng.integers(len(running))))
            continue
        tokens = rng.integers(0, 3, rng.integers(1, 12) * size).astype(np.int32)
        names = block_digests(tokens, size)
        found = pool.lookup(names, tokens)
        pool.acquire(found)
        try:
            new = pool.allocate(len(names) - len(found))
        except numkv.CacheFull:
            pool.release(found)
            continue
        ids = np.concatenate([found, new])
        holders = pool.register(ids, names, tokens)
        assert np.array_equal(holders[: len(found)], found)
        running.append(ids)
    pool.check()
    stats = pool.stats()
    assert stats.hits > 0
    assert stats.evictions > 0
    counts = np.bincount(np.concatenate(running), minlength=200)
    assert pool.ref_count(range(200)).tolist() == counts.tolist()
    for ids in running:
        pool.release(ids)
    assert pool.num_free == 200
    pool.forget()
    pool.check()
    assert sorted(pool.allocate(200).tolist()) == list(range(200))

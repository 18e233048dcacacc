"""The bundled model over shards that are actors on several nodes: equal, counted, and with nodes that die."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray.cluster_utils")  # `ray` alone may be this folder

import ray

from numkv.demo.cache import CacheChoice
from numkv.demo.model import Model, Session
from numkv.demo.network import Network
from numkv.demo.sharded import ShardedBatch
from numkv.ray import Limits, RayShards, ShardedKVCache, ShardLost

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
PROMPTS = ["def add(a, b):\n    return", "import json\nimport os\n\n\nclass Config:\n" * 3]
TOKENS = 12
#: Seconds that nothing takes, however busy the machine is. Actors import this file, so it imports nothing of the tests.
PATIENCE = 900.0
PATIENT = Limits(timeout=PATIENCE)


@pytest.fixture(scope="module")
def model():
    return Model.load()


def sharded(model, *, heads=1, context=1, **options) -> ShardedBatch:
    config = model.config
    cache = ShardedKVCache(
        config.num_layers, config.num_kv_heads, config.head_dim, num_blocks=24, block_size=16, kind="fp32",
        heads=heads, context=context, stripe=16, limits=PATIENT,
        transport=RayShards(num_cpus=1, start_timeout=PATIENCE), **options,
    )  # fmt: skip
    return ShardedBatch(Network(config, model.weights, 256, "cpu"), cache)


def decode(model, batch, at=None) -> tuple[list[list[int]], np.ndarray]:
    """The most probable continuation of the prompts; `at` is called before each token."""
    prompts = [model.tokenizer.encode(text) for text in PROMPTS]
    sessions, logits = batch.prefill(prompts)
    seen, tokens = [logits], [[int(row.argmax())] for row in logits]
    for i in range(TOKENS):
        if at is not None:
            at(i)
        assert all(isinstance(session, Session) for session in sessions)
        logits = batch.step(sessions, [own[-1] for own in tokens])
        seen.append(logits)
        for own, row in zip(tokens, logits, strict=True):
            own.append(int(row.argmax()))
    return tokens, np.array(seen)


@pytest.fixture(scope="module")
def alone(model):
    """In one process."""
    return decode(model, model.batch([128, 128], CacheChoice("fp32", block_size=16)))


@pytest.mark.parametrize(
    ("heads", "context"),
    [(2, 2), *(pytest.param(*x, marks=pytest.mark.nightly) for x in ((2, 1), (1, 4)))],
)
def test_the_bundled_model_on_several_nodes(cluster, model, alone, heads, context):
    """By heads to the bit, by context to rounding; one message to each shard for each layer of a step."""
    batch = sharded(model, heads=heads, context=context)
    with batch.cache as cache:
        nodes = {
            ray.get(actor.__ray_call__.remote(node_of)) for actor in cache._shards.transport._actors
        }
        assert len(nodes) >= 2
        tokens, logits = decode(model, batch)
        messages = cache.messages
        cache.check()
        runs = [cache.runs(seq) for seq in cache.sequences]
    assert tokens == alone[0]
    layers, steps = model.config.num_layers, TOKENS + len(PROMPTS)
    if context == 1:
        np.testing.assert_array_equal(logits, alone[1])
        assert messages == (layers * steps + 2,) * heads  # and one for the prefix of each prompt
    else:
        np.testing.assert_allclose(logits, alone[1], rtol=1e-3, atol=1e-3)
        assert len({column for column, _ in runs[1]}) == min(context, 4)
        assert max(messages) <= layers * steps


def node_of(shard) -> str:
    return ray.get_runtime_context().get_node_id()


def pid_of(shard) -> int:
    return os.getpid()


def runs(pid: int) -> bool:
    """Whether a process is there, and more than what its parent has not asked after."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def test_a_node_that_is_killed_while_texts_are_decoded(cluster, model, alone, tmp_path):
    """Full blocks come from the store, the other tokens are computed again; the text is the same."""
    batch = sharded(model, context=2, store={"place": tmp_path, "mark": "bundled"})
    with batch.cache as cache:

        def kill(i):
            if i != 4:
                return
            of_steps = model.config.num_layers * (i + len(PROMPTS))
            assert all(0 <= n - of_steps <= len(PROMPTS) for n in cache.messages)
            cache.flush()
            actor = cache._shards.transport._actors[1]
            lost, pid = (ray.get(actor.__ray_call__.remote(of)) for of in (node_of, pid_of))
            nodes = [n for n in cluster.worker_nodes if n.node_id == lost]
            if nodes:
                cluster.remove_node(nodes[0], allow_graceful=False)
            else:  # the node of this process stays
                os.kill(pid, signal.SIGKILL)
            end = time.monotonic() + PATIENCE
            while runs(pid):  # it notices that its node is gone, and might answer until then
                assert time.monotonic() < end
                time.sleep(0.01)

        tokens, _ = decode(model, batch, kill)
        cache.check()
        assert tokens == alone[0]
        assert 0 < batch.recomputed < 16 * len(PROMPTS)  # what was in blocks that were not full


def test_an_actor_that_does_not_answer_is_lost_with_its_sequences(cluster):
    cache = ShardedKVCache(
        1, 2, 8, num_blocks=400, block_size=16, context=2, stripe=16, limits=PATIENT,
        transport=RayShards(num_cpus=0, start_timeout=PATIENCE),
    )  # fmt: skip
    with cache:
        a, b = cache.add(), cache.add()
        big = (
            4000  # messages of this size go by the object store; what arrives cannot be written to
        )
        for seq, n in ((a, big), (b, 5)):
            step = cache.reserve([seq], n)
            rows = np.random.default_rng(n).standard_normal((2, n, 2, 8), np.float32)
            out = step.append_attend(0, *rows, np.ones((n, 4, 8), np.float32))
            assert np.isfinite(out).all()
            cache.commit(step)
        ((column, _),) = cache.runs(b)
        pid = ray.get(cache._shards.transport._actors[column].__ray_call__.remote(pid_of))
        step = cache.reserve([b], 1)
        os.kill(pid, signal.SIGSTOP)
        # Others may have to load kernels first.
        cache._shards.channels[column]._limits = Limits(timeout=5.0)
        one = np.ones((1, 2, 8), np.float32)
        with pytest.raises(ShardLost, match=r"no answer in 5\.0 s") as lost:
            step.append_attend(0, one, one, np.ones((1, 4, 8), np.float32))
        cache._shards.channels[column]._limits = PATIENT
        assert b in lost.value.sequences
        assert cache.length(b) == 0
        cache.check()
        step = cache.reserve([b], 1)
        out = step.append_attend(0, one, one, np.ones((1, 4, 8), np.float32))
        np.testing.assert_allclose(out, 1, rtol=1e-6)
        cache.commit(step)


OWN = """
import ray
from numkv.ray import RayShards
shards = RayShards({})
print("NODES", len(ray.nodes()), flush=True)
shards.close()
"""


@pytest.mark.parametrize(("address", "nodes"), [("", 1), ("'auto'", 3)])
def test_a_running_cluster_is_joined_by_name_alone(cluster, address, nodes):
    """Here the environment, as on the nodes of a cluster, says where it is."""
    done = subprocess.run(
        [sys.executable, "-c", OWN.format(address)], capture_output=True, text=True, check=True, timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "RAY_ADDRESS": cluster.address},
    )  # fmt: skip
    assert f"NODES {nodes}" in done.stdout


DRIVER = """
import os, ray, time
import numpy as np
from numkv.ray import RayShards, ShardedKVCache
ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR")
cache = ShardedKVCache(1, 2, 8, num_blocks=8, heads=2, transport=RayShards(num_cpus=0))
step = cache.reserve([cache.add()], 3)
one = np.ones((3, 2, 8), np.float32)
step.append_attend(0, one, one, np.ones((3, 4, 8), np.float32))
pids = ray.get([a.__ray_call__.remote(lambda shard: os.getpid()) for a in cache._shards.transport._actors])
print("PIDS", *pids, flush=True)
time.sleep(600)
"""


def test_actors_end_with_the_process_that_made_them(cluster):
    """It is one of two that use the cluster, and is killed with a step open."""
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(address=cluster.address)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    try:
        told = next(line for line in driver.stdout if line.startswith("PIDS"))  # Ray prints too
        pids = [int(pid) for pid in told.split()[1:]]
        assert len(pids) == 2
        assert all(map(alive, pids))
    finally:
        driver.kill()
        driver.wait()
        driver.stdout.close()
    end = time.monotonic() + PATIENCE
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(map(alive, pids))


def alive(pid) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


ENDS = """
import numpy as np, ray
from numkv.ray import RayShards, ShardDown, ShardedKVCache, ShardLost
ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR")
store = {{"place": "nowhere", "mark": "m", "other": 1}}
try:
    ShardedKVCache(1, 2, 8, num_blocks=8, store=store, transport=RayShards(num_cpus=0))
except ShardDown as down:
    print("SAID", down)
cache = ShardedKVCache(1, 2, 8, num_blocks=8, heads=2, transport=RayShards(num_cpus=0))
seq = cache.add()
ray.shutdown()
for again in (False, True):
    try:
        if again:
            ray.init(address={address!r}, log_to_driver=False, logging_level="ERROR")
        cache.stats()
    except ShardLost as lost:
        print("LOST", lost.hopeless, ray.is_initialized())
one = np.ones((3, 2, 8), np.float32)
step = cache.reserve([seq], 3)
print("GOES ON", step.append_attend(0, one, one, np.ones((3, 4, 8), np.float32)).mean())
cache.close()
"""


def test_ends_that_are_none_of_the_shards(cluster):
    """An error of a shard's arguments is told by its own words; after ray.shutdown no other Ray is started."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(address=cluster.address)], capture_output=True, text=True, check=False,
        timeout=PATIENCE, env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert (
        "SAID shard 0: TypeError: PrefixStore() got an unexpected keyword argument 'other'"
        in done.stdout
    )
    assert "LOST True False" in done.stdout
    assert "GOES ON 1.0" in done.stdout

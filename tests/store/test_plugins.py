"""Plug-ins of SGLang and LMCache, over the engines' own base classes where these can be imported."""

import asyncio
import importlib
import inspect
import threading
import types

import pytest

torch = pytest.importorskip("torch")
from engine_stand_ins import LMCACHE, SGLANG, Chunk, HostMemory, Pages, install  # noqa: E402


@pytest.fixture
def real(monkeypatch):
    """Which engines are installed; the others are stood in for."""
    return install(monkeypatch)


@pytest.fixture
def storage(real, tmp_path):
    """Makes back ends of HiCache over one folder."""
    module = importlib.import_module("numkv.plugins.sglang")

    def make(**facts):
        facts = {
            "tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
            "is_mla_model": False, "is_page_first_layout": False, "model_name": "m",
            "extra_config": {"place": str(tmp_path), "max_nbytes": 1 << 24, "prefetch": 7}, **facts,
        }  # fmt: skip
        return module.NumkvStorage(types.SimpleNamespace(**facts), {})

    return make


@pytest.fixture
def backend(real, tmp_path):
    """Makes storage plug-ins of LMCache over one folder."""
    module = importlib.import_module("numkv.plugins.lmcache")

    def make(memory=None, **settings):
        config = types.SimpleNamespace(extra_config={"numkv.place": str(tmp_path), **settings})
        return module.NumkvBackend("cpu", config, None, memory or HostMemory(), None)

    return make


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_methods_have_the_engines_names_and_parameters(real):
    for engine, cls, wanted in (
        ("sglang", "NumkvStorage", SGLANG),
        ("lmcache", "NumkvBackend", LMCACHE),
    ):
        made = getattr(importlib.import_module(f"numkv.plugins.{engine}"), cls)
        for name, names in wanted.items():
            assert parameters(getattr(made, name)) == names.split(), name
            if real[engine]:
                assert parameters(getattr(made.__mro__[1], name)) == names.split(), name
        assert not inspect.isabstract(made)


# ---------------------------------------------------------------- SGLang


def test_pages_one_by_one(storage):
    first, second = storage(), storage()
    page = torch.randn(3, 5).to(torch.bfloat16)
    assert not first.exists("k")
    assert first.set("k", page)
    into = torch.zeros_like(page)
    assert second.get("k", into) is into
    assert torch.equal(into, page)
    assert second.get("other", into) is None
    assert second.batch_exists(["k", "other", "k"]) == 1
    assert second.batch_set(["a", "b"], [page, page.T])
    assert second.batch_exists(["a", "b"]) == 2
    found = second.batch_get(
        ["a", "none", "b"], [torch.zeros(15, dtype=torch.bfloat16) for _ in range(3)]
    )
    assert [x is None for x in found] == [False, True, False]
    assert torch.equal(found[2].reshape(5, 3), page.T)
    wide = torch.zeros((3, 9), dtype=torch.bfloat16)
    assert second.get("a", into := wide[:, 2:7]) is into  # not contiguous
    assert torch.equal(into, page)
    assert not wide[:, :2].any()
    assert not wide[:, 7:].any()
    with pytest.raises(ValueError, match="target_locations"):
        second.batch_get(["a"], None)
    second.clear()
    assert first.batch_exists(["a"]) == 0
    second.close(), first.close()


def test_pages_of_a_host_pool(storage):
    made, pool = storage(), Pages(8)
    pool.data.copy_(torch.randn_like(pool.data.float()))
    want = pool.data.clone()
    made.register_mem_pool_host(pool)
    indices = torch.arange(8, 20)  # three pages from the third on
    assert made.batch_set_v1(["x", "y", "z"], indices) == [True] * 3
    pool.data.zero_()
    assert made.batch_get_v1(["x", "none", "z"], indices) == [True, False, True]
    assert torch.equal(pool.data[8:12], want[8:12])
    assert not pool.data[12:16].any()
    assert torch.equal(pool.data[16:20], want[16:20])
    with pytest.raises(ValueError, match="host_indices"):
        made.batch_get_v1(["x"], indices)


def test_whose_pages_are_found(storage, tmp_path):
    page, into = torch.ones(4), torch.zeros(4)
    storage().set("k", page)
    assert storage(tp_rank=1).get("k", into) is None
    assert storage(model_name="n").get("k", into) is None
    extra = {"place": str(tmp_path), "mark": "other weights"}
    assert storage(extra_config=extra).get("k", into) is None
    mla = {"is_mla_model": True}
    storage(**mla).set("k", page)
    assert storage(tp_rank=1, **mla).get("k", into) is into  # ranks have the same pages
    with pytest.raises(ValueError, match="`place`: expected a folder or a URL"):
        storage(extra_config=None)


# ---------------------------------------------------------------- LMCache


class Key:
    """As much of LMCache's key as plug-ins call."""

    def __init__(self, name):
        self.name = name

    def to_string(self):
        return f"model@1@0@{self.name}@bfloat16"


def chunk(seed=0):
    formats = importlib.import_module("lmcache.v1.memory_management").MemoryFormat
    torch.manual_seed(seed)
    return Chunk(torch.randn(2, 3, 16, 8).to(torch.bfloat16), formats.KV_2LTD)


def test_chunks_go_out_and_come_back(backend):
    first, second = backend(), backend()
    keys, objs, told = [Key("a"), Key("b")], [chunk(0), chunk(1)], []
    (future,) = first.batched_submit_put_task(keys, objs, on_complete_callback=told.append)
    assert future.result(60)
    assert told == keys
    assert [obj.references for obj in objs] == [1, 1]
    assert not first.exists_in_put_tasks(keys[0])
    assert second.contains(keys[0], pin=True)
    assert second.batched_contains([*keys, Key("c"), keys[0]]) == 2
    for key, obj in zip(keys, objs, strict=True):
        found = second.get_blocking(key)
        assert torch.equal(found.tensor, obj.tensor)
        assert (found.get_memory_format(), found.get_dtypes()) == (
            obj.get_memory_format(),
            [torch.bfloat16],
        )
    assert second.get_blocking(Key("c")) is None
    assert second.pin(keys[0])
    assert second.unpin(keys[0])
    assert second.remove(keys[0])
    assert not first.contains(keys[0])
    second.touch_cache()
    assert second.get_allocator_backend() is second.local_cpu_backend
    first.close(), second.close()


def test_a_callback_that_fails_is_logged_and_others_follow(backend, caplog):
    made, keys, told = backend(), [Key("a"), Key("b")], []

    def done(key):
        told.append(key)
        raise ValueError("no")

    objs = [chunk(0), chunk(1)]
    (future,) = made.batched_submit_put_task(keys, objs, on_complete_callback=done)
    assert future.result(60)
    assert told == keys
    assert "model@1@0@a@bfloat16" in caplog.text
    assert "ValueError: no" in caplog.text
    asyncio.run(made.async_batched_submit_put_task(keys, objs, None, done))
    assert told == keys * 2
    made.close()


def test_the_same_for_who_awaits(backend):
    made, keys = backend(), [Key(str(i)) for i in range(4)]

    async def run():
        await made.async_batched_submit_put_task(keys[:2], [chunk(0), chunk(1)])
        await made.async_batched_submit_put_task(keys[3:], [chunk(3)])
        assert await made.batched_async_contains("id", keys) == 2
        return await made.batched_get_non_blocking("id", keys)

    found = asyncio.run(run())
    assert len(found) == 2  # the fourth comes after one that is not there
    assert torch.equal(found[1].tensor, chunk(1).tensor)
    given = made.local_cpu_backend.given
    assert [obj.references for obj in given] == [1, 1, 0]


def test_a_cancelled_request_leaves_no_reference(backend, monkeypatch):
    made, keys = backend(), [Key(str(i)) for i in range(3)]
    made.batched_submit_put_task(keys, objs := [chunk(i) for i in range(3)])[0].result(60)
    store, go, begun = made._store, threading.Event(), threading.Semaphore(0)

    def late(call):
        return lambda *args: (begun.release(), go.wait(60), call(*args))[2]

    async def run():
        busy = [made.async_batched_submit_put_task([Key(f"b{i}")], [objs[i]]) for i in range(2)]
        busy = [asyncio.ensure_future(x) for x in busy]  # both writers
        for _ in range(2):
            await asyncio.to_thread(begun.acquire, timeout=60)
        last = asyncio.ensure_future(made.async_batched_submit_put_task([Key("c")], [objs[2]]))
        read = asyncio.ensure_future(made.batched_get_non_blocking("id", keys))
        await asyncio.to_thread(begun.acquire, timeout=60)
        for task in (last, read):
            task.cancel()
        assert all(
            isinstance(x, asyncio.CancelledError)
            for x in await asyncio.gather(last, read, return_exceptions=True)
        )
        go.set()
        await asyncio.gather(*busy)

    monkeypatch.setattr(store, "put", late(store.put))
    monkeypatch.setattr(store, "get", late(store.get))
    asyncio.run(run())
    given = made.local_cpu_backend.given
    made.close()  # waits for writers
    assert [obj.references for obj in objs] == [1, 1, 1]
    assert not made.exists_in_put_tasks(Key("c"))
    assert [obj.references for obj in given] == [0, 0, 0]
    with pytest.raises(RuntimeError, match="shutdown"):
        made.batched_submit_put_task(keys, objs)
    assert [obj.references for obj in objs] == [1, 1, 1]
    assert not made.exists_in_put_tasks(keys[0])
    assert backend().contains(Key("c"))


def test_without_memory_there_is_no_chunk(backend):
    made = backend(HostMemory(room=0))
    made.batched_submit_put_task([Key("a")], [chunk()])[0].result(60)
    assert made.get_blocking(Key("a")) is None


def test_settings_are_needed(backend, real):
    module = importlib.import_module("numkv.plugins.lmcache")
    with pytest.raises(ValueError, match=r"`numkv\.place`: expected a folder or a URL"):
        module.NumkvBackend("cpu", types.SimpleNamespace(extra_config={}))

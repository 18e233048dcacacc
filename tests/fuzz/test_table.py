"""The table is complete, and every callable in it meets every sort of argument that its families know."""

import random
import resource
import secrets
import warnings
from collections import Counter

import pytest

from fuzz import episodes, memory, play, table
from fuzz.hostile import VARIANTS
from fuzz.surface import callables, public

# What is public and not in the table, and why.
LEFT_OUT = {
    "QKMode": "an enumeration of Python's",
    "blocks.MissReason": "an enumeration of Python's",
    "warmup": "compiles for minutes; tests/objects/test_warmup.py",
    "SwappedSequence": "holds what `swap_out` gives; `swap_in` looks at it",
    "get_num_threads": "takes nothing",
    "set_num_threads": "is the Python thread's, for every row; tests/test_num_threads.py",
    "num_threads": "a ``with`` block; tests/test_num_threads.py",
    "on_stream": "a ``with`` block for CUDA; tests/targets/test_on_stream.py",
    "Kind": "a row of the table of kinds, made by nobody else",
    "Step": "made by `PagedKVCache.reserve`",
    "StepBuffers": "made by `PagedKVCache.step_buffers`",
    "BoundAttention": "made by `bind`",
    "BoundLayer": "made by `bind`; tests/objects/test_bound_misuse.py",
    "BoundStep": "made by `BoundAttention.begin`; tests/objects/test_bound_misuse.py",
    "AppendPlan": "made by `AppendPlan.select`",
    "AppendSku": "holds what a plan says of itself",
    "PrecisionGuarantee": "holds what a plan says of itself",
    "PagedStats": "holds what `stats` counts",
    "Profile": "holds layers, reads and writes files; tests/objects/test_profile.py",
    "blocks.PoolStats": "holds what `stats` counts",
    "blocks.BlocksStored": "holds what listeners are told",
    "blocks.BlocksRemoved": "holds what listeners are told",
    "store.StoreStats": "holds what `stats` counts",
    "store.BlocksWritten": "holds what listeners are told",
    "store.BlocksDropped": "holds what listeners are told",
    "store.PrefixFound": "holds what listeners are told",
    "store.StoreSilent": "holds what listeners are told",
    "store.StoreAnswers": "holds what listeners are told",
    "store.ByteStats": "holds what `stats` counts",
    "store.BlockStore": "reads and writes objects; tests/store/test_byte_store.py",
    "PagedKVCache.lookup": "asks a store; tests/store/test_network.py",
    "PagedKVCache.add: lookup": "what a lookup gave; tests/store/test_network.py",
    "store.PrefixStore.flush": "waits for threads; tests/store/test_arguments.py",
    "device.CacheArrays": "holds what `arrays` gives",
    "files.save_sequences": "writes files; tests/objects/test_files.py",
    "files.load_sequences": "reads files; tests/objects/test_files.py",
    "device.slot_of": "compiled into functions of a user's own, which check nothing",
    "device.is_finite": "compiled into functions of a user's own, which check nothing",
    "save": "writes files; tests/objects/test_files.py",
    "load": "reads files; tests/objects/test_files.py",
    "caches.save_sequences": "writes files; tests/objects/test_files.py",
    "caches.load_sequences": "reads files; tests/objects/test_files.py",
    "storage.Pool": "buffers as kernels take them, whose arguments others have checked",
    "storage.Rotation.forward": "takes arrays that others have checked",
    "storage.Rotation.backward": "takes arrays that others have checked",
    "targets.CpuTarget": "takes arrays that others have checked",
    "targets.Target": "says what a target has",
    "targets.Array": "says what an array has",
}  # fmt: skip
# Methods that end an object, compile a jitclass, or are called by Python: by ``with``, by `copy.deepcopy`.
ENDING = {"close", "__enter__", "__exit__", "__deepcopy__"}


def named() -> dict[str, set[str]]:
    """Arguments of every callable in the table."""
    found: dict[str, set[str]] = {}
    for _, scene in table.SCENES:
        for row in table.fitting(scene):
            found.setdefault(row.name, set()).update(row.args)
    return found


def left_out(name: str) -> bool:
    """Whether a callable, or its class, is left out."""
    return name in LEFT_OUT or name.rpartition(".")[0] in {
        n for n in LEFT_OUT if n not in ("Kind", "Step", "AppendPlan")
    }


def test_everything_public_is_in_the_table():
    """A method without arguments needs no row: it is called by itself."""
    missing = []
    rows = named()
    for name, arguments in callables():
        method = name.rpartition(".")[2]
        if (
            left_out(name)
            or method in ENDING
            or ("." in name and not arguments and name not in rows)
        ):
            continue
        if name not in rows:
            missing.append(name)
        else:
            given = [f"{name}: {a}" for a in arguments if a not in rows[name]]
            missing += [argument for argument in given if argument not in LEFT_OUT]
    assert not missing


def test_nothing_is_both_in_the_table_and_left_out():
    assert not set(named()) & {
        name for name in LEFT_OUT if name not in ("Kind", "Step", "AppendPlan")
    }
    assert len(set(LEFT_OUT) & {*public(), *(name for name, _ in callables())}) > len(LEFT_OUT) / 2


def test_families_are_known():
    families = {
        a.family for _, scene in table.SCENES for row in scene.rows for a in row.args.values()
    }
    assert families <= set(VARIANTS)


#: Of scenes with many rows, how many of all variants are tried in an everyday run; nightly runs try all of them.
SHARE = {"Cells": 0.15, "Layers": 0.25, "Paged": 0.25, "ByChannel": 0.2, "Attention": 0.3}


def scene_for(row, scene_class, rng):
    """A scene that has what a row is called on, after a few valid calls."""
    for _ in range(100):
        scene = scene_class(rng)
        if row.on and row.on not in scene.objects and row.on != "Step":
            continue
        rows = [(row.weight, row) for row in table.rows_of(scene)]
        for _ in range(12):
            valid = episodes.weighted(
                rng, [r for r in rows if not r[1].on or r[1].on in scene.objects]
            )
            play.play(valid, scene, episodes.function_of(valid, scene), rng, {})
        if not row.on or row.on in scene.objects:
            return scene
    raise AssertionError(f"no {scene_class.__name__} has a {row.on}")


def plays_of(row, scene_class, rng, share):
    """Every argument of a row with every variant of its family, once each, or a share of them."""
    scene = None
    for name, arg in row.args.items():
        for number in range(len(VARIANTS[arg.family])):
            if rng.random() > share:
                continue
            if scene is None or (row.on and row.on not in scene.objects):
                scene = scene_for(row, scene_class, rng)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                outcome, _ = play.play(
                    row, scene, episodes.function_of(row, scene), rng, {name: number}
                )
            if outcome.defect is not None:
                scene = None
                yield outcome.defect


@pytest.fixture
def limited():
    """No more memory than a few buffers need: sizes beyond all bounds are among the arguments."""
    before = memory.limit()
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("scene", [scene for _, scene in table.SCENES], ids=lambda s: s.__name__)
def test_every_argument_in_every_variant(scene, limited, request):
    """What is accepted is right, what is refused is named and has changed nothing: each sort of argument once."""
    # The same calls in every run, but for nightly ones.
    nightly = request.config.getoption("nightly")
    seed = secrets.randbits(32) if nightly else 1
    print("seed", seed)
    rng = random.Random(seed)
    share = 1.0 if nightly else SHARE.get(scene.__name__, 1.0)
    found = Counter()
    for row in table.fitting(scene):
        for defect in plays_of(row, scene, rng, share):
            found[f"{defect.kind}: {defect.name}: {defect.detail}"] += 1
    assert not found, "\n".join(found)

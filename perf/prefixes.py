"""The prefix store beside the disk, beside prefilling, and behind a decode loop: ``python -m perf prefixes``.

- *hit*: `PagedKVCache.add` of a prompt that is in the store, in turns with a plain read of the same bytes, CRC-32
  included, after the system was told to forget them (``posix_fadvise``): once from one file in large pieces, once
  object by object.
- *first token*: a second process, in which this prompt is found, beside one that prefills it: the forward pass of the
  bundled model's shape with random weights.
- *decode*: a loop of tokens with a store that is written to, in turns with the same loop without.
- *network*: a hit, and writing, on a file system that waits 50 ms a call, in turns with the plain transfer of the same
  objects by 128 threads; then what `add` takes when that file system is silent.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np

import numkv
from numkv.demo import BUNDLED_MODEL
from numkv.demo.checkpoint import LayerWeights, ModelConfig, Weights
from numkv.demo.model import Batch
from numkv.demo.network import Network
from numkv.store import PrefixStore
from perf.load import beside
from perf.report import table

PIECE = 8 << 20
MARK = {"model": "random weights", "base": 1e4}
#: What a hit may cost, as a multiple of the plain read of one file; how much sooner a first token has to be there.
MOST, SOONER = 1.5, 5.0


def config():
    """The bundled model's."""
    return ModelConfig.read(BUNDLED_MODEL)


def random_weights(of):
    """Weights of no use, always the same."""
    rng = np.random.default_rng(0)

    def matrix(*shape):
        return rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)

    heads, kv, dim, hidden = of.num_q_heads, of.num_kv_heads, of.head_dim, of.hidden_size
    norm, head_norm = np.ones(hidden, np.float32), np.ones(dim, np.float32)
    layers = [
        LayerWeights(
            input_norm=norm, qkv=matrix((heads + 2 * kv) * dim, hidden), q_norm=head_norm, k_norm=head_norm,
            o=matrix(hidden, heads * dim), post_norm=norm, gate_up=matrix(2 * of.intermediate_size, hidden),
            down=matrix(hidden, of.intermediate_size),
        )
        for _ in range(of.num_layers)
    ]  # fmt: skip
    embedding = matrix(of.vocab_size, hidden)
    return Weights(embedding, tuple(layers), norm, embedding)


def paged(of, tokens, options, store):
    """A cache with room for so many tokens."""
    blocks = -(-tokens // options.block_size)
    return numkv.PagedKVCache(
        of.num_layers, of.num_kv_heads, of.head_dim, num_blocks=blocks, block_size=options.block_size,
        kind=options.kind, store=store,
    )  # fmt: skip


def prompt(options, seed=0):
    return np.random.default_rng(seed).integers(0, 256, options.tokens + 1)


def filled(cache, ids, rng):
    """A sequence with rows of no use."""
    seq = cache.add(ids)
    begin = cache.length(seq)
    step = cache.reserve([seq], len(ids) - begin)
    of = cache.layers[0]
    rows = rng.standard_normal((2, step.num_tokens, of.num_kv_heads, of.head_dim), np.float32)
    for layer in range(cache.num_layers):
        step.append(layer, *rows)
    cache.commit(step, token_ids=ids[begin:])
    return seq


def forget(paths):
    """Have the system read files from the disk the next time."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read(paths, buffer):
    """The bytes of files one after another, and their CRC-32."""
    for path in paths:
        descriptor, crc = os.open(path, os.O_RDONLY), 0
        while n := os.readv(descriptor, [buffer]):
            crc = zlib.crc32(buffer[:n], crc)
        os.close(descriptor)


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def hit(folder, options):
    """Times of a hit, and of plain reads; bytes."""
    ids, place = prompt(options), folder / "hit"
    of, rng = config(), np.random.default_rng(1)
    with PrefixStore(place, mark=MARK) as store:
        filled(paged(of, options.tokens + 1, options, store), ids, rng)
    objects = sorted(p for p in place.rglob("*") if p.is_file())
    one = folder / "one"
    one.write_bytes(b"".join(path.read_bytes() for path in objects))
    buffer = memoryview(bytearray(PIECE))
    times = {"hit": [], "one file": [], "the same objects": []}
    cache = paged(of, options.tokens + 1, options, PrefixStore(place, mark=MARK, host_nbytes=0))

    def found():
        seq = cache.add(ids)
        assert cache.cached_len(seq) == options.tokens

    calls = {
        "hit": found,
        "one file": lambda: read([one], buffer),
        "the same objects": lambda: read(objects, buffer),
    }
    for turn in range(options.rounds + 1):
        for name in sorted(calls, reverse=turn % 2 == 0):
            forget([*objects, one])
            took = seconds(calls[name])
            if turn:  # the first one loads kernels
                times[name].append(took)
        cache.store.flush()
        cache.clear()
    cache.store.close()
    return times, one.stat().st_size, len(objects)


def far(delay):
    """A file system in memory that waits before each call, and answers nothing while it is silent."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Far(MemoryFileSystem):
        cachable, store, pseudo_dirs = False, {}, [""]
        speaks = threading.Event()

        def answer(self, call, *given, **options):
            time.sleep(delay)
            self.speaks.wait()
            return call(*given, **options)

        def info(self, path, **options):
            return self.answer(super().info, path, **options)

        def cat_file(self, path, **options):
            return self.answer(super().cat_file, path, **options)

        def pipe_file(self, path, value, **options):
            return self.answer(super().pipe_file, path, value, **options)

    Far.speaks.set()
    return Far()


def network(options):
    """Seconds of a hit, of writing and of the same objects plainly; then of `add` where nobody answers."""
    ids, of, rng, file_system = (
        prompt(options),
        config(),
        np.random.default_rng(1),
        far(options.delay),
    )
    times = {"hit": [], "read plainly": [], "written": [], "written plainly": []}
    threads = ThreadPoolExecutor(128)
    for turn in range(options.rounds):
        writer = PrefixStore(f"round{turn}", mark=MARK, file_system=file_system)
        cache = paged(of, options.tokens + 1, options, writer)
        filled(cache, ids, rng)
        times["written"].append(seconds(writer.flush))
        assert writer.close() == 0
        reader = PrefixStore(f"round{turn}", mark=MARK, file_system=file_system, host_nbytes=0)
        cache = paged(of, options.tokens + 1, options, reader)
        times["hit"].append(seconds(lambda cache=cache: cache.add(ids)))
        assert cache.cached_len(next(iter(cache.sequences))) == options.tokens
        paths = [path for path in file_system.store if path.startswith(f"/round{turn}/")]
        found = []
        times["read plainly"].append(
            seconds(
                lambda paths=paths, found=found: found.extend(
                    threads.map(file_system.cat_file, paths)
                )
            )
        )
        copies = [f"/plain{path}" for path in paths]
        times["written plainly"].append(
            seconds(
                lambda c=copies, found=found: list(threads.map(file_system.pipe_file, c, found))
            )
        )
        reader.close()
    store = PrefixStore("round0", mark=MARK, file_system=file_system)
    cache = paged(of, options.tokens + 1, options, store)
    file_system.speaks.clear()
    gone = [seconds(lambda seed=seed: cache.add(prompt(options, seed))) for seed in range(6)]
    file_system.speaks.set()
    store.close()
    return times, len(paths), gone


def first_token(options):
    """What a process of its own prints: how long its first token took."""
    of, place = config(), options.place
    store = PrefixStore(place, mark=MARK) if place else None
    cache = paged(of, 2 * options.tokens, options, store)
    batch = Batch(Network(of, random_weights(of), 2 * options.tokens, "cpu"), cache)
    warm = batch.start()
    warm.prefill(np.arange(300) % 256)
    warm.step(1)
    cache.clear()
    if options.drop:
        forget(p for p in Path(place).rglob("*") if p.is_file())
    ids = prompt(options)
    start = time.perf_counter()
    session = batch.start(ids)
    logits = session.prefill(ids[session.num_reused :])
    took = time.perf_counter() - start
    lost = store.close() if store else 0
    said = {"seconds": took, "found": session.num_reused, "lost": lost, "crc": zlib.crc32(logits)}
    print(json.dumps(said))


def in_a_process(options, place, drop):
    """`first_token` in a process of its own."""
    words = ["--first-token", "--tokens", options.tokens, "--kind", options.kind]
    words += ["--block-size", options.block_size, *(["--place", place] if place else [])]
    words += ["--drop"] * drop
    done = subprocess.run(
        [sys.executable, "-m", "perf.prefixes", *map(str, words)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def decode(folder, options):
    """Milliseconds of decode steps of some sequences, without and with a store."""
    of, sequences, context, steps = config(), options.sequences, 512, 192
    network = Network(of, random_weights(of), context + steps + 1, "cpu")
    times, missed = {"without": [], "with": []}, 0
    for turn in range(options.rounds + 1):
        for name in ("without", "with")[:: 1 if turn % 2 else -1]:
            place = folder / f"decode {turn}"
            store = PrefixStore(place, mark=MARK) if name == "with" else None
            cache = paged(of, sequences * (context + steps + 16), options, store)
            rng = np.random.default_rng(turn)
            texts = [rng.integers(0, 256, context) for _ in range(sequences)]
            seqs = [filled(cache, text, rng) for text in texts]
            if store is not None:
                store.flush()
            took = []
            for _ in range(steps):
                ids = rng.integers(0, 256, sequences)
                start = time.perf_counter()
                step = cache.reserve(seqs, 1)
                network.hidden(ids, step)
                cache.commit(step, token_ids=ids)
                took.append(time.perf_counter() - start)
            if turn:
                times[name] += took
            if store is not None:
                missed += store.close()
                assert store.stats().written == sequences * (context + steps) // options.block_size
    return times, missed


def main(argv):
    """``python -m perf prefixes``."""
    parser = argparse.ArgumentParser(prog="python -m perf prefixes", description=__doc__)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure; /tmp")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt (8192)")
    parser.add_argument("--kind", default="fp32", help="storage kind (fp32)")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=16, help="that decode (16)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["hit", "first", "decode", "network"])
    parser.add_argument(
        "--delay", type=float, default=0.05, help="seconds of a call on the network (0.05)"
    )
    parser.add_argument("--first-token", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--drop", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.first_token:
        first_token(options)
        return 0
    load, failed = beside([]), 0
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        if options.only in (None, "hit"):
            failed += report_hit(*hit(folder, options), options)
        if options.only in (None, "first"):
            failed += report_first(folder, options)
        if options.only in (None, "decode"):
            report_decode(*decode(folder, options), options)
        if options.only in (None, "network"):
            report_network(*network(options), options)
    print(f"other processes used {load.of_others():.0%} of the cores")
    return int(failed > 0)


def report_hit(times, size, count, options):
    print(
        f"a hit of {options.tokens} tokens: {count} objects of {size / count / 1024:.0f} KiB, {options.kind}"
    )
    rows = []
    for name in ("one file", "the same objects"):
        ratios = [a / b for a, b in zip(times["hit"], times[name], strict=True)]
        took = [f"{1e3 * median(x):.1f}" for x in (times[name], times["hit"])]
        rows.append([name, *took, f"{median(ratios):.2f}"])
    print(table(["read plainly", "ms", "hit, ms", "ratio"], rows, (1, 2, 3)))
    return median(times["hit"]) > MOST * median(times["one file"])


def report_network(times, count, gone, options):
    print(f"{options.tokens} tokens, {count} objects, {1e3 * options.delay:.0f} ms a call")
    rows = []
    for name, plain in (("hit", "read plainly"), ("written", "written plainly")):
        ratio = median(a / b for a, b in zip(times[name], times[plain], strict=True))
        rows.append([name, *(f"{median(times[x]):.2f}" for x in (name, plain)), f"{ratio:.2f}"])
    print(table(["what", "s", "plainly, s", "ratio"], rows, (1, 2, 3)))
    later = 1e3 * median(gone[1:])
    print(f"add while nobody answers: {gone[0]:.2f} s at first, {later:.1f} ms later")


def report_first(folder, options):
    place = folder / "first"
    plain = in_a_process(options, None, False)
    first = in_a_process(options, place, False)
    second = [in_a_process(options, place, True) for _ in range(3)]
    assert first["found"] == 0
    assert first["lost"] == 0
    assert all(
        x["found"] == options.tokens // options.block_size * options.block_size for x in second
    )
    took = median(x["seconds"] for x in second)
    sooner = plain["seconds"] / took
    same = "the same logits" if {x["crc"] for x in second} == {plain["crc"]} else "other logits"
    print(
        f"first token of {options.tokens + 1} tokens: {plain['seconds']:.2f} s prefilled, {first['seconds']:.2f} s "
        f"prefilled and written behind, {took:.3f} s found by a second process: {sooner:.1f} times sooner, {same}"
    )
    return sooner < SOONER


def report_decode(times, missed, options):
    rows = []
    for name, found in times.items():
        found = sorted(1e3 * x for x in found)
        rows.append([name, *(f"{found[int(len(found) * q)]:.2f}" for q in (0.5, 0.9, 0.99))])
        rows[-1].append(f"{sum(found) / len(found):.2f}")
    print(f"decoding {options.sequences} sequences, ms a step; {missed} blocks were given up")
    print(table(["store", "median", "0.9", "0.99", "mean"], rows, (1, 2, 3, 4)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

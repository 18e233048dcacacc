"""What a forked child does: the same as its parent, to the last bit, without waiting for threads that are not there."""

import os

import processes
import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

SCRIPT = """
import hashlib, multiprocessing, pickle, struct, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)

def digest(problem):
    return hashlib.sha256(decode(problem).tobytes()).hexdigest()

def in_child(function, *args):
    # What a child's call returns, what it raises, or "hangs" after minutes.
    here, there = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            result = function(*args)
        except BaseException as error:
            result = type(error).__name__
        os.write(there, result.encode())
        os._exit(0)
    os.close(there)
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            with os.fdopen(here) as pipe:
                return pipe.read()
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"

small, large, huge = problem(16, 2, 32), problem(6000, 4, 64), problem(200_000, 4, 64)
digest(small)
results = {"large in a child, no threads so far": in_child(digest, large)}
expected = digest(large), digest(small)
results |= {
    "large in a child": in_child(digest, large),
    "large in a child's child": in_child(in_child, digest, large),
}
stop = threading.Event()

def keep_busy():
    while not stop.is_set():
        decode(huge)

thread = threading.Thread(target=keep_busy)
thread.start()
time.sleep(0.05)
for i in range(4):
    results[f"large, parent inside a kernel, {i}"] = in_child(digest, large)
    results[f"small, parent inside a kernel, {i}"] = in_child(digest, small)
stop.set()
thread.join()

with multiprocessing.get_context("fork").Pool(2) as pool:
    for i, found in enumerate(pool.map_async(digest, [large] * 4).get(timeout=300)):
        results[f"large in a pool's worker, {i}"] = found

results["large in the parent, afterwards"] = digest(large)
print(json.dumps({name: found for name, found in results.items()
                  if found != expected["small" in name]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("layer", processes.EACH_LAYER)
def test_children_compute_the_same(layer):
    assert processes.run(SCRIPT, NUMBA_THREADING_LAYER=layer) == {}


def test_a_fork_waits_for_the_compiler(tmp_path):
    """A child that is forked while another thread compiles can compile itself."""
    found = processes.run(
        """
        import warnings
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        from numba import types
        from numkv.kernels import builder
        started = threading.Event()

        def slowly(x):
            return x

        def compile_slowly():
            from numba.core.compiler_lock import global_compiler_lock
            with global_compiler_lock:
                started.set()
                time.sleep(1)

        thread = threading.Thread(target=compile_slowly)
        thread.start()
        started.wait()
        pid = os.fork()
        if not pid:
            signal.alarm(300)
            warnings.simplefilter("ignore")  # a script's function is not kept on disk
            os._exit(builder.build(slowly, (types.int64,), label="slowly")(7))
        thread.join()
        print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        """,
        NUMBA_CACHE_DIR=str(tmp_path),
    )
    assert found == 7

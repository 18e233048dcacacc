"""The parent's end of `perf.worker`: one process for each library, of which one at a time has something to do.

The others wait for a command in a blocking read, with their thread pools asleep. A library that dies takes nothing
with it but what it was about to do.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from perf import envs
from perf.peers import MODULES, CannotRun, threads

ROOT = Path(__file__).parent.parent
#: A worker that says nothing for so many seconds is ended.
PATIENCE = 900.0


class Died(Exception):
    """A worker is no more; the message says how it ended."""


class Missing(Exception):
    """A library cannot be imported; the message says why."""


def environment(count):
    """What every process finds in its environment, in the race and alone: so many threads."""
    names = (
        "NUMKV_PERF_THREADS", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS",
    )  # fmt: skip
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, **dict.fromkeys(names, str(count)), "PYTHONPATH": path}


class Worker:
    """A process with one library in it; `name` and `versions` are what the library says."""

    def __init__(self, module, python=None, patience=PATIENCE, variables=None):
        self.patience = patience
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python or envs.this(), "-m", "perf.worker", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment(threads()) | (variables or {}),
            cwd=ROOT,
        )
        try:
            hello = self._answer()
        except BaseException:
            self.close()
            raise
        if "missing" in hello:
            self.close()
            raise Missing(hello["missing"])
        self.name, self.versions = hello["name"], hello["versions"]

    @property
    def pid(self):
        return self._process.pid

    @property
    def alive(self):
        return self._process.poll() is None

    def ask(self, do, **given):
        """Send a command and wait for the answer; `Died` if there will be none."""
        try:
            self._process.stdin.write(json.dumps({"do": do, **given}).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise self._died() from None
        return self._answer()

    def close(self):
        """End the process: by the end of its input, or by force."""
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _answer(self):
        if not select.select([self._process.stdout], [], [], self.patience)[0]:
            self._process.kill()
            self._process.wait()
            raise Died(f"no answer for {self.patience:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        return json.loads(line)

    def _died(self):
        status = self._process.wait()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        self._log.seek(0)
        said = [x.strip() for x in self._log.read().splitlines() if x.strip()]
        return Died(f"died of {how}" + (f": {said[-1][:200]}" if said else ""))


@dataclass
class Remote:
    """A contestant in a worker's process, with what `perf.worker` says of it."""

    worker: Worker
    form: str
    error: float
    bytes: int
    layers: int
    pieces: tuple[int, ...] = ()

    def turn(self, seconds):
        """Times of its calls in one turn; its threads sleep again."""
        return self.worker.ask("turn", form=self.form, seconds=seconds)["times"]


class Library:
    """A library in the race: its worker, started again where it died; `variables` are for its environment."""

    def __init__(self, peer, module=None, python=None, variables=None):
        self.peer = peer
        module, python = module or f"perf.peers.{MODULES[peer]}", python or envs.python_of(peer)
        self._start = lambda: Worker(module, python, variables=variables)
        self.worker = self._start()
        self.name, self.versions = self.worker.name, self.worker.versions
        self._problem = None

    @property
    def pid(self):
        return self.worker.pid

    def problem(self, **problem):
        """The problem that the next contestants get."""
        self._problem = problem
        if self.worker.alive:
            self.worker.ask("problem", **problem)
        else:
            self._again()

    def contestants(self, kind):
        """A `Remote`, or the reason why there is none, for each form.

        One that takes the process with it is told apart from the others, which are made again in a new one.
        """
        fatal = {}
        while True:
            try:
                if not self.worker.alive:
                    self._again()
                return self._made(kind, fatal)
            except _DiedOf as form:
                fatal[form.form] = str(form)

    def _made(self, kind, fatal):
        self.worker.ask("free")
        made = {}
        for form in self.worker.ask("forms", kind=kind):
            if form in fatal:
                made[form] = fatal[form]
                continue
            try:
                said = self.worker.ask("make", kind=kind, form=form)
            except Died as error:
                raise _DiedOf(form, str(error)) from None
            made[form] = said.get("reason") or Remote(self.worker, form, **said)
        return made

    def only(self, kind, form):
        """One contestant; `CannotRun` or `Died` says why not."""
        if not self.worker.alive:
            self._again()
        said = self.worker.ask("make", kind=kind, form=form)
        if "reason" in said:
            raise CannotRun(said["reason"])
        return Remote(self.worker, form, **said)

    def _again(self):
        self.worker.close()
        self.worker = self._start()
        if self._problem:
            self.worker.ask("problem", **self._problem)

    def free(self):
        """Let go of the contestants' memory."""
        if self.worker.alive:
            self.worker.ask("free")

    def close(self):
        self.worker.close()


class _DiedOf(Exception):
    def __init__(self, form, said):
        super().__init__(said)
        self.form = form

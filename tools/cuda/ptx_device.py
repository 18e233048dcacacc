"""numkv's CUDA target, run by the interpreter of PTX: the stub driver, with kernels that compute.

    from tools.cuda import ptx_device
    device = ptx_device.start()  # before numba.cuda is imported
    ... calls of numkv with target "cuda" ...
    device.launches  # what each kernel did

The PTX comes from the same linker as machine code: from the optimised program, with the signature and the options of
the run. Results are those of calls of numkv; the caller compares them.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tools.cuda import stub_driver
from tools.cuda.ptx_machine import Compiled, Run, run
from tools.cuda.ptx_program import Program, PtxError, parse

__all__ = ["Device", "Done", "start"]


class Done(NamedTuple):
    """A launch that has run."""

    name: str  #: of the kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    run: Run


class Device:
    """A device that interprets what is launched on it.

    Attributes
    ----------
    launches : list of Done
        All launches, in order.
    change : function or None
        Returns the program to run, given a kernel's name and program: for mutants.
    choose : function or None
        Returns the numbers of the blocks to run, given the number of blocks: for counts of large launches.
    """

    def __init__(self, driver: stub_driver.Driver) -> None:
        self.driver = driver
        self.launches: list[Done] = []
        self.change: Callable[[str, Program], Program] | None = None
        self.choose: Callable[[int], Any] | None = None
        self._programs: dict[bytes, Program] = {}
        self._compiled: dict[Any, Compiled] = {}
        self._kept: dict[int, tuple[stub_driver.Launch, dict[str, bytes]]] = {}
        driver.on_launch(self._launch, self._replay)

    def check(self) -> None:
        """Raise the error of a launch: the interpreter's error, or the problems that it found."""
        error, self.driver.error = self.driver.error, None
        if error is not None:
            raise error
        for done in self.launches:
            if not done.run.ok:
                raise PtxError(
                    f"{short(done.name)}: {dict(done.run.problems.counts)} {done.run.problems.where}"
                )

    def forget(self) -> None:
        """Forget launches and errors."""
        self.launches.clear()
        self.driver.error = None

    def program(self, function: int) -> Program:
        """Return the program of a function of the driver."""
        image = self.driver.image(function)
        if image not in self._programs:
            if image[:4] == b"\x7fELF":
                raise PtxError("machine code was loaded; the interpreter needs PTX")
            self._programs[image] = parse(image.rstrip(b"\0").decode())
        return self._programs[image]

    def _launch(self, launch: stub_driver.Launch) -> None:
        program = self.program(launch.function)
        pointers = (ctypes.c_void_p * len(program.params)).from_address(launch.params)
        params = {
            p.name: ctypes.string_at(at, p.size)
            for p, at in zip(program.params, pointers, strict=True)
        }
        if launch.node:
            self._kept[launch.node] = launch, params
        else:
            self._run(launch, program, params)

    def _replay(self, node: int) -> None:
        launch, params = self._kept[node]
        self._run(launch, self.program(launch.function), params)

    def _run(self, launch: stub_driver.Launch, program: Program, params: dict[str, bytes]) -> None:
        if self.driver.error is not None:
            return  # launches after a failure are meaningless
        if self.change is not None:
            program = self.change(launch.name, program)
        key = id(program)
        compiled = self._compiled.get(key)
        if compiled is None or compiled.program is not program:
            compiled = self._compiled[key] = Compiled(program)
        try:
            result = run(
                compiled,
                launch.grid,
                launch.block,
                launch.shared_bytes,
                params,
                self.driver.allocation,
                None if self.choose is None else self.choose(math.prod(launch.grid)),
            )
        except PtxError as error:
            found = getattr(error, "result", None)
            if found is not None:
                self.launches.append(Done(launch.name, launch.grid, launch.block, found))
            raise
        self.launches.append(Done(launch.name, launch.grid, launch.block, result))


def short(name: str) -> str:
    """Return the name of a kernel's factory, from its mangled name."""
    found = re.search(r"\d+make_([a-z_]+?)\d+_3clocals", name)
    return found[1] if found else name[:60]


_started: list[Device] = []


def start() -> Device:
    """Load the stub driver, and make the linker return PTX; every call returns the same device.

    Raises
    ------
    RuntimeError
        If a driver has been loaded before, or the simulator is on.
    """
    if _started:
        return _started[0]
    # Kernels on disk are machine code, but these are PTX, so they need their own folder.
    folder = Path(tempfile.gettempdir(), f"numkv-ptx-{os.getuid()}")
    folder.mkdir(parents=True, exist_ok=True)
    driver = stub_driver.load()
    from numba.core import config

    # Numba may have been imported before.
    os.environ["NUMBA_CACHE_DIR"] = config.CACHE_DIR = str(folder)
    driver.poison(0xA5)
    _give_ptx()
    _started.append(Device(driver))
    return _started[0]


def _give_ptx() -> None:
    """Make Numba's linker return PTX instead of machine code."""
    from cuda.core import ObjectCode
    from numba.cuda.cudadrv import driver

    def complete(self: Any) -> Any:
        ptx = self.get_linked_ptx()
        return ObjectCode.from_cubin(ptx if isinstance(ptx, bytes) else ptx.encode())

    driver._Linker.complete = complete

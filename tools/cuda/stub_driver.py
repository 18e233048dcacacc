"""A libcuda.so.1 without a GPU, which records all calls; built from ``stub_driver.c`` by the C compiler.

Numba, cuda.core and cuda.bindings run on it as on a driver: device memory is host memory; launches do nothing unless
`Driver.on_launch` sets a function that runs them. It must be loaded before any other driver::

    from tools.cuda import stub_driver
    driver = stub_driver.load()  # then import numba.cuda
    with driver.calls() as log: ...
    print(log.names)

The list of the driver's functions comes from the installed cuda.bindings. Functions that the C file lacks return
CUDA_ERROR_NOT_SUPPORTED, so their callers fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

__all__ = ["ASYNC_WAITS", "BLOCKING_WAITS", "Call", "Driver", "Launch", "Log", "build", "load", "source"]  # fmt: skip

C_FILE = Path(__file__).with_name("stub_driver.c")

#: Groups of calls in a ledger, by the names that the stub records. A copy to or from pageable memory counts as
#: blocking, because the driver waits for it or stages it.
LAUNCHES = {
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuLaunchCooperativeKernel",
    "cuGraphLaunch",
    "cuLaunchHostFunc",
}
ALLOCATIONS = {
    "cuMemAlloc", "cuMemAllocAsync", "cuMemHostAlloc", "cuMemAllocManaged", "cuMemPoolCreate",
    "cuStreamCreate", "cuEventCreate", "cuModuleLoadData", "cuLibraryLoadData",
}  # fmt: skip
FREES = {
    "cuMemFree",
    "cuMemFreeAsync",
    "cuMemFreeHost",
    "cuMemPoolDestroy",
    "cuEventDestroy",
    "cuStreamDestroy",
}
FILLS = {f"cuMemsetD{bits}{how}" for bits in (8, 16, 32) for how in ("", "Async")}
ASYNC_COPIES = {
    "cuMemcpyAsync",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
    "cuMemcpyDtoDAsync",
    "cuMemcpyDtoD",
}
BLOCKING_COPIES = {"cuMemcpy", "cuMemcpyHtoD", "cuMemcpyDtoH"} | {
    f"{n} (pageable)" for n in ASYNC_COPIES
}
ASYNC_WAITS = {"cuStreamWaitEvent"}
BLOCKING_WAITS = {"cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"}
GROUPS = {
    "launches": LAUNCHES, "async copies": ASYNC_COPIES | FILLS, "blocking copies": BLOCKING_COPIES,
    "allocations": ALLOCATIONS, "frees": FREES, "async waits": ASYNC_WAITS, "blocking waits": BLOCKING_WAITS,
}  # fmt: skip


class Call(NamedTuple):
    """A call of the driver."""

    name: str
    note: int  #: bytes, or blocks of a launch
    stream: int


class Launch(NamedTuple):
    """The arguments of a launch."""

    function: int  #: the handle
    name: str  #: of the kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    params: int  #: address of the pointers to the arguments
    node: int  #: number within a graph that is being captured; 0 where it runs now


@dataclass
class Log:
    """The recorded calls of the driver."""

    calls: list[Call] = field(default_factory=list)

    @property
    def names(self) -> Counter[str]:
        """Return the number of calls of each function."""
        return Counter(call.name for call in self.calls)

    def groups(self) -> dict[str, int]:
        """Launches, copies, allocations, frees and waits; each name belongs to one of `GROUPS`."""
        names = self.names
        return {group: sum(names[name] for name in members) for group, members in GROUPS.items()}


def functions() -> list[str]:
    """Return the names of the driver's functions in the installed cuda.bindings, without suffixes of versions."""
    spec = importlib.util.find_spec("cuda.bindings")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("the stub driver needs cuda.bindings: pip install 'numkv[cuda]'")
    text = Path(spec.submodule_search_locations[0], "_internal", "driver.pxd").read_text()
    return sorted(set(re.findall(r"^cdef \w+ _(cu[A-Z]\w*)\(", text, re.M)))


def source() -> str:
    """Return the stub's C source: the written part, the missing functions, and a table of all by name."""
    written = C_FILE.read_text()
    have = set(re.findall(r"^(?:EXPORT )?CUresult (cu\w+)\(", written, re.M))
    wanted = set(functions())
    bare = {re.sub(r"_v\d+$", "", name) for name in wanted} | wanted
    missing = sorted(bare - have)
    lines = [
        "",
        *(
            f'CUresult {n}(void) {{ note("{n} (missing)", 0, 0); return NOT_SUPPORTED; }}'
            for n in missing
        ),
    ]
    table = ",\n".join(f'    {{"{n}", (void *){n}}}' for n in sorted(have | set(missing)))
    lines += ["const struct named stub_table[] = {", table + ",", "    {0, 0}", "};"]
    return written + "\n".join(lines) + "\n"


def build(folder: Path | None = None) -> Path:
    """Compile the stub, unless it exists already from the same source.

    Parameters
    ----------
    folder : Path, optional
        Target folder: one in the temporary directory by default.

    Returns
    -------
    Path
        The file, named ``libcuda.so.1``.

    Raises
    ------
    RuntimeError
        If there is no C compiler, or it fails.
    """
    text = source()
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = folder or Path(tempfile.gettempdir(), f"numkv-stub-driver-{os.getuid()}")
    library = folder / digest / "libcuda.so.1"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    c_file, made = library.with_name("stub.c"), library.with_name(f"made-{os.getpid()}")
    c_file.write_text(text)
    command = [
        os.environ.get("CC", "cc"), "-O1", "-w", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1",
        str(c_file), "-o", str(made),
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError(f"the stub driver needs a C compiler: {command[0]}") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"the stub driver does not compile:\n{error.stderr}") from error
    made.rename(library)
    return library


LaunchHook = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_void_p, ctypes.c_long
)
ReplayHook = ctypes.CFUNCTYPE(None, ctypes.c_long)


class Driver:
    """The loaded stub."""

    def __init__(self, library: Path) -> None:
        self.path = library
        self._c = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        for name, result in (
            ("stub_name", ctypes.c_char_p), ("stub_note", ctypes.c_size_t), ("stub_stream", ctypes.c_size_t),
            ("stub_function_name", ctypes.c_char_p), ("stub_function_image", ctypes.c_size_t),
            ("stub_function_image_size", ctypes.c_size_t),
        ):  # fmt: skip
            getattr(self._c, name).restype = result
        for name in ("stub_function_name", "stub_function_image", "stub_function_image_size"):
            getattr(self._c, name).argtypes = [ctypes.c_void_p]
        self._c.stub_fail.argtypes = [ctypes.c_char_p] + [ctypes.c_int] * 3
        self._c.stub_find.argtypes = [ctypes.c_uint64] + [ctypes.c_void_p] * 4
        self._hooks: tuple[object, ...] = ()
        self.error: BaseException | None = None

    # -- recorded calls

    def reset(self) -> None:
        """Drop the calls recorded so far."""
        self._c.stub_reset()

    def logging(self, on: bool) -> None:
        """Choose whether calls are recorded from now on."""
        self._c.stub_logging(int(on))

    def log(self) -> Log:
        """Return the calls since the last `reset`."""
        c = self._c
        return Log(
            [
                Call(c.stub_name(i).decode(), c.stub_note(i), c.stub_stream(i))
                for i in range(c.stub_count())
            ]
        )

    @contextlib.contextmanager
    def calls(self) -> Iterator[Log]:
        """Record the calls within a context; yield the log."""
        log = Log()
        self.reset()
        try:
            yield log
        finally:
            log.calls = self.log().calls

    # -- behaviour

    def devices(self, count: int, compute_capability: tuple[int, int] = (9, 0)) -> None:
        """Set the number and the kind of devices, before their first use."""
        self._c.stub_devices(count, *compute_capability)

    @contextlib.contextmanager
    def failing(
        self, name: str, code: int, *, sticky: bool = False, after: int = 0
    ) -> Iterator[None]:
        """Make calls fail within a context.

        Parameters
        ----------
        name : str
            Name of the function in the log; "" for any function that can fail.
        code : int
            The driver's error number, such as 700 for an illegal address.
        sticky : bool
            Whether all later calls fail too, as after an invalid access of a kernel.
        after : int
            Number of successful calls before.
        """
        self._c.stub_fail(name.encode(), code, int(sticky), after)
        try:
            yield
        finally:
            self._c.stub_fail(b"", 0, 0, 0)

    def poison(self, byte: int | None) -> None:
        """Fill new memory with a byte; None does not fill it."""
        self._c.stub_poison(-1 if byte is None else byte)

    def allocation(self, address: int) -> tuple[int, int] | None:
        """Return the first address and the bytes of an address's allocation; None if there is none."""
        base, size, kind, device = (
            ctypes.c_uint64(),
            ctypes.c_size_t(),
            ctypes.c_int(),
            ctypes.c_int(),
        )
        parts = [ctypes.byref(x) for x in (base, size, kind, device)]
        return (base.value, size.value) if self._c.stub_find(address, *parts) else None

    def image(self, function: int) -> bytes:
        """Return the code of a loaded function: a cubin, or PTX."""
        return ctypes.string_at(
            self._c.stub_function_image(function), self._c.stub_function_image_size(function)
        )

    # -- launches

    def on_launch(
        self, launch: Callable[[Launch], None] | None, replay: Callable[[int], None] | None = None
    ) -> None:
        """Set functions for every launch, and for every launch that a graph replays; None removes them.

        C code calls them and cannot pass exceptions, so the first exception is stored in `error`.

        Parameters
        ----------
        launch : function or None
            Called with a `Launch`. With ``node > 0`` a stream is captured: store the arguments, do not run them.
        replay : function, optional
            Called with the number of such a node.
        """
        if launch is None:
            self._c.stub_on_launch(None, None)
            self._hooks = ()
            return

        def launched(function: int, sizes: object, params: int, node: int) -> None:
            z = [int(sizes[i]) for i in range(7)]  # type: ignore[index]
            name = self._c.stub_function_name(function).decode()
            found = Launch(
                function, name, (z[0], z[1], z[2]), (z[3], z[4], z[5]), z[6], params or 0, node
            )
            self._guard(launch, found)

        def replayed(node: int) -> None:
            if replay is not None:
                self._guard(replay, node)

        self._hooks = LaunchHook(launched), ReplayHook(replayed)
        self._c.stub_on_launch(*self._hooks)

    def _guard(self, function: Callable[..., None], *args: object) -> None:
        try:
            function(*args)
        except BaseException as error:  # the calling C code cannot pass exceptions
            self.error = self.error or error


_loaded: list[Driver] = []


def load() -> Driver:
    """Build and load the stub; every call returns the same one.

    Raises
    ------
    RuntimeError
        If a driver has been loaded before, or the simulator is on.
    """
    if _loaded:
        return _loaded[0]
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        raise RuntimeError(
            "the stub driver needs a process without the simulator: NUMBA_ENABLE_CUDASIM=0"
        )
    if "numba.cuda.cudadrv.driver" in sys.modules and _maps_a_driver():
        raise RuntimeError("a CUDA driver is loaded already; load the stub first")
    os.environ["NUMBA_ENABLE_CUDASIM"] = "0"
    _loaded.append(Driver(build()))
    return _loaded[0]


def _maps_a_driver() -> bool:
    """Return whether this process has loaded a libcuda.so.1."""
    return "libcuda.so" in Path("/proc/self/maps").read_text()

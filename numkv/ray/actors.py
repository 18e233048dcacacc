"""`RayShards`: shards that are actors of Ray, on this machine or on those of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numkv.ray.errors import ShardDown
from numkv.ray.shard import Shard, ShardSpec
from numkv.ray.transport import Delivery
from numkv.ray.wire import Answer, Message

#: Places that are tried for an actor.
_PLACES = 3
#: What errors begin with where there was no answer, which may be as there is no place at all.
_LATE = "no answer in"


class RayShards:
    """A `Transport` whose shards are Ray actors.

    Where this process has not started Ray, it is started: a cluster of its own on this machine, or as part of the one
    at `address`. Actors end with the process that made them. One that is lost is made anew wherever Ray finds a place
    for it.

    Parameters
    ----------
    address : str
        ``"local"``: a cluster of its own, whatever else runs on this machine. Others are joined by name: ``"auto"``, or
        an address as `ray.init` takes it. After a `ray.init` of yours its cluster is used.
    num_cpus : float
        CPUs that each actor asks Ray for; with 0 any number of actors finds a place.
    num_gpus : float
        GPUs that each actor asks for.
    spread : bool
        Whether actors are put on different nodes as far as there are such.
    threads : int, optional
        Threads that each actor computes with; None: as many as its machine has cores.
    start_timeout : float
        Seconds that actors may take to be there.

    Raises
    ------
    NotSupported
        If Ray is not installed.
    """

    def __init__(
        self,
        address: str = "local",
        *,
        num_cpus: float = 0,
        num_gpus: float = 0,
        spread: bool = True,
        threads: int | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        self._ray = _ray()
        self._started = False
        if not self._ray.is_initialized():
            self._ray.init(
                address=address,
                log_to_driver=False,
                include_dashboard=False if address == "local" else None,
            )
            self._started = True
        self._options: dict[str, Any] = {
            "num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": 0, "max_task_retries": 0,
            "scheduling_strategy": "SPREAD" if spread else "DEFAULT",
        }  # fmt: skip
        self._threads, self._timeout = threads, start_timeout
        self._specs: list[ShardSpec] = []
        self._actors: list[Any] = []

    def start(self, specs: Sequence[ShardSpec]) -> None:
        """Make the shards, and wait until they are there; see `Transport.start`."""
        self._specs = list(specs)
        self._actors = [self._made(spec) for spec in specs]  # all at once
        try:
            for shard in range(len(specs)):
                try:
                    self._wait(shard)
                except ShardDown as down:
                    if down.reason.startswith(_LATE):
                        raise
                    self.replace(shard)
        except BaseException:
            self.close()
            raise

    def _made(self, spec: ShardSpec) -> Any:
        actor = self._ray.remote(Shard).options(**self._options)
        return actor.remote(spec, self._threads)

    def _wait(self, shard: int) -> None:
        """Wait until a shard is there."""
        ready = self._actors[shard].__ray_ready__.remote()
        _Coming(self._ray, shard, ready).result(self._timeout)

    def send(self, shard: int, message: Message) -> Delivery:
        """Send a message; see `Transport.send`."""
        actor = self._actors[shard]
        if actor is None:
            raise ShardDown(shard, "it is gone")
        try:
            return _Coming(self._ray, shard, actor.handle.remote(message))
        except self._ray.exceptions.RayError as error:
            raise ShardDown(shard, str(error)) from None

    def replace(self, shard: int) -> None:
        """Make a shard anew; see `Transport.replace`."""
        for left in range(_PLACES - 1, -1, -1):
            self._kill(shard)
            self._actors[shard] = self._made(self._specs[shard])
            try:
                self._wait(shard)
                return
            except ShardDown as down:  # on a node that is gone, say, which Ray has not noticed yet
                if not left or down.reason.startswith(_LATE):
                    self._kill(shard)
                    raise

    def _kill(self, shard: int) -> None:
        actor, self._actors[shard] = self._actors[shard], None
        if actor is not None:
            self._ray.kill(actor)

    def close(self) -> None:
        """End the actors, and Ray too where this object has started it; see `Transport.close`."""
        if self._ray.is_initialized():
            for shard in range(len(self._actors)):
                self._kill(shard)
            if self._started:
                self._ray.shutdown()
        self._actors = []


class _Coming:
    """A `Delivery` that Ray makes."""

    def __init__(self, ray: Any, shard: int, reference: Any) -> None:
        self._ray, self._shard, self._reference = ray, shard, reference

    def result(self, timeout: float | None) -> Answer:
        """The answer; see `Delivery.result`."""
        try:
            found: Answer = self._ray.get(self._reference, timeout=timeout)
        except self._ray.exceptions.GetTimeoutError:
            raise ShardDown(self._shard, f"{_LATE} {timeout} s") from None
        except self._ray.exceptions.RayError as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ShardDown(self._shard, first) from None
        return found


def _ray() -> Any:
    """Ray, which is an extra."""
    try:
        import ray

        ray.init  # noqa: B018 (a folder of this name can be imported too)
    except (ImportError, AttributeError):
        from numkv.errors import NotSupported

        raise NotSupported(
            "expected the package ray for shards on other machines: pip install 'numkv[ray]'"
        ) from None
    return ray

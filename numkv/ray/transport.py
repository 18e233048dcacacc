"""Transports of messages to shards (`RayShards`, `LocalShards` or another `Transport`), and a `Channel` to each."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from numkv.errors import NotSupported, NumkvError
from numkv.ray.messages import (
    Answer,
    Message,
    Operation,
    ShardDown,
    each,
    nbytes,
    packed,
    unpacked,
)
from numkv.ray.shard import BOOKKEEPING, Shard, ShardSpec

#: Attempts to place an actor.
_PLACES = 3
#: Beginning of the error for a missing reply, whose cause may be that there is no place.
_LATE = "no answer in"
#: Most operations that wait to be sent with the next message.
_MOST_WAITING = 256


class Delivery(Protocol):
    """A pending message, or its reply."""

    def result(self, timeout: float | None) -> Answer:
        """Wait for the answer.

        Parameters
        ----------
        timeout : float or None
            The most seconds to wait.

        Returns
        -------
        Answer

        Raises
        ------
        ShardDown
            If the shard has ended, or does not reply in time.
        """


class Transport(Protocol):
    """Carries messages. Messages to one shard arrive in the order of sending."""

    def start(self, specs: Sequence[ShardSpec]) -> None:
        """Make the shards; they are numbered from 0.

        Parameters
        ----------
        specs : sequence of ShardSpec
            The arguments of each shard.
        """

    def send(self, shard: int, message: Message) -> Delivery:
        """Send a message, without waiting.

        Parameters
        ----------
        shard : int
            Number of the shard.
        message : tuple
            See `numkv.ray.messages`.

        Returns
        -------
        Delivery
        """

    def replace(self, shard: int) -> None:
        """End a shard, if it still runs, and make an empty one in its place.

        Parameters
        ----------
        shard : int
            Number of the shard.

        Raises
        ------
        ShardDown
            If there is no place for one.
        """

    def close(self) -> None:
        """End all shards."""


class LocalShards:
    """A `Transport` whose shards are objects in this process: for tests, and to measure the cost of sharding itself.

    Examples
    --------
    >>> import numpy as np
    >>> from numkv.ray import LocalShards, ShardedKVCache
    >>> cache = ShardedKVCache(1, 2, 8, num_blocks=8, heads=2, transport=LocalShards())
    >>> seq = cache.add()
    >>> step = cache.reserve([seq], 3)
    >>> rows = np.ones((3, 2, 8), np.float32)
    >>> step.append_attend(0, rows, rows, np.ones((3, 4, 8), np.float32)).shape
    (3, 4, 8)
    >>> cache.commit(step)
    >>> cache.length(seq)
    3
    >>> cache.close()
    """

    def __init__(self) -> None:
        self.shards: list[Any] = []
        self._specs: list[ShardSpec] = []

    def start(self, specs: Sequence[ShardSpec]) -> None:
        """Make the shards; see `Transport.start`."""
        self._specs = list(specs)
        self.shards = [Shard(spec) for spec in specs]

    def send(self, shard: int, message: Message) -> Delivery:
        """Handle a message at once; see `Transport.send`."""
        found = self.shards[shard]
        if found is None:
            return _Here(shard, None)
        return _Here(shard, found.handle(_copied(message)))

    def replace(self, shard: int) -> None:
        """Replace a shard by a new one; see `Transport.replace`."""
        self.shards[shard] = Shard(self._specs[shard])

    def close(self) -> None:
        """End all shards; see `Transport.close`."""
        self.shards = [None] * len(self.shards)


class _Here:
    """A `Delivery` whose reply exists already, or will never arrive."""

    def __init__(self, shard: int, answer: Answer | None) -> None:
        self._shard, self._answer = shard, answer

    def result(self, timeout: float | None) -> Answer:
        """Return the reply; see `Delivery.result`."""
        if self._answer is None:
            raise ShardDown(self._shard, "it has ended")
        return self._answer


def _copied(x: Any) -> Any:
    """Return a message as another process receives it: arrays are read-only copies."""
    if not isinstance(x, np.ndarray):
        return each(_copied, x)
    made = x.copy()
    made.flags.writeable = False
    return made


class RayShards:
    """A `Transport` whose shards are Ray actors.

    If this process has not started Ray, it is started here: as a separate cluster on this machine, or connected to the
    cluster at `address`. Actors end with the process that made them. A lost actor is replaced wherever Ray finds a
    place.

    Parameters
    ----------
    address : str
        ``"local"`` starts a separate cluster, even if another one runs on this machine. ``"auto"``, or an address as
        for `ray.init`, joins a cluster. If the process has called `ray.init`, that cluster is used.
    num_cpus : float
        CPUs that each actor requests of Ray; 0 permits any number of actors.
    num_gpus : float
        GPUs that each actor requests.
    spread : bool
        Whether actors are placed on different nodes if possible.
    threads : int, optional
        Threads of each actor's computations; by default as many as its machine has cores.
    start_timeout : float
        Seconds until all actors must have started.

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
        """Make the shards, and wait until they have started; see `Transport.start`."""
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
        """Wait until a shard has started."""
        ready = self._actors[shard].__ray_ready__.remote()
        _Coming(self._ray, shard, ready).result(self._timeout)

    def send(self, shard: int, message: Message) -> Delivery:
        """Send a message; see `Transport.send`."""
        actor = self._actors[shard]
        if actor is None or not self._ray.is_initialized():
            raise ShardDown(shard, "it has ended")
        try:
            return _Coming(self._ray, shard, actor.handle.remote(message))
        except self._ray.exceptions.RayError as error:
            raise ShardDown(shard, str(error)) from None

    def replace(self, shard: int) -> None:
        """Replace a shard by a new one; see `Transport.replace`."""
        if not self._ray.is_initialized():  # Ray would start another cluster by itself
            raise ShardDown(shard, "Ray was shut down in this process")
        for left in range(_PLACES - 1, -1, -1):
            self._kill(shard)
            self._actors[shard] = self._made(self._specs[shard])
            try:
                self._wait(shard)
                return
            except ShardDown as down:  # such as on a lost node that Ray has not noticed yet
                if not left or down.reason.startswith(_LATE):
                    self._kill(shard)
                    raise

    def _kill(self, shard: int) -> None:
        actor, self._actors[shard] = self._actors[shard], None
        if actor is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):  # it is another session's
                self._ray.kill(actor)

    def close(self) -> None:
        """End the actors, and also Ray if this object has started it; see `Transport.close`."""
        if self._ray.is_initialized():
            for shard in range(len(self._actors)):
                self._kill(shard)
            if self._started:
                self._ray.shutdown()
        self._actors = []


class _Coming:
    """A pending `Delivery` of Ray."""

    def __init__(self, ray: Any, shard: int, reference: Any) -> None:
        self._ray, self._shard, self._reference = ray, shard, reference

    def result(self, timeout: float | None) -> Answer:
        """Return the reply; see `Delivery.result`."""
        try:
            found: Answer = self._ray.get(self._reference, timeout=timeout)
        except self._ray.exceptions.GetTimeoutError:
            raise ShardDown(self._shard, f"{_LATE} {timeout} s") from None
        except self._ray.exceptions.RayError as error:
            lines = (str(error).strip() or type(error).__name__).splitlines()
            # The last line of a traceback is the shard's own error.
            is_own = getattr(error, "actor_init_failed", False)
            raise ShardDown(self._shard, lines[-1 if is_own else 0].rstrip(".")) from None
        return found


def _ray() -> Any:
    """Return Ray, which is an extra."""
    try:
        import ray

        ray.init  # noqa: B018 (a folder of this name can be imported too)
    except (ImportError, AttributeError):
        raise NotSupported(
            "expected the package ray for shards on other machines: pip install 'numkv[ray]'"
        ) from None
    return ray


class Limits(NamedTuple):
    """Bounds of the messages on their way to a shard; sends beyond them block until the oldest reply."""

    messages: int = 8
    nbytes: int = 256 << 20
    timeout: float | None = 60.0
    """Seconds after which a shard that does not answer counts as lost."""


class Ticket:
    """A sent message, and later its value, its error, or the loss of the shard."""

    def __init__(self, channel: Channel, number: int, cost: int, size: int) -> None:
        self._channel = channel
        self.number, self.cost, self.size = number, cost, size
        self.delivery: Delivery | None = None
        self.shard = channel.shard
        self.value: Any = None
        self.error: BaseException | None = None
        self.down: ShardDown | None = None

    def wait(self) -> None:
        """Wait for the replies to earlier messages, then for this one."""
        self._channel.wait_for(self)

    def take(self, timeout: float | None) -> None:
        """Receive the reply."""
        if self.delivery is None:
            return
        try:
            answer = self.delivery.result(timeout)  # an interrupt leaves it to be received again
        except ShardDown as down:
            self.delivery, self.down = None, down
            return
        self.delivery = None
        if answer.error is None:
            self.value = unpacked(answer.value)
        elif answer.failed in BOOKKEEPING or answer.failed == "lost":
            self.down = ShardDown(
                self.shard, f"its bookkeeping is wrong, {answer.failed}: {answer.error!r}"
            )
        else:
            self.error = answer.error
        if self.down is None:
            self._channel.said_free = answer.free


class Channel:
    """Messages to a shard.

    Parameters
    ----------
    transport : Transport
        Carries the messages.
    shard : int
        Number of the shard.
    num_blocks : int
        Blocks of the shard.
    limits : Limits
        Bounds of pending messages.

    Attributes
    ----------
    sent, sent_nbytes : int
        Messages sent so far. Bytes of their arrays.
    said_free : int
        Free blocks, as last reported by the shard.
    down : ShardDown or None
        Why the shard does not answer, if it does not.
    closed : bool
        Whether the cache is closed, so that it may send no message.
    """

    closed = False

    def __init__(self, transport: Transport, shard: int, num_blocks: int, limits: Limits) -> None:
        self._transport, self.shard, self._limits = transport, shard, limits
        self._num_blocks = num_blocks
        self.sent = self.sent_nbytes = 0
        self.begin()

    def begin(self) -> None:
        """Reset for an empty shard."""
        self._number, self.said_free = 0, self._num_blocks
        self._waiting: list[Operation] = []
        self._in_flight: deque[Ticket] = deque()
        self._cost = 0
        self.down: ShardDown | None = None

    @property
    def free(self) -> int:
        """Return the certainly free blocks: as last reported by the shard, less those requested since."""
        return self.said_free - self._cost - sum(ticket.cost for ticket in self._in_flight)

    def later(self, name: str, *arguments: Any, cost: int = 0) -> None:
        """Queue an operation to run before the next message; it takes at most `cost` blocks."""
        if self.down is not None:
            return  # a replacement receives the whole state
        self._waiting.append((name, packed(arguments)))
        self._cost += cost
        if len(self._waiting) > _MOST_WAITING:
            self.send("sync").wait()

    def send(self, name: str, *arguments: Any) -> Ticket:
        """Send a message, with all queued operations before it.

        Parameters
        ----------
        name : str
            Name of the operation, whose value is that of the reply.
        *arguments
            Arguments of the operation.

        Returns
        -------
        Ticket
        """
        if self.closed:
            raise NumkvError("expected an open cache, got a closed one; make another")
        operations = [*self._waiting, (name, packed(arguments))]
        ticket = Ticket(self, self._number + 1, self._cost, nbytes(operations))
        while (
            self.down is None
            and self._in_flight
            and (
                len(self._in_flight) >= self._limits.messages
                or sum(of.size for of in self._in_flight) + ticket.size > self._limits.nbytes
            )
        ):
            self.wait_for(self._in_flight[0])
        if self.down is None:
            self._number += 1
            self.sent += 1
            self.sent_nbytes += ticket.size
            self._waiting, self._cost = [], 0
            try:
                ticket.delivery = self._transport.send(self.shard, (self._number, operations))
                self._in_flight.append(ticket)
            except ShardDown as down:
                self._lose(down)
        ticket.down = self.down
        return ticket

    def wait_for(self, ticket: Ticket) -> None:
        """Receive replies up to this one."""
        while self._in_flight and self._in_flight[0].number <= ticket.number:
            first = self._in_flight[0]
            first.take(self._limits.timeout)
            if first.down is not None:
                self._lose(first.down)
                return
            self._in_flight.popleft()

    def drain(self) -> None:
        """Receive all replies."""
        if self._in_flight:
            self.wait_for(self._in_flight[-1])

    def _lose(self, down: ShardDown) -> None:
        """Mark the shard as lost: pending messages get no reply."""
        self.down = down
        while self._in_flight:
            ticket = self._in_flight.popleft()
            ticket.delivery, ticket.down = None, down
        self._waiting, self._cost = [], 0

"""`Channel`: what a cache says to one shard, in order, and what it knows of its free blocks."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from numkv.ray.errors import ShardDown
from numkv.ray.shard import BOOKKEEPING
from numkv.ray.transport import Delivery, Transport
from numkv.ray.wire import Answer, Operation, nbytes, packed, unpacked

#: Operations that may wait for a message to ride along with.
_MOST_WAITING = 256


class Limits(NamedTuple):
    """How much may be on its way to a shard at once; who sends more waits for the oldest answer."""

    messages: int = 8
    nbytes: int = 256 << 20
    timeout: float | None = 60.0
    """Seconds after which a shard that does not answer counts as lost."""


class Ticket:
    """A message that was sent, and in the end its value, or its error, or that the shard is gone."""

    def __init__(
        self, channel: Channel, delivery: Delivery | None, number: int, cost: int, size: int
    ) -> None:
        self._channel, self._delivery = channel, delivery
        self.number, self.cost, self.size = number, cost, size
        self.shard = channel.shard
        self.value: Any = None
        self.error: BaseException | None = None
        self.down: ShardDown | None = None

    def wait(self) -> None:
        """Wait for the answer, and for those to earlier messages first."""
        self._channel.wait_for(self)

    def take(self, timeout: float | None) -> None:
        """Receive the answer."""
        if self._delivery is None:
            return
        try:
            answer = self._delivery.result(timeout)  # an interrupt leaves it to be received again
        except ShardDown as down:
            self._delivery, self.down = None, down
            return
        self._delivery = None
        if answer.error is None:
            self.value = unpacked(answer.value)
        elif answer.failed in BOOKKEEPING or answer.failed == "lost":
            self.down = ShardDown(
                self.shard, f"its books are wrong, {answer.failed}: {answer.error!r}"
            )
        else:
            self.error = answer.error
        if self.down is None:
            self._channel.told(answer)

    def fail(self, down: ShardDown) -> None:
        """Have no answer any more."""
        if self._delivery is not None:
            self._delivery, self.down = None, down


class Channel:
    """Messages to a shard.

    Parameters
    ----------
    transport : Transport
        What carries them.
    shard : int
        To which shard.
    num_blocks : int
        Its blocks.
    limits : Limits
        What may be on its way at once.

    Attributes
    ----------
    sent, sent_nbytes : int
        Messages, and bytes of their arrays, so far.
    down : ShardDown or None
        Why the shard does not answer, if it does not.
    """

    def __init__(self, transport: Transport, shard: int, num_blocks: int, limits: Limits) -> None:
        self._transport, self.shard, self._limits = transport, shard, limits
        self._num_blocks = num_blocks
        self.sent = self.sent_nbytes = 0
        self.begin()

    def begin(self) -> None:
        """Begin anew, with a shard that is empty."""
        self._number, self._free = 0, self._num_blocks
        self._waiting: list[Operation] = []
        self._in_flight: deque[Ticket] = deque()
        self._cost = 0
        self.down: ShardDown | None = None

    @property
    def free(self) -> int:
        """Free blocks that there are for certain: as the shard said last, less what was asked for since."""
        return self._free - self._cost - sum(ticket.cost for ticket in self._in_flight)

    def later(self, name: str, *arguments: Any, cost: int = 0) -> None:
        """Have something done before anything that is sent from now on; it takes so many blocks at most."""
        if self.down is not None:
            return  # what comes in its place is told everything
        self._waiting.append((name, packed(arguments)))
        self._cost += cost
        if len(self._waiting) > _MOST_WAITING:
            self.send("sync").wait()

    def send(self, name: str, *arguments: Any) -> Ticket:
        """Send a message, and what waits along with it.

        Parameters
        ----------
        name : str
            What the shard is to do; its value is the message's.
        *arguments
            For that.

        Returns
        -------
        Ticket
        """
        if self.down is not None:
            ticket = Ticket(self, None, 0, 0, 0)
            ticket.down = self.down
            return ticket
        operations = [*self._waiting, (name, packed(arguments))]
        size = nbytes(operations)
        while self._in_flight and (
            len(self._in_flight) >= self._limits.messages
            or sum(ticket.size for ticket in self._in_flight) + size > self._limits.nbytes
        ):
            self.wait_for(self._in_flight[0])
        if self._is_down():
            return self.send(name, *arguments)
        self._number += 1
        self.sent += 1
        self.sent_nbytes += size
        self._waiting, cost, self._cost = [], self._cost, 0
        try:
            delivery = self._transport.send(self.shard, (self._number, operations))
        except ShardDown as down:
            self._lose(down)
            return self.send(name, *arguments)
        ticket = Ticket(self, delivery, self._number, cost, size)
        self._in_flight.append(ticket)
        return ticket

    def wait_for(self, ticket: Ticket) -> None:
        """Receive answers up to this one."""
        while self._in_flight and self._in_flight[0].number <= ticket.number:
            first = self._in_flight[0]
            first.take(self._limits.timeout)
            if first.down is not None:
                self._lose(first.down)
                return
            self._in_flight.popleft()

    def drain(self) -> None:
        """Receive all answers."""
        if self._in_flight:
            self.wait_for(self._in_flight[-1])

    def told(self, answer: Answer) -> None:
        """Learn from an answer how many blocks are free."""
        self._free = answer.free

    def _is_down(self) -> bool:
        return self.down is not None

    def _lose(self, down: ShardDown) -> None:
        """The shard is gone: nothing that is on its way will be answered."""
        self.down = down
        while self._in_flight:
            self._in_flight.popleft().fail(down)
        self._waiting, self._cost = [], 0


def first_error(tickets: list[Ticket]) -> BaseException | None:
    """The error of the first shard that had one, whichever was first to answer."""
    return next((ticket.error for ticket in tickets if ticket.error is not None), None)

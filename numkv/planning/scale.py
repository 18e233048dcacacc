"""A cost model of decode steps of `numkv.ray` on many nodes, to be fitted to measured messages.

A *group* of nodes stores some sequences: ``heads`` parts of the kv heads times ``context`` columns of tokens. A caller
sends each node one message a layer. For a layer of a step, with n = heads * context nodes::

    latency                           of one message and its reply; those to all nodes travel at once
    n * message                       the caller's time for each message, one after another
    bytes / bandwidth                 of all messages and replies, through the caller's link
    rows read / memory_bandwidth      by the node with most rows: heads are whole
    partial results / memory_bandwidth    merged by the caller, by context only

and for a step weights / memory_bandwidth, because the caller computes the model. Its arithmetic is not counted.

A window bounds the rows that are read. By heads it also bounds the stored rows; by context, columns store all rows
(`ShardedKVCache`), and one column may contain the whole window.

The model assumes no overlap; a caller may do better with `ShardedStep.submit`. Further nodes form more groups, each
with its share of the sequences.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Network(NamedTuple):
    """Properties of nodes and of the network between them; times in seconds, sizes in bytes.

    The first four fit decode steps over two and four actors of Ray, with a thread each. The actors shared two cores of
    an AMD EPYC with other work (2026-11-24, ``python -m perf.ray_steps``). For twelve steps of 16 to 108 ms, the
    model's time was 0.73x to 1.20x the measured one, in a second run 0.63x to 1.25x. Nodes with cores of their own read
    many times faster.
    """

    latency: float = 0.2e-3
    """Seconds of a message and its reply."""
    message: float = 1.9e-3
    """Seconds of the caller's own work for a message and its reply."""
    bandwidth: float = 0.13e9
    """Bytes a second of the caller's link."""
    memory_bandwidth: float = 4.5e9
    """Bytes a second of rows that a node reads, and of weights that the caller reads."""
    memory: float = 64e9
    """Bytes of a node for rows."""


class Load(NamedTuple):
    """A model, and its sequences to decode."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    head_dim_v: int
    row_bytes: int
    """Stored bytes of K and V of one kv head and token."""
    batch: int
    """Sequences."""
    context: int
    """Tokens of each."""
    windows: tuple[int, ...] = ()
    """Tokens that a query sees, itself included, in layers with a window."""
    weights: int = 0
    """Bytes of the model's weights."""
    word: int = 4
    """Bytes of an element of queries and new rows in messages."""


class GroupCost(NamedTuple):
    """Seconds of a decode step in a group, by cause."""

    latency: float
    messages: float
    network: float
    read: float
    merge: float
    weights: float

    @property
    def total(self) -> float:
        """Return the sum of all causes."""
        return sum(self)


class Sharding(NamedTuple):
    """Nodes in groups."""

    groups: int
    heads: int
    context: int
    cost: GroupCost
    tokens_per_second: float
    """Of all groups."""
    memory: float
    """Bytes of rows on the fullest node."""
    bytes_per_step: float
    """Bytes of a step through the link of a caller."""

    @property
    def nodes(self) -> int:
        """Return the number of used nodes."""
        return self.groups * self.heads * self.context

    @property
    def bandwidth_needed(self) -> float:
        """Return the bytes a second at which the network adds a tenth to the rest of the step."""
        rest = self.cost._replace(network=0.0).total  # exact beside any network
        return self.bytes_per_step / (0.1 * rest) if rest else math.inf


def cost_of(
    load: Load, network: Network, heads: int, context: int, batch: int
) -> tuple[GroupCost, float, float]:
    """Return the cost of a step in a group.

    Parameters
    ----------
    load : Load
        The model, and the length of its sequences.
    network : Network
        Nodes and their network.
    heads, context : int
        Parts of the kv heads, and columns.
    batch : int
        Sequences of the group.

    Returns
    -------
    cost : GroupCost
    bytes_per_step : float
        Bytes through the caller's link.
    memory : float
        Bytes of rows on the fullest node.
    """
    nodes = heads * context
    own_heads = math.ceil(load.kv_heads / heads)
    own_tokens = math.ceil(load.context / context)
    of_token = batch * own_heads * load.row_bytes
    full = (load.layers - len(load.windows)) * own_tokens
    read = of_token * (full + sum(min(window, own_tokens) for window in load.windows))
    kept = of_token * load.layers * own_tokens if context > 1 else read
    q = batch * load.q_heads * load.head_dim * load.word
    new = batch * load.kv_heads * (load.head_dim + load.head_dim_v) * load.word
    partial = batch * load.q_heads * (load.head_dim_v + 1) * 4
    back = context * partial if context > 1 else batch * load.q_heads * load.head_dim_v * load.word
    sent = load.layers * (context * q + new + back)
    merge = 3 * context * partial if context > 1 else 0  # read, and the sum read and written
    cost = GroupCost(
        load.layers * network.latency,
        load.layers * nodes * network.message,
        sent / network.bandwidth,
        read / network.memory_bandwidth,
        load.layers * merge / network.memory_bandwidth,
        load.weights / network.memory_bandwidth,
    )
    return cost, sent, kept


def shardings(load: Load, network: Network, nodes: int) -> list[Sharding]:
    """Return all divisions of nodes into equal groups whose rows fit, with powers of two as parts and columns.

    Parameters
    ----------
    load : Load
        The model and its sequences.
    network : Network
        Nodes and their network.
    nodes : int
        Number of nodes.

    Returns
    -------
    list of Sharding
    """
    found = []
    for heads in [2**i for i in range(20) if 2**i <= min(load.kv_heads, nodes)]:
        for context in [2**i for i in range(20) if heads * 2**i <= nodes]:
            most = min(nodes // (heads * context), load.batch)
            for groups in {most, max(1, most // 2), 1}:
                batch = math.ceil(load.batch / groups)
                cost, sent, memory = cost_of(load, network, heads, context, batch)
                if memory <= network.memory:
                    rate = load.batch / cost.total
                    found.append(Sharding(groups, heads, context, cost, rate, memory, sent))
    return found


def best_sharding(
    load: Load, network: Network, nodes: int, *, heads_only: bool = False
) -> Sharding | None:
    """Return the division with the most tokens a second; within 1 % of it, the one with the fewest nodes.

    Parameters
    ----------
    load : Load
        The model and its sequences.
    network : Network
        Nodes and their network.
    nodes : int
        Number of nodes.
    heads_only : bool
        Whether the context stays whole.

    Returns
    -------
    Sharding or None
        None if the rows do not fit.

    Examples
    --------
    Sixteen sequences of a million tokens do not fit by heads alone:

    >>> from numkv.planning.scale import Load, Network, best_sharding
    >>> load = Load(32, 32, 8, 128, 128, row_bytes=512, batch=16, context=1_000_000)
    >>> best_sharding(load, Network(memory=64e9), 64, heads_only=True) is None
    False
    >>> best_sharding(load, Network(memory=64e9), 8) is None
    True
    >>> best_sharding(load, Network(memory=8e9), 512, heads_only=True) is None
    True
    >>> best_sharding(load, Network(memory=8e9), 512).context > 1
    True
    """
    ways = [way for way in shardings(load, network, nodes) if not heads_only or way.context == 1]
    if not ways:
        return None
    most = max(way.tokens_per_second for way in ways)
    good = [way for way in ways if way.tokens_per_second >= 0.99 * most]
    return min(good, key=lambda way: (way.nodes, way.context, way.heads))

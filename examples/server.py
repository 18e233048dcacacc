"""A server's loop: continuous batching over one `PagedKVCache`, with admission, preemption and a bound on memory.

Requests come at any time. Each pass of the loop computes one batch: prompts of requests that are let in, and one token
of each that runs. When the pool is full, the youngest request is swapped out to the host and comes back later. The
model is random numbers; put your own layers into `Model`.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

import numkv

LAYERS, KV_HEADS, Q_HEADS, DIM = 2, 2, 8, 64


@dataclass
class Request:
    """What a client asks for, and where it stands."""

    name: int
    tokens: list[int]  # the prompt, and what was generated
    wanted: int  # tokens still to be generated
    seq: int = -1  # its sequence in the cache while it runs
    swapped: numkv.SwappedSequence | None = field(default=None, repr=False)


class Model:
    """A step of all layers over tokens of several sequences; one new token for each of them."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)

    def run(self, step, counts):
        for layer in range(LAYERS):
            k, v = self.rng.standard_normal((2, step.num_tokens, KV_HEADS, DIM), dtype=np.float32)
            step.append(layer, k, v)
            q = self.rng.standard_normal((step.num_tokens, Q_HEADS, DIM), dtype=np.float32)
            out = step.attention(layer, q)
        last = np.cumsum(counts) - 1  # the newest token of each sequence
        return (np.abs(out[last, 0, 0]) * 1000).astype(int).tolist()


class Server:
    """Requests that wait, run, or are swapped out."""

    def __init__(self, num_blocks, max_batch_tokens):
        self.cache = numkv.PagedKVCache(
            LAYERS, KV_HEADS, DIM, num_blocks=num_blocks, block_size=16, kind="int8"
        )
        self.max_batch_tokens = max_batch_tokens
        self.model = Model()
        self.waiting, self.swapped = deque(), deque()
        self.running, self.done = [], []
        self.events = {"admitted": 0, "swapped out": 0, "swapped in": 0, "steps": 0, "found": 0}

    def submit(self, request):
        most = self.cache.num_blocks * self.cache.block_size
        if len(request.tokens) + request.wanted > most:
            raise ValueError(f"request {request.name} can never fit into {most} tokens")
        self.waiting.append(request)

    def blocks_for(self, tokens):
        return -(-tokens // self.cache.block_size)

    def admit(self):
        """Bring back what was swapped out, then let in what fits, with a block for each to grow."""
        room = self.cache.num_free - len(self.running)
        while self.swapped and self.blocks_for(self.swapped[0].swapped.length) + 1 <= room:
            request = self.swapped.popleft()
            request.seq, request.swapped = self.cache.swap_in(request.swapped), None
            self.running.append(request)
            self.events["swapped in"] += 1
            room = self.cache.num_free - len(self.running)
        budget = self.max_batch_tokens - len(self.running)
        while self.waiting and not self.swapped:
            request = self.waiting[0]
            if self.blocks_for(len(request.tokens)) + 1 > room or len(request.tokens) > budget:
                return
            self.waiting.popleft()
            request.seq = self.cache.add(request.tokens)
            self.running.append(request)
            self.events["admitted"] += 1
            self.events["found"] += self.cache.cached_len(request.seq)
            budget -= len(request.tokens) - self.cache.cached_len(request.seq)
            room -= self.blocks_for(len(request.tokens)) + 1

    def preempt(self):
        """Swap the youngest request out to the host."""
        request = self.running.pop()
        request.swapped = self.cache.swap_out(request.seq)
        self.cache.remove(request.seq)
        self.swapped.appendleft(request)
        self.events["swapped out"] += 1

    def step(self):
        """Compute one batch."""
        self.admit()
        while self.running:
            new = [r.tokens[self.cache.length(r.seq) :] for r in self.running]
            counts = [len(tokens) for tokens in new]
            try:
                step = self.cache.reserve([r.seq for r in self.running], counts)
                break
            except numkv.CacheFull:  # nothing has changed: make room and try again
                self.preempt()
        else:
            return
        chosen = self.model.run(step, counts)
        self.cache.commit(step, token_ids=np.concatenate(new))
        self.events["steps"] += 1
        for request, token in zip(list(self.running), chosen, strict=True):
            request.tokens.append(token)
            request.wanted -= 1
            if request.wanted == 0:
                self.cache.remove(request.seq)  # its full blocks can be found until they are needed
                self.running.remove(request)
                self.done.append(request)

    def run(self, draw_every=0):
        while self.waiting or self.running or self.swapped:
            self.step()
            if draw_every and self.events["steps"] % draw_every == 1:
                print(
                    f"-- step {self.events['steps']}: {len(self.waiting)} wait, {len(self.swapped)} swapped out"
                )
                numkv.show(self.cache)


def main(requests=12, prompt=40, answer=30, num_blocks=24, draw_every=20):
    server = Server(num_blocks, max_batch_tokens=256)
    for name in range(requests):
        system = list(range(32))  # the same beginning for all
        server.submit(Request(name, system + [100 + name] * (prompt - 32), answer))
    server.run(draw_every)
    print(f"{len(server.done)} requests done: {server.events}")
    server.cache.check()
    return server


if __name__ == "__main__":
    main()

"""Several texts at once over the decoder of `decoder.py`: one paged cache, and what prompts share is computed once.

Texts join and leave between steps. A step takes whatever is new: whole prompts of those that join, a token of each of
the others.
"""

import numpy as np
from decoder import Decoder

import numkv

HEADER = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def "
ENDINGS = ("push(self", "pop(self", "is_empty(self")


class Batch:
    """Texts that are being continued."""

    def __init__(self, model, **options):
        self.model = model
        self.cache = numkv.PagedKVCache(model.layers, model.kv_heads, model.dim, **options)
        self.new, self.texts = {}, {}

    def add(self, prompt):
        """Let a text join; the cache finds what it has of the prompt already."""
        tokens = np.array([0, *prompt.encode()])
        seq = self.cache.add(tokens)
        found = self.cache.cached_len(seq)
        self.new[seq], self.texts[seq] = tokens[found:], []
        return seq, found

    def step(self):
        """Compute a token of each text."""
        counts = [len(new) for new in self.new.values()]
        tokens = np.concatenate(list(self.new.values()))
        step = self.cache.reserve(self.new, counts)
        hidden = self.model.forward(tokens, step.positions, step.append, step.attention)
        self.cache.commit(step, token_ids=tokens)
        last = hidden[np.cumsum(counts) - 1]
        for seq, token in zip(list(self.new), self.model.next_tokens(last), strict=True):
            self.new[seq] = np.array([token])
            self.texts[seq].append(int(token))

    def remove(self, seq):
        """Let a text leave. Its blocks stay until others need them: a prompt may ask for them again."""
        self.cache.remove(seq)
        del self.new[seq]
        return bytes(self.texts.pop(seq)).decode(errors="replace")


def main(tokens=30, **options):
    batch = Batch(Decoder(), **{"num_blocks": 64, "kind": "int8", "rotate": True, **options})
    joined = []
    for ending in ENDINGS:
        joined.append(batch.add(HEADER + ending))
        batch.step()
    for _ in range(tokens):
        batch.step()
    texts = []
    for (seq, found), ending in zip(joined, ENDINGS, strict=True):
        texts.append(batch.remove(seq))
        first, _, _ = texts[-1].partition("\n\n")
        print(f"{found:3} tokens of the prompt were found: {ending}{first}")
    return texts, [found for _, found in joined]


if __name__ == "__main__":
    main()

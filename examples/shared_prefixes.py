"""Serve a batch whose requests begin with the same system prompt, in INT8: the prompt is stored and computed once.

The model is random numbers: what counts is which tokens are computed, and what they cost.
"""

import numpy as np

import numkv

LAYERS, KV_HEADS, Q_HEADS, DIM = 2, 2, 8, 64
SYSTEM = np.arange(1000, 1400)  # token ids of the system prompt
rng = np.random.default_rng(0)


def run(cache, sequences, new_tokens):
    """One step of the model for several sequences; returns how many tokens it computed."""
    step = cache.reserve(sequences, [len(tokens) for tokens in new_tokens])  # or CacheFull
    for layer in range(LAYERS):
        k, v = rng.standard_normal((2, step.num_tokens, KV_HEADS, DIM), dtype=np.float32)
        step.append(layer, k, v)
        q = rng.standard_normal((step.num_tokens, Q_HEADS, DIM), dtype=np.float32)
        out = step.attention(layer, q)  # (tokens of all sequences, Q_HEADS, DIM)
        assert out.shape == q.shape
    cache.commit(step, token_ids=np.concatenate(new_tokens))
    return step.num_tokens


def main(requests=16, answer=5):
    cache = numkv.PagedKVCache(LAYERS, KV_HEADS, DIM, num_blocks=128, block_size=16, kind="int8")
    prompts = [np.append(SYSTEM, [1, 2, user]) for user in range(requests)]

    computed, sequences = 0, []
    for prompt in prompts:
        seq = cache.add(prompt)  # takes over the full blocks that are there already
        computed += run(cache, [seq], [prompt[cache.cached_len(seq) :]])
        sequences.append(seq)
    print(f"prompts: {sum(map(len, prompts)):,} tokens, of which {computed:,} were computed")

    for token in range(answer):  # all requests in one batch, a token each
        run(cache, sequences, [[token]] * requests)
    numkv.show(cache)

    alone = requests * -(-(len(prompts[0]) + answer) // cache.block_size)
    used = cache.stats().pool.used
    print(f"{used} blocks in use; without sharing it would be {alone}")
    for seq in sequences:
        cache.remove(seq)
    cache.check()
    return used, alone


if __name__ == "__main__":
    main()

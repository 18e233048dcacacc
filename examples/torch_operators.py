"""PyTorch: tensors in and out, and attention over a cache inside of ``torch.compile``.

Needs PyTorch: ``pip install ".[torch]"`` in the source tree.

python examples/torch_operators.py
"""

import torch

import numkv.torch as numkv

KV_HEADS, Q_HEADS, DIM, BLOCK = 2, 8, 64, 16


class Attention(torch.nn.Module):
    """A layer that writes to a pool of blocks and attends to it."""

    def __init__(self, num_blocks):
        super().__init__()
        hidden = Q_HEADS * DIM
        self.project = torch.nn.Linear(hidden, (Q_HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.output = torch.nn.Linear(hidden, hidden, bias=False)
        pool = (num_blocks, KV_HEADS, BLOCK, DIM)
        self.register_buffer("k_pool", torch.zeros(pool, dtype=torch.bfloat16))
        self.register_buffer("v_pool", torch.zeros(pool, dtype=torch.bfloat16))

    def forward(self, x, slots, table, lengths):
        q, k, v = self.project(x).split([Q_HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
        k, v = (y.view(-1, KV_HEADS, DIM) for y in (k, v))
        numkv.paged_append(k, v, self.k_pool, self.v_pool, slots)
        out = numkv.paged_decode_attention(
            q.view(-1, Q_HEADS, DIM), self.k_pool, self.v_pool, table, lengths
        )
        return self.output(out.reshape(len(x), -1))


def main(sequences=4, tokens=3, backend="aot_eager"):
    torch.manual_seed(0)
    layer = Attention(num_blocks=sequences)
    layer = layer.to(torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    table = torch.arange(sequences, dtype=torch.int32)[:, None]  # a block for each sequence
    with torch.no_grad():
        for token in range(tokens):
            x = torch.randn(sequences, Q_HEADS * DIM, dtype=torch.bfloat16)
            slots = torch.arange(sequences) * BLOCK + token
            lengths = torch.full((sequences,), token + 1)
            eager = layer(x, slots, table, lengths)
            graph = compiled(x, slots, table, lengths)
            print(
                f"token {token}: {graph.dtype}, {tuple(graph.shape)}, as eager: {torch.equal(eager, graph)}"
            )
    return eager, graph


if __name__ == "__main__":
    main()

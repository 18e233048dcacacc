"""Bytes that an operation must move at least: each input read once, each output written once.

Scales of quantised kinds count as part of their rows.
"""

from numkv import kind


def decode_attention(num_seqs, num_q_heads, num_kv_heads, head_dim, seq_len, kind_name, q_bytes=4):
    """K and V of all sequences, the queries and the outputs."""
    kv = num_seqs * seq_len * kind(kind_name).bytes_per_token(num_kv_heads, head_dim)
    return kv + 2 * num_seqs * num_q_heads * head_dim * q_bytes


def paged_decode_attention(
    num_seqs, num_q_heads, num_kv_heads, head_dim, seq_len, block_size, kind_name, q_bytes=4
):
    """The same, and the blocks of each sequence."""
    rows = decode_attention(
        num_seqs, num_q_heads, num_kv_heads, head_dim, seq_len, kind_name, q_bytes
    )
    return rows + num_seqs * -(-seq_len // block_size) * 4


def append(num_tokens, num_kv_heads, head_dim, kind_name, source_bytes):
    """Rows of K and V read in the source's width and written in the kind's."""
    read = 2 * num_tokens * num_kv_heads * head_dim * source_bytes
    return read + num_tokens * kind(kind_name).bytes_per_token(num_kv_heads, head_dim)


def write(num_tokens, num_q_heads, num_kv_heads, head_dim, kind_name, source_bytes):
    """The fused projections read, q written back in their width, K and V in the kind's."""
    heads = num_q_heads + 2 * num_kv_heads
    read = num_tokens * heads * head_dim * source_bytes
    q = num_tokens * num_q_heads * head_dim * source_bytes
    return read + q + num_tokens * kind(kind_name).bytes_per_token(num_kv_heads, head_dim)


def compact(num_tokens, num_kv_heads, head_dim, kind_name):
    """Rows of K and V of the tokens that move, read and written."""
    return 2 * num_tokens * kind(kind_name).bytes_per_token(num_kv_heads, head_dim)


def attention_weights(
    num_queries, num_q_heads, num_kv_heads, head_dim, seq_len, kind_name, q_bytes=4
):
    """K of one sequence, the queries with their lse, and a float for each token and kv head."""
    keys = seq_len * kind(kind_name).bytes_per_token(num_kv_heads, head_dim) // 2
    queries = num_queries * num_q_heads * (head_dim * q_bytes + 4)
    return keys + queries + 4 * seq_len * num_kv_heads

"""Newest and first tokens in full precision beside quantised ones, against float64 over rows quantised by hand."""

import copy
import types

import naive
import numpy as np
import pytest
import tolerances

import numkv

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")

from decoder_models import make, prompts  # noqa: E402
from transformers import masking_utils as masking  # noqa: E402

from numkv.errors import NotSupported  # noqa: E402
from numkv.transformers import NumkvCache  # noqa: E402
from numkv.transformers.attention import attention  # noqa: E402
from numkv.transformers.masks import plan_of_mask  # noqa: E402

WINDOW, HEADS, Q_HEADS, DIM, DIM_V = 4, 2, 4, 32, 64
SINKS = np.linspace(-1, 1, Q_HEADS).astype(np.float32)
CONFIGS = {
    "full": transformers.LlamaConfig(num_hidden_layers=1),
    "sliding": transformers.MistralConfig(num_hidden_layers=1, sliding_window=6),
    "chunked": transformers.Llama4TextConfig(
        num_hidden_layers=1, attention_chunk_size=5, no_rope_layers=[1]
    ),
}

MASKS = {
    "full": masking.causal_mask_function,
    "sliding": masking.sliding_window_causal_mask_function(6),
    "chunked": masking.chunked_causal_mask_function(5, torch.zeros(2, dtype=torch.long)),
}


class Reference:
    """A batch of sequences as lists of rows, and which of them are quantised."""

    def __init__(self, batch, kinds, seen, window=WINDOW, first=0):
        self.window, self.first = window, first
        self.rows = [[] for _ in range(batch)]
        self.end = [0] * batch
        self.kinds, self.seen = kinds, seen

    def attend(self, query, keys, values, mask):
        """Rows of a pass, then its queries: (batch, T, heads, dim); 0 where it is padding."""
        batch, _, columns, _ = query.shape
        out = np.zeros((batch, columns, Q_HEADS, DIM_V))
        for b in range(batch):
            before = len(self.rows[b])
            new = [t for t in range(columns) if mask[b, t]]
            self.rows[b] += [(keys[b, :, t], values[b, :, t]) for t in new]
            self.end[b] = max(self.end[b], len(self.rows[b]) - self.window)
            for position, t in enumerate(new, before):
                for head in range(Q_HEADS):
                    out[b, t, head] = self.row(b, position, head, query[b, head, t])
        return out

    def row(self, b, position, head, q):
        low = {"full": 0, "sliding": max(0, position - 5), "chunked": position // 5 * 5}[self.seen]
        found = []
        for side, of in enumerate(self.kinds):
            x = np.array([r[side][head // 2] for r in self.rows[b][low : position + 1]])
            exact = x.astype(np.float64)
            codes = naive.dequantise(*naive.quantise(x, of)) if of else exact
            at = np.arange(low, position + 1)
            old = (at >= self.first) & (at < self.end[b])
            found.append(np.where(old[:, None], codes, exact))
        return naive.attention_row(q.astype(np.float64), *found, 0.3, 5.0, SINKS[head])[0]

    def crop(self, columns):
        for b, rows in enumerate(self.rows):
            del rows[len(rows) - columns :]
            self.end[b] = min(self.end[b], len(rows))

    def select(self, order):
        self.rows = [list(self.rows[b]) for b in order]
        self.end = [self.end[b] for b in order]


@pytest.mark.parametrize("seen", CONFIGS)
@pytest.mark.parametrize(
    ("kinds", "window", "first"),
    [
        (("int8", "int8"), WINDOW, 0),
        (("int4", None), WINDOW, 0),
        (("int4", "int4"), 0, 3),
        (("int8", "int8"), 3, 2),
    ],
    ids=str,
)
def test_passes_of_a_ragged_batch(rng, seen, kinds, window, first):
    """Padded on the left; cropped, copied and reordered between passes."""
    k_kind, v_kind = (kind or "fp32" for kind in kinds)
    kept = {"full_precision": numkv.FullPrecision(window, first)}
    cache = NumkvCache(CONFIGS[seen], k_kind=k_kind, v_kind=v_kind, **kept)
    cache.activate_past_recording()
    reference = Reference(2, kinds, seen, window, first)
    mask = np.ones((2, 0), bool)

    def forward(columns, padding=(0, 0)):
        nonlocal mask
        shapes = (Q_HEADS, columns, DIM), (HEADS, columns, DIM), (HEADS, columns, DIM_V)
        q, k, v = (rng.standard_normal((2, *shape), np.float32) for shape in shapes)
        new = np.arange(columns)[None] >= np.array(padding)[:, None]
        past, mask = mask.shape[1], np.concatenate([mask, new], 1)
        plan = plan_of_mask(
            2, columns, past + columns, past, mask_function=MASKS[seen], attention_mask=torch.from_numpy(mask)
        )  # fmt: skip
        module = types.SimpleNamespace(training=False, layer_idx=0)
        q, k, v = map(torch.from_numpy, (q, k, v))
        found, _ = attention(
            module, q, *cache.update(k, v, 0), plan, scaling=0.3, softcap=5.0, s_aux=torch.from_numpy(SINKS)
        )  # fmt: skip
        expected = reference.attend(q.numpy(), k.numpy(), v.numpy(), new)
        error = np.linalg.norm((found.numpy() - expected)[new])
        # Less than what it makes to read a window from codes, which is 5e-3 with int8.
        assert error < tolerances.INTEGERS * np.linalg.norm(expected[new])

    forward(9, (0, 6))
    forward(1)
    forward(1)
    other = copy.deepcopy(cache)
    cache.crop(-2)
    reference.crop(2)
    mask = mask[:, :-2]
    forward(1)
    cache.activate_past_recording()
    forward(5, (2, 0))
    order = [1, 1]
    cache.reorder_cache(torch.tensor(order))
    reference.select(order)
    mask = mask[order]
    for _ in range(6):
        forward(1)
    assert other.get_seq_length() == 11
    cache.crop(-8)  # to sequences of fewer tokens than are kept first, and on from there
    reference.crop(8)
    mask = mask[:, :-8]
    forward(2)
    forward(4)
    cache.reset()
    reference, mask = Reference(2, kinds, seen, window, first), mask[:, :0]
    forward(3)


def test_short_prompts_are_exact_and_memory_is_counted():
    """As long as all tokens are in the window nothing is read from codes."""
    model, given = make("llama"), prompts([13, 5, 9])
    expected = model.generate(**given, do_sample=False, max_new_tokens=8)
    model.set_attn_implementation("numkv")
    plain = NumkvCache(model.config, "int4")
    model.generate(**given, do_sample=False, max_new_tokens=8, past_key_values=plain)
    for kept in (numkv.FullPrecision(32), numkv.FullPrecision(num_sink_tokens=32)):
        cache = NumkvCache(model.config, "int4", full_precision=kept)
        found = model.generate(**given, do_sample=False, max_new_tokens=8, past_key_values=cache)
        assert torch.equal(found, expected)
        assert cache.nbytes == plain.nbytes + 4 * 2 * 3 * 32 * 2 * 16 * 4


def test_a_window_beside_floats_is_refused():
    for options in ({}, {"kind": "bf16"}, {"k_kind": "fp16", "v_kind": "fp32"}):
        for kept in (numkv.FullPrecision(8), numkv.FullPrecision(num_sink_tokens=8)):
            with pytest.raises(NotSupported, match=r"full_precision.*quantises nothing"):
                NumkvCache(CONFIGS["full"], full_precision=kept, **options)
    with pytest.raises(TypeError, match="full_precision"):
        NumkvCache(CONFIGS["full"], "int8", full_precision=8)
    with pytest.raises(NotSupported, match="no `kind`"):
        NumkvCache(CONFIGS["full"], "int8", full_precision=numkv.FullPrecision(8, kind="bf16"))

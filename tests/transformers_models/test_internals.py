"""What transformers does not promise is used in one module, and is as that expects; a failure says what changed."""

import ast
import inspect
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.19")

from decoder_models import make  # noqa: E402
from transformers import cache_utils, masking_utils  # noqa: E402
from transformers.integrations import sdpa_attention  # noqa: E402

import numkv.transformers  # noqa: E402
from numkv.transformers import internals  # noqa: E402

ROOM = Path(numkv.transformers.__file__).parent


def parameters(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.stem)
def test_it_is_used_in_one_module(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if path.stem == "internals":
            break
        if isinstance(node, ast.ImportFrom):
            assert not (node.module or "").startswith("transformers."), node.module
            if node.module == "transformers":
                assert {x.name for x in node.names} <= set(dir(transformers))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in (internals._MAKE_CACHE, "_attn_implementation")
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("_attn_implementation", "_can_set_attn_implementation")


def test_models():
    model = make("llama")
    assert internals.attention_of(model) == model.config._attn_implementation == "sdpa"
    assert internals.can_choose_attention(model)
    assert not internals.has_own_cache(model)
    assert internals.makes_caches(model)
    assert parameters(getattr(model, internals._MAKE_CACHE)) == [
        "generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length",
    ]  # fmt: skip
    source = inspect.getsource(transformers.GenerationMixin.generate)
    assert f"self.{internals._MAKE_CACHE}(" in source


def test_layers():
    config = make("gemma3").config
    assert internals.layers_of(config) == [
        ("sliding_attention", {"sliding_window": 8}), ("full_attention", {}),
    ] * 2  # fmt: skip
    assert type(internals.layer_of_transformers("full_attention", {})) is cache_utils.DynamicLayer
    layer = internals.CacheLayerMixin
    for name in ("update", "get_mask_sizes", "get_seq_length", "reset", "reorder_cache"):
        assert callable(getattr(layer, name)), name
    assert issubclass(internals.LinearAttentionLayer, internals.LinearAttentionCacheLayerMixin)


def test_attention():
    assert parameters(internals.sdpa_attention_forward)[:7] == [
        "module", "query", "key", "value", "attention_mask", "dropout", "scaling",
    ]  # fmt: skip
    assert internals.sdpa_attention_forward is sdpa_attention.sdpa_attention_forward
    for family in ("gemma2", "gpt_oss"):  # soft caps and sinks
        layer = make(family).model.layers[0].self_attn
        own = internals.own_attention(layer)
        assert own is sys.modules[type(layer).__module__].eager_attention_forward
        assert {"module", "query", "key", "value", "attention_mask", "dropout", "scaling"} <= set(
            parameters(own)
        )


def test_masks():
    """Which arguments masks are made with, and what their functions keep."""
    assert {
        "batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "attention_mask",
        "local_size", "allow_is_causal_skip", "allow_is_bidirectional_skip",
    } <= set(parameters(internals.sdpa_mask))  # fmt: skip
    of = masking_utils
    causal, seen = of.causal_mask_function, internals.seen_by
    ids = torch.tensor([[-1, 0, 0, -1]])
    window = of.sliding_window_causal_mask_function(5)
    blocks = of.blockwise_overlay(ids)
    cut = of.and_masks(of.or_masks(causal, blocks), of.sliding_window_overlay(5))
    for function, expected in (
        (causal, (0, 0, None, False)),
        (window, (5, 0, None, False)),
        (of.chunked_causal_mask_function(6, torch.zeros(1)), (0, 6, None, False)),
        (of.or_masks(causal, blocks), (0, 0, ids.tolist(), False)),
        (of.or_masks(window, blocks), (5, 0, ids.tolist(), False)),
        (cut, (5, 0, ids.tolist(), True)),
        (of.or_masks(causal, of.blockwise_overlay(ids * 0 - 1)), (0, 0, None, False)),
    ):
        found = seen(function)
        found_ids = None if found.blocks is None else found.blocks.tolist()
        assert (found.window, found.chunk, found_ids, found.cuts) == expected
    for function in (
        of.bidirectional_mask_function, lambda *_: True, of.and_masks(causal, lambda *_: True),
        of.or_masks(causal, lambda *_: True), of.and_masks(window, of.sliding_window_overlay(5)),
        of.or_masks(of.or_masks(causal, blocks), blocks),
        of.and_masks(of.packed_sequence_mask_function(ids), causal),
    ):  # fmt: skip
        assert seen(function) is None

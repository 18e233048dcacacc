"""Blocks of tokens that see both ways, as images in Gemma 3 and prefixes in PaliGemma: as with eager attention."""

import numpy as np
import pytest

import numkv

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.19")

from decoder_models import prompts  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from numkv.errors import DimensionMismatch, NotSupported  # noqa: E402
from numkv.transformers import NumkvCache  # noqa: E402
from numkv.transformers.metadata import BatchMetadata, Seen  # noqa: E402

VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4, "projection_dim": 16, "vision_use_head": False,
}  # fmt: skip
TEXT = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
SLIDING = {
    **TEXT, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 16,
}  # fmt: skip


def gemma3():
    """Windows of 4 tokens cut blocks."""
    config = transformers.Gemma3Config(
        text_config=SLIDING, vision_config=VISION, mm_tokens_per_image=4, image_token_id=63,
        boi_token_id=62, eoi_token_id=61,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def paligemma(**text):
    config = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", **TEXT, **text}, vision_config=VISION, projection_dim=64,
        image_token_index=63,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration(config)


def paligemma2():
    """Windows are laid over what comes earlier alone."""
    return paligemma(**SLIDING, model_type="gemma2")


def made(make):
    torch.manual_seed(3)
    return make().eval()


def answer(model, cache, given, **options):
    found = model.generate(
        **given, past_key_values=cache, max_new_tokens=8, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


def check(model, given, options=None, **of_generate):
    model.set_attn_implementation("eager")
    expected, logits = answer(
        model, DynamicCache(config=model.config.get_text_config()), given, **of_generate
    )
    model.set_attn_implementation("numkv")
    cache = NumkvCache(model.config, **(options or {"kind": "fp32"}))
    found, own = answer(model, cache, given, **of_generate)
    assert torch.equal(found, expected)
    assert (own - logits).abs().max() < 1e-4 * logits.abs().max()
    return logits


def with_blocks(lengths, blocks, of_block, of_others):
    """Padded prompts, and ids that say where their blocks are, as (sequence, first, end) in columns."""
    given = prompts(lengths)
    given["input_ids"].clamp_(max=60)
    given["token_type_ids"] = torch.full_like(given["input_ids"], of_others)
    for b, first, end in blocks:
        given["token_type_ids"][b, first:end] = of_block
    return given


@pytest.mark.parametrize(
    "options",
    [None, {"kind": "int8", "full_precision": numkv.FullPrecision(64)}],
    ids=["fp32", "tokens in full precision"],
)
def test_images_of_gemma_3(options):
    """Two in one prompt, of more tokens than a window; one that ends a padded prompt; none."""
    blocks = [(0, 2, 9), (0, 12, 15), (1, 14, 19)]
    model, given = made(gemma3), with_blocks([19, 13, 9], blocks, 1, 0)
    logits = check(model, given, options)
    plain = check(model, {**given, "token_type_ids": given["token_type_ids"] * 0}, options)
    assert not torch.allclose(logits, plain)


def test_an_image_in_parts():
    """Parts of a prompt see of an image what has come, as they do over transformers' own cache."""
    check(made(gemma3), with_blocks([19, 13], [(0, 2, 9), (1, 14, 19)], 1, 0), prefill_chunk_size=6)


@pytest.mark.parametrize("make", [paligemma, paligemma2])
def test_prefixes_of_paligemma(make):
    """The prefix begins where the padding does."""
    check(made(make), with_blocks([19, 13], [(0, 0, 14), (1, 0, 11)], 0, 1))


def test_an_image_with_pixels():
    model = made(paligemma)
    given = prompts([9])
    given["input_ids"].clamp_(max=60)[:, :4] = 63
    given["pixel_values"] = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    check(model, given)


def test_blocks_that_have_no_form():
    metadata = BatchMetadata.empty(1, 4, 4, -1)
    with pytest.raises(NotSupported, match="got one in parts"):
        metadata.advance(None, 5, Seen(blocks=np.array([[0, 0, -1, 0, -1]])))
    with pytest.raises(DimensionMismatch, match="token_type_ids of all tokens"):
        metadata.advance(None, 5, Seen(blocks=np.zeros((1, 4), int)))
    hidden = np.array([[True, True, False, True, True]])  # padding is no token
    step = metadata.advance(hidden, 5, Seen(blocks=np.array([[0, 0, -1, 0, -1]])))
    assert step.ranges.tolist()[:2] == [[0, 3], [0, 3]]
    assert step.ranges.tolist()[3:] == [[0, 3], [0, 4]]


def test_a_block_whose_beginning_was_dropped():
    sliding = BatchMetadata.empty(1, 4, 8, 3).advance(None, 12, Seen(window=4)).after
    ids = np.where(np.arange(16) < 2, -1, 0)[None]
    with pytest.raises(NotSupported, match="has dropped"):
        sliding.advance(None, 4, Seen(4, blocks=ids))
    assert sliding.advance(None, 4, Seen(4, blocks=ids, cuts=True)).ranges is not None

"""A Qwen-shaped model of Hugging Face's transformers, with its cache in INT8.

Needs transformers: ``pip install ".[transformers]"`` in the source tree.

The weights are random, so nothing is downloaded; `from_pretrained` gives the same model with real ones.
"""

import time

import torch
import transformers

import numkv.transformers


def generate(model, inputs, new_tokens):
    """Generate, and say how long it took."""
    begin = time.perf_counter()
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    return out, time.perf_counter() - begin


def main(context=512, new_tokens=16):
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=1000, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=context + new_tokens,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    inputs = {
        "input_ids": torch.randint(1, 1000, (1, context)),
        "attention_mask": torch.ones(1, context, dtype=torch.long),
    }
    plain, seconds = generate(model, inputs, new_tokens)
    print(f"DynamicCache: {new_tokens / seconds:7.1f} tokens a second, the prompt included")

    for kind in ("bf16", "int8"):
        numkv.transformers.use(model, kind=kind)
        generate(model, inputs, 2)  # compiles what is not on disk yet
        out, seconds = generate(model, inputs, new_tokens)
        numkv.transformers.restore(model)
        same = (out == plain)[0, context:].float().mean().item()
        print(
            f"numkv, {kind}:  {new_tokens / seconds:7.1f} tokens a second, {same:.0%} of the same tokens"
        )
    return out


if __name__ == "__main__":
    main()

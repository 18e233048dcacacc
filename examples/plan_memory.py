"""How many tokens fit into how much memory, from a model's config alone.

python examples/plan_memory.py [config.json]
"""

import json
import sys
from pathlib import Path

from numkv.planning import needs_of

GEMMA = {  # sliding layers, and every sixth one full
    "model_type": "gemma3_text", "num_hidden_layers": 34, "num_key_value_heads": 4,
    "num_attention_heads": 8, "head_dim": 256, "hidden_size": 2560, "sliding_window": 1024,
}  # fmt: skip


def main(config=None, memory=8 << 30, contexts=(1024, 8192, 131_072)):
    needs = needs_of(GEMMA if config is None else config)
    types = {layer.type for layer in needs.layers}
    for name in sorted(types):
        print(f"{sum(x.type == name for x in needs.layers):3} layers: {name}")
    header = "".join(f"{n:>12,}" for n in contexts)
    print(f"{'MB of a sequence of':24}{header}  tokens in {memory >> 30} GiB")
    for kinds in (("fp16",), ("int8",), ("int8", "int4"), ("int4",)):
        sizes = "".join(f"{needs.sequence_bytes(n, *kinds) / 1e6:12,.1f}" for n in contexts)
        print(f"{'/'.join(kinds):24}{sizes}{needs.tokens_in(memory, *kinds):14,}")
    for remark in needs.remarks:
        print(f"NOT KNOWN: {remark}")
    return needs


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()) if len(sys.argv) > 1 else None)

"""FlashInfer's double: it answers where PyTorch's does."""

from unittest.mock import MagicMock

BatchDecodeWithPagedKVCacheWrapper = single_prefill_with_kv_cache = MagicMock()

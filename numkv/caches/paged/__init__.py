"""`PagedKVCache`: all layers of many sequences in shared blocks, by steps."""

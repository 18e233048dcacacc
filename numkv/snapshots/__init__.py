"""Snapshots: the small values and tensors of an object with tokens, declared in one place."""

"""Snapshots: what an object that holds tokens consists of, as small values and tensors; it says so in one place."""

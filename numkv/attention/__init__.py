"""Attention over caches: one door for all functions and methods, and attention summed over queries."""

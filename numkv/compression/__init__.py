"""Compressed heads: rotated unit vectors as packed codes of a codebook."""

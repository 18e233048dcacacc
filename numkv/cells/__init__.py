"""Cells of a multi-sequence cache as numbers: which sequence has which position in which cell."""

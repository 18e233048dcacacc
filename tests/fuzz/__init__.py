"""Calls of everything public with arguments of every sort, right and wrong; `python -m tests.fuzz` plays them."""

"""Calls of everything public with arguments of every sort, right and wrong; `python -m tests.fuzz` plays them."""

#: Environment variable, of any value: leave out what is compiled for nothing else.
SHORT = "NUMKV_FUZZ_SHORT"

"""The steps of attention in vector code: functions that kernels call, whose bodies emit LLVM.

===============  =========================================================================================
`floats`         query rows side by side and their dot products with a tile of K rows; the sum of V rows
`pairs`          what is special about pairs of bf16
`integers`       the same in integers, over INT8 and INT4
`scales`         scales of a tile's tokens, side by side
`softmax`        the soft cap, and the online softmax over a tile
`many_rows`      all of it for many query rows
`amx`            the same on Intel's matrix unit
===============  =========================================================================================

A factory ``make_...`` makes each function whose code depends on storage kinds or on the float type. All floats are in
one array of scratch memory, and records store their places (`numkv.kernels.cpu.attention.records`).
"""

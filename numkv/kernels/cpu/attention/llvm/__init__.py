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

A function whose code depends on storage kinds or on the float type is made by a factory ``make_...``. All floats are in
one array of scratch memory; records say where (`numkv.kernels.cpu.attention.records`).
"""

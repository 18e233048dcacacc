"""The steps of attention in vector code: functions that kernels call, whose bodies emit LLVM.

==================  ==========================================================================================
`qk`                query rows side by side, and their dot products with a tile of K rows
`softmax`           the soft cap, and the online softmax over a tile
`pv`                the weighted sum of a tile's V rows
`scales`            scales of a tile's tokens, side by side
`int8`, `int4_qk`,  the same in integers
`int4_pv`
`amx_qk`,           the same on Intel's matrix unit
`amx_softmax`,
`amx_pv`
`amx_few_qk`,       the same there, for few query rows
`amx_few_softmax`,
`amx_few_pv`
==================  ==========================================================================================

A function whose code depends on storage kinds or on the float type is made by a factory ``make_...``. All floats are in
one array of scratch memory; records say where (`numkv.kernels.cpu.attention.records`).
"""

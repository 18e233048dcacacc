"""Operations on CUDA: see `numkv.kernels.operations`.

Arrays are device arrays. Their values are not known to the host, so a slot or block out of range is skipped where a
kernel meets it. Integer arrays may be int32 or int64. A kernel needs a case in `tools/cuda/catalogue.py`: so it is
compiled without a GPU.
"""

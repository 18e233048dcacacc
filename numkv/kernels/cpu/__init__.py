"""Operations on the CPU: see `numkv.kernels.operations`."""

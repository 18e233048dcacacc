"""Operations on one element or row: plain functions that compile on the CPU and on CUDA and run in the simulator.

Every accumulator and constant has an explicit dtype: compiled code and the simulator promote plain Python numbers
differently.
"""

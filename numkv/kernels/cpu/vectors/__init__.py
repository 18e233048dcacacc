"""Vector code for the CPU: modules that emit LLVM for kernels, from the CPU's features up to loops and threads.

Numba vectorises plain loops well, but not loops like attention's: a dot product for every token, an exponential in the
middle, half floats to widen. Such steps are written as LLVM vector code, in functions (intrinsics) that a kernel calls
like any other. These modules are their building blocks:

============  ================================================================================================
`features`    which instructions the CPU has, how wide its vectors are
`emit`        loops and branches while emitting; how an intrinsic is made of what emits its code
`vectors`     `Vectors`: vectors of floats, loaded from any storage kind, and functions of them
`words`       `Words`: vectors of 16-bit integers and bytes, and their products
`stored`      storage kinds as LLVM sees them; codes of a codebook to their levels, by a look into a table
`coding`      rows of floats to codes of INT4, CODE4 and CODE6, bit for bit as `numkv.rows` defines them
`amx`         `Amx`: Intel's matrix unit
`prefetch`    `PrefetchStream`: memory that is asked for ahead of time, evenly spread among arithmetic
`arrays`      rows of strided arrays, arrays without reference counts, addresses; records of where arrays lie
`emitted`     functions of integers, emitted from their source
`launch`      running a kernel on several threads, and handing out items to them
============  ================================================================================================

How to read it. `Vectors` emits instructions on vectors of `lanes` floats. LLVM turns them into those of the CPU
(AVX-512, AVX2, NEON, or pairs of narrow ones). The storage kind and the float type are known when a kernel is built.
They are arguments of the function that makes an intrinsic. Sizes that vary by call are ordinary numbers, so one
compiled kernel serves every head dim and group. Rows are never read past their ends: the elements after whole vectors
are loaded under a mask. Arguments named ``*_at`` are element offsets into an array's memory.
"""

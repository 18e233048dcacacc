"""Kernels: loops over rows and their distribution among threads. One operation per file, the same file names under
``cpu`` and ``cuda``.

Objects reach them through `numkv.targets.Target.ops`, so that nothing outside of the targets asks which one it runs on.
"""

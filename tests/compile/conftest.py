"""Have the stub driver loaded before any test of this folder has looked for a real one."""

import contextlib

import pytest

with contextlib.suppress(pytest.skip.Exception):  # the modules that need it are skipped then
    import ptx_on_cuda  # noqa: F401

"""A plugin, ``-p plain_simulator``: tests run in Numba's own simulator, one case of each on CUDA.

It would show where `tests/simulator.py` differs from the simulator that users run.
"""

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items) -> None:
    """Keep the first case of each test function that runs on CUDA."""
    first = {}
    for item in items:
        if getattr(item, "callspec", None) and item.callspec.params.get("target") == "cuda":
            first.setdefault((item.path, item.originalname), item)
    config.hook.pytest_deselected(items=[item for item in items if item not in first.values()])
    items[:] = first.values()

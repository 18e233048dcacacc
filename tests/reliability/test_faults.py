"""Memory that runs out at every place where it can: a method fails, and the object is what it was, to the last bit.

Of each method the first allocation fails, then the second, and so on until it needs no more. What can be seen of the
object must be as before the call; it can be used; and the same call, with memory, does what it does to another object.
"""

import inspect

import numpy as np
import pytest
from failing_memory import failing
from fault_base import run_out
from fault_subjects import LEFT_OUT, SUBJECTS

CASES = [(name, call) for name, subject in SUBJECTS.items() for call in subject.calls]
#: Subjects that differ from another one in an option that few methods look at.
VARIATIONS = {
    "KVCache int8", "KVCache fp32, rotated", "PagedLayer int8", "ContiguousLayer int8",
    "ContiguousLayer int8, residual", "PagedKVCache int8, windows", "Step fp32", "CausalCache int8",
}  # fmt: skip
#: By day every so many allocations fail, from another one on for each method; nightly all of them.
BY_DAY = 16


@pytest.mark.parametrize(
    ("name", "call"),
    [
        pytest.param(
            *case, id=": ".join(case), marks=[pytest.mark.nightly] * (case[0] in VARIATIONS)
        )
        for case in CASES
    ],
)
def test_nothing_changes_where_memory_runs_out(request, monkeypatch, name, call):
    every = 1 if request.config.getoption("nightly") else BY_DAY
    run_out(monkeypatch, SUBJECTS[name], call, f"{name}: {call}", every)


def test_variations_are_subjects():
    assert SUBJECTS.keys() >= VARIATIONS


def test_every_method_is_tried():
    """A call is named after its method; what is left out has a reason."""
    tried = {}
    for subject in SUBJECTS.values():
        names = {call.split(",")[0].split()[0] for call in subject.calls}
        tried.setdefault(subject.of, set()).update(names)
    missing = {
        of.__name__: left
        for of, names in tried.items()
        if of is not None and (left := methods_of(of) - names - LEFT_OUT.keys())
    }
    assert not missing


def methods_of(of):
    return {
        name
        for name in dir(of)
        if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(of, name))
    }


def test_the_allocator_fails_where_it_is_told_to():
    with failing() as memory:
        np.zeros(3) + 1
    asked = memory.asked
    assert asked >= 2
    for at in range(1, asked + 1):
        with failing(at) as memory:
            with pytest.raises(MemoryError):
                np.zeros(3) + 1
            assert memory.failed
            np.zeros(3)  # only once

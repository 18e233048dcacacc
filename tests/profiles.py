"""How hard hypothesis tries: the same few examples in every run, many other ones in each nightly run."""

from hypothesis import HealthCheck, settings

_common = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile(
    "everyday", max_examples=16, stateful_step_count=25, derandomize=True, **_common
)
settings.register_profile("nightly", max_examples=300, stateful_step_count=50, print_blob=True, **_common)  # fmt: skip


def machine(model, share=1):
    """Return the test case of a state machine, with a `share` of the usual examples and steps."""
    case, usual = model.TestCase, settings()
    case.settings = settings(
        max_examples=max(1, int(usual.max_examples * share)),
        stateful_step_count=max(1, int(usual.stateful_step_count * share)),
    )
    return case

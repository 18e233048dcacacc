"""Settings of Numba under which no kernel runs: said by name at the first call, however small."""

import processes
import pytest

SCRIPT = """
try:
    decode(problem(3, 1, 8))
except numkv.NotSupported as error:
    said = str(error)
else:
    said = "fine"
print(json.dumps(said))
"""


@pytest.mark.slow
def test_kernels_are_compiled():
    said = processes.run(SCRIPT, NUMBA_DISABLE_JIT="1")
    assert said.startswith("NUMBA_DISABLE_JIT: expected 0")
    assert said.endswith("unset it before Python starts")


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["tbb", "safe", "nonsense"])
def test_layers_that_do_not_load(layer):
    said = processes.run(SCRIPT, NUMBA_THREADING_LAYER=layer)
    if layer != "nonsense" and "tbb" in processes.LAYERS:
        assert said == "fine"
    else:
        assert said.startswith(
            f"NUMBA_THREADING_LAYER: expected a layer of Numba that loads here, got '{layer}'"
        )


def test_layers_that_load():
    assert processes.run(SCRIPT, NUMBA_THREADING_LAYER="forksafe") == "fine"

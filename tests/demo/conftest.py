"""What tests of the demo share."""

import pytest
from demo_models import write_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a small random checkpoint."""
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, eos_token_id=None)
    return folder

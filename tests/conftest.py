"""What all tests share. Hypothesis draws the same examples in every run, so that a change alone can turn a test red;
`pytest --hypothesis-profile=explore` draws new ones.
"""

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="module")
def one_torch_thread():
    """For small matrices: torch's threads would only wait for each other."""
    import torch  # not before pufferl, which says how torch's threads wait

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

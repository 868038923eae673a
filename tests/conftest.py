"""Fixtures for tests in several folders."""

import pytest


@pytest.fixture(scope="module")
def one_torch_thread():
    """Tiny products gain nothing from a second thread, and torch's threads spin beside those of others."""
    import torch  # here, so that the tests of the scheduler start without it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

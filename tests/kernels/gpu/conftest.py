"""Rounding as on a device, where Triton kernels are interpreted."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def rounding_as_on_a_device(triton_interpreter):
    """For every test of this folder."""

"""Rounding as on a device, where Triton kernels are interpreted."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def rounding_as_on_a_device(nearest_bfloat16):
    """For every test of this folder."""

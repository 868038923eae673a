"""What is told of a wrong sampling parameter."""

import numpy as np
import pytest

from headway_proto.sampling import SamplingParams, violations


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (float(np.float32(1.2)), "1.2"),
        (float(np.float32(-0.1)), "-0.1"),
        (float(np.nextafter(np.float32(1), np.float32(2))), "1.0000001"),
        (1.00000000001, "1.00000000001"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (1e300, "1e+300"),
    ],
)
def test_a_number_is_told_as_its_sender_wrote_it(value: float, told: str) -> None:
    """Over gRPC comes the nearest number of 32 bits, which has more digits than anybody writes."""
    assert violations(SamplingParams(min_p=value), 10) == [("min_p", f"{told} is not allowed; allowed: 0 to 1")]

"""Int8 weights cost the demo model less than 1% of its held-out loss."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "int8_loss.py"


def test_held_out_loss_of_the_demo_model_stays_within_one_percent():
    finished = subprocess.run(
        [sys.executable, str(BENCHMARK), "--tokens", "4000"], check=True, capture_output=True, text=True
    )
    result = json.loads(finished.stdout)
    assert result["tokens"] == 4000
    assert result["float32_nats_per_token"] < 4.5
    assert abs(result["relative_difference"]) < 0.01

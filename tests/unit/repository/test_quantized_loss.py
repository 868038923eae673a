"""Quantised weights cost the demo model less than 1% of its held-out loss."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "quantized_weights.py"


def test_held_out_loss_of_the_demo_model_stays_within_one_percent():
    finished = subprocess.run(
        [sys.executable, str(BENCHMARK), "--tokens", "4000", "--rounds", "0"],
        check=True,
        capture_output=True,
        text=True,
    )
    result = json.loads(finished.stdout)
    assert result["tokens"] == 4000
    by_form = {row["form"]: row for row in result["results"]}
    assert by_form["float32"]["nats_per_token"] < 4.5
    assert all(abs(row["relative_difference"]) < 0.01 for row in by_form.values())
    assert by_form["int4"]["relative_difference"] != 0

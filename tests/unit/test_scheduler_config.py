"""The scheduler's settings: what is refused, and how."""

import pytest

from headway_scheduler.config import SchedulerConfig


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: 0 is not allowed; allowed: 1 to"),
        ({"max_num_seqs": -1}, "max_num_seqs: -1 is not allowed"),
        ({"max_steps_in_flight": 17}, "max_steps_in_flight: 17 is not allowed; allowed: 1 to 16"),
        ({"max_num_waiting": 0}, "max_num_waiting: 0"),
        ({"grace_s": -1.0}, "grace_s: -1.0"),
        ({"grace_s": float("nan")}, "grace_s: nan"),
        ({"step_address": "ipc://" + "x" * 108}, "step_address: .* at most 107 bytes, not 108"),
        ({"step_address": "tcp://0.0.0.0:5"}, "step_address: .* together with curve_keys"),
        ({"ingress_address": "tcp://*:5"}, "ingress_address: .* together with curve_keys"),
        ({"ingress_address": "tcp://127.0.0.1:port"}, "ipc://PATH or tcp://HOST:PORT"),
        ({"ingress_address": "localhost:5"}, "ipc://PATH or tcp://HOST:PORT"),
        ({"curve_keys": "nowhere"}, "curve_keys: 'nowhere' is not allowed"),
    ],
)
def test_bad_settings_are_refused_in_one_line(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        SchedulerConfig(**setting).validate()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:0", "ipc:///run/headway/step"]
)
def test_local_addresses_need_no_keys(address: str) -> None:
    SchedulerConfig(step_address=address, ingress_address=address).validate()

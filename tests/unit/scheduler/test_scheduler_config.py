"""The scheduler's settings: what is refused, and how."""

import pytest

from headway.__main__ import main
from headway_scheduler.config import SchedulerConfig


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens: 0 is not allowed; allowed: 1 to"),
        ({"max_num_seqs": -1}, "max_num_seqs: -1 is not allowed"),
        ({"max_steps_in_flight": 17}, "max_steps_in_flight: 17 is not allowed; allowed: 0 to 16"),
        ({"max_num_waiting": 0}, "max_num_waiting: 0"),
        ({"grace_s": -1.0}, "grace_s: -1.0"),
        ({"grace_s": float("nan")}, "grace_s: nan"),
        ({"aging_s": -0.5}, "aging_s: -0.5 is not allowed; allowed: 0 or more seconds"),
        ({"aging_s": float("nan")}, "aging_s: nan is not allowed"),
        ({"aging_s": float("inf")}, "aging_s: inf is not allowed"),
        ({"tenant_weights": {"a": 1.0, "b": 0.0}}, "tenant_weights: 'b'=0.0 is not allowed; allowed: weights above 0"),
        ({"tenant_weights": {"a": -2.0}}, "tenant_weights: 'a'=-2.0"),
        ({"tenant_weights": {"a": float("nan")}}, "tenant_weights: 'a'=nan"),
        ({"tenant_weights": {"x" * 500: float("inf")}}, "tenant_weights: 'x+\\.\\.\\.x+'=inf"),
        ({"default_ttft_slo_ms": -1}, "default_ttft_slo_ms: -1 is not allowed; allowed: 0 to"),
        ({"default_ttft_slo_ms": 1 << 31}, "default_ttft_slo_ms: 2147483648"),
        ({"default_itl_slo_ms": -1}, "default_itl_slo_ms: -1"),
        ({"default_itl_slo_ms": 1 << 31}, "default_itl_slo_ms: 2147483648"),
        ({"max_decode_only_steps": -1}, "max_decode_only_steps: -1 is not allowed; allowed: 0 to"),
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
    ("flags", "message"),
    [
        (("--aging-s", "-1"), "--aging-s: -1.0 is not allowed; allowed: 0 or more seconds"),
        (("--aging-s", "soon"), "--aging-s: 'soon'"),
        (("--tenant-weight", "a=0"), "--tenant-weight: 'a'=0.0 is not allowed; allowed: weights above 0"),
        (("--tenant-weight", "a"), "--tenant-weight: 'a'"),
        (("--tenant-weight", "a=much"), "--tenant-weight: "),
        (("--default-ttft-slo-ms", "-1"), "--default-ttft-slo-ms: -1 is not allowed; allowed: 0 to"),
        (("--default-itl-slo-ms", "0.5"), "--default-itl-slo-ms: '0.5'"),
        (("--order", "lifo"), "--order: 'lifo'"),
        (("--budget", "none"), "--budget: 'none'"),
        (("--preemption", "kill"), "--preemption: 'kill'"),
        (("--prefix-cache-scope", "nobody"), "--prefix-cache-scope: 'nobody'"),
    ],
)
def test_the_command_answers_them_with_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    try:
        code = main(["scheduler", *flags])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("headway scheduler: ")
    assert message in line


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:0", "ipc:///run/headway/step"]
)
def test_local_addresses_need_no_keys(address: str) -> None:
    SchedulerConfig(step_address=address, ingress_address=address).validate()

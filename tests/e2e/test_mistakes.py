"""What a user gets wrong about ``headway serve`` and its siblings: one line, and an exit code."""

import re
import shutil
import socket
from pathlib import Path

import pytest

from e2e.running_server import finished
from headway.planning.model_source import DEMO_MODEL_DIRECTORY

MISTAKES = [
    (
        "serve --max-num-batched-token 5",
        2,
        r"unknown flag --max-num-batched-token; did you mean --max-num-batched-tokens\?",
    ),
    ("serve --max-num-batched-tokens 0", 2, r"--max-num-batched-tokens: .*0.* is not allowed; allowed: 1 to \d+"),
    ("serve --max-num-seqs x", 2, r"--max-num-seqs: 'x' is not allowed; allowed: a whole number"),
    ("serve --max-steps-in-flight 99", 2, r"--max-steps-in-flight: 99 is not allowed; allowed: 0 to 16"),
    ("serve --block-size 12", 2, r"--block-size: 12 is not allowed; allowed: a power of two.*"),
    ("serve --dtype int4", 2, r"--dtype: 'int4' is not allowed; allowed: .*bfloat16.*"),
    ("serve --device tpu", 2, r"--device: 'tpu' is not allowed; allowed: cpu, cuda.*"),
    ("serve --quantization int3", 2, r"--quantization: 'int3' is not allowed; allowed: .*int8.*"),
    ("serve --grpc-address nowhere", 2, r"--grpc-address: 'nowhere' is not allowed; allowed: HOST:PORT.*"),
    (
        "serve --grpc-address 0.0.0.0:50051",
        2,
        r"--grpc-address: '0\.0\.0\.0:50051' is not allowed; allowed: .*TLS.*|.*tls.*",
    ),
    ("serve --backend-option oops", 2, r"--backend-option: 'oops' is not allowed; allowed: KEY=VALUE"),
    ("serve --config absent.toml", 2, r"--config: cannot read 'absent\.toml': No such file or directory"),
    (
        "scheduler --step-address tcp://0.0.0.0:1",
        2,
        r"--step-address: 'tcp://0\.0\.0\.0:1' is not allowed; .*curve_keys",
    ),
    (
        "executor --step-address tcp://192.0.2.1:1",
        2,
        r"--step-address: 'tcp://192\.0\.2\.1:1' is not allowed; .*curve_keys",
    ),
    (f"scheduler --step-address ipc:///{'x' * 120}", 2, r"--step-address: .* at most 107 bytes.*"),
    ("gateway", 2, r"--model is required; allowed: text"),
    ("executor --backend nonesuch", 2, r".*nonesuch.* is not allowed; allowed: .*simulated.*"),
    (
        "serve --model absent-directory",
        3,
        r"--model: 'absent-directory' is not allowed; allowed: a checkpoint directory.*",
    ),
    ("gateway --model absent-directory", 3, r".*absent-directory.*"),
]


@pytest.mark.parametrize(("words", "code", "message"), MISTAKES, ids=[words[:48] for words, _, _ in MISTAKES])
def test_a_mistake_is_one_line_and_an_exit_code(words, code, message):
    run = finished(*words.split(), *(("--log-level", "error") if "serve" not in words else ()))
    assert run.process.returncode == code, "".join(run.err)
    assert run.out == []
    assert len(run.err) == 1, "".join(run.err)
    assert re.fullmatch(rf"headway {words.split()[0]}: ({message})\n", run.err[0])


def test_an_address_in_use_is_told_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = finished("serve", "--backend", "simulated", "--log-level", "error", "--grpc-address", address)
    assert run.process.returncode == 2
    (line,) = run.err
    assert line == (
        f"headway serve: --grpc-address: cannot listen on '{address}' (Address already in use); allowed: a free address\n"
    )


def test_what_a_process_finds_out_later_is_the_last_line(tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL_DIRECTORY, model)
    (model / "tokenizer.json").write_text("{}")
    run = finished("serve", "--model", str(model), "--backend", "simulated", "--grpc-address", "127.0.0.1:0")
    assert run.process.returncode == 3
    assert [line for line in run.err if line.startswith("headway gateway: ")] == run.err[-1:]
    assert "tokenizer.json" in run.err[-1]
    assert run.out == []
    assert max(map(len, run.err)) < 300


def test_an_unknown_variable_is_named(tmp_path: Path):
    run = finished("scheduler", HEADWAY_SCHEDULER_MAX_NUM_SEQ="5")
    assert run.process.returncode == 2
    expected = (
        "unknown environment variable HEADWAY_SCHEDULER_MAX_NUM_SEQ; did you mean HEADWAY_SCHEDULER_MAX_NUM_SEQS?"
    )
    assert run.err == [f"headway scheduler: {expected}\n"]

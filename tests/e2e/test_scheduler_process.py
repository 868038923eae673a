"""The scheduler as a process: light, idle at no cost, and clean at its end."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

from e2e.running_server import command, free_port, wait_until
from headway.commands.keys import make_keys

REPOSITORY = Path(__file__).resolve().parents[2]

IMPORTS_NOTHING_HEAVY = """
import sys
import headway_scheduler.process
heavy = {"torch", "grpc", "google.protobuf", "triton", "transformers", "tokenizers"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""


def start_scheduler(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "headway",
            "scheduler",
            "--step-address",
            f"ipc://{directory}/step",
            "--ingress-address",
            f"ipc://{directory}/ingress",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "scheduler ready" in line:
            return process
    raise AssertionError(f"the scheduler ended with {process.wait()}")


def test_a_scheduler_host_needs_neither_torch_nor_grpc() -> None:
    subprocess.run([sys.executable, "-c", IMPORTS_NOTHING_HEAVY], check=True)


def test_an_idle_scheduler_sleeps_and_ends_cleanly(tmp_path: Path) -> None:
    process = start_scheduler(tmp_path)
    try:
        usage = psutil.Process(process.pid)
        before = usage.cpu_times()
        time.sleep(2.0)
        after = usage.cpu_times()
        # Four heartbeats a second and nothing else: well under one per cent of a core, where polling takes all of it.
        assert after.user + after.system - before.user - before.system < 0.1
        assert usage.memory_info().rss < 150 * 1024 * 1024
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=5) == 0
        assert process.stderr is not None
        process.stderr.close()
    assert list(tmp_path.iterdir()) == []


def test_an_address_in_use_ends_with_one_line_and_exit_code_2() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        ended = subprocess.run(
            [sys.executable, "-m", "headway", "scheduler", "--step-address", address],
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == (
        f"headway scheduler: step_address: {address!r} cannot be bound: Address already in use"
    )
    assert "Traceback" not in ended.stderr


def test_the_health_check_of_several_hosts_passes_and_turns_nobody_away(tmp_path: Path) -> None:
    make_keys(tmp_path)
    service = yaml.safe_load((REPOSITORY / "compose.hosts.yaml").read_text())["services"]["scheduler"]
    here = {"/keys": str(tmp_path / "scheduler"), **{port: str(free_port()) for port in ("50052", "50053", "9464")}}

    def of_this_host(words: list[str]) -> list[str]:
        for there, value in here.items():
            words = [word.replace(there, value) for word in words]
        return words

    check = of_this_host(service["healthcheck"]["test"][1:])
    assert check[0] == "python3"
    with command("scheduler", *of_this_host(service["command"])) as scheduler:
        wait_until(lambda: any("scheduler ready" in line for line in scheduler.err), 30.0, "the scheduler")
        for _ in range(2):
            subprocess.run([sys.executable, *check[1:]], check=True)
        time.sleep(0.5)  # Twice what the scheduler sleeps at most before it tells of one that it has turned away.
        assert scheduler.stop() == 0
    assert [line for line in scheduler.err if "warning" in line or "error" in line] == []

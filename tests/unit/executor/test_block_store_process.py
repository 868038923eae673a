"""The executor process: its host pool in shared memory comes with it, outlives kill -9 and goes at a graceful end."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from headway_executor.block_store.pool_file import SHARED_MEMORY
from headway_proto.step import BackendInfo, ExecutorHello, scheduler_frame_reader

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs /dev/shm")

PROGRAM = """
import sys, msgspec
from headway_executor.config import ExecutorConfig
from headway_executor.process import run
settings = dict(backend="simulated", num_kv_blocks=32, max_model_len=64, block_size=4, step_address=sys.argv[1])
sys.exit(run(ExecutorConfig(**settings, **msgspec.json.decode(sys.argv[2]))))
"""


@contextmanager
def executor(address: str, settings: str = "{}", number: int = 3):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, address, settings],
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HEADWAY_EXECUTOR": str(number)},
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def info_of(router: zmq.Socket) -> BackendInfo:
    """What the next executor that says hello announces."""
    reader = scheduler_frame_reader()
    while True:
        assert router.poll(20_000), "no hello"
        body = reader.decode(router.recv_multipart()[-1]).body
        if isinstance(body, ExecutorHello):
            return body.info


@pytest.fixture
def bound(tmp_path):
    """Binds a router anew for each executor, so that late frames of the one before are gone."""

    @contextmanager
    def router():
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.linger = 0
            socket.bind(f"ipc://{tmp_path}/step")
            yield socket

    return router


def test_a_pool_outlives_its_process_and_ends_with_a_graceful_one(bound, tmp_path):
    address = f"ipc://{tmp_path}/step"
    with bound() as router, executor(address) as process:
        first = info_of(router)
        path = SHARED_MEMORY / first.block_addresses[0].removeprefix("shm:")
        assert re.fullmatch(r"headway-[0-9a-f]{12}-(3|x)-[0-9a-f]{12}", path.name)
        assert path.stat().st_mode & 0o777 == 0o600
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert path.exists()
    with bound() as router, executor(address) as process:
        second = info_of(router)
        assert (second.host_pool, second.block_addresses) == (first.host_pool, first.block_addresses)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not path.exists()


@pytest.mark.parametrize("settings", ['{"host_pool": "private"}', '{"block_transports": ""}'])
def test_a_private_pool_is_not_announced(bound, tmp_path, settings):
    with bound() as router, executor(f"ipc://{tmp_path}/step", settings):
        info = info_of(router)
    assert (info.host_pool, info.block_addresses) == ("", ())
    assert info.num_host_blocks == 32


def test_an_unknown_transport_is_one_line(tmp_path):
    started = time.monotonic()
    with executor(f"ipc://{tmp_path}/step", '{"block_transports": "shm,smoke"}') as process:
        _, error = process.communicate(timeout=20)
        assert process.returncode == 2
    assert (
        error.strip()
        .splitlines()[-1]
        .startswith("headway executor: block_transports: 'smoke' is not allowed; allowed: each at most once, of ")
    )
    assert time.monotonic() - started < 20
    assert Path(SHARED_MEMORY).is_dir()

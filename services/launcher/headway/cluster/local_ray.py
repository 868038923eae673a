"""A Ray of our own on this machine's loopback: a head and some nodes, in one process that ``headway cluster down`` ends.

``python -m headway.cluster.local_ray DIRECTORY NODES`` is that process. Ray's own ports are on loopback, want a token that
only this user can read, and there is neither a dashboard nor a report of use.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from headway.flags.settings import ConfigurationError

_MOST_DIRECTORY_CHARS = 24
"""Ray makes Unix sockets some 80 characters further down."""
_START_S = 90.0
_STOP_S = 30.0
_OBJECT_STORE_BYTES = 80 << 20
_CPUS_PER_NODE = 16


class LocalRay:
    """The Ray of one deployment's name, if there is one."""

    def __init__(self, name: str) -> None:
        parent = tempfile.gettempdir()
        if len(parent) > _MOST_DIRECTORY_CHARS:
            parent = "/tmp"  # noqa: S108  # only a directory of this user's in it is used
        self._user_directory = Path(parent) / f".hwc{os.getuid()}"
        self._directory = self._user_directory / name

    @property
    def is_there(self) -> bool:
        """Whether one was started and not ended."""
        return (self._directory / "address").is_file()

    @property
    def address(self) -> str:
        """HOST:PORT of its head."""
        return (self._directory / "address").read_text("ascii")

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process may use it."""
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self._directory / "token"),
            # Despite its name: with 0, Ray is content with loopback.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self._directory),
        }

    def start(self, num_nodes: int) -> None:
        """Start it, and wait until it can be used.

        Raises:
            ConfigurationError: there is one already, or it does not start.
        """
        self._make_directory()
        with (self._directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "headway.cluster.local_ray", str(self._directory), str(num_nodes)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        (self._directory / "pid").write_text(str(process.pid), "ascii")
        deadline = time.monotonic() + _START_S
        while not self.is_there:
            if process.poll() is not None or time.monotonic() > deadline:
                words = (self._directory / "log").read_text("utf-8", "replace").strip().splitlines()[-1:]
                self.stop()
                raise ConfigurationError(f"nodes_here: Ray did not start: {' '.join(words)[:200]}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End it with all that it has started, and remove its files; nothing if there is none."""
        with contextlib.suppress(OSError, ValueError):
            _end(int((self._directory / "pid").read_text("ascii")))
        shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._user_directory.rmdir()

    def _make_directory(self) -> None:
        self._user_directory.mkdir(mode=0o700, exist_ok=True)
        status = self._user_directory.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise ConfigurationError(f"nodes_here: {self._user_directory} is open to others; allowed: without it")
        try:
            self._directory.mkdir(mode=0o700)
        except FileExistsError:
            raise ConfigurationError(
                f"name: {self._directory.name!r} is not allowed; allowed: another, or headway cluster down first"
            ) from None
        with os.fdopen(os.open(self._directory / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))


def _end(process_id: int) -> None:
    """End the process that holds the nodes; a session of its own, so that its id names its group too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process_id, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        while time.monotonic() < deadline and _lives(process_id):
            time.sleep(0.1)
        os.killpg(process_id, signal.SIGKILL)


def _lives(process_id: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process_id, os.WNOHANG)
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def main(directory: Path, num_nodes: int) -> None:
    """Hold a head and nodes until SIGTERM."""
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    from ray.cluster_utils import Cluster

    alike = {
        "node_ip_address": "127.0.0.1",
        "num_cpus": _CPUS_PER_NODE,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "include_log_monitor": False,
    }
    head = {**alike, "no_monitor": True, "temp_dir": str(directory / "ray")}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(num_nodes):  # One by one: Ray sets a handler of signals, which only this thread may.
            cluster.add_node(wait=False, **alike)
        signal.signal(signal.SIGTERM, lambda *_: stopped.set())
        cluster.wait_for_nodes(_START_S)
        unfinished = directory / "address.new"
        unfinished.write_text(cluster.address, "ascii")
        unfinished.rename(directory / "address")
        stopped.wait()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

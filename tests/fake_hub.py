"""A hub on loopback: one repository of files, over the calls that huggingface_hub makes.

It may cut the first answer of a file in half, or send a damaged one.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """``asked``: method, path and range of each request. ``cuts``: files whose first answer ends in the middle."""

    repository: str
    files: dict[str, bytes]
    revisions: frozenset[str] = frozenset({"main", COMMIT})
    cuts: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    address: str = ""

    def fetched(self, name: str) -> list[str]:
        """The ranges of the GET requests for a file."""
        return [its_range for method, path, its_range in self.asked if method == "GET" and path.endswith(f"/{name}")]


def _is_large(name: str) -> bool:
    return name.endswith(".safetensors")


def _etag(hub: FakeHub, name: str) -> str:
    content = hub.files[name]
    return hashlib.sha256(content).hexdigest() if _is_large(name) else hashlib.sha1(content).hexdigest()


def _entry(hub: FakeHub, name: str) -> dict[str, object]:
    size = len(hub.files[name])
    entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": "0" * 40}
    if _is_large(name):
        entry["lfs"] = {"oid": _etag(hub, name), "size": size, "pointerSize": 130}
    return entry


class _Handler(BaseHTTPRequestHandler):
    """Answers for ``hub``."""

    hub: ClassVar[FakeHub]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        hub = self.hub
        path = unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path, self.headers.get("Range", "")))
        api, files = f"/api/models/{hub.repository}", f"/{hub.repository}/resolve/"
        if path == api or path.startswith(f"{api}/revision/"):
            if path != api and path.removeprefix(f"{api}/revision/") not in hub.revisions:
                return self._refuse("RevisionNotFound")
            files_of_it = [{"rfilename": name} for name in sorted(hub.files)]
            return self._json({"id": hub.repository, "sha": COMMIT, "siblings": files_of_it})
        if path.startswith(f"{api}/tree/"):
            return self._json([_entry(hub, name) for name in sorted(hub.files)])
        if path.startswith(files):
            return self._file(path.removeprefix(files).partition("/")[2], with_body=with_body)
        return self._refuse("RepoNotFound")

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, name: str, *, with_body: bool) -> None:
        hub = self.hub
        content = hub.files[name]
        if name in hub.damaged:
            content = bytes(len(content))
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if first else 200)
        self.send_header("ETag", f'"{_etag(hub, name)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - first))
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not with_body:
            return
        if name in hub.cuts:
            hub.cuts.remove(name)
            self.wfile.write(content[first : len(content) // 2])
            self.close_connection = True
            return
        self.wfile.write(content[first:])


@contextmanager
def fake_hub(repository: str, directory: Path, **changes: object) -> Iterator[FakeHub]:
    """Serve the files of a directory until the block ends."""
    files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    hub = FakeHub(repository, files, **changes)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""``headway demo``: what a newcomer sees first."""

import importlib.metadata
import json
import os
import re
from pathlib import Path

from packaging.utils import canonicalize_name

from e2e.running_server import finished

LOCK = Path(__file__).resolve().parents[2] / "requirements" / "serve.lock"
# Imported by every process of the demonstration when it starts.
HIDE = """
import importlib.machinery, importlib.metadata
hidden = frozenset({hidden})
find_spec = importlib.machinery.PathFinder.find_spec
def find_what_is_locked(name, path=None, target=None):
    return None if name in hidden else find_spec(name, path, target)
importlib.machinery.PathFinder.find_spec = find_what_is_locked
"""


def not_locked() -> list[str]:
    """The packages here that an environment with ``serve.lock`` and nothing else lacks."""
    locked = {"headway", "pip", *re.findall(r"^([a-z0-9.-]+)==", LOCK.read_text(), re.MULTILINE)}
    return sorted(
        package
        for package, owners in importlib.metadata.packages_distributions().items()
        if not any(canonicalize_name(owner) in locked for owner in owners) and not package.startswith("headway")
    )


def test_the_demonstration_needs_what_its_lock_has_and_streams_readable_answers_and_timings(tmp_path: Path):
    hidden = not_locked()
    assert {"triton", "mypy", "transformers"} <= set(hidden)
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=json.dumps(hidden)))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    demo = finished("demo", "--max-tokens", "12", PYTHONPATH=path)
    text = "".join(demo.out)
    assert demo.process.returncode == 0, "".join(demo.err)
    assert demo.out[0].startswith("headway is ready on 127.0.0.1:")
    answers = re.findall(r"^\[\d+\] (.+)\n((?: {4}.*\n|\n)+)", text, re.MULTILINE)
    assert len(answers) >= 8
    assert all(re.search(r"[a-z]{2,}", answer) for _, answer in answers)
    assert re.search(
        r"^ *# +prompt tokens +output tokens +TTFT ms +mean ITL ms +tokens/s +ended +request$", text, re.MULTILINE
    )
    assert re.search(
        r"^total: \d+ requests; \d+ output tokens in [\d.]+ s, \d+ tokens/s; mean TTFT", text, re.MULTILINE
    )

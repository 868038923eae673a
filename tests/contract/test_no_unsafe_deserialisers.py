"""Nothing in the project turns bytes into running code: no pickle, no eval, no template outside the sandbox."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

MODULES = {
    "pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle", "copyreg",
    "multiprocessing", "xmlrpc", "code", "codeop", "runpy",
}  # fmt: skip
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load": "loads pickles",
    "torch.save": "writes pickles",
    "torch.hub.load": "runs downloaded code",
    "torch.jit.load": "runs code of a file",
    "torch.package.PackageImporter": "runs code of a file",
    "yaml.load": "makes objects of any class",
    "yaml.load_all": "makes objects of any class",
    "yaml.unsafe_load": "makes objects of any class",
    "yaml.full_load": "makes objects of any class",
    "jinja2.Environment": "is no sandbox",
    "jinja2.Template": "is no sandbox",
    "jinja2.sandbox.SandboxedEnvironment": "lets templates change what they are given",
    "numpy.fromregex": "",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "pandas.read_pickle": "loads pickles",
}
METHODS = {"recv_pyobj", "send_pyobj", "unsafe_load", "from_pretrained"}
"""Of any object: pyzmq's pickles, and transformers, which may run code of a checkpoint."""
KEYWORDS = {"allow_pickle": True, "trust_remote_code": True, "weights_only": False, "shell": True}

# Where one of these is the subject itself: what is used, and why it is harmless.
ALLOWED = {
    ("tests/unit/executor/test_weights.py", "pickle"): "writes a pickle that must not be read",
    ("tests/e2e/test_bad_model_files.py", "pickle"): "writes a pickle that must not be read",
}
TRANSFORMERS_AS_THE_ORACLE = ("tests/", "benchmarks/", "tools/")
"""Tests and benchmarks load tiny models that they have just written themselves."""


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [REPOSITORY / line for line in listed.stdout.splitlines() if (REPOSITORY / line).exists()]


def findings(text: str, name: str) -> Iterator[tuple[int, str]]:
    """Line and name of everything in a module that may turn bytes into running code."""
    nodes = list(ast.walk(ast.parse(text)))
    aliases: dict[str, str] = {"np": "numpy"}
    for node in nodes:
        yield from _imported(node, aliases)
    for node in nodes:
        yield from _used(node, aliases, name)


def _imported(node: ast.AST, aliases: dict[str, str]) -> Iterator[tuple[int, str]]:
    """What an import brings; ``aliases`` learns under which names."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            first = alias.name.partition(".")[0]
            aliases[alias.asname or first] = alias.name if alias.asname else first
            yield from _module(node.lineno, alias.name)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from _module(node.lineno, node.module or "")
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            aliases[alias.asname or alias.name] = full
            yield from _module(node.lineno, full)
            yield from _dotted(node.lineno, full)


def _used(node: ast.AST, aliases: dict[str, str], name: str) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Attribute):
        yield from _dotted(node.lineno, _full_name(node, aliases))
        is_oracle = node.attr == "from_pretrained" and name.startswith(TRANSFORMERS_AS_THE_ORACLE)
        if node.attr in METHODS and not is_oracle:
            yield node.lineno, node.attr
    elif isinstance(node, ast.Name) and node.id in BUILTINS and isinstance(node.ctx, ast.Load):
        yield node.lineno, node.id
    elif isinstance(node, ast.Call):
        for keyword in node.keywords:
            wanted = KEYWORDS.get(keyword.arg or "")
            value = keyword.value
            if wanted is not None and not (isinstance(value, ast.Constant) and value.value is not wanted):
                yield node.lineno, f"{keyword.arg}="


def _module(line: int, name: str) -> Iterator[tuple[int, str]]:
    if name.partition(".")[0] in MODULES:
        yield line, name.partition(".")[0]
    elif name == "torch.multiprocessing":
        yield line, name


def _dotted(line: int, name: str) -> Iterator[tuple[int, str]]:
    if name in CALLS:
        yield line, name


def _full_name(node: ast.expr, aliases: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([aliases.get(node.id, node.id), *reversed(parts)])


def test_no_source_turns_bytes_into_running_code() -> None:
    found = []
    paths = sources()
    assert len(paths) > 200
    for path in paths:
        name = path.relative_to(REPOSITORY).as_posix()
        for line, what in findings(path.read_text(encoding="utf-8"), name):
            if (name, what) not in ALLOWED:
                found.append(f"{name}:{line}: {what}")
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "import a, marshal",
        "import shelve.x",
        "def f():\n    import dill",
        "from cloudpickle import *",
        "from multiprocessing import Queue",
        "import torch.multiprocessing",
        "from torch import multiprocessing",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "from torch import load",
        "from torch import load as l",
        "loader = __import__('torch')",
        "import yaml\nyaml.load(x)",
        "eval('1')",
        "f = exec",
        "compile(a, b, c)",
        "import numpy as np\nnp.load(x, allow_pickle=True)",
        "np.load(x, allow_pickle=setting)",
        "import jinja2\njinja2.Environment()",
        "from jinja2 import Template",
        "from jinja2.sandbox import SandboxedEnvironment",
        "socket.recv_pyobj()",
        "AutoTokenizer.from_pretrained(x)",
        "f(trust_remote_code=True)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_each_of_them_is_found(source: str) -> None:
    assert list(findings(source, "services/x.py"))


@pytest.mark.parametrize(
    "source",
    [
        "import json, msgspec, tomllib",
        "import re\nre.compile('x')",
        "model.eval()",
        "import numpy as np\nnp.load(x, allow_pickle=False)",
        "import jinja2.sandbox\njinja2.sandbox.ImmutableSandboxedEnvironment()",
        "import yaml\nyaml.safe_load(x)",
        "import torch\ntorch.load_state = 1",
    ],
)
def test_what_is_harmless_passes(source: str) -> None:
    assert list(findings(source, "services/x.py")) == []

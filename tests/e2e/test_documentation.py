"""Every block of commands or code in the documentation runs as it stands there, or a comment before it says why not.

A block of README.md, docs/ or benchmarks/README.md that is not to run has ``<!-- not run: REASON -->`` on the line before.
All others run here, against one server of the demo model; loads are made smaller and addresses and files replaced.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from e2e.running_server import command
from headway import Client
from headway.__main__ import COMMANDS, main, parser_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").glob("*.md")]
FENCE = re.compile(
    r"^(?:<!-- (?P<comment>[^\n]*) -->\n)?(?P<fence>```+)(?P<language>\w*)\n(?P<text>.*?)^(?P=fence)$",
    re.MULTILINE | re.DOTALL,
)
RUN = {"sh", "console", "bash", "python"}
RUN_BY_OTHERS = {"js": "tests/e2e/test_other_languages.py"}
NO_PROGRAM = {"text", "toml", "yaml", "json"}
ADDRESS = "127.0.0.1:50051"
SMALLER = {
    "--num-requests 440 --warmup-requests 40": "--num-requests 12 --warmup-requests 2",
    "--num-requests 1024 --warmup-requests 128": "--num-requests 40 --warmup-requests 8",
    "--sweep-budget 192,256,384,512,768,1024,2048": "--sweep-budget 256,512",
    "lognormal:1024,0.6,3000 --output-tokens lognormal:200,0.5,800": "1000 --output-tokens 12 --num-requests 50 --devices 8",
    "--arrivals poisson --rate 20 ": "--arrivals poisson --rate 50 ",
    "headway doctor": "headway doctor --quick",
    "--output-tokens lognormal:60,0.6": "--output-tokens 6",
}
SERVED = "headway serve /path/to/checkpoint"
"""Stands for the server of this module, which has been started with this command and settings of the test."""


class Block(msgspec.Struct, frozen=True):
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    comment: str

    @property
    def is_run(self) -> bool:
        return self.language in RUN and not self.comment.startswith("not run: ")

    @property
    def commands(self) -> list[str]:
        """The lines of a block of commands, each with what continues it and without remarks."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [re.sub(r"\s+#.*| +(?= )", "", line).removeprefix(".venv/bin/") for line in lines if line.strip()]


def blocks() -> Iterator[Block]:
    for page in sorted(PAGES):
        text = page.read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("fence")) + 1
            yield Block(str(page.relative_to(ROOT)), line, match["language"], match["text"], match["comment"] or "")


BLOCKS = list(blocks())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a server of the demo model that records, and a directory with the files that the pages speak of."""
    directory = tmp_path_factory.mktemp("documentation")
    (directory / "prompts.txt").write_text("A dictionary is\nThe str.split method\n")
    (directory / "schema.json").write_text('{"type": "object", "properties": {}, "additionalProperties": false}')
    words = ("--model", "demo", "--grpc-address", "127.0.0.1:0", "--flight-log", str(directory / "flight"))
    with command("serve", *words) as serving:
        address = serving.wait_for_ready()
        with Client(address) as client:
            client.generate("A dictionary is", max_tokens=4, request_id="REQUEST").result()
        yield address, directory
        assert serving.stop() == 0


def test_every_block_of_code_is_run_or_says_why_not() -> None:
    assert len(BLOCKS) > 40
    for block in BLOCKS:
        place = f"{block.page}:{block.line}"
        assert block.language in RUN | NO_PROGRAM | RUN_BY_OTHERS.keys(), (
            f"{place}: a block of what? {block.language!r}"
        )
        if block.comment.startswith("not run"):
            assert re.fullmatch(r"not run: \S.{8,}", block.comment), f"{place}: says no reason"
            named = re.findall(r"(?:tests|benchmarks)/[\w/.]+", block.comment)
            assert all((ROOT / name).exists() for name in named), f"{place}: {named}"
    # A block that the expression above does not see would not be run either.
    assert len(BLOCKS) * 2 == sum(len(re.findall(r"^\s*```", page.read_text(), re.MULTILINE)) for page in PAGES)


@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.language in RUN - {"python"}],
    ids=lambda block: f"{block.page}:{block.line}",
)
def test_the_commands_of_headway_are_written_right(block: Block) -> None:
    for line in block.commands:
        words = shlex.split(line.split(" && ")[0])
        if "headway" in words[:2]:
            name, *rest = words[words.index("headway") + 1 :]
            known = set(re.findall(r"--[a-z][a-z-]+", parser_of(name).format_full_help()))
            assert name in COMMANDS
            assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= known, line


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.is_run], ids=lambda block: f"{block.page}:{block.line}"
)
def test_a_block_runs(block: Block, server: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    address, directory = server
    monkeypatch.chdir(directory)
    monkeypatch.setenv("COLUMNS", "100")
    if block.language == "python":
        script = directory / "block.py"
        script.write_text(block.text.replace(ADDRESS, address))
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
        return
    for line in block.commands:
        if line == SERVED:
            continue
        shorter = line
        for long, short in SMALLER.items():
            shorter = shorter.replace(long, short)
        program, *words = shlex.split(shorter)
        assert program == "headway", f"{block.page}:{block.line}: mark the block as not run, or run it: {line}"
        words = [address if word in {ADDRESS, "gateway:50051"} else word for word in words]
        if words[0] in {"generate", "bench", "top"} and "--address" not in words:
            words += ["--address", address]
        assert main(words) == 0, line

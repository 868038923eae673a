"""What shells are told of the commands is what the commands take, and bash completes with it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from headway.__main__ import COMMANDS, main, parser_of
from headway.completion import SHELLS


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        written: list[str] = []
        patch.setattr("sys.stdout.write", written.append)
        assert main(["completion", "bash"]) == 0
    path = tmp_path_factory.mktemp("completion") / "headway.bash"
    path.write_text("".join(written))
    return path


def completions(script: Path, *words: str, directory: Path | None = None) -> set[str]:
    """What bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in ("headway", *words))
    ask = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _shtab_headway; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(
        ["bash", "--norc", "-c", ask],
        cwd=directory or script.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_every_shell_has_every_command_and_flag(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in COMMANDS:
        assert name in script
        for flag in parser_of(name)._option_string_actions:
            assert flag.removeprefix("--") in script, (name, flag)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
class TestBash:
    def test_it_completes_commands_flags_and_values(self, bash_script: Path) -> None:
        assert completions(bash_script, "ser") == {"serve"}
        assert "--executors" in completions(bash_script, "serve", "--exec")
        assert completions(bash_script, "completion", "ba") == {"bash"}
        assert completions(bash_script, "serve", "--order", "f") == {"fair", "fcfs"}
        assert completions(bash_script, "simulate", "--model", "llama-3") == {"llama-3-70b", "llama-3-8b"}

    def test_it_completes_files_where_a_flag_takes_one(self, bash_script: Path) -> None:
        (bash_script.parent / "prompts.txt").touch()
        assert "prompts.txt" in completions(bash_script, "generate", "--file", "pro")
        assert "prompts.txt" in completions(bash_script, "serve", "--auth-token-file", "pro")
        assert "prompts.txt" in completions(bash_script, "bench", "--trace", "pro")


def test_another_shell_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "nushell"])
    assert ended.value.code == 2
    assert "bash" in capsys.readouterr().err

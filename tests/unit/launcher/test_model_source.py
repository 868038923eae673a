"""What a model's name may stand for: directories, GGUF files, and a hub's models, against a hub on loopback."""

import argparse
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fake_hub import COMMIT, FakeHub, fake_hub
from headway.planning.hub import Hub, HubError, HubName, _chosen
from headway.planning.model_source import DEMO_MODEL_DIRECTORY, ModelSourceError, ModelSources
from headway.planning.services import SERVICES, add_service_flags, load
from unit.launcher.test_gguf import Kind, write_file

REPOSITORY = "org/tiny"
WEIGHTS = "model.safetensors"
STRANGERS = (
    *("modeling_tiny.py", "pytorch_model.bin", "consolidated.safetensors"),
    *("original/params.json", "onnx/config.json"),
)
IN_FOLDERS = ("1_Pooling/config.json", "additional_chat_templates/tool_use.jinja")
PROGRAM = """
import sys
from headway.planning.model_source import ModelSources, ModelSourceError
try:
    print(ModelSources(offline=sys.argv[2] == "offline").find(sys.argv[1]).directory)
except ModelSourceError as error:
    print(error)
    sys.exit(3)
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("published")
    for file in DEMO_MODEL_DIRECTORY.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    for more in (*STRANGERS, *IN_FOLDERS):
        (directory / more).parent.mkdir(exist_ok=True)
        (directory / more).write_text("{}")
    # The library keeps what has come in pieces of 10 MB.
    (directory / WEIGHTS).write_bytes(random.Random(0).randbytes(24_000_000))
    return directory


def found(hub: FakeHub | None, cache: Path, name: str = REPOSITORY, *, offline: bool = False) -> tuple[int, str, str]:
    """Exit code, answer and messages of a process of its own: the library reads its environment once."""
    environment = os.environ | {
        "HF_ENDPOINT": hub.address if hub else "http://127.0.0.1:1",
        "HF_HOME": str(cache / "hf"),
        "XDG_CACHE_HOME": str(cache),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-c", PROGRAM, name, "offline" if offline else "online"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return done.returncode, done.stdout.strip(), done.stderr


def test_a_hubs_model_is_fetched_once_and_then_served_without_it(published: Path, tmp_path: Path) -> None:
    with fake_hub(REPOSITORY, published, cuts={WEIGHTS}) as hub:
        code, directory, told = found(hub, tmp_path)
        assert code == 0, directory + told
        ranges = hub.fetched(WEIGHTS)
        again = found(hub, tmp_path, f"{REPOSITORY}@{COMMIT}")
        assert again[:2] == (0, directory)
        assert hub.fetched(WEIGHTS) == ranges
    assert len(ranges) == 2, "the first answer is cut"
    assert ranges[1].startswith("bytes="), "what has come is not fetched again"
    fetched = {str(path.relative_to(directory)) for path in Path(directory).rglob("*") if path.is_file()}
    served = {
        path.name for path in DEMO_MODEL_DIRECTORY.iterdir() if path.suffix in {".json", ".safetensors", ".jinja"}
    }
    assert fetched == served | set(IN_FOLDERS)
    assert (Path(directory) / WEIGHTS).read_bytes() == (published / WEIGHTS).read_bytes()
    assert "looking for org/tiny" in told
    assert "checking the sums of 1 files" in told
    assert "No files matched" not in told
    for offline in (True, False):
        code, same, told = found(None, tmp_path, offline=offline)
        assert (code, same) == (0, directory)
        assert "checking" not in told


def test_damaged_weights_are_removed_and_fetched_again(published: Path, tmp_path: Path) -> None:
    with fake_hub(REPOSITORY, published, damaged={WEIGHTS}) as hub:
        code, reason, _ = found(hub, tmp_path)
        assert code == 3
        assert reason.endswith("a file of it, came damaged and was removed; try again")
        hub.damaged.clear()
        code, directory, told = found(hub, tmp_path)
    assert code == 0, directory + told
    assert (Path(directory) / WEIGHTS).read_bytes() == (published / WEIGHTS).read_bytes()


def test_what_a_hub_does_not_have_is_told_in_one_line(published: Path, tmp_path: Path) -> None:
    with fake_hub(REPOSITORY, published) as hub:
        assert found(hub, tmp_path, "org/other")[:2] == (
            3,
            "the hub has no such model, or asks for a token of its own (HF_TOKEN), and there is no such directory",
        )
        assert found(hub, tmp_path, f"{REPOSITORY}@v9")[:2] == (3, "the hub's model has no revision v9")
    reason = "it is not in the cache, the hub does not answer, and there is no such directory"
    assert found(None, tmp_path)[:2] == (3, reason)
    assert found(None, tmp_path, offline=True)[:2] == (3, "it is not in the cache, and there is no such directory")


@pytest.fixture
def gguf_files(tmp_path: Path) -> Path:
    directory = tmp_path / "published"
    directory.mkdir()
    made = tmp_path / "made" / "tiny-Q4_0.gguf"
    made.parent.mkdir()
    write_file(made, [Kind.Q8_0])
    made.rename(directory / made.name)
    for name in ("tiny-UD-Q4_0.gguf", "tiny-UD-Q8_0.gguf", "mmproj-F16.gguf", "README.md"):
        (directory / name).write_bytes(b"never asked for")
    return directory


def test_a_gguf_file_of_a_hub_is_named_by_its_form(gguf_files: Path, tmp_path: Path) -> None:
    with fake_hub(REPOSITORY, gguf_files) as hub:
        code, directory, told = found(hub, tmp_path, f"{REPOSITORY}:q4_0")
        assert code == 0, directory + told
        assert Path(directory, "config.json").exists()
        assert [name for name in hub.files if hub.fetched(name)] == ["tiny-Q4_0.gguf"]
        choices = "allowed: org/tiny:Q4_0, org/tiny:UD-Q4_0, org/tiny:UD-Q8_0"
        assert found(hub, tmp_path)[:2] == (3, f"the hub's model has GGUF files only; {choices}")
        other = found(hub, tmp_path, f"{REPOSITORY}:Q5_K_M")[:2]
        assert other == (3, f"the hub's model has no GGUF files called Q5_K_M; {choices}")
    for name in (":Q4_0", ":tiny-Q4_0.gguf", f":Q4_0@{COMMIT}"):
        for offline in (True, False):
            assert found(None, tmp_path, REPOSITORY + name, offline=offline)[:2] == (0, directory)
    unknown = found(None, tmp_path / "empty", f"{REPOSITORY}:Q4_0")[:2]
    assert unknown == (3, "it is not in the cache, the hub does not answer, and there is no such directory")


@pytest.mark.parametrize(
    ("form", "files"),
    [
        ("q8_0", ["tiny-UD-Q8_0.gguf"]),
        ("UD-Q4_0", ["tiny-UD-Q4_0.gguf"]),
        ("tiny-Q4_0.gguf", ["tiny-Q4_0.gguf"]),
        ("BF16", ["BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"]),
    ],
)
def test_one_file_in_all_its_parts_is_chosen(form: str, files: list[str]) -> None:
    there = ["tiny-Q4_0.gguf", "tiny-UD-Q4_0.gguf", "tiny-UD-Q8_0.gguf"]
    there += [f"BF16/tiny-BF16-0000{part}-of-00002.gguf" for part in (1, 2)]
    assert _chosen(HubName("a/b", form, None), there) == files


def test_a_form_of_two_files_is_refused_with_the_names_of_the_files() -> None:
    reason = "the hub's model has 2 GGUF files called Q4_0; allowed: a/b:one-Q4_0.gguf, a/b:two-Q4_0.gguf"
    with pytest.raises(HubError, match=f"^{re.escape(reason)}$"):
        _chosen(HubName("a/b", "Q4_0", None), ["one-Q4_0.gguf", "two-Q4_0.gguf"])


def test_directories_and_names_of_nothing_stay(tmp_path: Path) -> None:
    models = ModelSources(offline=True)
    assert models.find("demo").directory == str(DEMO_MODEL_DIRECTORY)
    for name in (str(tmp_path), "/no/such/directory", "no-such-model", "./org/name", "~/models/llama", "org/none.gguf"):
        assert models.find(name).directory == name


def test_a_directory_with_a_pipe_or_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "nothing").symlink_to("none")
    assert ModelSources().find(str(tmp_path)).directory == str(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelSourceError, match=r"^'config\.json' in it is a pipe or a device; allowed: files$"):
        ModelSources().find(str(tmp_path))


def test_a_user_without_a_home_is_told_where_a_checkpoint_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(ModelSourceError, match=r"has no home directory; XDG_CACHE_HOME names a place$"):
        ModelSources().find(str(file))


def test_a_gguf_file_becomes_a_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "small.gguf"
    write_file(file, [Kind.Q8_0])
    told: list[str] = []
    directory = Path(ModelSources(say=told.append).find(str(file)).directory)
    assert directory.parent == tmp_path / "cache" / "headway" / "gguf"
    assert json.loads((directory / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert ModelSources(say=told.append).find(str(file)).directory == str(directory)
    assert len(told) == 1
    os.utime(file, (1, 1))
    assert ModelSources(say=told.append).find(str(file)).directory != str(directory), "the file may be another one now"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelSourceError, match=r"small\.gguf"):
        ModelSources(say=told.append).find(str(file))
    assert not [path for path in directory.parent.iterdir() if path.name.startswith(".part-")]


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    file = tmp_path / "small.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelSourceError, match=r"^no checkpoint can be made of it in .*; XDG_CACHE_HOME names another"):
        ModelSources(say=lambda _: None).find(str(file))


def test_a_model_is_served_by_the_name_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub, "fetch", lambda *_: tmp_path)
    monkeypatch.setattr(ModelSources, "_from_gguf", lambda *_: tmp_path)
    file = tmp_path / "Tiny-Q4_0.gguf"
    file.touch()
    names = {
        "demo": "demo",
        REPOSITORY: REPOSITORY,
        f"{REPOSITORY}@main": REPOSITORY,
        f"{REPOSITORY}:Q4_0@main": f"{REPOSITORY}:Q4_0",
        str(file): "Tiny-Q4_0",
        str(tmp_path): "",  # its executor takes the directory's
        "no-such-model": "",
    }
    assert {name: ModelSources().find(name).served_name for name in names} == names


@pytest.mark.parametrize(("flags", "name"), [((), "demo"), (("--served-model-name", "mine"), "mine")])
def test_who_serves_may_choose_another_name(flags: tuple[str, ...], name: str) -> None:
    service = SERVICES["executor"]
    parser = argparse.ArgumentParser()
    add_service_flags(parser, service)
    config = load(service, parser.parse_args(["--model", "demo", *flags]), {})
    assert (config.served_model_name, config.model) == (name, str(DEMO_MODEL_DIRECTORY))

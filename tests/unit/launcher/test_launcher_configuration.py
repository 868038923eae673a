"""Where settings come from, which source wins, and what a mistake in any of them is answered with."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from headway.__main__ import COMMANDS, main, parser_of
from headway.flags.configuration import (
    OneLineParser,
    add_setting_flags,
    build,
    check_environment,
    given_by_environment,
    given_by_flags,
    merged,
    read_file,
)
from headway.flags.settings import ConfigurationError, as_text, from_text, settings_of
from headway.planning.serve_config import ServeConfig
from headway.planning.services import SERVICES
from headway_executor.config import ExecutorConfig
from headway_gateway.config import GatewayConfig
from headway_scheduler.config import SchedulerConfig


class ToyConfig(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, Meta(description="a directory")]
    slots: Annotated[int, Meta(description="how many")] = 4
    workers: Annotated[int, Meta(ge=1, le=8, description="processes")] = 1
    ratio: Annotated[float, Meta(description="a share")] = 0.5
    order: Annotated[Literal["fcfs", "priority"], Meta(description="who first")] = "fcfs"
    caching: Annotated[bool, Meta(description="reuse")] = True
    options: Annotated[dict[str, str], Meta(description="the backend's own")] = {}
    hosts: Annotated[tuple[str, ...], Meta(description="peers")] = ()

    def validate(self) -> None:
        if self.slots & (self.slots - 1):
            raise ValueError(f"slots: {self.slots} is not allowed; allowed: a power of two")


SETTINGS = settings_of(ToyConfig)


def parsed(*words):
    parser = OneLineParser(prog="headway toy", allow_abbrev=False)
    add_setting_flags(parser, SETTINGS.values())
    return parser.parse(words)


def configured(*words, environment=None, file=None):
    layers = [given_by_flags(parsed(*words), SETTINGS), given_by_environment(environment or {}, "toy", SETTINGS)]
    if file is not None:
        layers.append(read_file(str(file), {"toy": SETTINGS})["toy"])
    return build(ToyConfig, merged(layers), ToyConfig.validate)


def test_every_kind_of_flag_reaches_its_field():
    config = configured(
        *("--model", "m", "--slots", "8", "--ratio=0.25", "--order", "priority", "--no-caching"),
        *("--option", "a=1,2", "--option", "b=x=y", "--hosts", "h1,h2"),
    )
    assert config == ToyConfig(
        model="m",
        slots=8,
        ratio=0.25,
        order="priority",
        caching=False,
        options={"a": "1,2", "b": "x=y"},
        hosts=("h1", "h2"),
    )


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path):
    file = tmp_path / "headway.toml"
    file.write_text('[toy]\nmodel = "from file"\nslots = 16\nratio = 0.1\noptions = {a = "1"}\n')
    environment = {"HEADWAY_TOY_SLOTS": "32", "HEADWAY_TOY_RATIO": "0.2", "HEADWAY_TOY_CACHING": "false"}
    config = configured("--slots", "64", environment=environment, file=file)
    assert config == ToyConfig(model="from file", slots=64, ratio=0.2, caching=False, options={"a": "1"})


def test_environment_reads_mappings_with_commas():
    config = configured(environment={"HEADWAY_TOY_MODEL": "m", "HEADWAY_TOY_OPTIONS": "a=1,b=2"})
    assert config.options == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    "config",
    [
        ToyConfig(model="--odd name"),
        ToyConfig(model="m", slots=8, workers=3, ratio=1e-7, order="priority", caching=False),
        ToyConfig(model="", options={"a": "1,2", "b": "="}, hosts=("h1", "h2")),
    ],
)
def test_a_configuration_survives_the_way_over_a_command_line(config):
    words = [word for name, setting in SETTINGS.items() for word in as_text(setting, getattr(config, name))]
    assert configured(*words) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slots", "many"], "--slots: 'many' is not allowed; allowed: a whole number"),
        (["--workers", "9"], "--workers: '9' is not allowed; allowed: a whole number, at least 1, at most 8"),
        (["--ratio", "half"], "--ratio: 'half' is not allowed; allowed: a number"),
        (["--order", "random"], "--order: 'random' is not allowed; allowed: fcfs, priority"),
        (["--option", "novalue"], "--option: 'novalue' is not allowed; allowed: KEY=VALUE"),
        (["--slots", "12", "--model", "m"], "--slots: 12 is not allowed; allowed: a power of two"),
        ([], "--model is required; allowed: text"),
    ],
)
def test_a_bad_flag_is_one_line_with_flag_value_and_what_is_allowed(words, message):
    with pytest.raises(ConfigurationError) as error:
        configured(*words)
    assert str(error.value) == message


def test_a_long_value_is_cut_and_never_breaks_the_line():
    with pytest.raises(ConfigurationError) as error:
        from_text(SETTINGS["slots"], ["9\n" * 500], "--slots")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 220


def test_bad_values_are_told_in_the_words_of_their_source(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"^HEADWAY_TOY_SLOTS: 'x' is not allowed; allowed: a whole number$"):
        configured(environment={"HEADWAY_TOY_SLOTS": "x"})
    with pytest.raises(ConfigurationError, match=r"^HEADWAY_TOY_SLOTS: 12 is not allowed; allowed: a power of two$"):
        configured("--model", "m", environment={"HEADWAY_TOY_SLOTS": "12"})
    file = tmp_path / "h.toml"
    file.write_text('[toy]\nslots = "8"\n')
    with pytest.raises(ConfigurationError) as error:
        configured(file=file)
    assert str(error.value) == f"slots in [toy] of {file}: '8' is not allowed; allowed: a whole number"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slotz", "1"], "headway toy: unknown flag --slotz; did you mean --slots?\n"),
        (["--slot=1"], "headway toy: unknown flag --slot; did you mean --slots?\n"),
        (["--xyzzy"], "headway toy: unknown flag --xyzzy; see --help for those that exist\n"),
        (["stray"], "headway toy: unexpected argument 'stray'; did you mean --model 'stray'?\n"),
        (["--slots"], "headway toy: argument --slots: expected one argument\n"),
    ],
)
def test_a_wrong_command_line_exits_2_with_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as exit_request:
        parsed(*words)
    assert exit_request.value.code == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[toy]\nslotz = 1\n", "unknown key 'slotz' in [toy] of {file}; did you mean slots?"),
        ("[tory]\nslots = 1\n", "unknown section [tory] in {file}; allowed: [toy]"),
        ("toy = 1\n", "toy in {file} is not a section; write [toy] above its keys"),
    ],
)
def test_a_file_with_unknown_names_is_refused(text, message, tmp_path: Path):
    file = tmp_path / "h.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError) as error:
        configured(file=file)
    assert str(error.value) == message.format(file=file)


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"cannot read .* No such file"):
        configured(file=tmp_path / "absent.toml")
    file = tmp_path / "h.toml"
    file.write_text("slots = [")
    with pytest.raises(ConfigurationError, match="is not valid TOML") as error:
        configured(file=file)
    assert "\n" not in str(error.value)


def test_an_unknown_variable_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigurationError) as error:
        check_environment({"HEADWAY_TOY_SLOT": "1", "PATH": "/bin"}, {"toy": SETTINGS})
    assert str(error.value) == "unknown environment variable HEADWAY_TOY_SLOT; did you mean HEADWAY_TOY_SLOTS?"


def test_a_variable_that_only_begins_like_others_is_near_to_none_of_them():
    for variable in ("HEADWAY_TOY_XYZ", "HEADWAY_XYZ"):
        with pytest.raises(ConfigurationError, match=f"variable {variable}; allowed: HEADWAY_SECTION_NAME"):
            check_environment({variable: "1"}, {"toy": SETTINGS})


def test_a_truth_value_is_shown_as_the_file_has_it(tmp_path: Path):
    file = tmp_path / "h.toml"
    file.write_text("[toy]\nslots = true\n")
    with pytest.raises(ConfigurationError, match=": true is not allowed; allowed: a whole number"):
        configured(file=file)


def test_what_kubernetes_puts_into_every_container_is_no_mistake():
    injected = ("HEADWAY_PORT", "HEADWAY_SERVICE_HOST", "HEADWAY_SERVICE_PORT_GRPC", "HEADWAY_TOY_PORT_50051_TCP_ADDR")
    check_environment({**dict.fromkeys(injected, "x"), "HEADWAY_TOY_SLOTS": "1"}, {"toy": SETTINGS})


def test_the_variable_of_the_build_may_stay_set():
    check_environment({"HEADWAY_BUILD_CPU_KERNELS": "0", "HEADWAY_BUILD_CORE": "0"}, {"toy": SETTINGS})


def test_every_number_and_choice_of_a_service_says_what_is_allowed() -> None:
    """In the table of docs/settings.md and in --help alike: both come from what ``validate`` checks."""
    table = (Path(__file__).parents[3] / "docs" / "settings.md").read_text()
    for service in SERVICES.values():
        for setting in service.settings.values():
            shape = setting.shape
            if isinstance(shape, msgspec.inspect.IntType | msgspec.inspect.FloatType | msgspec.inspect.LiteralType):
                assert setting.within, setting.name
                assert f"| {setting.within} |" in table
    order, seqs = (SERVICES["scheduler"].settings[name] for name in ("order", "max_num_seqs"))
    assert order.within == "class_deadline, deadline, fair, fcfs, priority, shortest"
    assert seqs.within == "1 to 65536"
    assert settings_of(ServeConfig)["restart_window_s"].within == "above 0, at most 86400"
    said = " ".join(parser_of("scheduler").format_full_help().split())
    assert "requests that may run at once (1 to 65536; default: 256)" in said


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_what_is_said_to_be_allowed_is_what_is_checked(value: float) -> None:
    with pytest.raises(ValueError, match=r"^grace_s: .* is not allowed; allowed: 0 or more seconds$"):
        SchedulerConfig(grace_s=value).validate()
    for config in (SchedulerConfig(), ExecutorConfig(), GatewayConfig(model="m")):
        for name, (least, most) in config.RANGES.items():
            assert least <= getattr(config, name) <= most


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve --port 8000", "unknown flag --port; host and port are one flag: --grpc-address HOST:PORT"),
        ("gateway --host=::", "unknown flag --host; host and port are one flag: --grpc-address HOST:PORT"),
        ("serve --api-key sekret", "unknown flag --api-key; tokens are in a file: --auth-token-file FILE"),
        ("serve --alias=x", "unknown flag --alias; did you mean --served-model-name?"),
        ("serve --gpu-memory-utilization 0.9", "unknown flag --gpu-memory-utilization; blocks take what is free"),
        ("serve --tool-call-parser hermes", "unknown flag --tool-call-parser; the chat template says what calls"),
        ("serve --trust-remote-code", "unknown flag --trust-remote-code; no code of a model is run"),
        ("serve --ctx-size 4096", "unknown flag --ctx-size; did you mean --max-model-len?"),
        ("executor models/mine", "unexpected argument 'models/mine'; did you mean --model 'models/mine'?"),
        (
            "serve models/mine stray",
            "unexpected argument 'stray'; a text with spaces needs quotes, see headway serve --help",
        ),
        (
            "generate --port 1 --prompt x",
            "unknown flag --port; host and port of the server are one flag: --address HOST:PORT",
        ),
        ("generate --api-key=sekret", "unknown flag --api-key; the token is read from a file"),
        (
            "generate hello world",
            "unexpected argument 'world'; a text with spaces needs quotes, see headway generate --help",
        ),
        ("generate hello --prompt world", "argument --prompt: not allowed with argument TEXT"),
        ("generate", "one of the arguments TEXT --prompt --file is required"),
        ("generate --prompt a --file b", "argument --file: not allowed with argument --prompt"),
        ("bench --host h", "unknown flag --host; host and port of the server are one flag: --address HOST:PORT"),
        ("top --api-key sekret", "unknown flag --api-key; the token is read from a file"),
    ],
)
def test_what_other_programs_call_it_gets_an_answer_that_helps(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"headway {words.split(maxsplit=1)[0]}: {message}")
    assert said.count("\n") == 1
    assert "sekret" not in said


@pytest.mark.parametrize("name", ["serve", "scheduler", "executor", "gateway"])
def test_help_fits_a_screen_and_help_all_has_every_flag(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    parser = parser_of(name)
    flags = {action.option_strings[-1] for action in parser._actions if action.option_strings}
    missing = set(COMMANDS[name].main_flags) - {word for action in parser._actions for word in action.option_strings}
    assert not missing, "main flags that the command does not have"
    shown = []
    for word in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            parser.parse([word])
        assert ended.value.code == 0
        shown.append(capsys.readouterr().out)
    assert shown[0].count("\n") <= 40
    assert f"headway {name} --help-all has " in shown[0]
    assert all(flag in shown[1] for flag in flags)


def test_what_other_programs_call_a_command_gets_one_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "demo"]) == 2
    told = "headway: unknown command chat; headway generate --chat TEXT asks a running server\n"
    assert capsys.readouterr().err == told

"""The sources of configuration: flags, then environment, then a TOML file, then defaults.

Each value keeps its origin, so that an error can name it.
"""

import argparse
import copy
import difflib
import itertools
import re
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec

from headway.flags.named_files import bytes_of_file
from headway.flags.settings import (
    ConfigurationError,
    Setting,
    allowed,
    from_text,
    from_toml,
    metavar,
    settings_of,
    variable_of,
)
from headway_proto.wording import shown

ConfigT = TypeVar("ConfigT", bound=msgspec.Struct)

# Kubernetes sets such variables for every service of a namespace; one may be called headway.
_KUBERNETES_VARIABLE = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?$")
_MAX_FILE_BYTES = 1 << 20
# hatch_build.py reads these when it builds the project, perhaps in the same shell.
_LEAST_ALIKE = 0.65
"""Below it two names share some letters only, as model and order do."""
_BUILD_VARIABLES = frozenset({"HEADWAY_BUILD_CPU_KERNELS", "HEADWAY_BUILD_CORE"})


class Given(msgspec.Struct, frozen=True):
    """A value, and the user's name for it."""

    value: Any
    origin: str


Layer = Mapping[str, Given]
"""One source's values by field name."""


_POSITIONAL = ("--prompt", "--model")
"""Other programs allow these words without a flag, if the command has one of the flags."""
_ADDRESSES = (
    (
        "--grpc-address",
        "host and port are one flag: --grpc-address HOST:PORT, or --http-address HOST:PORT for OpenAI's API",
    ),
    ("--address", "host and port of the server are one flag: --address HOST:PORT, such as --address 127.0.0.1:50051"),
)
_TOKENS = (
    ("--auth-token-file", "tokens are in a file: --auth-token-file FILE, see docs/security.md"),
    ("--token-file", "the token is read from a file, since others see command lines: --token-file FILE"),
)
_NAMES = (("--served-model-name", "did you mean --served-model-name?"),)
_SHARES = (("--num-kv-blocks", "blocks take what is free; --num-kv-blocks N bounds them"),)
_FORMS = (("--http-address", "the chat template says what calls and thoughts look like; leave it out"),)
_TEMPLATES = (("--model", "the template is chat_template.jinja in the model's directory"),)
_CODE = (("--model", "no code of a model is run; leave it out"),)
_CONTEXTS = (("--max-model-len", "did you mean --max-model-len?"),)
_ELSEWHERE = {
    "--port": _ADDRESSES,
    "--host": _ADDRESSES,
    "--api-key": _TOKENS,
    "--token": _TOKENS,
    "--alias": _NAMES,
    "--gpu-memory-utilization": _SHARES,
    "--mem-fraction-static": _SHARES,
    "--enable-auto-tool-choice": _FORMS,
    "--tool-call-parser": _FORMS,
    "--reasoning-parser": _FORMS,
    "--chat-template": _TEMPLATES,
    "--trust-remote-code": _CODE,
    "--ctx-size": _CONTEXTS,
    "--context-length": _CONTEXTS,
}
"""Other programs' names for a flag, by our flag."""


_DEFAULT = re.compile(r"(?P<text>.*?)( \((?:[^()]*; )?(?P<default>default: [^()]*|required)\))?", re.DOTALL)


class OneLineParser(argparse.ArgumentParser):
    """An argument parser with one-line errors and suggestions, and with a help that fits a screen.

    ``--help`` shows ``main_flags`` and words without a flag, if there are more; ``--help-all`` shows everything.
    """

    def __init__(self, *, main_flags: Collection[str] = (), **settings: Any) -> None:
        super().__init__(**settings)
        self._main_flags = frozenset(main_flags)
        if main_flags:
            self.add_argument("--help-all", action=_FullHelp, nargs=0, help="show every flag and exit")

    def format_help(self) -> str:
        """See the class."""
        if not self._main_flags:
            return self.format_full_help()
        words = [each for each in self._actions if not each.option_strings]
        flags = [each for each in self._actions if self._main_flags & {*each.option_strings}]
        formatter = argparse.HelpFormatter(self.prog, max_help_position=30)
        formatter.add_usage(f"%(prog)s {''.join(f'[{each.metavar}] ' for each in words)}[flags]", (), ())
        formatter.add_text(self.description)
        formatter.start_section("main flags")
        formatter.add_arguments([_in_short(each) for each in (*words, *flags)])
        formatter.end_section()
        num_others = len(self._actions) - len(words) - len(flags)
        formatter.add_text(f"{self.prog} --help-all has {num_others} more, docs/settings.md all of them.")
        return formatter.format_help()

    def format_full_help(self) -> str:
        """Return the help with every flag."""
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Exit with one line."""
        self.exit(2, f"{self.prog}: {message}\n")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Refuse the first unknown argument by name."""
        for word in itertools.takewhile(lambda word: word != "--", words):
            # Before a required one is missed, or its value taken for a word without a flag.
            if word.startswith("--") and word.partition("=")[0] not in self._option_string_actions:
                self.error(self._unknown([word]))
        parsed, unknown = self.parse_known_args(words)
        if unknown:
            self.error(self._unknown(unknown))
        return parsed

    def _unknown(self, words: Sequence[str]) -> str:
        known = self._option_string_actions
        if not words[0].startswith("-"):
            if self._get_positional_actions():
                return f"unexpected argument {shown(words[0])}; a text with spaces needs quotes, see {self.prog} --help"
            flag = next((flag for flag in _POSITIONAL if flag in known), "")
            hint = f"did you mean {flag} {shown(words[0])}?" if flag else f"see {self.prog} --help"
            return f"unexpected argument {shown(words[0])}; {hint}"
        flag = words[0].partition("=")[0]
        for instead, hint in _ELSEWHERE.get(flag, ()):
            if instead in known:
                return f"unknown flag {flag}; {hint}"
        return f"unknown flag {shown(flag)[1:-1]}{suggestion(flag, known)}"


class _FullHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, OneLineParser)
        sys.stdout.write(parser.format_full_help())
        parser.exit()


def _in_short(action: argparse.Action) -> argparse.Action:
    """Keep what a help text says before its first remark."""
    short = copy.copy(action)
    if action.help:
        parts = _DEFAULT.fullmatch(action.help)
        assert parts is not None
        default = f" ({parts['default']})" if parts["default"] else ""
        short.help = re.split(r"; |\. |: see | \(", parts["text"], maxsplit=1)[0] + default
    return short


def suggestion(name: str, known: Iterable[str], otherwise: str = "see --help for those that exist") -> str:
    """Return ``; did you mean X?``, or ``otherwise``, which says where to look."""
    near = _nearest(name, known)
    return f"; did you mean {near}?" if near else f"; {otherwise}"


def _nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=_LEAST_ALIKE)), None)


def add_setting_flags(parser: argparse.ArgumentParser, settings: Iterable[Setting], *, title: str = "settings") -> None:
    """Add one flag per setting; an unused flag leaves no attribute."""
    group = parser.add_argument_group(title)
    for setting in settings:
        text = _help_text(setting)
        if setting.is_bool:
            group.add_argument(
                setting.flag,
                dest=setting.name,
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text,
            )
        else:
            group.add_argument(
                setting.flag,
                dest=setting.name,
                action="append",
                default=argparse.SUPPRESS,
                metavar=metavar(setting),
                help=text,
            )


def _help_text(setting: Setting) -> str:
    value = setting.default
    default = "required" if setting.required else f"default: {'none' if value in ('', None, {}, ()) else value}"
    if isinstance(value, bool):
        default = f"default: {'on' if value else 'off'}"
    # The flag's placeholder already lists the values.
    within = f"{setting.within}; " if setting.within and metavar(setting) == "N" else ""
    return f"{setting.description} ({within}{default})".replace("%", "%%")


def given_by_flags(parsed: argparse.Namespace, settings: Mapping[str, Setting]) -> Layer:
    """Return the values on the command line."""
    layer = {}
    for name, setting in settings.items():
        if not hasattr(parsed, name):
            continue
        value = getattr(parsed, name)
        layer[name] = Given(value if setting.is_bool else from_text(setting, value, setting.flag), setting.flag)
    return layer


def given_by_environment(environment: Mapping[str, str], section: str, settings: Mapping[str, Setting]) -> Layer:
    """Return the values of ``HEADWAY_<SECTION>_*``."""
    layer = {}
    for name, setting in settings.items():
        variable = variable_of(section, name)
        if variable in environment:
            text = environment[variable]
            texts = [part for part in text.split(",") if part] if setting.is_mapping else [text]
            layer[name] = Given(from_text(setting, texts, variable), variable)
    return layer


def is_setting(variable: str) -> bool:
    """Return whether an environment variable looks like a setting of ours."""
    return variable.startswith("HEADWAY_")


def check_environment(environment: Mapping[str, str], sections: Mapping[str, Iterable[str]]) -> None:
    """Refuse a variable that no setting reads: it would silently do nothing.

    Raises:
        ConfigurationError: it names the nearest variable.
    """
    known = {variable_of(section, name) for section, names in sections.items() for name in names}
    for variable in sorted(environment.keys() - _BUILD_VARIABLES):
        if not is_setting(variable) or variable in known or _KUBERNETES_VARIABLE.search(variable):
            continue
        raise ConfigurationError(
            f"unknown environment variable {shown(variable)[1:-1]}{_suggested_variable(variable, sections)}"
        )


def _suggested_variable(variable: str, sections: Mapping[str, Iterable[str]]) -> str:
    """See ``suggestion``. What all variables begin with makes none of them near, so names are compared without it."""
    otherwise = f"allowed: {variable_of('SECTION', 'name')}, with the settings of docs/settings.md"
    for section, names in sections.items():
        prefix = variable_of(section, "")
        if variable.startswith(prefix):
            known = [variable_of(section, name).removeprefix(prefix) for name in names]
            near = _nearest(variable.removeprefix(prefix), known)
            return f"; did you mean {prefix}{near}?" if near else f"; {otherwise}"
    return f"; {otherwise}"


def read_file(path: str, sections: Mapping[str, Mapping[str, Setting]], *, tables: str = "") -> dict[str, Layer]:
    """Read a TOML file: one table per section. ``read_tables`` reads the array of tables named ``tables``.

    Raises:
        ConfigurationError: the file, a name or a value is wrong.
    """
    document = _toml(path)
    layers: dict[str, Layer] = {section: {} for section in sections}
    for section, table in document.items():
        if section == tables:
            continue
        if section not in sections:
            names = ", ".join((*(f"[{name}]" for name in sections), *([f"[[{tables}]]"] if tables else [])))
            raise ConfigurationError(f"unknown section [{section}] in {path}; allowed: {names}")
        if not isinstance(table, dict):
            raise ConfigurationError(f"{section} in {path} is not a section; write [{section}] above its keys")
        layers[section] = _given_by_table(table, f"[{section}] of {path}", sections[section])
    return layers


def read_tables(path: str, name: str, settings: Mapping[str, Setting]) -> list[Layer]:
    """Read the array of tables ``[[name]]`` of a TOML file; empty without one.

    Raises:
        ConfigurationError: the file, a name or a value is wrong.
    """
    tables = _toml(path).get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigurationError(f"{name} in {path} is not a list of tables; write [[{name}]] above the keys of each")
    return [
        _given_by_table(table, f"[[{name}]] number {number} of {path}", settings)
        for number, table in enumerate(tables, start=1)
    ]


def _toml(path: str) -> dict[str, Any]:
    content = bytes_of_file(path, "--config", _MAX_FILE_BYTES) or b""
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # from TOML, from UTF-8, or from a number with thousands of digits
        raise ConfigurationError(f"--config: {shown(path)} is not valid TOML: {error}") from None


def _given_by_table(table: Mapping[str, Any], place: str, settings: Mapping[str, Setting]) -> Layer:
    layer = {}
    for key, value in table.items():
        if key not in settings:
            raise ConfigurationError(f"unknown key {shown(key)} in {place}{suggestion(key, settings)}")
        origin = f"{key} in {place}"
        layer[key] = Given(from_toml(settings[key], value, origin), origin)
    return layer


def merged(layers: Iterable[Layer]) -> dict[str, Given]:
    """Merge sources; the first value wins."""
    result: dict[str, Given] = {}
    for layer in layers:
        for name, given in layer.items():
            result.setdefault(name, given)
    return result


def build(struct: type[ConfigT], given: Layer, validate: Callable[[ConfigT], None]) -> ConfigT:
    """Make the frozen struct.

    ``validate`` raises ValueError with a message that begins with the field's name.

    Raises:
        ConfigurationError: a required setting is missing, or ``validate`` objects.
    """
    settings = settings_of(struct)
    for name, setting in settings.items():
        if setting.required and name not in given:
            raise ConfigurationError(f"{setting.flag} is required; allowed: {allowed(setting)}")
    config = struct(**{name: given[name].value for name in settings if name in given})
    try:
        validate(config)
    except ValueError as error:
        raise ConfigurationError(in_the_authors_words(str(error), settings, given)) from None
    return config


def in_the_authors_words(message: str, settings: Mapping[str, Setting], given: Layer) -> str:
    """Replace the leading field name by its origin."""
    field = re.match(r"\w*", message).group()  # type: ignore[union-attr]  # matches the empty string at least
    if field in given:
        return given[field].origin + message.removeprefix(field)
    if field in settings:
        return settings[field].flag + message.removeprefix(field)
    return message


def effective(config: msgspec.Struct) -> dict[str, Any]:
    """Return every setting's value."""
    return msgspec.structs.asdict(config)

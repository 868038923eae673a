"""The fields of a configuration struct as settings with names, types and help."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from headway_process.ranges import number_text, range_text
from headway_proto.wording import shown


class ConfigurationError(ValueError):
    """The message is one line for the user."""

    exit_code = 2


class ModelDirectoryError(ConfigurationError):
    """The configured model does not exist."""

    exit_code = 3


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One field. ``default`` has no meaning if ``required``."""

    name: str
    type: Any
    shape: inspect.Type
    description: str
    required: bool
    default: Any
    within: str = ""
    """The allowed values, if they are a list or a range."""

    @property
    def flag(self) -> str:
        """The flag; singular for a mapping."""
        name = self.name.removesuffix("s") if self.is_mapping else self.name
        return "--" + name.replace("_", "-")

    @property
    def is_bool(self) -> bool:
        """Whether the flag has no value."""
        return isinstance(self.shape, inspect.BoolType)

    @property
    def is_mapping(self) -> bool:
        """Whether the value is given as KEY=VALUE."""
        return isinstance(self.shape, inspect.DictType)

    @property
    def is_sequence(self) -> bool:
        """Whether the value is a sequence."""
        return isinstance(self.shape, inspect.VarTupleType | inspect.ListType)


def settings_of(struct: type[msgspec.Struct]) -> dict[str, Setting]:
    """Return a struct's settings, in order."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    types_by_name = {field.name: field.type for field in msgspec.structs.fields(struct)}
    ranges = getattr(struct, "RANGES", {})
    return {field.name: _setting(field, types_by_name[field.name], ranges.get(field.name)) for field in info.fields}


def _setting(field: inspect.Field, annotation: Any, bounds: tuple[float, float] | None) -> Setting:
    shape, description = field.type, ""
    while isinstance(shape, inspect.Metadata):
        description = (shape.extra_json_schema or {}).get("description", description)
        shape = shape.type
    default = field.default_factory() if callable(field.default_factory) else field.default
    return Setting(
        name=field.name,
        type=annotation,
        shape=shape,
        description=description,
        required=field.required,
        default=default,
        within=range_text(bounds) if bounds else _within(shape),
    )


def _within(shape: inspect.Type) -> str:
    match shape:
        case inspect.LiteralType(values=values):
            return ", ".join(map(str, values))
        case inspect.IntType() | inspect.FloatType():
            if shape.ge is not None and shape.le is not None:
                return range_text((shape.ge, shape.le))
            return _bounds(shape).removeprefix(", ")
        case _:
            return ""


def variable_of(section: str, name: str) -> str:
    """Return the environment variable, as in ``HEADWAY_SCHEDULER_MAX_NUM_SEQS``."""
    return f"HEADWAY_{section}_{name}".upper()


def from_text(setting: Setting, texts: Sequence[str], origin: str) -> Any:
    """Read the texts of a flag, one per use, or a variable's one text.

    A scalar takes the last text.

    Raises:
        ConfigurationError: the text does not fit the type.
    """
    if setting.is_mapping:
        return _checked(setting, _entries(texts, origin), origin)
    if setting.is_sequence:
        return _checked(setting, [part for text in texts for part in text.split(",") if part], origin)
    return _checked(setting, texts[-1], origin)


def from_toml(setting: Setting, value: Any, origin: str) -> Any:
    """Check a TOML value.

    Raises:
        ConfigurationError: it does not fit the type.
    """
    return _checked(setting, value, origin, strict=True)


def _entries(texts: Sequence[str], origin: str) -> dict[str, str]:
    entries: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise ConfigurationError(f"{origin}: {shown(text)} is not allowed; allowed: KEY=VALUE")
        entries[key] = value
    return entries


def _checked(setting: Setting, value: Any, origin: str, *, strict: bool = False) -> Any:
    try:
        return msgspec.convert(value, setting.type, strict=strict)
    except msgspec.ValidationError:
        # As it was written: TOML's words for a truth value are not Python's.
        written = str(value).lower() if isinstance(value, bool) else shown(value)
        raise ConfigurationError(f"{origin}: {written} is not allowed; allowed: {allowed(setting)}") from None


def allowed(setting: Setting) -> str:
    """Describe the allowed values."""
    return _allowed(setting.shape)


def _allowed(shape: inspect.Type) -> str:
    match shape:
        case inspect.Metadata(type=inner):
            return _allowed(inner)
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + _bounds(shape)
        case inspect.FloatType():
            return "a number" + _bounds(shape)
        case inspect.LiteralType(values=values):
            return ", ".join(map(str, values))
        case inspect.DictType():
            return "KEY=VALUE"
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return f"{_allowed(item)}, several separated by commas"
        case inspect.UnionType(types=members):
            return " or ".join(_allowed(member) for member in members if not isinstance(member, inspect.NoneType))
        case _:
            return "text"


def _bounds(shape: inspect.IntType | inspect.FloatType) -> str:
    limits = (("at least", shape.ge), ("above", shape.gt), ("at most", shape.le), ("below", shape.lt))
    return "".join(f", {words} {number_text(limit)}" for words, limit in limits if limit is not None)


def metavar(setting: Setting) -> str:
    """Return the value's placeholder for help texts."""
    match setting.shape:
        case inspect.IntType() | inspect.FloatType():
            return "N"
        case inspect.LiteralType(values=values):
            return "{" + ",".join(map(str, values)) + "}"
        case inspect.DictType():
            return "KEY=VALUE"
        case _:
            return "TEXT"


def as_text(setting: Setting, value: Any) -> list[str]:
    """The inverse of ``from_text``."""
    if setting.is_bool:
        return [setting.flag if value else setting.flag.replace("--", "--no-", 1)]
    if setting.is_mapping:
        assert isinstance(value, Mapping)
        return [f"{setting.flag}={key}={entry}" for key, entry in value.items()]
    if setting.is_sequence:
        return [f"{setting.flag}={','.join(map(str, value))}"]
    return [f"{setting.flag}={value}"]

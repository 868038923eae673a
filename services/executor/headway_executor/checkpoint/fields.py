"""Typed fields of a checkpoint's JSON files.

Owns: names of files, reading and refusing values. Must not know: models, tensors.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway_executor.backend import ModelFilesError
from headway_proto.wording import shown

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
TEXT_CONFIG = "text_config"
"""Where the fields of the text are, in a checkpoint of several models."""
WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

MAX_SIZE = 1 << 24
"""Larger than any dimension of a real model."""


class ConfigFields:
    """Typed access to one JSON object.

    A method returns its default for an absent or null field, and raises ``ModelFilesError`` for wrong values. ``names``:
    what the file calls fields that have another name here.
    """

    def __init__(self, source: str, values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.values = values
        self._names = names or {}

    def renamed(self, **names: str) -> "ConfigFields":
        """The same, with fields under the names that most families give them, as transformers reads both."""
        values = {name: self.values[own] for name, own in names.items() if self.values.get(own) is not None}
        own_names = {name: own for name, own in names.items() if name in values or self.values.get(name) is None}
        return ConfigFields(self.source, {**self.values, **values}, own_names)

    def refuse(self, field: str, allowed: str) -> ModelFilesError:
        """Return the error for ``field``."""
        try:
            value = repr(self.values.get(field))[:64]
        except ValueError:  # Python does not write integers with so many digits.
            value = "of thousands of digits"
        field = self._names.get(field, field)
        return ModelFilesError(f"{self.source}: {field} {value} is not supported; allowed: {allowed}")

    def integer(self, field: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE) -> int:
        """An integer in a range; required without a ``default``."""
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.refuse(field, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, field: str) -> int | None:
        """A positive integer or None."""
        return None if self.values.get(field) is None else self.integer(field)

    def number(self, field: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number; required without a ``default``."""
        value = self.values.get(field)
        if value is None and default is not None:
            return default
        try:
            number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        except OverflowError:  # A JSON integer may have any length.
            number = math.nan
        if not math.isfinite(number) or number <= above:
            raise self.refuse(field, f"a number above {above:g}")
        return number

    def optional_number(self, field: str) -> float | None:
        """A positive number or None."""
        return None if self.values.get(field) is None else self.number(field)

    def numbers(self, field: str, count: int) -> tuple[float, ...]:
        """So many positive numbers."""
        values = self.values.get(field)
        if not isinstance(values, list) or len(values) != count:
            raise self.refuse(field, f"a list of {count} numbers")
        return tuple(ConfigFields(f"{self.source}: {field}", {"item": value}).number("item") for value in values)

    def flag(self, field: str, *, default: bool) -> bool:
        """A boolean."""
        value = self.values.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(field, "true or false")
        return value

    def section(self, field: str) -> "ConfigFields | None":
        """A nested object; None if it is empty."""
        value = self.values.get(field)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.refuse(field, "an object")
        return ConfigFields(f"{self.source}: {field}", value)

    def token_ids(self, field: str) -> tuple[int, ...]:
        """One token id or a list of them, ascending."""
        value = self.values.get(field)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in ids):
            raise self.refuse(field, "a token id or a list of token ids")
        return tuple(sorted(set(ids)))


def read_json_object(path: Path) -> ConfigFields:
    """Read a JSON file that holds one object.

    Raises:
        ModelFilesError: the file cannot be read, or holds something else.
    """
    try:
        values = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFilesError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path}: not valid JSON ({str(error)[:64]})") from None
    if not isinstance(values, dict):
        raise ModelFilesError(f"{path}: holds {shown(values)}; allowed: a JSON object")
    return ConfigFields(path.name, values)

"""Regular expressions of configuration files: usual ones are tried, and none that could take long."""

import time

import pytest

from headway_executor.backend import ModelFilesError
from headway_executor.checkpoint.fields import ConfigFields
from headway_executor.checkpoint.name_patterns import name_patterns

NAME = "model.layers.17.mlp.experts.101.gate_proj"
FIELDS = ConfigFields("config.json", {})


@pytest.mark.parametrize(
    "text",
    [
        r".*\.layers\.\d+\..*experts\.\d+\.(gate|up|down)_proj",
        r".*\.17\..*gate.*",
        r"model\.layers\.(?!0\.)\d+\.mlp\..*",
        NAME,
        r"(.*\.)?(gate_proj)$",
        r"model\.layers\.(1|2|3|4|5|6|7|8|9|10|11|12|13|14|15|16|17|18|19|20|21|22|23|24)\.mlp\..*",
    ],
)
def test_usual_patterns_are_tried(text):
    assert name_patterns(FIELDS, "dynamic", [text])[0].match(NAME)


@pytest.mark.parametrize(
    "text",
    [
        "(.+)+x",
        "(?:a|b|ab)*c",
        "(m?){60}",
        ".*" * 5,
        "m?" * 40,
        "(m|m)(o|o)(d|d)(e|e)(l|l)" * 8,
        "a" * 600,
        "+" * 100_000,
    ],
)
def test_patterns_that_could_take_long_are_refused_at_once(text):
    start = time.perf_counter()
    with pytest.raises(
        ModelFilesError, match=r"config.json: dynamic: pattern .* could take too long; allowed: at most"
    ):
        name_patterns(FIELDS, "dynamic", [text])
    assert time.perf_counter() - start < 1


def test_many_patterns_share_the_bound():
    name_patterns(FIELDS, "dynamic", [f"model.layers.{index}.mlp.down_proj" for index in range(5_000)])
    with pytest.raises(ModelFilesError, match="could take too long"):
        name_patterns(FIELDS, "dynamic", [".*a.*b.*c.*"] * 20)


def test_the_slowest_that_is_allowed_is_over_soon():
    (slowest,) = name_patterns(FIELDS, "dynamic", [r"(a|e|i).*.*.*.*\n"])
    start = time.perf_counter()
    assert slowest.match("a" * 80) is None
    assert time.perf_counter() - start < 5


def test_what_is_no_pattern_is_refused():
    with pytest.raises(ModelFilesError, match=r"pattern 'a\(' is not a regular expression \(missing \)"):
        name_patterns(FIELDS, "dynamic", ["a("])

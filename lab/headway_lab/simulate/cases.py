"""The simulated cases: scheduler settings, one case per row of the table."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.flags.configuration import Given, Layer, build, suggestion
from headway.flags.settings import ConfigurationError, Setting, from_text, settings_of
from headway_proto.wording import shown
from headway_scheduler.config import SchedulerConfig
from headway_scheduler.core.choosing.policies import AUTO
from headway_scheduler.core.state.limits import SchedulerLimits

SWEPT_LIMIT = "max_num_batched_tokens"
PLACEMENT = "placement"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, and their name in the table. ``placement``: a policy's name, or ``AUTO``."""

    label: str
    limits: SchedulerLimits
    placement: str = AUTO


def limit_settings() -> dict[str, Setting]:
    """Return the fields of ``SchedulerLimits`` as settings."""
    configured = settings_of(SchedulerConfig)
    settings = {}
    for name, setting in settings_of(SchedulerLimits).items():
        public = configured.get(name)
        settings[name] = setting if public is None else msgspec.structs.replace(public, default=setting.default)
    return settings


def case_settings() -> dict[str, Setting]:
    """Return what may differ between simulated cases: the limits, and the placement."""
    return {**limit_settings(), PLACEMENT: settings_of(SchedulerConfig)[PLACEMENT]}


def make_cases(
    given: Layer,
    compared: Mapping[str, str],
    swept: Sequence[int],
    listed: Sequence[str],
    *,
    origin: str = "--case",
    settings: Mapping[str, Setting] | None = None,
) -> tuple[Case, ...]:
    """Return the cases in the given order; without a comparison one case of ``given``.

    ``compared`` gives a case per combination of values. ``listed`` has one ``FIELD=VALUE,...`` per case. ``swept`` has
    token budgets. ``settings``: those that may be named; by default the limits.

    Raises:
        ConfigurationError: a limit or value is wrong, or two ways of comparing are mixed.
    """
    if sum(map(bool, (compared, swept, listed))) > 1:
        raise ConfigurationError("--compare, --case and --sweep-budget do not go together; allowed: one of them")
    if swept:
        compared = {SWEPT_LIMIT: ",".join(map(str, swept))}
    settings = limit_settings() if settings is None else settings
    if listed:
        variants = [_listed(text, settings, origin) for text in listed]
    else:
        flag = "--sweep-budget" if swept else "--compare"
        axes = [_axis(name, values, settings, flag) for name, values in compared.items()]
        variants = [dict(variant) for variant in itertools.product(*axes)]
    return tuple(case_of(_label(variant), {**given, **variant}) for variant in variants)


def case_of(label: str, given: Layer) -> Case:
    """Return the case with these limits, and perhaps a placement.

    Raises:
        ConfigurationError: a value is wrong.
    """
    limits = {name: value for name, value in given.items() if name != PLACEMENT}
    placement = given[PLACEMENT].value if PLACEMENT in given else AUTO
    return Case(label=label, limits=build(SchedulerLimits, limits, _validate), placement=placement)


def _axis(name: str, values: str, settings: Mapping[str, Setting], origin: str) -> list[tuple[str, Given]]:
    setting = _setting(name, settings, origin)
    texts = [text for text in values.split(",") if text]
    if not texts:
        raise ConfigurationError(f"{origin}: {shown(f'{name}=')} is not allowed; allowed: FIELD=VALUE,VALUE,...")
    return [(name, Given(from_text(setting, [text], f"{origin} {name}"), f"{origin} {name}")) for text in texts]


def _listed(text: str, settings: Mapping[str, Setting], origin: str) -> dict[str, Given]:
    variant: dict[str, Given] = {}
    for part in text.split(","):
        name, separator, value = part.partition("=")
        if not separator:
            raise ConfigurationError(f"{origin}: {shown(text)} is not allowed; allowed: FIELD=VALUE,FIELD=VALUE,...")
        if name in variant:
            raise ConfigurationError(f"{origin}: {shown(text)} has {name} twice; allowed: once in a case")
        variant.update(_axis(name, value, settings, origin))
    return variant


def _setting(name: str, settings: Mapping[str, Setting], origin: str) -> Setting:
    if name not in settings:
        near = suggestion(name, settings, f"allowed: {', '.join(sorted(settings))}")
        raise ConfigurationError(f"{origin}: unknown limit {shown(name)}{near}")
    return settings[name]


def _label(variant: Mapping[str, Given]) -> str:
    return ", ".join(f"{name}={_shown_value(given.value)}" for name, given in variant.items())


def _shown_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _validate(limits: SchedulerLimits) -> None:
    values = msgspec.structs.asdict(limits)
    SchedulerConfig(**{name: values[name] for name in SchedulerConfig.__struct_fields__ if name in values}).validate()

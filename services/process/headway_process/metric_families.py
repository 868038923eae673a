"""Turns figures into Prometheus families for one scrape.

Owns: that conversion. Must not know: the figures' sources, HTTP.
"""

from collections.abc import Mapping
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from headway_process.histogram import HistogramSnapshot

Values: TypeAlias = (
    float | Mapping[tuple[str], float] | Mapping[tuple[str, str], float] | Mapping[tuple[str, ...], float]
)
"""One value, or several by label values."""


class MetricFamilies:
    """Every sample carries ``labels``."""

    def __init__(self, **labels: str) -> None:
        self.families: list[Metric] = []
        self._names = tuple(labels)
        self._values = tuple(labels.values())

    def gauge(self, name: str, description: str, values: Values, *labels: str) -> None:
        """Add a value that may fall."""
        family = GaugeMetricFamily(name, description, labels=(*self._names, *labels))
        for own, value in _by_label(values):
            family.add_metric((*self._values, *own), value)
        self.families.append(family)

    def counter(self, name: str, description: str, values: Values, *labels: str) -> None:
        """Add a growing value; ``name`` gets ``_total``."""
        family = CounterMetricFamily(name, description, labels=(*self._names, *labels))
        for own, value in _by_label(values):
            family.add_metric((*self._values, *own), value)
        self.families.append(family)

    def histogram(self, name: str, description: str, values: HistogramSnapshot) -> None:
        """Add counts of values."""
        family = HistogramMetricFamily(name, description, labels=self._names)
        bounds = [floatToGoString(bound) for bound in values.bounds]  # type: ignore[no-untyped-call]
        buckets = [*zip(bounds, values.cumulative, strict=True), ("+Inf", values.num_values)]
        family.add_metric(self._values, buckets, values.total)
        self.families.append(family)


def _by_label(values: Values) -> list[tuple[tuple[str, ...], float]]:
    return [*values.items()] if isinstance(values, Mapping) else [((), values)]

"""When an executor is added and when one is drained. Pure: figures and the time in, a decision out."""

import msgspec

from headway.planning.cluster_config import ClusterConfig

_DECODE = "decode"
_FULL = 0.9


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one table of executors at a moment.

    ``num_wanted``: executors that are to run, ``num_ready``: of those, the ones that take requests. ``wait_s``: how long
    what waits now takes to start at the present pace. ``use``: the share of the rows and of the blocks of those ready
    that is taken, the greater of the two.
    """

    num_wanted: int
    num_ready: int
    wait_s: float
    use: float


def waiting_s(num_waiting: int, num_waiting_tokens: int, prompt_tokens_per_s: float, rows_free: bool) -> float:
    """Return how long what waits takes to start; with no pace known yet, for ever if no row is free."""
    if not num_waiting:
        return 0.0
    if prompt_tokens_per_s > 0:
        return num_waiting_tokens / prompt_tokens_per_s
    return 0.0 if rows_free else float("inf")


class Scaler:
    """One table of executors. Hysteresis: a wish must hold without a break, and a change ends all wishes."""

    def __init__(self, least: int, most: int, role: str, config: ClusterConfig) -> None:
        self._least, self._most, self._role, self._config = least, most, role, config
        self._more_since: float | None = None
        self._fewer_since: float | None = None

    def decide(self, figures: Figures, now: float) -> int:
        """Return 1 to add an executor, -1 to drain one, 0 to change nothing."""
        wants_more, wants_fewer = self._wants_more(figures), self._wants_fewer(figures)
        self._more_since = _since(self._more_since, now) if wants_more else None
        self._fewer_since = _since(self._fewer_since, now) if wants_fewer else None
        if figures.num_ready < figures.num_wanted:
            return 0  # The last change has not taken effect yet.
        if self._more_since is not None and now - self._more_since >= self._config.scale_up_after_s:
            return self._changed(1)
        if self._fewer_since is not None and now - self._fewer_since >= self._config.scale_down_after_s:
            return self._changed(-1)
        return 0

    def _changed(self, by: int) -> int:
        self._more_since = self._fewer_since = None
        return by

    def _wants_more(self, figures: Figures) -> bool:
        if figures.num_wanted >= self._most:
            return False
        if self._role == _DECODE:  # Nothing waits for it in the queue: it is full, or it is not.
            return figures.use > _FULL
        return figures.wait_s > self._config.scale_up_wait_s

    def _wants_fewer(self, figures: Figures) -> bool:
        others = figures.num_ready - 1
        if figures.num_wanted <= self._least or others < 1 or figures.wait_s > 0:
            return False
        return figures.use * figures.num_ready / others <= self._config.scale_down_use


def _since(earlier: float | None, now: float) -> float:
    return now if earlier is None else earlier

"""The keyboard's state: the selected request, the sort order, an open question. Must not know: terminals, or the
server.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import msgspec

from headway.terminal.tables import printable
from headway_proto import admin_pb2
from headway_proto.operations import EXECUTOR_ROLES

UP, DOWN, ESCAPE = "up", "down", "escape"
ENTER, BACKSPACE = {"\r", "\n"}, {"\x08", "\x7f"}
_DIGITS = set("0123456789")
_MOST_DIGITS = 4
HELP = (
    "p        pause: admit no more waiting requests; running ones go on",
    "r        resume: admit again",
    "d        drain: refuse new requests from now on; asks first",
    "x, u, o  drain one executor: its requests go on elsewhere; use it; its role",
    "j, k     select the next or previous request, as the arrow keys do",
    "c        cancel the selected request; asks first",
    "e        explain why the selected request is where it is",
    "s        sort requests by age, tokens, blocks, state or tenant",
    "Escape   close what is open, then select none; q quits",
)


class OrderKind(Enum):
    """An action of an operator."""

    PAUSE = "pause"
    RESUME = "resume"
    DRAIN = "drain"
    DRAIN_EXECUTOR = "drain executor"
    UNDRAIN_EXECUTOR = "use executor"
    SET_ROLE = "role of executor"
    CANCEL = "cancel"
    EXPLAIN = "explain"


class Order(msgspec.Struct, frozen=True):
    """One order, about a request, or an executor, or the whole server."""

    kind: OrderKind
    request_id: str = ""
    executor: int = -1
    role: str = ""


_ORDERS = {"p": Order(OrderKind.PAUSE), "r": Order(OrderKind.RESUME)}
_ABOUT_EXECUTORS = {OrderKind.DRAIN_EXECUTOR, OrderKind.UNDRAIN_EXECUTOR, OrderKind.SET_ROLE}
_ROLES = {role[0]: role for role in EXECUTOR_ROLES}
_ROLES_IN_WORDS = " or ".join(f"{key} ({role})" for key, role in _ROLES.items())
_ASKED_FIRST = {
    "d": Order(OrderKind.DRAIN),
    "x": Order(OrderKind.DRAIN_EXECUTOR),
    "u": Order(OrderKind.UNDRAIN_EXECUTOR),
    "o": Order(OrderKind.SET_ROLE),
}
_MOVES = {"j": 1, DOWN: 1, "k": -1, UP: -1}

Request = admin_pb2.RequestState
_SORT_KEYS: dict[str, Callable[[Request], Any]] = {
    "age": lambda request: -request.age_ms,
    "tokens": lambda request: -(request.num_prompt_tokens + request.num_output_tokens),
    "blocks": lambda request: -request.num_blocks,
    "state": lambda request: (request.state, -request.age_ms),
    "tenant": lambda request: (request.tenant, -request.age_ms),
}
_SORT_ORDERS = tuple(_SORT_KEYS)


class Controls:
    """The state that keys change."""

    def __init__(self) -> None:
        self.sort_order = _SORT_ORDERS[0]
        self.selected = ""
        """The id of the selected request; empty for none."""
        self.message = ""
        """The outcome of the last key."""
        self.explanation = ""
        self.shows_help = False
        self.wants_to_quit = False
        self._asked: Order | None = None
        self._digits = ""
        """Of an executor's number, while that is asked for."""

    @property
    def question(self) -> str:
        """The question that the next key answers."""
        if self._asked is None:
            return ""
        if self._asked.kind in _ABOUT_EXECUTORS:
            ends = _ROLES_IN_WORDS if self._asked.kind is OrderKind.SET_ROLE else "Enter"
            return f"{self._asked.kind.value}, by its number and {ends}: {self._digits}_"
        if self._asked.kind is OrderKind.DRAIN:
            return "drain? New requests will be refused until the scheduler is restarted. y/n"
        return f"cancel {printable(self._asked.request_id)}? y/n"

    def sorted(self, requests: Sequence[Request]) -> list[Request]:
        """Return requests in the chosen order."""
        return sorted(requests, key=_SORT_KEYS[self.sort_order])

    def press(self, key: str, requests: Sequence[Request]) -> Order | None:
        """Process one key; return its order, if any."""
        if self._asked is not None:
            return self._type(key) if self._asked.kind in _ABOUT_EXECUTORS else self._answer(key)
        self.message = ""
        if key in _ORDERS:
            return _ORDERS[key]
        self._asked = _ASKED_FIRST.get(key)
        if key in _MOVES:
            self._move(_MOVES[key], requests)
        match key:
            case "q":
                self.wants_to_quit = True
            case "c" | "e":
                return self._about_selected(key, requests)
            case "s":
                self.sort_order = _SORT_ORDERS[(_SORT_ORDERS.index(self.sort_order) + 1) % len(_SORT_ORDERS)]
            case "?":
                self.shows_help, self.explanation = not self.shows_help, ""
            case _ if key == ESCAPE:
                self._close()
        return None

    def report(self, message: str) -> None:
        """Show the outcome of an order."""
        self.message = printable(message)

    def explain(self, explanation: str) -> None:
        """Show an explanation until it is closed."""
        self.explanation, self.shows_help = printable(explanation), False

    def _answer(self, key: str) -> Order | None:
        order, self._asked = self._asked, None
        digits, self._digits = self._digits, ""
        assert order is not None
        if key == "y":
            return msgspec.structs.replace(order, executor=int(digits)) if digits else order
        self.message = f"{order.kind.value}: not done"
        return None

    def _type(self, key: str) -> Order | None:
        """Take one key of an executor's number. Any key but a digit, Backspace and what ends the number gives up."""
        assert self._asked is not None
        if key in BACKSPACE:
            self._digits = self._digits[:-1]
        elif key in _DIGITS and len(self._digits) < _MOST_DIGITS:
            self._digits += key
        else:
            sets_role = self._asked.kind is OrderKind.SET_ROLE
            if self._digits and key in (_ROLES if sets_role else ENTER):
                self._asked = msgspec.structs.replace(self._asked, role=_ROLES.get(key, ""))
                return self._answer("y")
            return self._answer("n")
        return None

    def _about_selected(self, key: str, requests: Sequence[Request]) -> Order | None:
        if not any(request.request_id == self.selected for request in requests):
            self.message = "no live request is selected; select one with j and k"
            return None
        if key == "e":
            return Order(OrderKind.EXPLAIN, self.selected)
        self._asked = Order(OrderKind.CANCEL, self.selected)
        return None

    def _move(self, places: int, requests: Sequence[Request]) -> None:
        # Continuations share an id, so they are selected together.
        ids = list(dict.fromkeys(request.request_id for request in self.sorted(requests)))
        if not ids:
            return
        if self.selected not in ids:
            self.selected = ids[0 if places > 0 else -1]
            return
        place = min(max(ids.index(self.selected) + places, 0), len(ids) - 1)
        self.selected = ids[place]

    def _close(self) -> None:
        if self.shows_help or self.explanation:
            self.shows_help, self.explanation = False, ""
        else:
            self.selected = ""

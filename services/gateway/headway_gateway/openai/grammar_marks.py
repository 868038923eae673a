"""Marks of templates, as grammars have them. Must not know: which marks a form has.

In Lark's dialect as llguidance has it, ``<[7]>`` is the token 7, ``<[^7,8]>`` any other than these, ``<[*]>`` any.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

from headway_gateway.text.grammar_literals import text


class Marks(NamedTuple):
    """How marks are said to the grammar library."""

    token_id: Callable[[str], int | None]
    """The token that a mark is, if it is one."""
    end_ids: Collection[int]
    """Tokens that end an output."""

    def said(self, mark: str) -> str:
        """Return the mark as a grammar has it. Of some, only the beginning is a token, and a word follows."""
        token_id = self.token_id(mark)
        if token_id is not None:
            return f"<[{token_id}]>"
        begin, end, word = mark.partition(">")
        token_id = self.token_id(begin + end) if word else None
        return text(mark) if token_id is None else f"<[{token_id}]> {text(word)}"

    def up_to(self, name: str, mark: str) -> str:
        """Return the rule ``name`` of anything up to a mark, and the mark."""
        if self.token_id(mark) is None:
            return f"{name}[suffix={text(mark)}]: /(?s:.*)/"
        return f"{self.without(name, mark)} {self.said(mark)}"

    def without(self, name: str, *marks: str) -> str:
        """Return the rule ``name`` of anything without marks that are tokens."""
        ids = {token_id for token_id in map(self.token_id, marks) if token_id is not None}
        return f"{name}: <[^{','.join(map(str, sorted(ids.union(self.end_ids))))}]>*"

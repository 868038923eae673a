"""A chat on its way to the template. Must not know: templates, tokens, the API's messages."""

from typing import TypeAlias

import msgspec

Message: TypeAlias = tuple[str, ...]
"""A role and a content, or with a JSON object of further keys for the template."""


class Conversation(msgspec.Struct, frozen=True):
    """Messages, the tools (a JSON array) and further variables of the template (a JSON object).

    The text ends with what begins an answer, unless ``asks`` is false. With ``continues``, it ends with the last message's
    content, which has no end: the model goes on with it.
    """

    messages: tuple[Message, ...]
    tools: str = ""
    variables: str = ""
    asks: bool = True
    continues: bool = False

    @property
    def size(self) -> int:
        """Its characters, without the roles."""
        return len(self.tools) + len(self.variables) + sum(sum(map(len, message[1:])) for message in self.messages)

    def followed_by(self, message: Message) -> "Conversation":
        """Return it with one more message."""
        return msgspec.structs.replace(self, messages=(*self.messages, message))

"""From what a caller sent to token ids, for every call that takes a prompt.

Owns: which way of encoding a field takes, and that a text which cannot fit is refused before any work is spent on it.
Must not know: what becomes of the tokens, the scheduler.
"""

from headway_gateway.encoding_lanes import EncodingLanes
from headway_gateway.statuses import invalid_argument
from headway_gateway.tokenization import PromptError, TextModel
from headway_gateway.validation import most_prompt_tokens
from headway_proto import generation_pb2 as api
from headway_proto.ingress import ModelInfo


class PromptEncoder:
    """Encodes off the event loop. What is wrong with a prompt is a ``CallRefusedError``, INVALID_ARGUMENT."""

    def __init__(self, text_model: TextModel, lanes: EncodingLanes) -> None:
        self._text_model = text_model
        self._lanes = lanes

    async def encode_text(self, text: str, model: ModelInfo) -> list[int]:
        """The tokens of a plain text."""
        try:
            self._text_model.require_plausible_length(len(text), most_prompt_tokens(model))
            return await self._lanes.encode(text)
        except PromptError as error:
            raise invalid_argument("text", str(error)) from error

    async def encode_chat(self, chat: api.Chat, model: ModelInfo) -> list[int]:
        """The tokens of a chat, ready for an answer."""
        messages, most = self._messages(chat, model)
        try:
            return await self._lanes.encode_chat(messages, max_tokens=most)
        except PromptError as error:
            raise invalid_argument("chat", str(error)) from error

    async def encode_chat_prefix(self, chat: api.Chat, model: ModelInfo) -> list[int]:
        """The tokens that chats have in common which begin like this one and go on with a user's message."""
        messages, most = self._messages(chat, model)
        try:
            return await self._lanes.encode_chat_prefix(messages, max_tokens=most)
        except PromptError as error:
            raise invalid_argument("chat", str(error)) from error

    def _messages(self, chat: api.Chat, model: ModelInfo) -> tuple[list[tuple[str, str]], int]:
        """Role and content of each message, and the most tokens that they may come to."""
        messages = [(message.role, message.content) for message in chat.messages]
        most = most_prompt_tokens(model)
        try:
            self._text_model.require_plausible_length(sum(len(content) for _, content in messages), most)
        except PromptError as error:
            raise invalid_argument("chat", str(error)) from error
        return messages, most

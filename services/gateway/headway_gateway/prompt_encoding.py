"""From what a caller sent to token ids, for every call that takes a prompt.

Owns: which way of encoding a field takes, and that a text which cannot fit is refused before any work is spent on it.
Must not know: what becomes of the tokens, the scheduler.
"""

from collections.abc import Awaitable

import grpc

from headway_gateway.encoding_lanes import EncodingLanes
from headway_gateway.statuses import CallRefusedError, invalid_argument
from headway_gateway.tokenization import PromptError, PromptUnavailableError, TextModel
from headway_gateway.validation import most_prompt_tokens
from headway_proto import generation_pb2 as api
from headway_proto.ingress import ModelInfo

_RETRY_S = 1.0


class PromptEncoder:
    """Encodes off the event loop. What is wrong with a prompt is a ``CallRefusedError``, INVALID_ARGUMENT; where it could not
    be encoded this time, UNAVAILABLE.
    """

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
        return await _refusing(self._lanes.encode_chat(messages, max_tokens=most))

    async def encode_chat_prefix(self, chat: api.Chat, model: ModelInfo) -> list[int]:
        """The tokens that chats have in common which begin like this one and go on with a user's message."""
        messages, most = self._messages(chat, model)
        return await _refusing(self._lanes.encode_chat_prefix(messages, max_tokens=most))

    def _messages(self, chat: api.Chat, model: ModelInfo) -> tuple[list[tuple[str, str]], int]:
        """Role and content of each message, and the most tokens that they may come to."""
        messages = [(message.role, message.content) for message in chat.messages]
        most = most_prompt_tokens(model)
        try:
            self._text_model.require_plausible_length(sum(len(content) for _, content in messages), most)
        except PromptError as error:
            raise invalid_argument("chat", str(error)) from error
        return messages, most


async def _refusing(encoding: Awaitable[list[int]]) -> list[int]:
    try:
        return await encoding
    except PromptError as error:
        raise invalid_argument("chat", str(error)) from error
    except PromptUnavailableError as error:
        raise CallRefusedError(
            grpc.StatusCode.UNAVAILABLE, f"chat: {error}; try again", retry_after_s=_RETRY_S, reason="chat_not_rendered"
        ) from error

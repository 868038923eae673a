"""From a request's prompt to token ids."""

from typing import Any

import grpc

from headway_gateway.requests.validation import most_prompt_tokens
from headway_gateway.statuses import CallRefusedError, beyond_context, invalid_argument, try_later
from headway_gateway.text.conversation import Conversation
from headway_gateway.text.encoding_lanes import EncodingLanes
from headway_gateway.text.tokenization import PromptError, PromptTooLongError, PromptUnavailableError, TextModel
from headway_proto import generation_pb2 as api
from headway_proto.ingress import ModelInfo


def conversation_of(chat: api.Chat) -> Conversation:
    """Return a chat as its template wants it."""
    return Conversation(
        tuple((one.role, one.content, one.more) for one in chat.messages),
        chat.tools,
        chat.variables,
        asks=not chat.continue_final_message
        and (chat.add_generation_prompt or not chat.HasField("add_generation_prompt")),
        continues=chat.continue_final_message,
    )


class PromptEncoder:
    """Encodes prompts outside the event loop."""

    def __init__(self, text_model: TextModel, lanes: EncodingLanes) -> None:
        self._text_model = text_model
        self._lanes = lanes

    async def encode(self, prompt: Any, kind: str, model: ModelInfo, *, is_prefix: bool = False) -> list[int]:
        """Return the tokens; ``kind`` names the field.

        With ``is_prefix``, a chat gives the tokens common to all chats that begin with it.

        Raises:
            CallRefusedError: INVALID_ARGUMENT, or UNAVAILABLE if it cannot be encoded now.
        """
        if kind == "token_ids":
            return list(prompt.token_ids.ids)
        most = most_prompt_tokens(model)
        try:
            if kind == "text":
                self._text_model.require_plausible_length(len(prompt.text), most)
                return await self._lanes.encode(prompt.text)
            chat = conversation_of(prompt.chat)
            self._text_model.require_plausible_length(chat.size, most)
            encode = self._lanes.encode_chat_prefix if is_prefix else self._lanes.encode_chat
            return await encode(chat, max_tokens=most)
        except PromptError as error:
            raise _refused(kind, error, model) from error
        except PromptUnavailableError as error:
            message = f"{error}; try again"
            raise try_later(grpc.StatusCode.UNAVAILABLE, message, field=kind, reason="chat_not_rendered") from error

    async def encode_input(
        self, one: api.Input, field: str, model: ModelInfo, *, with_special_tokens: bool
    ) -> list[int]:
        """Return the tokens of one of several inputs; ``field`` names it.

        Raises:
            CallRefusedError: INVALID_ARGUMENT.
        """
        if one.HasField("token_ids"):
            return list(one.token_ids.ids)
        try:
            self._text_model.require_plausible_length(len(one.text), most_prompt_tokens(model))
            encode = self._lanes.encode if with_special_tokens else self._lanes.encode_plain
            return await encode(one.text)
        except PromptError as error:
            raise _refused(f"{field}.text", error, model) from error

    async def encode_pair(self, first: str, second: str, field: str, model: ModelInfo) -> list[int]:
        """Return the tokens of two texts as a pair; ``field`` names the second.

        Raises:
            CallRefusedError: INVALID_ARGUMENT.
        """
        try:
            self._text_model.require_plausible_length(len(first) + len(second), most_prompt_tokens(model))
            return await self._lanes.encode_pair(first, second)
        except PromptError as error:
            raise _refused(field, error, model) from error


def _refused(field: str, error: PromptError, model: ModelInfo) -> CallRefusedError:
    if isinstance(error, PromptTooLongError):
        return beyond_context(field, str(error), most_prompt_tokens(model) + 1)
    return invalid_argument(f"{field}.{error.part}" if error.part else field, str(error))

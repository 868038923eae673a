"""Tokenisation: short prompts at once, others in threads, long ones apart."""

# ruff: noqa: D102 (``TextModel`` describes the methods)

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headway_gateway.text.conversation import Conversation
from headway_gateway.text.tokenization import TextModel

_SHORT_PROMPT_CHARACTERS = 256
"""As long as handing work to a thread and back takes."""

_LONG_PROMPT_CHARACTERS = 65536

_Result = TypeVar("_Result")


class EncodingLanes:
    """Asynchronous access to a ``TextModel``."""

    def __init__(self, text_model: TextModel, num_threads: int) -> None:
        self._text_model = text_model
        self._ordinary = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="encode-long")

    async def encode(self, text: str) -> list[int]:
        if len(text) <= _SHORT_PROMPT_CHARACTERS:
            return self._text_model.encode(text)
        return await self._run(len(text), lambda: self._text_model.encode(text))

    async def encode_plain(self, text: str) -> list[int]:
        return await self._run(len(text), lambda: self._text_model.encode_plain(text))

    async def encode_pair(self, first: str, second: str) -> list[int]:
        return await self._run(len(first) + len(second), lambda: self._text_model.encode_pair(first, second))

    async def encode_chat(self, chat: Conversation, *, max_tokens: int) -> list[int]:
        return await self._run(chat.size, lambda: self._text_model.encode_chat(chat, max_tokens=max_tokens))

    async def encode_chat_prefix(self, chat: Conversation, *, max_tokens: int) -> list[int]:
        return await self._run(2 * chat.size, lambda: self._text_model.encode_chat_prefix(chat, max_tokens=max_tokens))

    async def decode(self, token_ids: Sequence[int], *, keeps_special_tokens: bool = False) -> str:
        return await self._run(
            len(token_ids), lambda: self._text_model.decode(token_ids, keeps_special_tokens=keeps_special_tokens)
        )

    def close(self) -> None:
        self._ordinary.shutdown(wait=False, cancel_futures=True)
        self._long.shutdown(wait=False, cancel_futures=True)

    async def _run(self, size: int, work: Callable[[], _Result]) -> _Result:
        lane = self._long if size > _LONG_PROMPT_CHARACTERS else self._ordinary
        return await asyncio.get_running_loop().run_in_executor(lane, work)

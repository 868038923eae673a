"""What a puller asks over the network, and how the answer is laid out.

Owns: the two messages, their limits, packing and matching. Must not know: sockets, where the memory comes from.

An answer is one message: the length of its frame (u32), the frame, the records, the blocks. The frame repeats the
question's epoch (drawn by the puller) and sequence, under its checksum, so no answer counts for another question. Bytes of
blocks have no checksum here: the caller checks them against their records, whichever way they came.
"""

import struct
from typing import NamedTuple

import msgspec
import numpy as np

from headway_executor.block_store.transport import RECORD, Bytes, HostMemory, PulledBlocks
from headway_proto.framing import Frame, FrameReader, FrameWriter, FramingError
from headway_proto.wording import shown

MAX_BLOCKS = 4096
"""Blocks of one question."""

MAX_QUESTION_BYTES = 64 << 10
ANSWER_BYTES = 4 << 20
"""What one answer carries, unless a single block is larger."""

MAX_BLOCK_BYTES = 256 << 20

PARTS_UNDER_WAY = 4
"""Questions of one puller that wait for answers."""

_LENGTH = struct.Struct("<I")
_MAX_FRAME_BYTES = 1024


class BlockQuestion(msgspec.Struct, frozen=True, array_like=True):
    """``host_blocks`` of the pool of this name, each of ``block_bytes``."""

    pool: str
    block_bytes: int
    host_blocks: list[int]


class BlockAnswer(msgspec.Struct, frozen=True, array_like=True):
    """So many blocks follow; or none, and ``refusal`` says why in one line."""

    num_blocks: int
    block_bytes: int
    refusal: str = ""


class Answer(NamedTuple):
    """A message that came: to which question, and with what. ``content`` lies in the message's own memory."""

    sequence: int
    refusal: str
    content: PulledBlocks


_QUESTION, _ANSWER = 1, 2


def question_writer(epoch: int) -> FrameWriter:
    """Numbers the questions of one puller."""
    return FrameWriter({BlockQuestion: _QUESTION}, epoch)


def blocks_per_question(block_bytes: int) -> int:
    """How many blocks one question may ask for."""
    return max(1, min(MAX_BLOCKS, ANSWER_BYTES // max(1, block_bytes)))


class AnswerReader:
    """Reads the answers to questions of one epoch."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._frames = FrameReader({_ANSWER: BlockAnswer}, _MAX_FRAME_BYTES)

    def read(self, message: memoryview) -> Answer:
        """Take a message apart.

        Raises:
            FramingError: it is damaged, cut short, or answers somebody else.
        """
        if len(message) < _LENGTH.size:
            raise FramingError(f"answer of {len(message)} bytes; allowed: {_LENGTH.size} or more")
        end = _LENGTH.size + _LENGTH.unpack_from(message)[0]
        frame = self._frames.decode(message[_LENGTH.size : end])
        if frame.epoch != self._epoch:
            raise FramingError(f"answer of epoch {frame.epoch}; expected {self._epoch}")
        head = frame.body
        assert isinstance(head, BlockAnswer)
        expected = head.num_blocks * (RECORD.itemsize + head.block_bytes)
        if min(head.num_blocks, head.block_bytes) < 0 or len(message) - end != expected:
            raise FramingError(f"answer with {len(message) - end} bytes of blocks; announced: {expected}")
        records = np.frombuffer(message, RECORD, head.num_blocks, end)
        blocks = np.frombuffer(message, np.uint8, -1, end + records.nbytes)
        return Answer(
            frame.sequence, head.refusal, PulledBlocks(records, blocks.reshape(head.num_blocks, head.block_bytes))
        )


class Answerer:
    """Answers questions from one host memory."""

    def __init__(self, memory: HostMemory) -> None:
        self._memory = memory
        self._frames = FrameReader({_QUESTION: BlockQuestion}, MAX_QUESTION_BYTES)
        self._writer = FrameWriter({BlockAnswer: _ANSWER})

    def answer(self, question: bytes) -> Bytes:
        """Return the answer to a question, with copies of the blocks.

        Raises:
            FramingError: this is no question.
        """
        frame = self._frames.decode(question)
        body = frame.body
        assert isinstance(body, BlockQuestion)
        block_bytes = self._memory.blocks.shape[1]
        refusal = self._refusal(body)
        if refusal:
            return self._pack(frame, BlockAnswer(0, block_bytes, refusal), 0)
        index = np.array(body.host_blocks, dtype=np.intp)
        message = self._pack(frame, BlockAnswer(len(index), block_bytes), len(index) * (RECORD.itemsize + block_bytes))
        blocks_at = len(message) - len(index) * block_bytes
        records_at = blocks_at - len(index) * RECORD.itemsize
        message[records_at:blocks_at] = self._memory.records[index].view(np.uint8)
        place = message[blocks_at:].reshape(len(index), block_bytes)
        np.take(self._memory.blocks, index, axis=0, out=place, mode="clip")  # mode "raise" would copy once more
        return message

    def _refusal(self, question: BlockQuestion) -> str:
        num_blocks, block_bytes = self._memory.blocks.shape
        if question.pool != self._memory.name:
            return f"the pool {shown(question.pool)} is not here"
        if question.block_bytes != block_bytes:
            return f"its blocks have {block_bytes} bytes, not {question.block_bytes}"
        allowed = blocks_per_question(block_bytes)
        if len(question.host_blocks) > allowed:
            return f"{len(question.host_blocks)} blocks in one question; allowed: {allowed}"
        outside = [block for block in question.host_blocks if not 0 <= block < num_blocks]
        return f"it has no block {outside[0]}; allowed: 0 to {num_blocks - 1}" if outside else ""

    def _pack(self, question: Frame, head: BlockAnswer, content_bytes: int) -> Bytes:
        self._writer.epoch, self._writer.next_sequence = question.epoch, question.sequence
        frame = self._writer.encode(head)
        message = np.empty(_LENGTH.size + len(frame) + content_bytes, dtype=np.uint8)
        prefix = _LENGTH.pack(len(frame)) + frame
        message[: len(prefix)] = np.frombuffer(prefix, dtype=np.uint8)
        return message

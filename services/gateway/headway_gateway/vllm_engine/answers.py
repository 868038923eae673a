"""A generation's events as VllmEngine's answers."""

from collections.abc import Awaitable, Callable

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from headway_gateway.statuses import CallRefusedError
from headway_proto import generation_pb2 as api

_FINISH_REASONS = {
    api.FINISH_REASON_STOP: "stop",
    api.FINISH_REASON_LENGTH: "length",
    api.FINISH_REASON_ABORT: "abort",
}


class AnswerWriter:
    """Makes chunks for a stream, else one whole answer per output."""

    def __init__(self, request: vllm.GenerateRequest, send: Callable[[vllm.GenerateResponse], Awaitable[None]]) -> None:
        self._send = send
        self._streams = request.stream
        self._has_alternatives = request.sampling_params.logprobs > 0
        self._stop_token_ids = frozenset(request.sampling_params.stop_token_ids)
        self._accepted = api.Accepted()
        self._num_outputs = max(1, request.sampling_params.n)
        self._gathered: dict[int, vllm.GenerateComplete] = {}
        self._ended: dict[int, vllm.GenerateComplete] = {}
        self._prompt = vllm.InputLogProbs()
        self._has_prompt_alternatives = request.sampling_params.prompt_logprobs > 0
        self._has_prompt: set[int] = set()

    async def write(self, message: api.GenerateResponse, /) -> None:
        """Process the next event.

        Raises:
            CallRefusedError: INTERNAL, an output failed.
        """
        kind = message.WhichOneof("event")
        if kind == "accepted":
            self._accepted = message.accepted
        elif kind == "prompt":
            self._take_prompt(message.prompt)
        elif kind == "delta":
            await self._take_delta(message.delta)
        elif kind == "finished":
            await self._end(self._complete(message.finished))

    async def _end(self, complete: vllm.GenerateComplete) -> None:
        """Without a stream, callers rely on the order of index."""
        if complete.index not in self._has_prompt and (complete.index == 0 or not self._streams):
            self._add_prompt(complete.index, complete.input_logprobs)
        if self._streams:
            await self._send(vllm.GenerateResponse(complete=complete))
            return
        self._ended[complete.index] = complete
        if len(self._ended) == self._num_outputs:
            for index in range(self._num_outputs):
                await self._send(vllm.GenerateResponse(complete=self._ended[index]))

    async def _take_delta(self, delta: api.Delta) -> None:
        if not delta.token_ids:
            return  # the text is held until the end; the caller has its tokens
        if not self._streams:
            gathered = self._gathered.setdefault(delta.index, vllm.GenerateComplete())
            gathered.output_ids.extend(delta.token_ids)
            self._add_logprobs(gathered.output_logprobs, delta)
            return
        chunk = vllm.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=self._accepted.prompt_tokens,
            completion_tokens=len(delta.token_ids),
            cached_tokens=self._accepted.cached_tokens,
            index=delta.index,
        )
        self._add_logprobs(chunk.output_logprobs, delta)
        # The prompt is complete before the first chunk of output 0, but perhaps not before another's.
        if delta.index == 0 and 0 not in self._has_prompt:
            self._add_prompt(0, chunk.input_logprobs)
        await self._send(vllm.GenerateResponse(chunk=chunk))

    def _take_prompt(self, prompt: api.Prompt) -> None:
        columns = self._prompt
        columns.token_ids.extend(prompt.token_ids)
        if prompt.first_token_index == 0:
            columns.token_logprobs.add()
            if self._has_prompt_alternatives:
                columns.top_logprobs.add()
        for entry in prompt.logprobs:
            columns.token_logprobs.add(value=entry.logprob)
            if self._has_prompt_alternatives:
                columns.top_logprobs.add(
                    values=[top.logprob for top in entry.top], token_ids=[top.token_id for top in entry.top]
                )

    def _add_prompt(self, index: int, columns: vllm.InputLogProbs) -> None:
        self._has_prompt.add(index)
        if self._prompt.token_ids:
            columns.CopyFrom(self._prompt)

    def _add_logprobs(self, columns: vllm.OutputLogProbs, delta: api.Delta) -> None:
        for entry in delta.logprobs:
            columns.token_logprobs.append(entry.logprob)
            columns.token_ids.append(entry.token_id)
            if self._has_alternatives:
                columns.top_logprobs.add(
                    values=[top.logprob for top in entry.top], token_ids=[top.token_id for top in entry.top]
                )

    def _complete(self, finished: api.Finished) -> vllm.GenerateComplete:
        reason = _FINISH_REASONS.get(finished.reason)
        if reason is None:
            raise CallRefusedError(
                grpc.StatusCode.INTERNAL, f"output {finished.index} could not be run: {finished.error}"
            )
        complete = self._gathered.pop(finished.index, None) or vllm.GenerateComplete()
        complete.index = finished.index
        complete.finish_reason = reason
        complete.prompt_tokens = finished.usage.prompt_tokens
        complete.completion_tokens = finished.usage.output_tokens
        complete.cached_tokens = finished.usage.cached_tokens
        matched = finished.WhichOneof("matched")
        if matched == "stop":
            complete.matched_stop_str = finished.stop
        elif matched == "stop_token_id" and finished.stop_token_id in self._stop_token_ids:
            complete.matched_token_id = finished.stop_token_id  # the model's own end token is no match
        return complete

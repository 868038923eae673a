"""The Admin service: operators' questions and orders, carried to the scheduler and back.

Owns: the translation between admin.proto and ``AdminCall`` / ``AdminReply``.
Must not know: how the scheduler answers them.
"""

from typing import Any, TypeAlias

import grpc

from headway_gateway.scheduler_client import SchedulerClient, SchedulerUnavailableError
from headway_gateway.statuses import CallRefusedError, invalid_argument, shown
from headway_gateway.validation import MAX_REQUEST_ID_BYTES
from headway_proto import admin_pb2 as api
from headway_proto import admin_pb2_grpc as api_grpc
from headway_proto.ingress import AdminReply, SequenceState, Status

_ANSWER_TIMEOUT_S = 5.0
_NOT_FOUND = "not found"

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class AdminServicer(api_grpc.AdminServicer):
    """Serves ``headway.v1.Admin`` for one scheduler."""

    def __init__(self, client: SchedulerClient) -> None:
        self._client = client

    async def GetStatus(self, request: api.GetStatusRequest, context: Context) -> api.GetStatusResponse:  # noqa: ARG002, N802
        """The scheduler's figures."""
        status = (await self._call("status", context)).status
        if status is None:
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, "the scheduler told no status")
        return api.GetStatusResponse(**{field: getattr(status, field) for field in Status.__struct_fields__})

    async def ListRequests(self, request: api.ListRequestsRequest, context: Context) -> api.ListRequestsResponse:  # noqa: ARG002, N802
        """Every live sequence; the continuations of one request share its id."""
        reply = await self._call("list", context)
        return api.ListRequestsResponse(requests=map(_request_state, reply.sequences))

    async def Explain(self, request: api.ExplainRequest, context: Context) -> api.ExplainResponse:  # noqa: N802
        """Why a request is where it is. NOT_FOUND if it is not live."""
        reply = await self._call("explain", context, request.request_id)
        state = _request_state(reply.sequences[0]) if reply.sequences else None
        return api.ExplainResponse(request=state, explanation=reply.explanation)

    async def Cancel(self, request: api.CancelRequest, context: Context) -> api.CancelResponse:  # noqa: N802
        """End a request with reason ABORT. NOT_FOUND for an id never seen, OK for one that has ended."""
        await self._call("cancel", context, request.request_id)
        return api.CancelResponse()

    async def Pause(self, request: api.PauseRequest, context: Context) -> api.PauseResponse:  # noqa: ARG002, N802
        """Stop admitting."""
        await self._call("pause", context)
        return api.PauseResponse()

    async def Resume(self, request: api.ResumeRequest, context: Context) -> api.ResumeResponse:  # noqa: ARG002, N802
        """Admit again."""
        await self._call("resume", context)
        return api.ResumeResponse()

    async def Drain(self, request: api.DrainRequest, context: Context) -> api.DrainResponse:  # noqa: ARG002, N802
        """Refuse new requests from now on."""
        await self._call("drain", context)
        return api.DrainResponse()

    async def _call(self, method: str, context: Context, request_id: str | None = None) -> AdminReply:
        if request_id is not None and not 1 <= len(request_id.encode()) <= MAX_REQUEST_ID_BYTES:
            raise invalid_argument(
                "request_id", f"{shown(request_id)} is not allowed; allowed: 1 to {MAX_REQUEST_ID_BYTES} bytes"
            )
        remaining_s = context.time_remaining()
        timeout_s = _ANSWER_TIMEOUT_S if remaining_s is None else min(_ANSWER_TIMEOUT_S, max(0.0, remaining_s))
        try:
            reply = await self._client.call_admin(method, request_id or "", timeout_s=timeout_s)
        except SchedulerUnavailableError as error:
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, str(error)) from error
        if reply.error == _NOT_FOUND:
            raise CallRefusedError(grpc.StatusCode.NOT_FOUND, f"request_id: {shown(request_id)} is not known")
        if reply.error:
            raise CallRefusedError(grpc.StatusCode.FAILED_PRECONDITION, reply.error)
        return reply


def _request_state(state: SequenceState) -> api.RequestState:
    return api.RequestState(
        request_id=state.request_id,
        state=state.state,
        priority=state.priority,
        tenant=state.tenant,
        num_prompt_tokens=state.num_prompt_tokens,
        num_output_tokens=state.num_output_tokens,
        num_computed_tokens=state.num_computed_tokens,
        num_blocks=state.num_blocks,
        num_preemptions=state.num_preemptions,
        age_ms=state.age_ms,
    )

"""The Admin service."""

# ruff: noqa: D102 (admin.proto describes the methods)

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec

from headway_gateway.grpc_server.call import Call
from headway_gateway.link.scheduler_client import SchedulerClient, SchedulerUnavailableError
from headway_gateway.operators.flight_log import flight_log_pieces
from headway_gateway.operators.operator_calls import ask, time_left_s
from headway_gateway.requests.prompt_encoding import PromptEncoder
from headway_gateway.requests.validation import MAX_REQUEST_ID_BYTES, check_pin, require_token_ids
from headway_gateway.statuses import CallRefusedError, invalid_argument
from headway_proto import admin_pb2 as api
from headway_proto import admin_pb2_grpc as api_grpc
from headway_proto.adapters import ADAPTER_NAME_FORM, is_adapter_name
from headway_proto.columns import encode_column
from headway_proto.ingress import ModelInfo
from headway_proto.operations import (
    EXECUTOR_ROLES,
    AdapterToLoad,
    AdminCall,
    AdminReply,
    FlightLogPart,
    FlightLogPlace,
    PinnedPrefix,
    PrefixToPin,
    SequenceState,
    TenantPrefixUse,
)
from headway_proto.wording import shown

_NOT_FOUND = "not found"


class AdminServicer(api_grpc.AdminServicer):
    """Serves ``headway.v1.Admin`` for one scheduler."""

    def __init__(self, client: SchedulerClient, prompts: PromptEncoder) -> None:
        self._client = client
        self._prompts = prompts
        self._flight_log_turn = asyncio.Lock()

    async def GetStatus(self, request: api.GetStatusRequest, context: Call) -> api.GetStatusResponse:  # noqa: ARG002, N802
        reply = await self._call(context, AdminCall(method="status"))
        status = reply.status
        if status is None:
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, "the scheduler sent no status")
        return api.GetStatusResponse(**_fields(status), tenants=map(_tenant_use, reply.tenants))

    async def ListRequests(self, request: api.ListRequestsRequest, context: Call) -> api.ListRequestsResponse:  # noqa: ARG002, N802
        reply = await self._call(context, AdminCall(method="list"))
        return api.ListRequestsResponse(requests=map(_request_state, reply.sequences))

    async def Explain(self, request: api.ExplainRequest, context: Call) -> api.ExplainResponse:  # noqa: N802
        reply = await self._call_about(request.request_id, "explain", context)
        state = _request_state(reply.sequences[0]) if reply.sequences else None
        return api.ExplainResponse(request=state, explanation=reply.explanation)

    async def Cancel(self, request: api.CancelRequest, context: Call) -> api.CancelResponse:  # noqa: N802
        await self._call_about(request.request_id, "cancel", context)
        return api.CancelResponse()

    async def Pause(self, request: api.PauseRequest, context: Call) -> api.PauseResponse:  # noqa: ARG002, N802
        await self._call(context, AdminCall(method="pause"))
        return api.PauseResponse()

    async def Resume(self, request: api.ResumeRequest, context: Call) -> api.ResumeResponse:  # noqa: ARG002, N802
        await self._call(context, AdminCall(method="resume"))
        return api.ResumeResponse()

    async def Drain(self, request: api.DrainRequest, context: Call) -> api.DrainResponse:  # noqa: ARG002, N802
        await self._call(context, AdminCall(method="drain"))
        return api.DrainResponse()

    async def DrainExecutor(  # noqa: N802
        self, request: api.DrainExecutorRequest, context: Call
    ) -> api.DrainExecutorResponse:
        await self._call(context, AdminCall(method="drain_executor", executor=request.executor))
        return api.DrainExecutorResponse()

    async def UndrainExecutor(  # noqa: N802
        self, request: api.UndrainExecutorRequest, context: Call
    ) -> api.UndrainExecutorResponse:
        await self._call(context, AdminCall(method="undrain_executor", executor=request.executor))
        return api.UndrainExecutorResponse()

    async def SetExecutorRole(  # noqa: N802
        self, request: api.SetExecutorRoleRequest, context: Call
    ) -> api.SetExecutorRoleResponse:
        if request.role not in EXECUTOR_ROLES:
            allowed = ", ".join(EXECUTOR_ROLES)
            raise invalid_argument("role", f"{shown(request.role)} is not allowed; allowed: {allowed}")
        await self._call(context, AdminCall(method="set_executor_role", executor=request.executor, role=request.role))
        return api.SetExecutorRoleResponse()

    async def LoadAdapter(self, request: api.LoadAdapterRequest, context: Call) -> api.LoadAdapterResponse:  # noqa: N802
        _check_adapter_name(request.name)
        if not request.directory:
            raise invalid_argument("directory", "'' is not allowed; allowed: the directory of an adapter")
        await self._serving_model(context)
        await self._call(
            context, AdminCall(method="load_adapter", adapter=AdapterToLoad(request.name, request.directory))
        )
        return api.LoadAdapterResponse()

    async def UnloadAdapter(self, request: api.UnloadAdapterRequest, context: Call) -> api.UnloadAdapterResponse:  # noqa: N802
        _check_adapter_name(request.name)
        await self._serving_model(context)
        not_found = f"name: {shown(request.name)} is not loaded"
        await self._call(
            context, AdminCall(method="unload_adapter", adapter=AdapterToLoad(request.name)), not_found=not_found
        )
        return api.UnloadAdapterResponse()

    async def ListAdapters(self, request: api.ListAdaptersRequest, context: Call) -> api.ListAdaptersResponse:  # noqa: ARG002, N802
        reply = await self._call(context, AdminCall(method="adapters"))
        return api.ListAdaptersResponse(
            adapters=[api.LoadedAdapter(**msgspec.structs.asdict(adapter)) for adapter in reply.adapters]
        )

    async def PinPrefix(self, request: api.PinPrefixRequest, context: Call) -> api.PinPrefixResponse:  # noqa: N802
        check_pin(request)
        model = await self._serving_model(context)
        kind = request.WhichOneof("prefix") or "token_ids"
        token_ids = await self._prompts.encode(request, kind, model, is_prefix=True)
        require_token_ids(token_ids, "token_ids.ids", model.vocab_size)
        prefix = PrefixToPin(name=request.name, tenant=request.tenant, token_ids=encode_column(token_ids))
        reply = await self._call(context, AdminCall(method="pin", prefix=prefix))
        return api.PinPrefixResponse(pinned=_pinned_prefix(reply.pinned_prefixes[0]))

    async def UnpinPrefix(self, request: api.UnpinPrefixRequest, context: Call) -> api.UnpinPrefixResponse:  # noqa: N802
        not_found = f"name: nothing is pinned as {shown(request.name)}"
        await self._call(context, AdminCall(method="unpin", prefix=PrefixToPin(name=request.name)), not_found=not_found)
        return api.UnpinPrefixResponse()

    async def ListPinnedPrefixes(  # noqa: N802
        self,
        request: api.ListPinnedPrefixesRequest,
        context: Call,
    ) -> api.ListPinnedPrefixesResponse:
        reply = await self._call(context, AdminCall(method="pins", executor=request.executor))
        return api.ListPinnedPrefixesResponse(prefixes=map(_pinned_prefix, reply.pinned_prefixes))

    async def ReadFlightLog(  # noqa: N802
        self,
        request: api.ReadFlightLogRequest,  # noqa: ARG002
        context: Call,
    ) -> AsyncIterator[api.ReadFlightLogResponse]:
        async def ask(place: FlightLogPlace) -> FlightLogPart:
            async with self._flight_log_turn:  # Run one read at a time.
                part = (await self._call(context, AdminCall(method="flight_log", place=place))).flight_log
            if part is None:
                raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, "the scheduler sent nothing from its flight log")
            return part

        async for piece in flight_log_pieces(ask):
            yield piece

    async def _serving_model(self, context: Call) -> ModelInfo:
        try:
            return await self._client.wait_until_serving(time_left_s(context))
        except SchedulerUnavailableError as error:
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, str(error)) from error

    async def _call_about(self, request_id: str, method: str, context: Call) -> AdminReply:
        if not 1 <= len(request_id.encode()) <= MAX_REQUEST_ID_BYTES:
            raise invalid_argument(
                "request_id", f"{shown(request_id)} is not allowed; allowed: 1 to {MAX_REQUEST_ID_BYTES} bytes"
            )
        not_found = f"request_id: {shown(request_id)} is not known"
        return await self._call(context, AdminCall(method=method, request_id=request_id), not_found=not_found)

    async def _call(self, context: Call, call: AdminCall, *, not_found: str = _NOT_FOUND) -> AdminReply:
        reply = await ask(self._client, context, call)
        if reply.error == _NOT_FOUND:
            raise CallRefusedError(grpc.StatusCode.NOT_FOUND, not_found)
        if reply.error:
            raise CallRefusedError(grpc.StatusCode.FAILED_PRECONDITION, reply.error)
        return reply


def _check_adapter_name(name: str) -> None:
    if not is_adapter_name(name):
        raise invalid_argument("name", f"{shown(name)} is not allowed; allowed: {ADAPTER_NAME_FORM}")


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    return {name: _as_field(getattr(struct, name)) for name in struct.__struct_fields__}


def _as_field(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _fields(value)
    return [_as_field(entry) for entry in value] if isinstance(value, tuple) else value


def _tenant_use(use: TenantPrefixUse) -> api.TenantPrefixUse:
    return api.TenantPrefixUse(
        tenant=use.tenant, num_query_tokens=use.num_query_tokens, num_hit_tokens=use.num_hit_tokens
    )


def _pinned_prefix(pinned: PinnedPrefix) -> api.PinnedPrefix:
    return api.PinnedPrefix(
        name=pinned.name,
        tenant=pinned.tenant,
        num_tokens=pinned.num_tokens,
        num_blocks=pinned.num_blocks,
        num_resident_blocks=pinned.num_resident_blocks,
    )


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
        executor=state.executor if state.executor >= 0 else None,
    )

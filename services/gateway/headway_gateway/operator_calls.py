"""Questions to the scheduler for a gRPC call."""

import grpc

from headway_gateway.rpc_handlers import Context
from headway_gateway.scheduler_client import SchedulerClient, SchedulerUnavailableError
from headway_gateway.statuses import CallRefusedError
from headway_proto.operations import AdminReply, FlightLogPlace, PrefixToPin

ANSWER_TIMEOUT_S = 5.0


def time_left_s(context: Context) -> float:
    """Return the seconds before the call's deadline."""
    remaining_s = context.time_remaining()
    return ANSWER_TIMEOUT_S if remaining_s is None else min(ANSWER_TIMEOUT_S, max(0.0, remaining_s))


async def ask(
    client: SchedulerClient,
    context: Context,
    method: str,
    request_id: str = "",
    *,
    prefix: PrefixToPin | None = None,
    place: FlightLogPlace | None = None,
    executor: int = 0,
    role: str = "",
) -> AdminReply:
    """Return the scheduler's answer.

    Raises:
        CallRefusedError: UNAVAILABLE.
    """
    try:
        return await client.call_admin(
            method, request_id, prefix, place=place, executor=executor, role=role, timeout_s=time_left_s(context)
        )
    except SchedulerUnavailableError as error:
        raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, str(error)) from error

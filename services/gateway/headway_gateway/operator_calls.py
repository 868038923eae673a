"""Questions to the scheduler for a gRPC call."""

import grpc

from headway_gateway.grpc_server.call import Call
from headway_gateway.scheduler_client import SchedulerClient, SchedulerUnavailableError
from headway_gateway.statuses import CallRefusedError
from headway_proto.operations import AdminCall, AdminReply

ANSWER_TIMEOUT_S = 5.0

LOAD_TIMEOUT_S = 600.0
"""Executors read files, beside steps that may need every core."""


def time_left_s(context: Call, most_s: float = ANSWER_TIMEOUT_S) -> float:
    """Return the seconds before the call's deadline, at most so many."""
    remaining_s = context.time_remaining()
    return most_s if remaining_s is None else min(most_s, max(0.0, remaining_s))


async def ask(client: SchedulerClient, context: Call, call: AdminCall) -> AdminReply:
    """Return the scheduler's answer.

    Raises:
        CallRefusedError: UNAVAILABLE.
    """
    try:
        most_s = ANSWER_TIMEOUT_S if call.adapter is None else LOAD_TIMEOUT_S
        return await client.call_admin(call, timeout_s=time_left_s(context, most_s))
    except SchedulerUnavailableError as error:
        raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, str(error)) from error

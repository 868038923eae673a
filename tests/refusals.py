"""What a refusal carries besides its message: the details of ``google.rpc.Status``."""

import grpc
from google.rpc import error_details_pb2, status_pb2


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The status in the trailing metadata of a refused call; empty if there is none."""
    found = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    return status_pb2.Status.FromString(found[0] if found else b"")


def retry_after_s(error: grpc.aio.AioRpcError) -> float | None:
    """When to try again (``RetryInfo``); None if the refusal does not say."""
    info = error_details_pb2.RetryInfo()
    for detail in status_of(error).details:
        if detail.Unpack(info):
            return info.retry_delay.ToNanoseconds() / 1e9
    return None

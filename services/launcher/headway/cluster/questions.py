"""What a cluster asks the gateway through the client API: figures for scaling, and drains."""

from typing import Any

from headway.client import Client, HeadwayError
from headway.cluster.description import Probe
from headway.running.health import Target


def figures_of(probe: Probe) -> dict[str, Any]:
    """Return plain figures of GetStatus; empty if nobody answers."""
    try:
        with _client(probe) as client:
            status = client.status()
    except HeadwayError:
        return {}
    return {
        "num_waiting": status.num_waiting,
        "num_waiting_tokens": status.num_waiting_tokens,
        "prompt_tokens_per_s": status.prompt_tokens_per_s,
        "executors": {
            each.number: {
                "state": each.state,
                "is_draining": each.is_draining,
                "num_running": each.num_running,
                "num_waiting": each.num_waiting,
                "kv_usage": each.kv_usage,
            }
            for each in status.executors
        },
    }


def drain(probe: Probe, executor: int, undo: bool) -> str:
    """Drain an executor, or undo that; return the refusal, if it is refused."""
    try:
        with _client(probe) as client:
            if undo:
                client.undrain_executor(executor)
            else:
                client.drain_executor(executor)
    except HeadwayError as error:
        return str(error)
    return ""


def _client(probe: Probe) -> Client:
    address = Target(address=probe.address).reachable_address
    return Client(
        address, token=probe.admin_token or probe.token or None, root_certificates=probe.certificates, retry_s=0.0
    )

"""smg in front of the gateways of ``headway serve``: the OpenAI and Anthropic APIs."""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Collection, Sequence

from headway.running.health import SERVING, Target, health_of
from headway_process.parent import end_with_parent, launcher_is_gone
from headway_proto.wording import shown

_POLL_INTERVAL_S = 0.2
_SCHEME = "grpc://"
# By default smg looks for a late worker every 30 seconds, checks the others' health once a minute, and sends nothing
# for a minute to a worker whose streams broke when it was killed.
_FLEET_FLAGS = (
    *("--worker-startup-check-interval", "1"),
    *("--health-check-interval-secs", "2"),
    *("--cb-timeout-duration-secs", "5"),
)


def command(
    *, openai_address: str, gateway_addresses: Sequence[str], metrics_port: int, grace_s: float, flags: Sequence[str]
) -> list[str]:
    """Return smg's command. Addresses are HOST:PORT, on loopback."""
    host, _, port = openai_address.rpartition(":")
    workers = [f"{_SCHEME}{Target(address=address).reachable_address}" for address in gateway_addresses]
    return [
        *(sys.executable, "-P", "-m", "headway.planning.openai_front", ",".join(gateway_addresses)),
        *("--host", host.strip("[]"), "--port", port),
        # By default smg serves its metrics on every interface.
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--worker-urls", *workers),
        *("--shutdown-grace-period-secs", str(max(1, round(grace_s)))),
        *("--history-backend", "none", "--log-level", "error"),
        *(_FLEET_FLAGS if len(workers) > 1 else ()),
        *flags,
    ]


def check_flags(flags: Sequence[str]) -> None:
    """Check the flags with smg's own parser.

    Raises:
        ValueError: smg refuses them.
    """
    from smg.router_args import RouterArgs

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    try:
        _, unknown = parser.parse_known_args(flags)
    except argparse.ArgumentError as error:
        raise ValueError(f"smg_flags: {error}") from None
    if unknown:
        raise ValueError(
            f"smg_flags: {shown(unknown[0])} is not allowed; allowed: flags of smg launch, see smg launch --help"
        )


async def wait_until_serving(openai_address: str, num_gateways: int = 1, gateways: Collection[str] = ()) -> None:
    """Return once ``is_serving``."""
    while not await asyncio.to_thread(is_serving, openai_address, num_gateways, gateways):  # noqa: ASYNC110 (smg has no such event)
        await asyncio.sleep(_POLL_INTERVAL_S)


def is_serving(openai_address: str, num_gateways: int = 1, gateways: Collection[str] = ()) -> bool:
    """Return whether smg lists a model and its tokenizer, and uses this many gateways.

    ``gateways`` must be among them, because another smg may use this address.
    """
    try:
        has_all = all(b'"id"' in _asked(openai_address, f"v1/{listed}") for listed in ("models", "tokenizers"))
        ready = ready_gateways(openai_address) if has_all else []
        return len(ready) >= num_gateways and set(gateways) <= set(ready)
    except (OSError, ValueError):
        return False


def ready_gateways(openai_address: str) -> list[str]:
    """Return the HOST:PORT of smg's gateways.

    Raises:
        OSError: smg does not answer.
        ValueError: the answer is not smg's.
    """
    workers = json.loads(_asked(openai_address, "workers"))["workers"]
    return [worker["url"].removeprefix(_SCHEME) for worker in workers if worker["status"] == "ready"]


def _asked(openai_address: str, path: str) -> bytes:
    import urllib.request  # it imports much, and smg runs in few fleets

    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with without_proxy.open(f"http://{openai_address}/{path}", timeout=1.0) as answer:
        content: bytes = answer.read()
        return content


def main(arguments: Sequence[str]) -> None:
    """Run smg for the gateways in the first argument.

    It starts when there is a model, because smg asks for it less and less often.
    """
    if not end_with_parent() or launcher_is_gone(os.environ):
        return
    gateways = [Target(address=address) for address in arguments[0].split(",")]
    while not any(health_of(gateway).status == SERVING for gateway in gateways):
        time.sleep(_POLL_INTERVAL_S)
    from smg.cli import main as run_smg

    run_smg(["launch", *arguments[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])

"""smg, the field's gateway, in front of the one that ``headway serve`` starts: the OpenAI and Anthropic APIs.

Owns: smg's command line, running it once the gateway serves and until the launcher ends, and finding out whether it
serves itself.
Must not know: what smg does with a request, or when it is started again.
"""

import asyncio
import ctypes
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from headway.health import SERVING, Target, health_of
from headway.parentage import launcher_is_gone

_PR_SET_PDEATHSIG = 1
_POLL_INTERVAL_S = 0.2


def command(
    *, openai_address: str, gateway_address: str, metrics_port: int, grace_s: float, flags: Sequence[str]
) -> list[str]:
    """The command that serves on ``openai_address`` what the gateway generates. Addresses are HOST:PORT, on loopback."""
    host, _, port = openai_address.rpartition(":")
    return [
        *(sys.executable, "-m", "headway.openai_front", gateway_address),
        *("--host", host.strip("[]"), "--port", port),
        # smg would serve its figures to everybody.
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--worker-urls", f"grpc://{Target(address=gateway_address).reachable_address}"),
        *("--shutdown-grace-period-secs", str(max(1, round(grace_s)))),
        *("--history-backend", "none", "--log-level", "error"),
        *flags,
    ]


async def wait_until_serving(openai_address: str) -> None:
    """Return once smg has the gateway's model and its tokenizer."""
    while not await asyncio.to_thread(is_serving, openai_address):  # noqa: ASYNC110 (smg tells nobody)
        await asyncio.sleep(_POLL_INTERVAL_S)


def is_serving(openai_address: str) -> bool:
    """Whether smg lists a model and, which comes a moment later, its tokenizer."""
    try:
        for listed in ("models", "tokenizers"):
            with urllib.request.urlopen(f"http://{openai_address}/v1/{listed}", timeout=1.0) as answer:
                if b'"id"' not in answer.read():
                    return False
        return True
    except (urllib.error.URLError, OSError):
        return False


def main(arguments: Sequence[str]) -> None:
    """Be smg in front of the gateway that the first argument names; the others are smg's.

    smg asks for a worker's model when it starts, and then more and more rarely; so it starts when there is one.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if launcher_is_gone(os.environ):
        return
    gateway = Target(address=arguments[0])
    while health_of(gateway) != SERVING:
        time.sleep(_POLL_INTERVAL_S)
    from smg.cli import main as run_smg

    run_smg(["launch", *arguments[1:]])


if __name__ == "__main__":
    main(sys.argv[1:])

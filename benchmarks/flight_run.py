"""A recorded run of real processes: many requests of several tenants, then its replay and other policies.

Owns: the load, the server's settings, and the result. Must not know: how anything is recorded or replayed.

``headway serve`` runs with the simulated backend. Its steps take as long as those of a model of eight billion
parameters on one accelerator, and its KV pool is too small for the bursts, so requests wait and are preempted. The
client is this process. By default it sends 5,000 requests in ten minutes:

    python benchmarks/flight_run.py --log flight --json benchmarks/results/flight_run.json

See then ``headway replay flight``, ``headway explain flight REQUEST`` and ``headway timeline flight``.
"""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from headway.client import AsyncClient, HeadwayError
from headway_lab.flight.replay_command import replayed
from headway_lab.flight.source import Flight
from headway_process.free_ports import free_ports
from program import count, parser_of, provenance, write_result

SERVER = {
    "--model": "demo",
    "--backend": "simulated",
    "--num-kv-blocks": "640",
    "--max-num-seqs": "48",
    "--max-num-batched-tokens": "512",
    "--log-level": "warning",
}
STEP_TIMES = ("step_base_us=11000", "per_token_us=45", "per_seq_us=40", "per_context_token_us=0.05", "verify_kv=false")
TENANTS = (("chat", "high", 0.5), ("batch", "low", 0.2), ("agents", "normal", 0.3))
BURST_VARIATION = 2.5
VOCAB_SIZE = 400
READY_S = 60.0
MOST_PROMPT_TOKENS = 600


def start_server(log: Path, port: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "headway", "serve", "--grpc-address", f"127.0.0.1:{port}", "--flight-log", str(log)]
    for flag, value in SERVER.items():
        words += [flag, value]
    for option in STEP_TIMES:
        words += ["--backend-option", option]
    return subprocess.Popen(words)


async def send(client: AsyncClient, number: int, at_s: float, rng: np.random.Generator, began: float) -> bool:
    """Send one request at its time and read its stream; return whether it was answered to the end."""
    tenant, priority, _ = TENANTS[rng.choice(len(TENANTS), p=[share for _, _, share in TENANTS])]
    num_prompt_tokens = int(np.clip(rng.lognormal(5.3, 0.7), 8, MOST_PROMPT_TOKENS))
    max_tokens = int(np.clip(rng.lognormal(4.5, 0.6), 4, 400))
    prompt = rng.integers(3, VOCAB_SIZE, size=num_prompt_tokens).tolist()
    await asyncio.sleep(max(0.0, began + at_s - time.monotonic()))
    try:
        stream = client.generate(
            prompt,
            request_id=f"r{number}",
            max_tokens=max_tokens,
            ignore_eos=True,
            priority=priority,
            tenant=tenant,
            temperature=0.0,
        )
        await stream.result()
    except HeadwayError as error:
        sys.stderr.write(f"r{number}: {error}\n")
        return False
    return True


async def load(address: str, num_requests: int, seconds: float, seed: int) -> int:
    """Send everything; return how many requests were answered."""
    shape = BURST_VARIATION**-2
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.gamma(shape, seconds / num_requests / shape, size=num_requests))
    times *= seconds / times[-1]
    async with AsyncClient(address) as client:
        await client.wait_ready(READY_S)
        began = time.monotonic()
        sends = [
            send(client, number, at_s, np.random.default_rng((seed, number)), began)
            for number, at_s in enumerate(times.tolist())
        ]
        return sum(await asyncio.gather(*sends))


def main() -> None:
    parser = parser_of(__doc__, seed=1)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--requests", type=count, default=5000)
    parser.add_argument("--seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    port = free_ports("127.0.0.1", 1)[0]
    server = start_server(arguments.log, port)
    try:
        answered = asyncio.run(load(f"127.0.0.1:{port}", arguments.requests, arguments.seconds, arguments.seed))
    finally:
        server.terminate()
        server.wait()
    print(f"{answered} of {arguments.requests} requests were answered")
    flight = Flight(str(arguments.log))
    result = replayed(flight)
    print(result.line)
    document = {
        **provenance(arguments.seed),
        "requests": arguments.requests,
        "seconds": arguments.seconds,
        "answered": answered,
        "num_records": result.num_records,
        "num_steps": result.num_steps,
        "recorded_s": result.recorded_s,
        "replayed_in_s": result.replayed_in_s,
        "x_real_time": result.speed,
        "byte_identical": not result.difference,
        "log_bytes": flight.log.num_bytes,
        "server": {**SERVER, "backend_options": list(STEP_TIMES)},
    }
    write_result(arguments.json, document)


if __name__ == "__main__":
    main()

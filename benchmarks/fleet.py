"""Several Headways behind smg: the value of routing by the prefix cache, and the effect of a killed replica on clients.

Owns: the load, which replica is killed and when, the tables and the result file. Must not know: how smg decides.

The replicas are those of ``headway serve --replicas`` with the simulated backend, whose steps take ``--step-ms`` and
``--token-us`` per token, so a prompt's cached tokens save time. All share this machine's cores.

Routing: ``--groups`` groups of prompts share a long beginning each. One replica's cache holds a part of the groups; all
replicas together hold all. Two smg, one ``cache_aware`` with KV events and one ``round_robin``, take turns in rounds of
``--requests``, at Poisson times with ``--rate`` per second. Each round has new prompts and empty caches. The hit rate
is the schedulers' own, and times to the first token are the clients'.

Killing: ``--users`` clients send one request after the other through the smg of ``serve``. All processes of the busiest
replica are killed (SIGKILL) at once; later, only an executor. Counted are the requests that were open at a kill or
began within ``--after-s`` of it.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import aiohttp
import grpc
import psutil
from matplotlib.figure import Figure
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

from headway.planning import openai_front
from headway_gateway.text.tokenization import load_text_model
from headway_lab.percentiles import percentiles
from headway_process.free_ports import free_ports
from program import count, parser_of, provenance, write_result
from served import DEMO_MODEL, figures, row_of_free_ports, served
from smg_overhead import running_smg

POLICIES = ("cache_aware", "round_robin")
MODEL_NAME = "demo"
"""What requests ask for, and the embedded model is served as."""
WHOLE = "whole"
CUT_SHORT = "cut short"
_WORDS = 400
_PORTS_PER_REPLICA = 3
_BACK_S = 90.0
_POLL_S = 0.02
_AFTER_FAILURE_S = 0.1


@dataclass
class Stream:
    """One request as its client saw it. Times are those of ``time.perf_counter``."""

    began: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    outcome: str = CUT_SHORT
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.arrivals[0] - self.began

    def longest_gap_s(self, since: float, until: float) -> float:
        """Return the longest gap before a token that overlaps this span."""
        times = [self.began, *self.arrivals]
        return max(
            (after - before for before, after in pairwise(times) if after > since and before < until), default=0.0
        )


class Client:
    """Sends completions to an smg."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def stream(self, prompt: str, max_tokens: int) -> Stream:
        """Send one request; an error becomes its outcome."""
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        stream = Stream(time.perf_counter())
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                if answer.status == 200:
                    await _follow(answer.content, stream)
                else:
                    stream.outcome = f"HTTP {answer.status}: {_message(await answer.text())}"
        except aiohttp.ClientError as error:
            stream.outcome = type(error).__name__
        stream.ended = time.perf_counter()
        return stream


async def _follow(content: aiohttp.StreamReader, stream: Stream) -> None:
    async for line in content:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            stream.outcome = f"error in the stream: {_message(line[6:].decode())}"
            return
        if event["choices"]:
            stream.arrivals.append(time.perf_counter())
            if event["choices"][0].get("finish_reason"):
                stream.outcome = WHOLE
        if usage := event.get("usage"):
            stream.prompt_tokens = usage["prompt_tokens"]
            stream.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _message(body: str) -> str:
    """Return the reason in an error's body, without its variable parts."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = json.loads(body)["error"]
        body = error.get("code") or error["message"]
    return body.strip()[:80]


class Prompts:
    """Prompts in groups, which share a beginning. Every ``part`` has new groups."""

    def __init__(self, seed: int, groups: int, shared_tokens: int, own_tokens: int) -> None:
        self._random = random.Random(seed)
        self._groups = groups
        self._shared_tokens = shared_tokens
        self._own_tokens = own_tokens
        text_model = load_text_model(DEMO_MODEL)
        known = (text_model.decode([token]).strip() for token in range(text_model.vocab_size))
        self._words = [f" {word}" for word in known if word.isalpha() and word.isascii()]
        self._words = [word for word in self._words if len(text_model.encode(word)) == 1][:_WORDS]

    def part(self, num_requests: int) -> list[str]:
        """Return this many prompts, of groups in random order."""
        shared = [self.text(self._shared_tokens) for _ in range(self._groups)]
        return [self._random.choice(shared) + self.text(self._own_tokens) for _ in range(num_requests)]

    def text(self, num_tokens: int) -> str:
        """Return random words of one token each."""
        return "".join(self._random.choices(self._words, k=num_tokens))


class Fleet:
    """The running replicas, numbered from 0: addresses, metrics and processes."""

    def __init__(self, addresses: Sequence[str], metrics_port: int, session: aiohttp.ClientSession) -> None:
        self.addresses = addresses
        self._metrics_port = metrics_port
        self._session = session

    async def scheduler_metrics(self, replica: int) -> dict[str, float]:
        """Return a scheduler's figures; none while it is away."""
        port = self._metrics_port + _PORTS_PER_REPLICA * replica
        try:
            async with self._session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                return figures(await answer.text())
        except aiohttp.ClientError:
            return {}

    async def num_running(self, replica: int) -> float:
        """Return how many requests have a row."""
        return (await self.scheduler_metrics(replica)).get("headway_num_requests_running", 0.0)

    async def num_generated(self, replica: int) -> float:
        """Return the output tokens since the scheduler's start."""
        return (await self.scheduler_metrics(replica)).get("headway_generation_tokens_total", 0.0)

    async def num_epochs(self, replica: int) -> float:
        """Return how many executors have joined since the scheduler's start."""
        return (await self.scheduler_metrics(replica)).get("headway_epochs_total", 0.0)

    async def prefix_tokens(self) -> tuple[float, float]:
        """Return the tokens found in all prefix caches, and the tokens looked for."""
        figures = [await self.scheduler_metrics(replica) for replica in range(len(self.addresses))]
        hits = sum(each["headway_prefix_cache_hits_total"] for each in figures)
        return hits, sum(each["headway_prefix_cache_queries_total"] for each in figures)

    def processes(self, replica: int, services: Sequence[str]) -> list[psutil.Process]:
        """Return these processes of a replica."""
        ends = (f"/step-{replica}", f"/ingress-{replica}")
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if words[4:5] and words[4] in services and any(word.endswith(ends) for word in words):
                    found.append(process)
        return found


async def flush(addresses: Sequence[str]) -> None:
    """Empty the prefix caches behind these gateways."""
    for address in addresses:
        async with grpc.aio.insecure_channel(address) as channel:
            answer = await vllm_engine_pb2_grpc.VllmEngineStub(channel).FlushCache(
                common_pb2.FlushCacheRequest(timeout_s=5.0)
            )
            assert answer.success, answer.message


def fleet_flags(arguments: argparse.Namespace, metrics_port: int) -> list[str]:
    options = (f"step_base_us={arguments.step_ms * 1e3}", f"per_token_us={arguments.token_us}", "verify_kv=false")
    return [
        *("--replicas", str(arguments.replicas), "--backend", "simulated", "--kv-events"),
        *("--metrics-port", str(metrics_port), "--num-kv-blocks", str(arguments.num_kv_blocks)),
        *("--swap-space-mib", "0"),
        *(word for option in options for word in ("--backend-option", option)),
    ]


@contextlib.asynccontextmanager
async def running_fleet(arguments: argparse.Namespace, *flags: str) -> AsyncIterator[Fleet]:
    metrics_port = row_of_free_ports(_PORTS_PER_REPLICA * arguments.replicas)
    connector = aiohttp.TCPConnector(limit=0)
    with served(*fleet_flags(arguments, metrics_port), *flags) as addresses:
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Fleet(addresses.split(","), metrics_port, session)


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        yield Client(session, url)


async def compare_routing(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row for each policy and round."""
    prompts = Prompts(arguments.seed, arguments.groups, arguments.shared_tokens, arguments.own_tokens)
    rows: list[dict[str, object]] = []
    async with running_fleet(arguments) as fleet, contextlib.AsyncExitStack() as stack:
        clients = {}
        for policy in POLICIES:
            url, _ = stack.enter_context(_smg(fleet.addresses, policy))
            clients[policy] = await stack.enter_async_context(connected(url))
        for round_number in range(arguments.rounds):
            order = POLICIES if round_number % 2 == 0 else POLICIES[::-1]
            for policy in order:
                await flush(fleet.addresses)
                part = prompts.part(arguments.requests)
                rows.append(
                    {"policy": policy, "round": round_number} | await one_round(fleet, clients[policy], part, arguments)
                )
                print(f"  {rows[-1]}", file=sys.stderr)
    return rows


def _smg(addresses: Sequence[str], policy: str) -> "contextlib.AbstractContextManager[tuple[str, object]]":
    return running_smg(addresses, ("--policy", policy))


async def one_round(
    fleet: Fleet, client: Client, part: Sequence[str], arguments: argparse.Namespace
) -> dict[str, object]:
    """Send the prompts at Poisson times. The first of each group is in no cache."""
    gaps = random.Random(arguments.seed)
    hits_before, queries_before = await fleet.prefix_tokens()
    tasks = []
    due = time.perf_counter()
    for prompt in part:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(client.stream(prompt, arguments.tokens)))
        due += gaps.expovariate(arguments.rate)
    streams = await asyncio.gather(*tasks)
    hits, queries = await fleet.prefix_tokens()
    outcomes = Counter(stream.outcome for stream in streams)
    assert outcomes == {WHOLE: len(part)}, outcomes
    ttft_ms = percentiles([stream.ttft_s * 1e3 for stream in streams])
    return {
        "hit_rate": round((hits - hits_before) / (queries - queries_before), 4),
        "hit_rate_of_usage": round(
            sum(stream.cached_tokens for stream in streams) / sum(stream.prompt_tokens for stream in streams), 4
        ),
        "ttft_ms_p50": round(ttft_ms.p50 or math.nan, 1),
        "ttft_ms_p99": round(ttft_ms.p99 or math.nan, 1),
    }


async def kill_replicas(arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    (port, smg_metrics_port) = free_ports("127.0.0.1", 2)
    address = f"127.0.0.1:{port}"
    flags = ("--openai-address", address, f"--smg-flags=--prometheus-port,{smg_metrics_port}")
    kills = {"whole replica": ("gateway", "scheduler", "executor"), "only an executor": ("executor",)}
    rows = {}
    async with running_fleet(arguments, *flags) as fleet, connected(f"http://{address}") as client:
        await openai_front.wait_until_serving(address, arguments.replicas)
        for what, services in kills.items():
            rows[what] = await one_kill(fleet, client, services, arguments, smg_metrics_port)
            print(f"  {what}: {rows[what]}", file=sys.stderr)
    return rows


async def one_kill(
    fleet: Fleet,
    client: Client,
    services: Sequence[str],
    arguments: argparse.Namespace,
    smg_metrics_port: int,
) -> dict[str, object]:
    """Load, kill, load; return what happened to the requests around the kill."""
    prompts = Prompts(arguments.seed, arguments.groups, arguments.shared_tokens, arguments.own_tokens)
    endless = itertools.cycle(prompts.part(arguments.requests))
    streams: list[Stream] = []
    users = [asyncio.create_task(_user(client, endless, arguments.tokens, streams)) for _ in range(arguments.users)]
    try:
        await asyncio.sleep(arguments.before_s)
        retries_before = await _retries(smg_metrics_port)
        running = [await fleet.num_running(replica) for replica in range(arguments.replicas)]
        replica = running.index(max(running))
        victims = fleet.processes(replica, services)
        assert len(victims) == len(services), victims
        # A scheduler that is started again counts from 0.
        epochs = 0.0 if "scheduler" in services else await fleet.num_epochs(replica)
        killed = time.perf_counter()
        for victim in victims:
            victim.kill()
        back_s = await _seconds_until_it_generates(fleet, replica, epochs, killed)
        await asyncio.sleep(max(0.0, killed + arguments.after_s - time.perf_counter()))
        retries = await _retries(smg_metrics_port) - retries_before
    finally:
        for user in users:
            user.cancel()
        await asyncio.gather(*users, return_exceptions=True)
    horizon = killed + arguments.after_s
    seen = [stream for stream in streams if stream.ended > killed and stream.began < horizon]
    open_at_kill = [stream for stream in seen if stream.began < killed]
    later = [stream for stream in seen if stream.began >= killed]
    usual = [after - before for stream in streams for before, after in pairwise(stream.arrivals) if after < killed]
    whole = [stream for stream in seen if stream.outcome == WHOLE]
    return {
        "running_on_replicas": running,
        "killed": replica,
        "open_at_kill": dict(Counter(stream.outcome for stream in open_at_kill)),
        "begun_after": dict(Counter(stream.outcome for stream in later)),
        "retried_by_smg": retries,
        "last_failure_s": round(max((s.ended - killed for s in seen if s.outcome != WHOLE), default=0.0), 2),
        "usual_gap_ms": round(statistics.median(usual) * 1e3, 1),
        "longest_gap_of_whole_streams_s": round(
            max((stream.longest_gap_s(killed, horizon) for stream in whole), default=0.0), 2
        ),
        "ttft_ms_p99_after": round(percentiles([s.ttft_s * 1e3 for s in later if s.arrivals]).p99 or math.nan, 1),
        "generates_again_after_s": back_s,
    }


async def _user(client: Client, prompts: Iterator[str], max_tokens: int, streams: list[Stream]) -> None:
    """Send one request after the other, with a pause after a failed one."""
    for prompt in prompts:
        streams.append(await client.stream(prompt, max_tokens))
        if streams[-1].outcome != WHOLE:
            await asyncio.sleep(_AFTER_FAILURE_S)


async def _seconds_until_it_generates(fleet: Fleet, replica: int, epochs: float, since: float) -> float | None:
    """Return the seconds until a replica has a later executor and a token of it; None if that takes too long."""
    generated = float("inf")
    while time.perf_counter() < since + _BACK_S:
        if generated == float("inf") and await fleet.num_epochs(replica) > epochs:
            generated = await fleet.num_generated(replica)
        if await fleet.num_generated(replica) > generated:
            return round(time.perf_counter() - since, 2)
        await asyncio.sleep(_POLL_S)
    return None


async def _retries(smg_metrics_port: int) -> float:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{smg_metrics_port}/metrics") as answer,
    ):
        return figures(await answer.text()).get("smg_worker_retries_total", 0.0)


def summary(rows: Sequence[dict[str, object]]) -> dict[str, dict[str, float]]:
    """Return the median of the rounds, by policy."""
    names = ("hit_rate", "ttft_ms_p50", "ttft_ms_p99")
    return {policy: {name: statistics.median(_column(rows, policy, name)) for name in names} for policy in POLICIES}


def _column(rows: Sequence[dict[str, object]], policy: str, name: str) -> list[float]:
    return [float(str(row[name])) for row in rows if row["policy"] == policy]


def table(routing: dict[str, dict[str, float]], kills: dict[str, dict[str, object]]) -> str:
    lines = [f"{'policy':<14}{'hit rate':>10}{'TTFT p50 ms':>14}{'TTFT p99 ms':>14}"]
    lines += [
        f"{policy:<14}{row['hit_rate']:>10.1%}{row['ttft_ms_p50']:>14.1f}{row['ttft_ms_p99']:>14.1f}"
        for policy, row in routing.items()
    ]
    for what, seen in kills.items():
        lines += ["", f"killed: {what}", *(f"  {name:<34}{value}" for name, value in seen.items())]
    return "\n".join(lines)


def draw(path: Path, rows: Sequence[dict[str, object]]) -> None:
    picture = Figure(figsize=(9, 3.2), layout="constrained")
    panels = (("hit_rate", "prefix hit rate"), ("ttft_ms_p50", "TTFT p50, ms"), ("ttft_ms_p99", "TTFT p99, ms"))
    for axes, (name, title) in zip(picture.subplots(1, len(panels)), panels, strict=True):
        for position, policy in enumerate(POLICIES):
            values = _column(rows, policy, name)
            axes.bar(position, statistics.median(values), width=0.6)
            axes.plot([position] * len(values), values, "k.", markersize=5)
        axes.set_xticks(range(len(POLICIES)), POLICIES)
        axes.set_title(title)
        axes.set_ylim(bottom=0)
    picture.savefig(path, dpi=110)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    results = Path(__file__).parent / "results"
    parser.add_argument("--replicas", type=count, default=3, help="complete Headways (default: 3)")
    parser.add_argument("--num-kv-blocks", type=count, default=768, help="blocks of 16 tokens of each (default: 768)")
    parser.add_argument("--step-ms", type=float, default=8.0, help="time of a step (default: 8)")
    parser.add_argument("--token-us", type=float, default=100.0, help="and for each of its tokens (default: 100)")
    parser.add_argument("--groups", type=count, default=24, help="groups of prompts (default: 24)")
    parser.add_argument("--shared-tokens", type=count, default=768, help="tokens that a group shares (default: 768)")
    parser.add_argument("--own-tokens", type=count, default=64, help="tokens of its own of each prompt (default: 64)")
    parser.add_argument("--tokens", type=count, default=48, help="tokens of each answer (default: 48)")
    parser.add_argument("--requests", type=count, default=240, help="of each round (default: 240)")
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second (default: 12)")
    parser.add_argument("--rounds", type=count, default=3, help="of each policy (default: 3)")
    parser.add_argument("--no-kills", action="store_true", help="compare the routing only")
    parser.add_argument("--users", type=count, default=18, help="clients while a replica is killed (default: 18)")
    parser.add_argument("--before-s", type=float, default=8.0, help="seconds of load before a kill (default: 8)")
    parser.add_argument("--after-s", type=float, default=20.0, help="and after it (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and times (default: 0)")
    parser.add_argument("--json", type=Path, default=results / "fleet.json")
    parser.add_argument("--png", type=Path, default=results / "fleet.png")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    arguments = _arguments(words)
    rows = asyncio.run(compare_routing(arguments))
    kills = {} if arguments.no_kills else asyncio.run(kill_replicas(arguments))
    routing = summary(rows)
    print(table(routing, kills))
    settings = {name: value for name, value in vars(arguments).items() if name not in {"json", "png", "seed"}}
    result = {
        **provenance(seed=arguments.seed),
        "settings": settings,
        "routing": routing,
        "rounds": rows,
        "kills": kills,
    }
    write_result(arguments.json, result)
    draw(arguments.png, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())

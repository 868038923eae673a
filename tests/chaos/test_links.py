"""Links that damage, delay, break, or are spoken to by strangers; and processes that are far from one another.

Owns: the rows of the table about what is between the processes. Must not know: how the product recovers.
"""

import asyncio
import contextlib
import secrets
import socket
import statistics
import struct
import time

import pytest
import zmq
import zmq.auth

from chaos.harness import (
    Deployment,
    Oracle,
    Traffic,
    assert_equal_to_undisturbed,
    deployment,
    jobs,
    until_quiet,
)
from chaos.namespaces import CLIENT, Hosts, hosts, why_not
from chaos.proxy import FAULTS, FrameProxy
from e2e.running_server import free_port
from headway.client import AsyncClient
from headway.commands.keys import make_keys

SIMULATED = ("--backend", "simulated", "--backend-option", "step_base_us=20000")
needs_namespaces = pytest.mark.skipif(bool(why_not()), reason=why_not())
STEP_PORT, INGRESS_PORT, GRPC_PORT = 6001, 6002, 6003


# ----------------------------------------------------------------------------------------------------- damaged frames


# Of each fault, the share of frames. A link that is opened again brings a frame for each stream, and each has to arrive:
# with 64 streams and one frame in twenty harmed, hardly any link would open.
HARM = [
    pytest.param(8, 1, 0.01, marks=pytest.mark.chaos_quick),
    pytest.param(16, 4, 0.01, marks=pytest.mark.chaos_full),
    pytest.param(64, 4, 0.002, marks=pytest.mark.chaos_full),
]


@pytest.mark.parametrize(("num_streams", "rounds", "share"), HARM)
async def test_frames_that_are_harmed(num_streams, rounds, share, row, rng):
    row.about(
        f"a proxy on both links drops, duplicates, swaps, delays and corrupts {share:.1%} of the frames each, "
        f"{num_streams} streams at once",
        "equal; every corruption counted",
    )
    oracle, seed = Oracle(), rng.randrange(1 << 32)
    async with deployment(executor=SIMULATED) as processes:
        behind = {kind: f"ipc://{processes.directory}/{kind}-proxy" for kind in ("step", "ingress")}
        with (
            FrameProxy(behind["step"], f"ipc://{processes.directory}/step", seed=seed, share=share) as step,
            FrameProxy(behind["ingress"], f"ipc://{processes.directory}/ingress", seed=seed, share=share) as ingress,
        ):
            processes.addresses["executor"] = ["--step-address", behind["step"]]
            processes.addresses["gateway"] = ["--ingress-address", behind["ingress"]]
            client = await processes.serve()
            async with client:
                done, started = [], time.monotonic()
                for _ in range(rounds):
                    streams = jobs(num_streams, rng, output=(60, 160))
                    await asyncio.gather(*(stream.follow(client) for stream in streams))
                    done += streams
                took = time.monotonic() - started
                step.share = ingress.share = 0.0
                await until_quiet(client)
            await asyncio.sleep(0.3)
            told = processes.stop()
    assert set(told.values()) == {0}
    num_tokens = assert_equal_to_undisturbed(done, oracle)
    figures = {name: process.figures("stopped") for name, process in processes.processes.items()}
    counted = {
        ("step", "down"): figures["executor"]["damaged_frames"],
        ("step", "up"): figures["scheduler"]["damaged_step_frames"],
        ("ingress", "up"): figures["scheduler"]["damaged_ingress_frames"],
        ("ingress", "down"): figures["gateway"]["damaged_frames"],
    }
    proxies = {"step": step, "ingress": ingress}
    corrupted = {(link, way): proxies[link].counts[way, "corrupt"] for link, way in counted}
    harm = {fault: step.total(fault) + ingress.total(fault) for fault in FAULTS}
    row.note(f"{len(done)} streams, {num_tokens} tokens equal in {took:.0f} s")
    row.note(
        f"{step.total('frames') + ingress.total('frames')} frames: " + ", ".join(f"{n} {f}" for f, n in harm.items())
    )
    row.note(f"{sum(counted.values())} of {sum(corrupted.values())} corruptions counted")
    assert harm["corrupt"] > 0
    assert counted == corrupted


# -------------------------------------------------------------------------------------------------------- other hosts


class FarApart:
    """A deployment on namespaces with keys; the client is this process."""

    def __init__(self, network: Hosts, processes: Deployment, placed: dict[str, str]) -> None:
        make_keys(processes.directory / "keys")
        at = network.address_of
        scheduler = at[placed["scheduler"]]
        step, ingress = f"tcp://{scheduler}:{STEP_PORT}", f"tcp://{scheduler}:{INGRESS_PORT}"
        processes.addresses = {
            "scheduler": ["--step-address", step, "--ingress-address", ingress],
            "executor": ["--step-address", step],
            "gateway": ["--ingress-address", ingress, "--allow-insecure-bind"],
        }
        for kind, host in placed.items():
            processes.addresses[kind] += ["--curve-keys", str(processes.directory / "keys" / kind)]
            processes.prefixes[kind] = network.prefix(host)
        processes.grpc_addresses["gateway"] = f"{at[placed['gateway']]}:{GRPC_PORT}"


@contextlib.asynccontextmanager
async def far_apart(network: Hosts, placed: dict[str, str], step_us: int):
    options = ("--backend", "simulated", "--backend-option", f"step_base_us={step_us}")
    async with deployment(executor=options) as processes:
        FarApart(network, processes, placed)
        async with await processes.serve() as client:
            yield processes, client
            await until_quiet(client)
        assert set(processes.stop().values()) == {0}


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    """The gateway is asked directly, whatever proxy this machine uses."""
    monkeypatch.setenv("no_grpc_proxy", "10.0.0.0/8,127.0.0.1")


NUM_ROUNDS = 3
"""Of which the best counts: whatever else the machine does only adds."""
ALONE = {"scheduler": "a", "executor": "b", "gateway": "c"}
TWO_HOSTS = {"scheduler": "a", "executor": "b", "gateway": "a"}


async def _measured(network, placed, step_us, delays_ms, row, rng) -> list[tuple[float, float]]:
    oracle, found = Oracle(), []
    async with far_apart(network, placed, step_us) as (_, client):
        for delay_ms in delays_ms:
            network.delay("*", "*", delay_ms)
            network.delay(placed["gateway"], CLIENT, 0)
            await asyncio.sleep(0.3)
            firsts_ms, gaps_ms = [], []
            for _ in range(NUM_ROUNDS):
                streams = jobs(8, rng, prompt=(8, 24), output=(40, 40))
                await asyncio.gather(*(stream.follow(client) for stream in streams))
                assert_equal_to_undisturbed(streams, oracle)
                firsts_ms.append(statistics.median(stream.times[0] - stream.opened_at for stream in streams) * 1e3)
                gaps_ms.append(statistics.median((stream.times[-1] - stream.times[0]) / 39 for stream in streams) * 1e3)
            first_ms, gap_ms = min(firsts_ms), min(gaps_ms)
            found.append((first_ms, gap_ms))
            row.note(f"{delay_ms:g} ms one way: first token {first_ms:.1f} ms, then every {gap_ms:.1f} ms")
        network.delay("*", "*", 0)
    return found


@needs_namespaces
@pytest.mark.parametrize(
    ("placed", "names"),
    [pytest.param(TWO_HOSTS, "ab", id="two", marks=pytest.mark.chaos_full), pytest.param(ALONE, "abc", id="three")],
)
async def test_hosts_with_latency_between_them(placed, names, row, rng):
    row.about(
        f"scheduler, executor{'' if names == 'ab' else ', gateway'} on {len(names)} hosts (namespaces), CURVE, 10 ms steps",
        "streams equal; the first token waits for the way, the others do not while it is shorter than a step in flight",
    )
    with hosts(*names) as network:
        near, far, _ = await _measured(network, placed, 10_000, (0, 2, 10), row, rng)
    # Two steps are in flight, so 4 ms there and back fit behind a step of 10 ms.
    assert far[1] <= near[1] * 1.25 + 1
    assert far[0] <= near[0] + 40


@needs_namespaces
@pytest.mark.parametrize("cut_s", [0.5, pytest.param(5.0, marks=pytest.mark.chaos_full)])
@pytest.mark.parametrize(
    "between", ["executor", pytest.param("gateway", marks=pytest.mark.chaos_full)], ids=lambda kind: kind
)
async def test_partitions(cut_s, between, row, rng):
    row.about(
        f"no packet between scheduler and {between} for {cut_s:g} s (network namespaces)",
        "healed within 2 s" if cut_s < 1 else "noticed within 1 s, healed within 2 s",
    )
    oracle = Oracle()
    with hosts(*"abc") as network:
        async with far_apart(network, ALONE, 20_000) as (processes, client):
            async with Traffic(client, 16, rng, output=(60, 120)) as traffic:
                network.cut(ALONE["scheduler"], ALONE[between])
                cut_at = time.monotonic()
                noticed_at = await _noticed(processes, client, between, cut_at, cut_at + cut_s)
                network.heal(ALONE["scheduler"], ALONE[between])
                healed_s = await traffic.recovered(time.monotonic())
            row.note(traffic.assert_exact(oracle))
        row.note("too short to be noticed" if noticed_at is None else f"noticed after {noticed_at - cut_at:.2f} s")
        row.note(f"next token on every stream {healed_s:.2f} s after healing")
    assert healed_s <= 2.0
    if cut_s > 1.0:
        assert noticed_at is not None
        assert noticed_at - cut_at <= 1.0


async def _noticed(
    processes: Deployment, client: AsyncClient, between: str, cut_at: float, until_when: float
) -> float | None:
    """When operators could first read of it: the executor's in the status, the gateway's in its health and its log."""
    noticed_at = None
    while time.monotonic() < until_when:
        if between == "gateway":
            lines = list(processes.processes["gateway"].lines)
            noticed_at = noticed_at or next((when for when, line in lines if when > cut_at and "hailing" in line), None)
        elif (await client.status()).executor_state in {"silent", "absent"}:  # absent: the transport noticed it first
            noticed_at = noticed_at or time.monotonic()
        await asyncio.sleep(0.02)
    return noticed_at


# ---------------------------------------------------------------------------------------------------------- strangers


def _wrong_key(port: int, keys) -> zmq.Socket:
    public, secret = zmq.curve_keypair()
    server, _ = zmq.auth.load_certificate(keys / "scheduler" / "scheduler.key")
    stranger = zmq.Context.instance().socket(zmq.DEALER)
    stranger.linger = 0
    stranger.curve_serverkey, stranger.curve_publickey, stranger.curve_secretkey = server, public, secret
    stranger.connect(f"tcp://127.0.0.1:{port}")
    stranger.send(secrets.token_bytes(100))
    return stranger


def _huge_frame(port: int) -> int:
    """Greet as ZeroMQ does, then announce a frame of 1 GB and send what is taken of it; bytes taken."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)
    taken = 0
    with socket.create_connection(("127.0.0.1", port), timeout=2) as connection, contextlib.suppress(OSError):
        connection.sendall(greeting + b"\x02" + struct.pack(">Q", 1 << 30))
        for _ in range(64):
            taken += connection.send(bytes(1 << 20))
    return taken


def _scan(ports: list[int]) -> int:
    probes = (b"", b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(300), b"\xff" * 64)
    tried = 0
    for port in ports:
        for probe in probes:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                connection.sendall(probe)
                tried += 1
    return tried


@pytest.mark.parametrize(
    "counted",
    [
        pytest.param(False, id="harmless", marks=pytest.mark.chaos_full),
        pytest.param(
            True,
            id="counted",
            marks=pytest.mark.chaos_full,
        ),
    ],
)
async def test_strangers(counted, row, rng):
    promise = "they are counted in the scheduler's log" if counted else "nobody harmed"
    row.about("wrong keys, a frame of 1 GB, a port scan, under 16 streams", promise)
    oracle, step, ingress = Oracle(), free_port(), free_port()
    async with deployment(executor=SIMULATED) as processes:
        keys = processes.directory / "keys"
        make_keys(keys)
        addresses = {"--step-address": f"tcp://127.0.0.1:{step}", "--ingress-address": f"tcp://127.0.0.1:{ingress}"}
        for kind, names in (
            ("scheduler", list(addresses)),
            ("executor", ["--step-address"]),
            ("gateway", ["--ingress-address"]),
        ):
            processes.addresses[kind] = [word for name in names for word in (name, addresses[name])]
            processes.addresses[kind] += ["--curve-keys", str(keys / kind)]
        async with await processes.serve() as client:
            scheduler = processes.processes["scheduler"]
            async with Traffic(client, 16, rng) as traffic:
                before = scheduler.rss_mib()
                started = time.monotonic()
                strangers = [_wrong_key(port, keys) for port in (step, ingress) for _ in range(5)]
                taken = [await asyncio.to_thread(_huge_frame, port) for port in (step, ingress)]
                grpc_port = int(processes.grpc_addresses["gateway"].rpartition(":")[2])
                scanned = await asyncio.to_thread(_scan, [step, ingress, grpc_port])
                await asyncio.sleep(1)
                worst_gap = max(gap for stream in traffic.live.values() for gap in stream.gaps() or [0.0])
                for stranger in strangers:
                    stranger.close()
                grown = scheduler.rss_mib() - before
                took = time.monotonic() - started
            row.note(traffic.assert_exact(oracle))
            row.note(
                f"{len(strangers)} wrong keys, {sum(taken) >> 20} MiB of 2 GiB taken, {scanned} probes in {took:.1f} s"
            )
            row.note(f"scheduler {grown:+.1f} MiB; longest gap {worst_gap * 1e3:.0f} ms")
            await until_quiet(client)
        assert set(processes.stop().values()) == {0}
    assert grown < 20
    assert worst_gap < 1.0
    if counted:
        turned_away = [line for _, line in scheduler.lines if "turned away" in line]
        row.note(f"{len(turned_away)} lines on it")
        assert turned_away

"""The endpoint for Prometheus: who may read it, what happens to those who may not or who never ask."""

import contextlib
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway_process import metrics_endpoint
from headway_process import snapshots as snapshots_module
from headway_process.addresses import check_metrics_address
from headway_process.histogram import Histogram
from headway_process.metric_families import MetricFamilies
from headway_process.metrics_endpoint import MAX_READERS, MetricsEndpoint
from headway_process.snapshots import Snapshots

TOKEN = "0123456789abcdef-token"


@contextmanager
def endpoint(collect=list, token_file="", address="127.0.0.1:0") -> Iterator[MetricsEndpoint]:
    interval_s = sys.getswitchinterval()
    served = MetricsEndpoint(address, str(token_file), collect)
    try:
        yield served
    finally:
        served.close()
        sys.setswitchinterval(interval_s)


def read(served: MetricsEndpoint, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{served.port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def some_families():
    families = MetricFamilies(model_name="demo")
    families.gauge("headway_a", "A gauge.", 1.5)
    families.counter("headway_b", "A counter.", {("x", 'quote" and \\'): 3}, "one", "two")
    histogram = Histogram((0.1, 1.0))
    histogram.observe(0.5, 2)
    histogram.observe(7.0)
    families.histogram("headway_c_seconds", "A histogram.", histogram.snapshot())
    return families.families


def test_what_is_told_reads_as_prometheus_reads_it():
    with endpoint(some_families) as served:
        status, text = read(served)
    assert status == 200
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["headway_a", "demo"] == 1.5
    assert samples["headway_b_total", "demo", "x", 'quote" and \\'] == 3
    assert samples["headway_c_seconds_bucket", "0.1", "demo"] == 0
    assert samples["headway_c_seconds_bucket", "1.0", "demo"] == 2
    assert samples["headway_c_seconds_bucket", "+Inf", "demo"] == samples["headway_c_seconds_count", "demo"] == 3
    assert samples["headway_c_seconds_sum", "demo"] == 8.0
    assert ("process_resident_memory_bytes",) in samples


def test_other_paths_are_not_found():
    with endpoint() as served:
        assert read(served, "/")[0] == 404


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        (f"Bearer {TOKEN}", 200),
        ("Bearer another-token-0123456789", 200),
        (f"bearer{TOKEN}", 401),
        (f"Basic {TOKEN}", 401),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Bearer \xe9", 401),
    ],
)
def test_only_who_carries_a_token_reads(tmp_path, header, status):
    token_file = tmp_path / "tokens"
    token_file.write_text(f"{TOKEN}\n\nanother-token-0123456789\n")
    asked = []
    with endpoint(lambda: asked.append(1) or some_families(), token_file) as served:
        answered, text = read(served, **({} if header is None else {"Authorization": header}))
    assert answered == status
    assert ("headway_a" in text) == (status == 200) == bool(asked)


@pytest.mark.parametrize("content", ["", "\n", "short\n", f"{TOKEN}\nshort\n", "caf\xe9 0123456789abcdef\n", TOKEN])
def test_a_token_file_that_guards_nothing_is_refused(tmp_path, content):
    token_file = tmp_path / "tokens"
    token_file.write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match="metrics_token_file: "), endpoint(token_file=token_file):
        pass


def test_an_address_in_use_is_one_line():
    with endpoint() as served, pytest.raises(ValueError, match="metrics_address: cannot listen on"):
        MetricsEndpoint(f"127.0.0.1:{served.port}", "", list)


@pytest.mark.parametrize(
    ("address", "has_token", "problem"),
    [
        ("", False, None),
        ("127.0.0.1:0", False, None),
        ("[::1]:9464", False, None),
        ("localhost:9464", False, None),
        ("0.0.0.0:9464", False, "a loopback address, or any address together with metrics_token_file"),
        ("0.0.0.0:9464", True, None),
        ("host.example:9464", False, "loopback"),
        ("127.0.0.1", False, "HOST:PORT"),
        (":9464", True, "HOST:PORT"),
        ("127.0.0.1:65536", False, "0 to 65535"),
        ("127.0.0.1:nine", False, "HOST:PORT"),
    ],
)
def test_addresses(tmp_path, address, has_token, problem):
    token_file = tmp_path / "tokens"
    token_file.write_text(TOKEN)
    if problem is None:
        check_metrics_address(address, str(token_file) if has_token else "")
        return
    with pytest.raises(ValueError, match=r"^metrics_address: ") as raised:
        check_metrics_address(address, str(token_file) if has_token else "")
    assert problem in str(raised.value)


def test_a_token_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^metrics_token_file: .* allowed: a file that exists"):
        check_metrics_address("127.0.0.1:0", str(tmp_path / "none"))


def test_several_ports_must_fit():
    with pytest.raises(ValueError, match="0 to 65532"):
        check_metrics_address("127.0.0.1:65533", "", num_ports=4)


def test_a_process_that_does_not_come_by_is_unavailable(monkeypatch):
    monkeypatch.setattr(snapshots_module, "ANSWER_TIMEOUT_S", 0.05)
    snapshots: Snapshots[int] = Snapshots()
    with endpoint(lambda: [snapshots.ask()][1:]) as served:
        status, text = read(served)
        assert (status, text) == (503, "the process does not answer\n")
        # It comes by again, and finds nobody waiting until somebody asks.
        assert not snapshots.wanted
        snapshots.wake = lambda: snapshots.give(1)
        assert read(served)[0] == 200


def test_each_who_asks_gets_an_answer_of_its_own():
    snapshots: Snapshots[int] = Snapshots()
    given = iter(range(1000))
    stop = threading.Event()

    def loop():
        while not stop.is_set():
            if snapshots.wanted:
                snapshots.give(next(given))
            time.sleep(0.0005)

    thread = threading.Thread(target=loop)
    thread.start()
    answers: list[int] = []
    asking = [threading.Thread(target=lambda: answers.append(snapshots.ask())) for _ in range(20)]
    for one in asking:
        one.start()
    for one in asking:
        one.join()
    stop.set()
    thread.join()
    assert sorted(answers) == list(range(20))


@pytest.mark.parametrize("name", ["silent", "a byte now and then"])
def test_those_who_never_ask_do_not_keep_others_out_for_long(monkeypatch, name):
    if name == "silent":
        monkeypatch.setattr(metrics_endpoint._Handler, "timeout", 0.3)
    else:
        monkeypatch.setattr(metrics_endpoint, "_MOST_READING_S", 0.3)
    with endpoint(some_families) as served:
        strangers = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(3 * MAX_READERS)]
        try:
            deadline = time.monotonic() + 4  # less than the other bound
            status = 0
            while status != 200 and time.monotonic() < deadline:
                try:
                    status, _ = read(served)
                except OSError:
                    time.sleep(0.05)
                    for connection in strangers if name != "silent" else ():
                        with contextlib.suppress(OSError):
                            connection.send(b"G")
            assert status == 200
        finally:
            for connection in strangers:
                connection.close()

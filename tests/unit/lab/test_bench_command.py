"""The command line of ``headway bench``: what it refuses, and how it says so."""

import sys

import pytest

from headway.__main__ import main
from headway_lab.bench import command, session
from headway_lab.bench.options import BenchOptions
from headway_process.installation import install_advice


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--url", "ftp://x"), "--url: 'ftp://x' is not allowed; allowed: http://HOST:PORT or https://HOST:PORT"),
        (("--url", "http://x:abc/v1"), "--url: 'http://x:abc/v1' is not allowed; allowed: http://HOST:PORT"),
        (("--users", "4", "--processes", "5"), "--processes: 5 is not allowed; allowed: at most users, 4"),
        (("--body", "a={"), "--body: 'a={' is not allowed"),
        (("--require-rate", "0.9"), "--require-rate: 0.9 is not allowed with closed arrivals"),
        (("--rate", "0"), "--rate: '0' is not allowed; allowed: a number, above 0"),
        (("--rate", "9"), "--rate: is not allowed with closed arrivals"),
        (("--prompt-tokens", "x"), "--prompt-tokens: 'x' is not allowed"),
        (("--warmup-requests", "512"), "--warmup-requests: 512 is not allowed"),
        (("--json", "/nowhere/at/all.json"), "--json: '/nowhere/at/all.json' is not allowed"),
        (("--png", "a.svg"), "--png: 'a.svg' is not allowed; allowed: a name that ends in .png, or without an ending"),
        (("--client-certificate", "a"), "--client-certificate: is not allowed alone; allowed: with --client-key"),
        (("--token-file", "/nowhere"), "--token-file: cannot read '/nowhere'"),
        (("--trace", "/nowhere"), "--trace: cannot read '/nowhere'"),
        (("capacity",), "capacity wants an objective"),
        (("capacity", "--arrivals", "closed", "--ttft-slo-ms", "9"), "--arrivals: is not allowed for capacity"),
        (("speed",), "'speed' is not allowed; allowed: load, capacity"),
        (("--ratte", "3"), "unknown flag --ratte; did you mean --rate?"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(flags, message, capsys, monkeypatch):
    monkeypatch.setattr(session, "make_target", _target_that_opens(session.make_target))
    try:
        code = main(["bench", *flags])
    except SystemExit as exit_of_parser:
        code = exit_of_parser.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith(f"headway bench: {message}")
    assert error.count("\n") == 1


def _target_that_opens(make_target):
    """A load is drawn, or its trace read, only when the server has told its context."""

    class Target:
        async def open(self):
            from headway_lab.bench.target import TargetInfo

            return TargetInfo(model="m", address="a", runs_on="r", context_length=4096, counted_by="c")

        async def close(self):
            pass

    def make(options):
        make_target(options)
        return Target()

    return make


def test_no_server_is_one_line_and_exit_1(capsys, unused_tcp_port):
    assert main(["bench", "--address", f"127.0.0.1:{unused_tcp_port}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"headway bench: 127.0.0.1:{unused_tcp_port}: UNAVAILABLE: ")
    assert error.count("\n") == 1


def test_no_server_is_one_line_for_several_processes_too(capsys, unused_tcp_port):
    assert main(["bench", "--address", f"127.0.0.1:{unused_tcp_port}", "--processes", "2"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_library_names_its_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "headway_lab.bench.openai_target", raising=False)
    assert main(["bench", "--url", "http://127.0.0.1:1/v1"]) == 2
    assert capsys.readouterr().err == f"headway bench: this host lacks aiohttp; {install_advice('bench')}\n"


def test_what_is_tried_for_a_capacity_has_warm_up_and_other_requests_each_time():
    options = BenchOptions(arrivals="poisson", probe_requests=100, probe_s=10.0, seed=5)
    slow, fast, again = (command.at_rate(options, rate, look) for rate, look in ((2.0, 0), (50.0, 0), (50.0, 1)))
    assert (slow.num_requests, slow.warmup_requests) == (110, 10)
    assert (fast.num_requests, fast.warmup_requests) == (550, 50)
    assert command.at_rate(options, 50.0, 2, times=4).num_requests == 2200
    assert again.seed != fast.seed

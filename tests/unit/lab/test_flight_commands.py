"""The commands on flight logs: results, exit codes, pictures, traces, other policies."""

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import grpc
import msgspec
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from flight_logs import MemoryLog, RecordedExactCore, recorder_into
from headway.__main__ import main
from headway.client import NotFoundError, ServerError
from headway_lab.flight import fetched, live
from headway_lab.flight.cells import Cell, Kind, StepCollector, StepRange, TimelineStep, Transfer
from headway_lab.flight.perfetto import chrome_trace
from headway_lab.flight.picture import figure_of, fitting, short_names
from headway_lab.flight.recording import Recording
from headway_proto.admin_pb2 import ExplainResponse, ReadFlightLogResponse
from headway_scheduler.core.state.limits import ExecutorCapacity, SchedulerLimits
from headway_scheduler.flight.records import Turn
from headway_scheduler.flight.replay import Divergence, Replay

CAPACITY = ExecutorCapacity(num_blocks=20, block_size=4, max_model_len=64, vocab_size=13, max_num_rows=4)
LIMITS = SchedulerLimits(max_num_batched_tokens=16, max_num_seqs=4, max_steps_in_flight=2, reserve="none")


@pytest.fixture(scope="module")
def run() -> RecordedExactCore:
    """A dozen requests of two tenants, some of which wait and are preempted."""
    run = RecordedExactCore(LIMITS, CAPACITY)
    for number in range(12):
        run.add([number] * (3 + number), 20, tenant="ab"[number % 2], priority=1 + number % 4)
        go_on(run, 2)
    while run.live:
        go_on(run, 1)
    run.recorder.flush(run.now, None, is_final=True)
    return run


def go_on(run: RecordedExactCore, beats: int) -> None:
    for _ in range(beats):
        run.now += 0.002
        run.schedule()
        run.now += 0.008
        if run.num_in_flight:
            run.answer()


@pytest.fixture
def log(run: RecordedExactCore, tmp_path: Path) -> str:
    return str(run.log.write_to(tmp_path / "log"))


def test_a_replay_says_what_it_found(run: RecordedExactCore, log: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main(["replay", log, "--json", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    assert f"{run.core.counters.num_steps:,} steps, 12 requests of" in said
    assert said.endswith(": byte-identical\n")
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["replay"]["num_steps"] == run.core.counters.num_steps
    assert told["limits"]["max_num_batched_tokens"] == 16


def test_the_first_difference_is_told_and_the_exit_code_is_1(
    run: RecordedExactCore, tmp_path: Path, capsys: pytest.CaptureFixture
):
    tampered = MemoryLog()
    recorder_into(tampered, msgspec.structs.replace(LIMITS, max_num_batched_tokens=15))
    tampered.append(msgspec.msgpack.encode(run.log.records))
    assert main(["replay", str(tampered.write_to(tmp_path / "log"))]) == 1
    told = capsys.readouterr()
    assert "DIFFERENT: record " in told.out
    assert "step " in told.out
    assert "recorded by headway 0, replayed by" in told.err


def test_what_differs_in_a_short_step_is_named(run: RecordedExactCore):
    records = run.log.records
    place = next(
        place
        for place, record in enumerate(records)
        if isinstance(record, Turn) and record.decisions and record.decisions[0].message and place > 100
    )
    turn = records[place]
    assert isinstance(turn, Turn)
    other = next(
        record.decisions[0]
        for record in records[place + 1 :]
        if isinstance(record, Turn) and record.decisions and record.decisions[0].message
    )
    records[place] = msgspec.structs.replace(turn, decisions=(other, *turn.decisions[1:]))
    with pytest.raises(Divergence, match=r"step is \d+, was \d+"):
        list(Replay(LIMITS).run(records))


def test_the_same_arrivals_under_other_policies(log: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    words = ["--policy", "order=priority,batching=orca", "--policy", "order=fair", "--json", str(tmp_path / "out.json")]
    assert main(["replay", log, *words]) == 0
    said = capsys.readouterr().out
    for row in ("recorded ", "simulated as recorded ", "order=priority, batching=orca ", "order=fair "):
        assert f"\n{row}" in said
    cases = {case["label"]: case for case in json.loads((tmp_path / "out.json").read_text())["cases"]}
    asked = [request["num_output_tokens"] for request in cases["recorded"]["requests"]]
    for case in cases.values():
        assert [request["num_output_tokens"] for request in case["requests"]] == asked
        assert case["totals"]["num_finished"] == 12
    assert cases["order=fair"]["limits"]["order"] == "fair"
    recorded, simulated = (cases[label]["totals"]["num_steps"] for label in ("recorded", "simulated as recorded"))
    assert simulated == pytest.approx(recorded, rel=0.3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replay", "LOG", "--policy", "order=nobody"], "--policy order: 'nobody' is not allowed"),
        (["replay", "LOG", "--policy", "orders=fair"], "did you mean order?"),
        (["replay", "LOG/none"], "No such file or directory"),
        (["explain", "LOG/none", "1"], "No such file or directory"),
        (["timeline", "LOG"], "--png or --perfetto is required"),
        (["timeline", "LOG", "--png", "x.png", "--steps", "9:3"], "--steps: '9:3' is not allowed"),
        (["timeline", "LOG", "--perfetto", "LOG"], "--perfetto: "),
        (["timeline", "LOG", "--perfetto", "x.json", "--request", "none"], "--request: 'none' is not allowed"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    words: list[str], message: str, log: str, capsys: pytest.CaptureFixture
):
    assert main([word.replace("LOG", log) for word in words]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1


def test_explain_tells_a_life_or_which_are_worth_it(log: str, capsys: pytest.CaptureFixture):
    assert main(["explain", log, "3"]) == 0
    assert "Request 3 (tenant b, class low): 6 prompt tokens, up to 20 of output." in capsys.readouterr().out
    assert main(["explain", log]) == 0
    listed = capsys.readouterr().out
    assert "waited longest" in listed
    assert "12 requests got a first token and ended" in listed
    assert main(["explain", log, "nobody"]) == 1
    assert "'nobody' is no request of this recording" in capsys.readouterr().err


def test_a_picture_and_a_trace(run: RecordedExactCore, log: str, tmp_path: Path):
    png, trace = tmp_path / "t.png", tmp_path / "t.json"
    assert main(["timeline", log, "--png", str(png), "--perfetto", str(trace)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    events = json.loads(trace.read_text())["traceEvents"]
    steps = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    assert len(steps) == run.core.counters.num_steps
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert all(event["dur"] > 0 for event in slices)
    tokens = sum(event["args"]["tokens"] for event in slices)
    assert tokens == sum(event["args"]["tokens"] for event in steps)
    preempted = [event for event in events if event["ph"] == "i"]
    assert len(preempted) == run.core.counters.num_preemptions > 0


def test_cells_add_up_to_the_steps(run: RecordedExactCore):
    collector, replay = StepCollector(StepRange(0, 1 << 30)), Replay(LIMITS)
    for event in replay.run(run.log.records):
        collector.record(event, replay)
    assert collector.num_steps == len(collector.steps) == run.core.counters.num_steps
    for step in collector.steps:
        assert sum(cell.num_tokens for cell in step.cells) == step.num_tokens
    kinds = {cell.kind for step in collector.steps for cell in step.cells}
    assert kinds == set(Kind)
    part = StepCollector(StepRange(10, 20))
    replay = Replay(LIMITS)
    for event in replay.run(run.log.records):
        part.record(event, replay)
    assert part.steps == collector.steps[10:20]


class FakeClient:
    """Gives the log of a directory in two pieces per file; breaks off as often as it is told to."""

    def __init__(self, directory: str, num_failures: int) -> None:
        self.directory = Path(directory)
        self.num_failures = num_failures

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def explain(self, request_id: str) -> ExplainResponse:
        raise NotFoundError(grpc.StatusCode.NOT_FOUND, f"{request_id} has ended")

    def read_flight_log(self) -> Iterator[ReadFlightLogResponse]:
        for path in sorted(self.directory.iterdir()):
            data = path.read_bytes()
            half = len(data) // 2
            yield ReadFlightLogResponse(life=1, segment=0, data=data[:half])
            if self.num_failures:
                self.num_failures -= 1
                raise ServerError(grpc.StatusCode.ABORTED, "the log went on; try again")
            yield ReadFlightLogResponse(life=1, segment=0, offset=half, data=data[half:])


def test_a_server_is_asked_once_more_where_its_log_went_on(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr(live, "client_for", lambda arguments: FakeClient(log, num_failures=0))
    monkeypatch.setattr(fetched, "client_for", lambda arguments: FakeClient(log, num_failures=1))
    assert main(["explain", "server:1", "3"]) == 0
    assert "Request 3 (tenant b, class low)" in capsys.readouterr().out
    assert main(["timeline", "server:1", "--request", "3", "--perfetto", str(tmp_path / "t.json")]) == 0
    assert (tmp_path / "t.json").exists()
    monkeypatch.setattr(fetched, "client_for", lambda arguments: FakeClient(log, num_failures=2))
    assert main(["explain", "server:1", "3"]) == 2
    assert "server:1: ABORTED: the log went on; try again" in capsys.readouterr().err
    assert list((tmp_path / "copies").iterdir()) == []


def test_a_run_that_speculated_is_replayed_and_tells_how_often_that_was_right():
    run = RecordedExactCore(LIMITS, msgspec.structs.replace(CAPACITY, max_speculative_tokens=4))
    for handle in range(6):
        run.add([1 + handle] * 9, 20)
    run.drain(500)
    recording = Recording()
    run.recorder.flush(run.now, None, is_final=True)
    replay = Replay(run.limits)
    for event in replay.run(run.log.records):
        recording.record(event, replay)
    counters = run.core.counters
    assert replay.core.counters == counters
    assert counters.num_accepted_tokens > 10
    assert recording.acceptance == counters.num_accepted_tokens / counters.num_draft_tokens
    assert max(step.shape.num_tokens for step in recording.steps[1:]) > 6


def test_names_in_the_picture_tell_requests_apart_and_stay_in_their_cells():
    ids = {"ec41c9be66b8c052e9f35eac197e50eb", "ec41d9be66b8c052e9f35eac197e50eb", "77", "r1"}
    assert short_names(ids) == {**{one: one[:5] for one in ids if len(one) > 5}, "77": "77", "r1": "r1"}
    assert short_names(set()) == {}
    assert [fitting("ec41c", room) for room in (9, 5, 4, 3, 0)] == ["ec41c", "ec41c", "ec4…", "", ""]
    assert fitting("a-name-that-somebody-chose", 99) == "a-name-that-som…"


def test_no_name_leaves_its_cells():
    """Of many requests that follow each other closely in one row, with ids as the gateway makes them."""
    steps = [
        TimelineStep(*(number, 1, number, 0.0, 1, 0, 1), cells=(Cell(0, f"{number // 3:032x}"[::-1], Kind.DECODE, 1),))
        for number in range(60)
    ]
    canvas = FigureCanvasAgg(figure_of("title", steps))
    canvas.draw()
    rows, _, waiting = canvas.figure.axes
    renderer = canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in rows.texts]
    assert len(boxes) == 20
    assert all(one.x1 <= next_one.x0 + 1 for one, next_one in itertools.pairwise(boxes))
    assert boxes[-1].x1 <= rows.get_window_extent(renderer).x1 + 1
    assert waiting.get_ylim()[0] == 0
    assert all(float(tick).is_integer() for tick in waiting.get_yticks())


def test_a_hand_off_is_an_arrow_in_the_picture_and_a_flow_in_the_trace():
    def step(number: int, executor: int, kind: Kind, transfer: Transfer, at_s: float) -> TimelineStep:
        cells = (Cell(0, "mine", kind, 1, transfer), Cell(1, "other", Kind.DECODE, 1))
        return TimelineStep(number, 1, number, at_s, 2, 0, 2, cells, executor, at_s, at_s + 0.5, move_s=0.125)

    steps = [
        step(0, 0, Kind.PREFILL, Transfer.EXPORT, 1.0),
        step(1, 0, Kind.IDLE, Transfer.NONE, 1.5),
        step(2, 1, Kind.DECODE, Transfer.PULL, 2.25),
    ]
    figure = figure_of("title", steps)
    assert [text.get_text() for text in figure.axes[0].texts if text.get_text().endswith("ms")] == ["1250.0 ms"]
    assert "handed off, and the gap between its tokens" in {
        text.get_text() for text in figure.axes[0].get_legend().get_texts()
    }
    events = json.loads(chrome_trace(steps, 1.0, 2))["traceEvents"]
    flow = [event for event in events if event["ph"] in "sf"]
    assert [(event["pid"], event["ts"]) for event in flow] == [(1, 0.0), (3, 1.25e6)]
    assert {event["args"]["gap ms"] for event in flow} == {1250.0}
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"mine prefill 1, export", "mine decode, pull"}
    assert not figure_of("title", steps[1:2]).axes[0].texts[0].get_text().endswith("ms")

"""What ``headway top`` shows, and what its keys mean: history, figures, picture and controls without a terminal."""

import argparse
import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from headway.__main__ import main
from headway.flags.settings import ConfigurationError
from headway_lab.top import command, figures
from headway_lab.top.controls import HELP, Controls, Order, OrderKind
from headway_lab.top.frame import Frame
from headway_lab.top.history import RATE_WINDOW_S, History, Look
from headway_lab.top.keyboard import keys_of
from headway_lab.top.view import KEY_HINTS, picture
from headway_process.installation import install_advice
from headway_proto import admin_pb2 as api

HOSTILE = "\x1b]0;owned\x07\r\n\u202eabc\x9b2J"


def status(**changes) -> api.GetStatusResponse:
    fields = {
        "scheduler_state": "serving",
        "executor_state": "ready",
        "epoch": 7,
        "num_running": 48,
        "num_waiting": 12,
        "num_preempted": 3,
        "num_total_blocks": 1000,
        "num_free_blocks": 250,
        "num_cached_blocks": 600,
        "num_pinned_blocks": 40,
        "num_steps": 5000,
        "num_prompt_tokens": 20_000,
        "num_output_tokens": 100_000,
        "num_preemptions": 9,
        "num_finished": 80,
        "num_prefix_query_tokens": 1000,
        "num_prefix_hit_tokens": 125,
        "recent_prefix_hit_rate": 0.25,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 64,
        "num_gateways": 2,
        "uptime_s": 3723.0,
        "num_executor_losses": 1,
        "num_in_flight_steps": 1,
        "max_steps_in_flight": 2,
        "num_budget_tokens": 512,
        "budget_margin": 1.04,
        "prompt_tokens_per_s": 321.0,
        "output_tokens_per_s": 6543.0,
        "num_host_blocks": 100,
        "num_free_host_blocks": 90,
        "num_swapped_out_blocks": 33,
        "ttft": api.RecentPercentiles(count=1234, p50_ms=12.3, p90_ms=45.6, p99_ms=1890.0),
        "itl": api.RecentPercentiles(count=99_999_999, p50_ms=9.9, p90_ms=15.5, p99_ms=25.0),
        "preemptions": [
            api.PreemptionCount(mode="recompute", reason="no_block", count=5),
            api.PreemptionCount(mode="recompute", reason="higher_class", count=2),
            api.PreemptionCount(mode="swap", reason="no_block", count=2),
        ],
        "wasted_tokens": [api.WastedTokens(reason="recompute", count=77), api.WastedTokens(reason="surplus", count=3)],
        "step_time_model": api.StepTimeModelState(
            num_observed=900, relative_error=0.023, constant_s=0.0041, row_s=1.2e-5, context_token_s=1.5e-9
        ),
        "executor": api.ExecutorState(
            backend="torch",
            model_name="small-llama",
            device="cpu",
            dtype="float32",
            age_s=95.0,
            last_step_us=5120,
            last_step_age_s=0.01,
        ),
        "policies": api.PolicyNames(order="fair", batching="chunked", budget="slo", preemption="auto"),
        "tenant_services": [
            api.TenantServiceState(tenant="blue", num_running=40, num_waiting=2, num_output_tokens=60_000),
            api.TenantServiceState(tenant="green", num_running=8, num_waiting=10, num_output_tokens=40_000),
        ],
    }
    return api.GetStatusResponse(**{**fields, **changes})


def request(request_id: str, **changes) -> api.RequestState:
    fields = {
        "state": "running",
        "priority": 3,
        "tenant": "blue",
        "num_prompt_tokens": 100,
        "num_output_tokens": 20,
        "num_computed_tokens": 119,
        "num_blocks": 8,
        "age_ms": 2500.0,
    }
    return api.RequestState(request_id=request_id, **{**fields, **changes})


REQUESTS = (
    request("first", age_ms=9000, num_blocks=1),
    request("second", age_ms=5000, num_output_tokens=900, state="preempted"),
    request("third", age_ms=1000, tenant="green", num_blocks=90),
)


def history_of(*looks: Look) -> History:
    history = History(looks[0])
    for look in looks[1:]:
        history.add(look)
    return history


def busy_history(requests=REQUESTS, **changes) -> History:
    later = status(num_steps=5100, num_output_tokens=103_000, num_prompt_tokens=20_500, **changes)
    if "tenant_services" not in changes:
        later.tenant_services[0].num_output_tokens += 2400
        later.tenant_services[1].num_output_tokens += 600
    return history_of(Look(10.0, status(**changes), requests), Look(12.0, later, requests))


def lines_of(history: History, controls: Controls | None = None, **frame) -> list[str]:
    given_frame = {
        "width": 80,
        "height": 24,
        "address": "127.0.0.1:50051",
        "glyphs": figures.UNICODE,
        "hints": KEY_HINTS,
    }
    made_for = Frame(**{**given_frame, **frame})
    console = Console(file=io.StringIO(), width=made_for.width, color_system=None)
    with console.capture() as captured:
        console.print(picture(history, controls or Controls(), made_for))
    return captured.get().splitlines()


def line_of(lines: list[str], label: str) -> str:
    (found,) = [line for line in lines if line.startswith(label)]
    return found


@pytest.mark.parametrize(
    ("label", "parts"),
    [
        ("headway top", ["127.0.0.1:50051", "serving", "2 gateways", "up 1h02m"]),
        ("executor", ["ready", "small-llama on torch, cpu, float32", "for 1m35s", "1 loss"]),
        ("steps", ["50.0/s", "last 5.12 ms, 0.0s ago", "1 of 2 in flight", "epoch 7"]),
        ("running", ["████████████░░░░  48 of 64", "12 waiting (3 preempted)"]),
        ("blocks", ["████████████░░░░  750 used, 250 free, 600 cached, 40 pinned"]),
        ("on host", ["██░░░", "10 of 100", "33 swapped"]),
        ("prefix", ["████░", "25.0% of prompt tokens cached", "12.5% ever"]),
        ("budget", ["████░", "512 of 2,048 tokens a step", "slo, margin 1.04"]),
        ("step time", ["4.10 ms + 12.0 us/row + 1.50 ns/context", "off by 2.3%"]),
        ("tokens/s", ["output   6,543", "prompt     321"]),
        ("TTFT", ["p50 12.3 ms", "p90 45.6 ms", "p99  1.89 s", "of 1,234 in 1 min"]),
        ("ITL", ["p50 9.90 ms", "p99 25.0 ms", "of 100.0M in 1 min"]),
        ("preempted", ["9 (recompute 7, swap 2)", "wasted 80 (recompute 77, surplus 3)"]),
        ("blue", ["40", "2", "62,400", "1,200", "80.0%"]),
        ("green", ["8", "10", "40,600", "300", "20.0%"]),
        ("  first", ["running", "normal", "blue", "100+20", "9.0s"]),
        ("  second", ["preempted", "100+900", "5.0s"]),
        (KEY_HINTS, []),
    ],
)
def test_everything_an_operator_asks_for_stands_on_80_by_24(label, parts):
    line = line_of(lines_of(busy_history()), label)
    for part in parts:
        assert part in line


@given(
    width=st.integers(20, 200),
    height=st.integers(3, 80),
    request_id=st.text(min_size=1, max_size=128),
    tenant=st.text(max_size=128),
    number=st.integers(0, 2**32 - 1),
    trouble=st.text(max_size=100),
)
def test_no_line_is_wider_than_the_terminal_and_the_picture_is_no_taller(
    width, height, request_id, tenant, number, trouble
):
    requests = tuple(request(request_id, tenant=tenant, num_blocks=number, priority=9) for _ in range(5))
    history = busy_history(
        requests,
        num_running=number,
        num_total_blocks=number,
        num_budget_tokens=number,
        num_host_blocks=number,
        tenant_services=[api.TenantServiceState(tenant=tenant, num_running=number)],
    )
    lines = lines_of(history, width=width, height=height, trouble=trouble)
    assert len(lines) == height
    assert max(map(cell_len, lines)) <= width


def test_on_80_by_24_nothing_is_cut():
    assert "…" not in "\n".join(lines_of(busy_history()))


def test_a_wider_terminal_shows_more_of_each_request_and_a_taller_one_more_lines():
    narrow = lines_of(busy_history())
    assert not any(line.startswith(("queue", "end to end", "policies", "ended")) for line in narrow)
    wide = lines_of(busy_history(), width=120, height=40)
    assert "order fair, batching chunked, budget slo, preemption auto" in line_of(wide, "policies")
    assert line_of(wide, "queue").endswith("none in 1 min")
    header = line_of(wide, "  request")
    assert header.startswith("  request, by age")
    assert header.endswith("prompt+output blocks    age computed preempted")
    assert line_of(wide, "  first").split()[-2:] == ["119", "0"]


def test_a_long_model_of_step_times_breaks_between_its_terms():
    model = api.StepTimeModelState(
        relative_error=0.5,
        num_shifts=3,
        constant_s=0.00885,
        row_s=2.15e-5,
        token_s=1.83e-5,
        token_beyond_128_s=1.54e-6,
        token_beyond_256_s=8.68e-7,
        context_token_s=4.78e-8,
        prefill_pair_s=1.16e-9,
    )
    lines = lines_of(busy_history(step_time_model=model))
    first = next(place for place, line in enumerate(lines) if line.startswith("step time"))
    assert [line.strip() for line in lines[first : first + 3]] == [
        "step time  8.85 ms + 21.5 us/row + 18.3 us/token + 1.54 us/token over 128 +",
        "868 ns/token over 256 + 47.8 ns/context + 1.16 ns/pair",
        "(off by 50.0%, 3 shifts of speed)",
    ]


def test_a_shortage_is_told_where_outputs_are_predicted():
    assert not any(line.startswith("shortage") for line in lines_of(busy_history()))
    lines = lines_of(busy_history(steps_until_shortage=0))
    assert "in about 0 steps" in line_of(lines, "shortage")


def executor(number: int, **changes) -> api.ExecutorStatus:
    fields = {
        "state": "ready",
        "num_running": 24,
        "num_waiting": number,
        "num_total_blocks": 500,
        "num_free_blocks": 125,
        "num_cached_blocks": 300,
        "kv_usage": 0.75,
        "num_steps": 2500 + 100 * number,
        "details": api.ExecutorState(backend="torch", last_step_us=5120),
    }
    return api.ExecutorStatus(number=number, **{**fields, **changes})


def history_of_executors(*executors: api.ExecutorStatus, requests=REQUESTS) -> History:
    later = [api.ExecutorStatus.FromString(entry.SerializeToString()) for entry in executors]
    for entry in later:
        entry.num_steps += 50 * (1 + entry.number)
    looks = Look(10.0, status(executors=executors), requests), Look(12.0, status(executors=later), requests)
    return history_of(*looks)


def test_one_executor_has_no_table_and_no_column():
    alone = history_of_executors(executor(0))
    for size in ({}, {"width": 120, "height": 40}):
        without = lines_of(history_of(*(Look(at, status(), REQUESTS) for at in (10.0, 12.0))), **size)
        assert lines_of(alone, **size) == without


def test_several_executors_have_a_table():
    gone = executor(2, state="absent", num_running=0, num_free_blocks=500, kv_usage=0)
    gone.ClearField("details")
    lines = lines_of(history_of_executors(executor(0), executor(1, is_draining=True), gone), height=40)
    header = next(line for line in lines if line.startswith("executor  ") and "steps/s" in line)
    assert header.split() == ["executor", "running", "waiting", "blocks", "in", "use", "cached", "steps/s", "last"]
    assert line_of(lines, "0 ready").split() == ["0", "ready", "24", "0", "375", "75.0%", "300", "25.0", "5.12", "ms"]
    assert line_of(lines, "1 draining").split()[2:] == ["24", "1", "375", "75.0%", "300", "50.0", "5.12", "ms"]
    assert line_of(lines, "2 absent").split()[2:] == ["0", "2", "0", "0.0%", "300", "75.0", "-"]
    assert "2 of 3 ready" in next(line for line in lines if line.startswith("executor   "))
    assert "48 of 128 " in line_of(lines, "running"), "each that is connected has max_num_seqs rows"
    assert "1 of 4 in flight" in line_of(lines, "steps")


@pytest.mark.parametrize(("placement", "is_shown"), [("", False), ("aggregated", False), ("hybrid", True)])
def test_roles_are_shown_where_they_mean_something(placement, is_shown):
    history = history_of_executors(executor(0, role="prefill"), executor(1, role="decode"))
    history.latest.status.policies.placement = placement
    lines = lines_of(history, height=40)
    assert any("prefill" in line for line in lines) == is_shown
    header = next(line for line in lines if line.startswith("executor  ") and "steps/s" in line)
    assert header.rstrip().endswith("role" if is_shown else "last")
    if placement:
        wide = lines_of(history, width=120, height=40)
        assert line_of(wide, "policies").endswith(f", placement {placement}")


def test_many_executors_leave_room_for_requests():
    lines = lines_of(history_of_executors(*map(executor, range(64))))
    assert len(lines) == 24
    assert any(line.startswith("executor (3 of 64)") for line in lines)
    assert any(line.startswith("  request") for line in lines)


def test_of_many_executors_those_that_do_not_work_are_shown():
    executors = [executor(number) for number in range(62)]
    lines = lines_of(history_of_executors(*executors, executor(62, is_draining=True), executor(63, state="absent")))
    first = next(place for place, line in enumerate(lines) if line.startswith("executor (3 of 64)"))
    assert [line.split()[:2] for line in lines[first + 1 : first + 4]] == [
        ["0", "ready"],
        ["62", "draining"],
        ["63", "absent"],
    ]


def test_a_wide_terminal_tells_where_each_request_is():
    requests = (request("first", executor=0), request("second", executor=1), request("third", state="waiting"))
    lines = lines_of(history_of_executors(executor(0), executor(1), requests=requests), width=120, height=40)
    assert line_of(lines, "  request").endswith("computed preempted executor")
    assert [line_of(lines, f"  {name}").split()[-1] for name in ("first", "second", "third")] == ["0", "1", "-"]


def test_counts_of_a_large_pool_fit():
    pool = {
        "num_total_blocks": 99_280,
        "num_free_blocks": 12_677,
        "num_cached_blocks": 41_052,
        "num_pinned_blocks": 24_000,
    }
    line = line_of(lines_of(busy_history(**pool)), "blocks")
    assert line.endswith("86.6k used, 12.7k free, 41.1k cached, 24.0k pinned")


def test_what_is_not_known_yet_is_said():
    empty = api.GetStatusResponse(scheduler_state="waiting for executor", executor_state="absent")
    lines = lines_of(history_of(Look(0.0, empty, ())))
    assert "waiting for executor" in lines[0]
    assert "absent   0 losses so far" in line_of(lines, "executor")
    assert "no model yet" in line_of(lines, "step time")
    assert "none in 1 min" in line_of(lines, "TTFT")
    assert not any(line.startswith(("on host", "tenant")) for line in lines)


def test_names_from_callers_cannot_steer_the_terminal():
    history = busy_history(
        (request(HOSTILE, tenant=HOSTILE, state=HOSTILE),),
        tenant_services=[api.TenantServiceState(tenant=HOSTILE)],
        executor=api.ExecutorState(model_name=HOSTILE, backend=HOSTILE),
        scheduler_state=HOSTILE,
    )
    controls = Controls()
    controls.report(f"cancelled {HOSTILE}")
    for shown in (lines_of(history, controls), lines_of(history, silent_for="1s", trouble=HOSTILE)):
        assert len(shown) == 24
        assert "\n".join(shown).replace("\n", "").isprintable()


def test_silence_of_the_server_is_told_above_the_last_figures():
    reason = "UNAVAILABLE: failed to connect to all addresses; last error: connection refused by 127.0.0.1:50051"
    lines = lines_of(busy_history(), silent_for="12.0s", trouble=reason)
    assert lines[0].endswith("no answer for 12.0s")
    assert "48 of 64" in line_of(lines, "running")
    assert reason in " ".join(line.strip() for line in lines), "the whole of it"
    assert line_of(lines, "  first")


def test_too_many_requests_are_not_listed():
    lines = lines_of(busy_history(requests=None))
    assert any("too many are live to list them" in line for line in lines)


def test_the_selected_request_is_marked_and_always_in_sight():
    requests = tuple(request(f"r{number:03d}", age_ms=1000 * (100 - number)) for number in range(100))
    controls = Controls()
    for _ in range(60):
        controls.press("j", requests)
    assert controls.selected == "r059"
    assert line_of(lines_of(busy_history(requests), controls), "> r059")


def test_terminals_without_such_characters_get_others():
    lines = lines_of(busy_history(), glyphs=figures.glyphs_for("ascii"))
    "\n".join(lines).encode("ascii")
    assert "############...." in line_of(lines, "blocks")
    assert figures.glyphs_for("utf-8") is figures.UNICODE
    assert figures.glyphs_for("no such encoding") is figures.ASCII


def test_rates_are_taken_over_the_last_seconds_and_between_looks():
    looks = [
        Look(float(time), status(num_output_tokens=100_000 + tokens, num_steps=5000 + 10 * time), ())
        for time, tokens in ((0, 0), (1, 1000), (2, 1000), (3, 4000), (9, 4000))
    ]
    history = history_of(*looks[:4])
    assert history.output_rates == [1000.0, 0.0, 3000.0]
    assert history.output_tokens_per_s == pytest.approx(4000 / 3)
    assert history.steps_per_s == 10.0
    history.add(looks[4])
    assert looks[4].taken_at - looks[3].taken_at > RATE_WINDOW_S
    assert history.output_tokens_per_s == 0.0, "of the last two looks, where the others are too old"
    assert history.steps_per_s == 10.0


def test_a_scheduler_that_counts_anew_gives_no_negative_rates():
    history = history_of(Look(0.0, status(), ()), Look(1.0, status(num_steps=3, num_output_tokens=5), ()))
    assert not history.has_rates
    assert history.output_rates == []
    assert history.steps_per_s == 0.0
    history.add(Look(2.0, status(num_steps=13, num_output_tokens=25), ()))
    assert (history.steps_per_s, history.output_rates) == (10.0, [20.0])


def test_a_tenant_that_was_not_there_before_has_no_rate_yet():
    history = busy_history()
    assert history.tenant_tokens_per_s("blue") == 1200.0
    assert history.tenant_tokens_per_s("red") == 0.0
    newcomer = status(tenant_services=[api.TenantServiceState(tenant="red", num_output_tokens=5000)], num_steps=5200)
    newcomer.num_output_tokens = 110_000
    history.add(Look(13.0, newcomer, ()))
    assert history.tenant_tokens_per_s("red") == 0.0


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0, "░░░░"), (0.01, "█░░░"), (0.5, "██░░"), (0.99, "███░"), (1, "████"), (7, "████"), (-1, "░░░░")],
)
def test_a_bar_is_empty_only_for_nothing_and_full_only_for_all(share, shown):
    assert figures.bar(share, 4, figures.UNICODE) == shown


def test_a_sparkline_shows_the_latest_values_against_their_highest():
    assert figures.sparkline([9, 0, 2, 4], 3, figures.UNICODE) == "▁▅█"
    assert figures.sparkline([0, 0], 9, figures.UNICODE) == "▁▁"
    assert figures.sparkline([5], 9, figures.UNICODE) == ""
    assert figures.sparkline([1, 2], 0, figures.UNICODE) == ""


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (figures.count(9_999_999), "9,999,999"),
        (figures.count(12_300_000), "12.3M"),
        (figures.count(4.2e9), "4.2G"),
        (figures.count(1.5e13), "15.0T"),
        (figures.short_count(9_999), "9,999"),
        (figures.short_count(86_603), "86.6k"),
        (figures.short_count(12_300_000), "12.3M"),
        (figures.rate(0), "0"),
        (figures.rate(12.34), "12.3"),
        (figures.rate(1234.5), "1,234"),
        (figures.age(59.94), "59.9s"),
        (figures.age(61), "1m01s"),
        (figures.age(3 * 86400 + 7200), "3d02h"),
        (figures.duration(0), "0 s"),
        (figures.duration(2e-9), "2.00 ns"),
        (figures.duration(12.34e-6), "12.3 us"),
        (figures.duration(0.1234), "123 ms"),
        (figures.duration(12.3), "12.3 s"),
    ],
)
def test_figures_are_short(written, expected):
    assert written == expected


def test_keys_that_need_no_request_order_at_once():
    controls = Controls()
    assert controls.press("p", ()) == Order(OrderKind.PAUSE)
    assert controls.press("r", ()) == Order(OrderKind.RESUME)
    assert controls.press("z", ()) is None
    controls.press("q", ())
    assert controls.wants_to_quit


@pytest.mark.parametrize("answer", ["n", "q", "Y", "escape", "d"])
def test_drain_asks_and_takes_only_y_for_yes(answer):
    controls = Controls()
    assert controls.press("d", ()) is None
    assert controls.question.startswith("drain? ")
    assert controls.question in lines_of(busy_history(), controls)[-1]
    assert controls.press(answer, ()) is None
    assert (controls.question, controls.message, controls.wants_to_quit) == ("", "drain: not done", False)
    controls.press("d", ())
    assert controls.press("y", ()) == Order(OrderKind.DRAIN)


@pytest.mark.parametrize(
    ("key", "kind", "words"),
    [
        ("x", OrderKind.DRAIN_EXECUTOR, "drain executor"),
        ("u", OrderKind.UNDRAIN_EXECUTOR, "use executor"),
    ],
)
def test_an_executor_is_named_by_its_number(key, kind, words):
    controls = Controls()
    for typed, shown in (("", "_"), ("1", "1_"), ("3", "13_"), ("\x7f", "1_"), ("2", "12_")):
        assert controls.press(typed or key, ()) is None
        assert controls.question == f"{words}, by its number and Enter: {shown}"
    assert controls.press("\n", ()) == Order(kind, executor=12)
    assert controls.question == ""
    for keys in ("\n", "1q", "12345", "1\x7f\n", ["1", "escape"]):
        controls.press(key, ())
        assert [controls.press(typed, ()) for typed in keys] == [None] * len(keys)
        assert (controls.question, controls.message, controls.wants_to_quit) == ("", f"{words}: not done", False)
    controls.press(key, ())
    assert controls.question.endswith("Enter: _"), "nothing is left of the number that was given up"


def test_a_role_is_given_by_number_and_letter():
    controls = Controls()
    assert [controls.press(key, ()) for key in "o1"] == [None, None]
    words = "role of executor, by its number and p (prefill) or d (decode) or b (both): 1_"
    assert controls.question == words
    assert words in lines_of(busy_history(), controls)[-1]
    assert controls.press("d", ()) == Order(OrderKind.SET_ROLE, executor=1, role="decode")
    for keys in ("op", "o1\n", "o1x"):
        assert [controls.press(key, ()) for key in keys] == [None] * len(keys)
        assert (controls.question, controls.message) == ("", "role of executor: not done")


def test_cancel_and_explain_are_about_the_selected_request():
    controls = Controls()
    for key in ("c", "e"):
        assert controls.press(key, REQUESTS) is None
        assert "no live request is selected" in controls.message
    controls.press("down", REQUESTS)
    assert controls.press("e", REQUESTS) == Order(OrderKind.EXPLAIN, "first")
    assert controls.press("c", REQUESTS) is None
    assert controls.question == "cancel first? y/n"
    assert controls.press("y", REQUESTS) == Order(OrderKind.CANCEL, "first")
    assert controls.press("c", REQUESTS[1:]) is None, "it has ended meanwhile"
    assert "no live request is selected" in controls.message


def test_selection_walks_along_the_order_shown_and_stops_at_its_ends():
    controls, requests = Controls(), (*REQUESTS, request("third", age_ms=500))
    walked = []
    for key in ("j", "j", "down", "j", "k", "up", "k"):
        controls.press(key, requests)
        walked.append(controls.selected)
    assert walked == ["first", "second", "third", "third", "second", "first", "first"]
    controls.press("escape", requests)
    assert controls.selected == ""
    controls.press("k", requests)
    assert controls.selected == "third"
    controls.press("k", ())
    assert controls.selected == "third"


def test_s_goes_through_the_orders_and_comes_back():
    controls = Controls()
    seen = {}
    for _ in range(6):
        seen[controls.sort_order] = [entry.request_id for entry in controls.sorted(REQUESTS)]
        controls.press("s", REQUESTS)
    assert seen == {
        "age": ["first", "second", "third"],
        "tokens": ["second", "first", "third"],
        "blocks": ["third", "second", "first"],
        "state": ["second", "first", "third"],
        "tenant": ["first", "second", "third"],
    }


def test_panels_stand_in_the_place_of_the_tables_until_they_are_closed():
    controls = Controls()
    controls.explain("It arrived 1.0 s ago and waits behind 3 others: " + "admission is paused " * 10)
    lines = lines_of(busy_history(), controls)
    assert any(line.startswith("why") for line in lines)
    assert "It arrived 1.0 s ago" in "\n".join(lines)
    assert max(map(len, lines)) <= 80
    controls.press("?", ())
    shown = lines_of(busy_history(), controls)
    assert any("pause: admit no more" in line for line in shown)
    assert [line for line in HELP if f"  {line}" not in shown] == [], "all of it stands on 80 by 24"
    controls.press("escape", ())
    assert line_of(lines_of(busy_history(), controls), "  first")


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"q", ["q"]),
        (b"jjk", ["j", "j", "k"]),
        (b"\x1b[A\x1b[B\x1bOA", ["up", "down", "up"]),
        (b"\x1b", ["escape"]),
        (b"\x1b[1;5Aq\x1b[3~", ["up", "q"]),
        (b"\x1b[C", []),
        (b"", []),
    ],
)
def test_bytes_of_a_terminal_become_keys(data, keys):
    assert keys_of(data) == keys


@given(st.binary(max_size=64))
def test_any_bytes_are_keys_or_nothing(data):
    assert all(keys_of(data))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--interval", "0.01"), "--interval: 0.01 is not allowed; allowed: seconds, at least 0.1"),
        (("--interval", "nan"), "--interval: nan is not allowed"),
        (("--looks", "1"), "--looks: 1 is not allowed; allowed: 2 or more"),
        (("--max-listed", "-1"), "--max-listed: -1 is not allowed; allowed: 0 or more"),
        (("--token-file", "/absent", "--once"), "--token-file: cannot read '/absent': No such file or directory"),
    ],
)
def test_wrong_flags_are_told_with_what_is_allowed(words, message):
    parser = argparse.ArgumentParser()
    command.add_flags(parser)
    with pytest.raises(ConfigurationError) as refused:
        command.run(parser.parse_args(words))
    assert message in str(refused.value)


def test_a_host_without_rich_is_told_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["top", "--once"]) == 2
    assert capsys.readouterr().err == f"headway top: this host lacks rich; {install_advice('top')}\n"

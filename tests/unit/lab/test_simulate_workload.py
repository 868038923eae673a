"""What is drawn: lengths, arrivals, tenants, shared beginnings; and what a trace file may hold."""

import json
import math

import numpy as np
import pytest

from headway.flags.settings import ConfigurationError
from headway_lab.workload.arrivals import Arrival, ClosedArrivals, OpenArrivals, gamma_times
from headway_lab.workload.lengths import parse_lengths
from headway_lab.workload.requests import (
    Objectives,
    PromptSource,
    Tenant,
    WorkloadShape,
    draw_requests,
    parse_tenants,
    rng_of,
)
from headway_lab.workload.trace import read_trace


def drawn(text, count=20_000):
    return parse_lengths(text).draw(np.random.default_rng(1), count)


def shape_of(**changes):
    return WorkloadShape(
        **{"num_requests": 50, "prompt": parse_lengths("uniform:10,40"), "output": parse_lengths("8"), **changes}
    )


def test_lengths_have_the_distribution_they_are_named_after():
    assert set(drawn("7").tolist()) == {7}
    assert set(drawn("fixed:7").tolist()) == {7}
    uniform = drawn("uniform:10,20")
    assert (uniform.min(), uniform.max()) == (10, 20)
    assert uniform.mean() == pytest.approx(15, rel=0.01)
    lognormal = np.log(drawn("lognormal:512,0.8"))
    assert np.median(lognormal) == pytest.approx(math.log(512), rel=0.01)
    assert lognormal.std() == pytest.approx(0.8, rel=0.03)
    pareto = drawn("pareto:100,1.5")
    assert pareto.min() == 100
    # The survival function is (least / x) ** alpha.
    assert (pareto >= 400).mean() == pytest.approx(4**-1.5, rel=0.1)
    assert drawn("pareto:100,1.1,3000").max() == 3000


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "nan", "1e30", "x", "uniform:5", "uniform:9,3", "pareto:10,0", "lognormal:0,1", "zipf:1"]
)
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(ValueError, match="allowed: N, uniform"):
        parse_lengths(text)


def test_the_same_seed_draws_the_same_requests_and_another_seed_others():
    assert draw_requests(shape_of(), 4096, seed=5) == draw_requests(shape_of(), 4096, seed=5)
    assert draw_requests(shape_of(), 4096, seed=5) != draw_requests(shape_of(), 4096, seed=6)


def test_other_answers_leave_the_prompts_as_they_are():
    longer = shape_of(output=parse_lengths("uniform:10,90"))
    prompts = [request.num_prompt_tokens for request in draw_requests(shape_of(), 4096, seed=5)]
    assert prompts == [request.num_prompt_tokens for request in draw_requests(longer, 4096, seed=5)]


def test_requests_fit_the_context():
    shape = shape_of(prompt=parse_lengths("pareto:50,0.5"), output=parse_lengths("pareto:50,0.5"), num_prefix_tokens=64)
    for request in draw_requests(shape, 256, seed=0):
        assert request.num_prompt_tokens + request.num_output_tokens <= 256
        assert request.num_prompt_tokens > 64
        assert request.num_output_tokens >= 1


def test_tenants_send_their_shares_with_their_priority():
    tenants = parse_tenants({"chat": "3:high", "batch": "1:low"})
    assert tenants == (Tenant(name="chat", share=3.0, priority=2), Tenant(name="batch", share=1.0, priority=4))
    requests = draw_requests(shape_of(num_requests=4000, tenants=tenants), 4096, seed=0)
    assert np.mean([request.tenant == "chat" for request in requests]) == pytest.approx(0.75, abs=0.03)
    assert {(request.tenant, request.priority) for request in requests} == {("chat", 2), ("batch", 4)}


def test_a_tenant_has_the_common_objectives_unless_it_names_its_own():
    common = Objectives(ttft_slo_ms=900, itl_slo_ms=90)
    texts = {"a": "1", "b": "1:high:500", "c": "2::500:50", "d": "1:low::0"}
    tenants = parse_tenants(texts, common)
    assert [(tenant.objectives.ttft_slo_ms, tenant.objectives.itl_slo_ms) for tenant in tenants] == [
        (900, 90),
        (500, 90),
        (500, 50),
        (900, 0),
    ]
    requests = draw_requests(shape_of(tenants=tenants), 4096, seed=0)
    own = {tenant.name: tenant.objectives for tenant in tenants}
    assert all(request.objectives == own[request.tenant] for request in requests)
    assert {request.objectives for request in draw_requests(shape_of(objectives=common), 4096, seed=0)} == {common}


@pytest.mark.parametrize("text", ["1:high:x", "1:high:1:2:3", "1:high:-1", "1:high:1.5", "inf", "1:urgent"])
def test_what_is_no_tenant_is_refused(text):
    with pytest.raises(ValueError, match="allowed: NAME=SHARE"):
        parse_tenants({"a": text})


def test_prompts_of_a_prefix_begin_alike_and_end_differently():
    requests = draw_requests(shape_of(num_prefixes=2, num_prefix_tokens=32), 4096, seed=0)
    source = PromptSource(0, vocab_size=1000)
    by_prefix = {}
    for request in requests:
        prompt = source.prompt(request)
        assert len(prompt) == request.num_prompt_tokens
        assert 0 <= prompt.min() <= prompt.max() < 1000
        by_prefix.setdefault(request.prefix, []).append(prompt)
    assert len(by_prefix) == 2
    for prompts in by_prefix.values():
        assert len({prompt[:32].tobytes() for prompt in prompts}) == 1
        assert len({prompt[32:42].tobytes() for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
def test_gaps_have_the_rate_and_the_variation_that_were_asked_for(variation):
    gaps = np.diff(gamma_times(rng_of(3, 0), 40_000, 5.0, variation))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_users_send_the_next_request_when_the_last_has_ended():
    requests = draw_requests(shape_of(num_requests=4), 4096, seed=0)
    arrivals = ClosedArrivals(requests, num_users=2, think_s=0.5)
    assert arrivals.first() == [Arrival(0.0, 0, requests[0]), Arrival(0.0, 1, requests[1])]
    assert arrivals.after_end(3.0) == Arrival(3.5, 2, requests[2])
    assert arrivals.after_end(4.0, rejected=True) == Arrival(5.0, 3, requests[3])
    assert arrivals.after_end(5.0) is None


def test_open_arrivals_wait_for_nobody():
    requests = draw_requests(shape_of(num_requests=2), 4096, seed=0)
    arrivals = OpenArrivals(requests, [0.5, 2.0])
    assert [arrival.time_s for arrival in arrivals.first()] == [0.5, 2.0]
    assert arrivals.after_end(1.0) is None


def test_a_trace_gives_requests_by_arrival(tmp_path):
    lines = [
        {"arrival_s": 2.0, "prompt_tokens": 40, "output_tokens": 5, "tenant": "b", "priority": "low"},
        {"arrival_s": 0.5, "prompt_tokens": 64, "output_tokens": 9, "prefix": "system", "prefix_tokens": 48},
        {
            "arrival_s": 1.0,
            "prompt_tokens": 60,
            "output_tokens": 9,
            "prefix": "system",
            "prefix_tokens": 32,
            "ttft_slo_ms": 300,
            "itl_slo_ms": 0,
        },
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    requests, times = read_trace(str(path))
    assert times == [0.5, 1.0, 2.0]
    assert [request.number for request in requests] == [0, 1, 2]
    assert (requests[2].tenant, requests[2].priority, requests[2].num_prompt_tokens) == ("b", 4, 40)
    common = Objectives(ttft_slo_ms=800, itl_slo_ms=80)
    assert [request.objectives for request in read_trace(str(path), common)[0]] == [
        common,
        Objectives(ttft_slo_ms=300, itl_slo_ms=0),
        common,
    ]
    long, short = (PromptSource(0, 500).prompt(request) for request in requests[:2])
    assert long[:32].tobytes() == short[:32].tobytes()
    assert long[32:48].tobytes() != short[32:48].tobytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no request in it"),
        ("{}", "line 1"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 2}\nnonsense', "line 2"),
        ('{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 2}', "arrival_s"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 2, "prompt": "x"}', "unknown field"),
        ('{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 2, "prefix_tokens": 6}', "at most prompt_tokens"),
    ],
)
def test_a_bad_trace_is_answered_with_its_line(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        read_trace(str(path))
    assert "\n" not in str(caught.value)


def test_a_trace_may_begin_with_a_byte_order_mark(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"arrival_s": 0, "prompt_tokens": 3, "output_tokens": 2}\n', "utf-8-sig")
    requests, _ = read_trace(str(trace))
    assert [request.num_prompt_tokens for request in requests] == [3]

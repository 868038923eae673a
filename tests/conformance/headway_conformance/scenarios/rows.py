"""Rows: their numbers, which of them run, and what a row forgets."""

from headway_conformance.requests import ScriptedRequest
from headway_conformance.scenario import scenario
from headway_conformance.scenarios.kinds import LOGPROBS, kinds
from headway_conformance.stage import Stage


@scenario
def empty_steps(stage: Stage) -> None:
    """A step without rows gives no tokens, at an epoch's start, in between, and when it only finishes a row."""
    scheduler = stage.scheduler()
    scheduler.step()
    request = stage.request(5, 2, LOGPROBS)
    scheduler.run([request])
    scheduler.step()
    scheduler.step()
    another = stage.request(6, 2, LOGPROBS)
    scheduler.run([another])
    stage.verify(request, another)


@scenario
def rows_in_any_order(stage: Stage) -> None:
    """Row numbers are in no order and have gaps; tokens and logprobs come back by ascending row."""
    last = stage.size.max_num_seqs - 1
    rows = (last, 2, 0, last - 2, 1)
    requests = [stage.request(3 + 4 * place, sampling=LOGPROBS) for place in range(len(rows))]
    scheduler = stage.scheduler(seed=2)
    for request, row in zip(requests[:3], rows, strict=False):
        scheduler.admit(request, row=row)
    scheduler.step_whole()
    for request, row in zip(requests[3:], rows[3:], strict=True):
        scheduler.admit(request, row=row)
    scheduler.step_whole()
    scheduler.run()
    stage.verify(*requests)


@scenario
def a_row_changes_hands(stage: Stage) -> None:
    """A row that finishes and starts another request in one step keeps no token, no parameter and no block."""
    row, size = 3, stage.size
    scheduler = stage.scheduler()
    neighbours = [stage.request(4 + place, 64, foreseen=False) for place in range(2)]
    for neighbour, its_row in zip(neighbours, (1, size.max_num_seqs - 1), strict=True):
        scheduler.admit(neighbour, row=its_row)
    scheduler.step_whole()
    plain = ("greedy", "logprobs")
    parameters = kinds(size)
    order = [name for kind in parameters if kind not in plain for name in (kind, plain[len(kind) % 2])]
    requests = [
        ScriptedRequest(stage.prompt(2 + (5 * place) % (size.block_size + 3)), 2, parameters[name])
        for place, name in enumerate(order)
    ]
    for request in requests:
        scheduler.admit(request, row=row)
        scheduler.step_whole()
        scheduler.step()
        scheduler.finish(request)
    scheduler.step()
    scheduler.drain()
    stage.verify(*requests)
    for neighbour in neighbours:
        stage.verify_output(neighbour)


@scenario
def rows_that_sit_out(stage: Stage) -> None:
    """Rows that run no token for some steps, in their prompt or in decode, continue unchanged; so do all rows at once."""
    block_size = stage.size.block_size
    requests = [stage.request(length, 6, LOGPROBS) for length in (block_size + 2, 3, 2 * block_size, block_size - 1)]
    scheduler = stage.scheduler(seed=3)
    for request in requests:
        scheduler.admit(request)
    first, *others = requests
    scheduler.step({first: 4, **dict.fromkeys(others[1:], 0)})
    scheduler.step({request: 0 for request in requests if request is not others[0]})
    scheduler.step(dict.fromkeys(requests, 0))
    scheduler.step({first: 3, others[0]: 0, others[1]: block_size, others[2]: block_size - 1})
    scheduler.step(dict.fromkeys(others, 0))
    scheduler.step({first: 0})
    scheduler.run()
    stage.verify(*requests)


@scenario
def a_row_admitted_to_sit_out(stage: Stage) -> None:
    """A row, or all rows, may be new in a step in which they run nothing; their data is not lost."""
    size = stage.size
    requests = [stage.request(size.block_size + 1 + place, 3, LOGPROBS) for place in range(4)]
    scheduler = stage.scheduler(seed=5)
    for request in requests[:2]:
        scheduler.admit(request)
    scheduler.step(dict.fromkeys(requests[:2], 0))
    for request in requests[2:]:
        scheduler.admit(request)
    scheduler.step({requests[0]: 3, requests[1]: 0, requests[2]: 0, requests[3]: size.block_size})
    scheduler.run()
    stage.verify(*requests)


@scenario
def as_many_rows_as_there_are(stage: Stage) -> None:
    """``max_num_seqs`` rows run at once, in prefill and in decode, and as one after another ends."""
    size = stage.size
    requests = [
        stage.request(1 + place % (size.block_size + 2), 2 + place % 3, LOGPROBS) for place in range(size.max_num_seqs)
    ]
    stage.scheduler().run(requests)
    stage.verify(*requests)


SCENARIOS = (
    empty_steps,
    rows_in_any_order,
    a_row_changes_hands,
    rows_that_sit_out,
    a_row_admitted_to_sit_out,
    as_many_rows_as_there_are,
)

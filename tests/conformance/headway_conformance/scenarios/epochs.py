"""New epochs: everything is forgotten, and no row is listed as finished."""

from headway_conformance.failures import require
from headway_conformance.requests import ScriptedRequest
from headway_conformance.scenario import scenario
from headway_conformance.scenarios.kinds import LOGPROBS, kinds
from headway_conformance.scripted_scheduler import ScriptedScheduler
from headway_conformance.stage import Stage
from headway_executor.batch.diff_checks import ImpossibleDiff
from headway_proto.columns import encode_column
from headway_proto.step import SchedulerOutput


@scenario
def a_new_epoch(stage: Stage) -> None:
    """An epoch begins with steps in flight: rows and blocks are reused at once, and the old results are ignored."""
    scheduler = stage.scheduler(depth=3, seed=1)
    requests = _fill(stage, scheduler)
    scheduler.new_epoch()
    for place, request in enumerate(reversed(requests)):
        scheduler.admit(request, row=place)
    scheduler.step_whole()
    scheduler.run()
    stage.verify(*requests)


@scenario
def rows_of_an_earlier_epoch_later(stage: Stage) -> None:
    """A new epoch begins with an empty step, or another follows at once; old rows stay forgotten."""
    scheduler = stage.scheduler(depth=2, seed=2)
    requests = _fill(stage, scheduler)
    scheduler.new_epoch()
    scheduler.new_epoch()
    scheduler.step()
    scheduler.run(requests[:1])
    scheduler.new_epoch()
    scheduler.run(requests[1:])
    stage.verify(*requests)


@scenario
def an_epoch_lost_to_an_impossible_step(stage: Stage) -> None:
    """A message that contradicts the state never reaches the backend; the epoch after it starts clean."""
    scheduler = stage.scheduler(seed=3)
    requests = _fill(stage, scheduler)
    epoch, step = scheduler.position
    row = requests[0].row
    wrong = SchedulerOutput(
        epoch=epoch, step=step, finished_rows=encode_column([row]), total_num_scheduled_tokens=1 << 20
    )
    try:
        scheduler.submit_raw(wrong)
    except ImpossibleDiff:
        pass
    else:
        require(condition=False, message="a step with a wrong total was accepted")
    scheduler.new_epoch()
    for request in requests:
        scheduler.admit(request)
    scheduler.step_whole()
    scheduler.run()
    stage.verify(*requests)


@scenario
def host_blocks_of_a_new_epoch(stage: Stage) -> None:
    """Host blocks are empty in a new epoch, and hold what the new one writes to them."""
    scheduler = stage.scheduler(seed=4)
    (request, *_) = _fill(stage, scheduler)
    scheduler.swap_out(request)
    scheduler.step()
    scheduler.new_epoch()
    request.host_blocks = []
    other = stage.request(stage.size.block_size + 6, 5, LOGPROBS)
    scheduler.admit(other)
    scheduler.step_whole()
    scheduler.swap_out(other)
    scheduler.run([request])
    scheduler.swap_in(other)
    scheduler.run()
    stage.verify(request, other)


def _fill(stage: Stage, scheduler: ScriptedScheduler) -> list[ScriptedRequest]:
    """One of them is in the middle of its prompt."""
    parameters = kinds(stage.size)
    names = ("everything", "greedy", "min_tokens", "top_p", "logprobs")
    requests = [stage.request(6 + 3 * place, 5, parameters[name]) for place, name in enumerate(names)]
    for place, request in enumerate(requests):
        scheduler.admit(request, row=place)
    counts = {request: request.remaining for request in requests[:-1]}
    scheduler.step(counts | {requests[-1]: 4})
    scheduler.step()
    return requests


SCENARIOS = (
    a_new_epoch,
    rows_of_an_earlier_epoch_later,
    an_epoch_lost_to_an_impossible_step,
    host_blocks_of_a_new_epoch,
)

"""Mistakes made on purpose in the lanes of executors that work on several steps at once. See ``simulation.mutants``.

Owns: these mistakes. Must not know: how one is hunted.
"""

from headway_executor.batch.batch_state import BatchState
from headway_executor.batch.row_lanes import RowLanes
from headway_proto.step import NO_LANE, state_digest
from headway_scheduler.core.admission.lane_balance import LaneBalance
from headway_scheduler.core.admission.running_requests import RunningRequests
from headway_scheduler.core.memory.decoding_rows import DecodingRows
from headway_scheduler.core.memory.epoch import Epoch
from headway_scheduler.core.state.step_plan import InFlightStep, StepPlan
from simulation.hand_off_mutants import Mistake, registering

MISTAKES: list[Mistake] = []
_mistake = registering(MISTAKES)


@_mistake("a row is said to be in the lane behind the one in which it decodes", (DecodingRows, "enter"))
def row_in_the_wrong_lane(original):
    def enter(self, starting):
        original(self, starting)
        for row in starting:
            self._rows.lane[row] = self.lane + 1

    return enter


@_mistake("the executor's digest says nothing of lanes", (BatchState, "digest"))
def digest_without_lanes(original):
    def digest(self):
        if self._lanes is None:
            return original(self)
        rows, tables = self._rows, self._tables
        return state_digest(rows, self._num_computed_tokens[rows], tables.num_blocks[rows], tables.table)

    return digest


@_mistake("the last lane has its turn only if no other has anything to do", (Epoch, "lanes_in_turn"))
def lane_starves(original):
    def lanes_in_turn(self):
        return sorted(original(self), key=lambda lane: lane.lane == self.num_lanes - 1)

    return lanes_in_turn


@_mistake("a chunk of a prompt runs again in the next lane", (RunningRequests, "advance_prompt"))
def chunk_in_two_lanes(original):
    def advance_prompt(self, plan, request, end, num_tokens):
        original(self, plan, request, end, num_tokens)
        if plan.has_lane and end < request.num_admitted_tokens:
            self._rows.num_computed_tokens[request.row] -= num_tokens

    return advance_prompt


@_mistake("a prompt that runs one token is not listed", (StepPlan, "add_chunk"))
def last_token_not_listed(original):
    def add_chunk(self, row, num_tokens):
        original(self, row, num_tokens)
        if num_tokens == 1 and self.has_lane:
            self.exceptions.pop()

    return add_chunk


@_mistake("a row that is given up goes on in its lane", (DecodingRows, "give_up"))
def given_up_row_in_its_lane(original):
    def give_up(self, row):
        decodes = int(self._decodes[row])
        original(self, row)
        if self.lane > 0:
            self._decodes[row] = decodes

    return give_up


@_mistake("prompts end in whatever lane has its turn", (LaneBalance, "most_of"))
def lanes_not_balanced(original):
    del original
    return lambda self, plan, num_tokens, num_left: num_tokens


@_mistake("the executor keeps rows in their lanes when they have finished", (RowLanes, "leave"))
def finished_row_in_its_lane(original):
    del original
    return lambda self, rows: None


@_mistake("who is given up while in flight is taken to be in no step", (InFlightStep, "runs"))
def freed_while_in_flight(original):
    del original
    return lambda self, row: False


@_mistake("who needs a block is not looked for again when a row stops", (DecodingRows, "stop"))
def turns_kept(original):
    def stop(self, row):
        known = self._rows_of_turn.copy()
        original(self, row)
        self._rows_of_turn = known

    return stop


@_mistake("due ticks count steps of all lanes", (Epoch, "send"))
def ticks_of_all_lanes(original):
    def send(self, step):
        original(self, step)
        for lane in self.lanes:
            lane._tick += lane.lane != step.lane

    return send


@_mistake("the executor puts a row into a lane with the first chunk of its prompt", (RowLanes, "scheduled"))
def in_a_lane_too_soon(original):
    def scheduled(self, lane, exceptions, live, most):
        rows, counts = original(self, lane, exceptions, live, most)
        self._lane_of[rows[self._lane_of[rows] == NO_LANE]] = lane
        return rows, counts

    return scheduled

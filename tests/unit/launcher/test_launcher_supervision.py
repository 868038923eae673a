"""The supervision state machine: restarts with back-off and budget, orderly and impatient stops, exit codes."""

import pytest

from headway.running.supervision import Fleet, Kill, Report, RestartPolicy, Start, Terminate

NAMES = ("executor", "scheduler", "gateway")
GRACES = {"gateway": 35.0, "scheduler": 5.0, "executor": 5.0}


def running_fleet(**policy):
    fleet = Fleet([{name: grace_s} for name, grace_s in GRACES.items()], RestartPolicy(**policy))
    assert fleet.start(NAMES) == [Start(name) for name in NAMES]
    return fleet


def without_reports(actions):
    return [action for action in actions if not isinstance(action, Report)]


def test_a_dead_process_starts_again_after_a_delay_and_the_others_are_left_alone():
    fleet = running_fleet(first_delay_s=0.5)
    actions = fleet.child_exited("executor", -9, now=10.0)
    assert actions == [Report("executor ended (signal 9); starting it again in 0.5 s")]
    assert fleet.next_deadline == 10.5
    assert fleet.tick(now=10.4) == []
    assert fleet.tick(now=10.5) == [Start("executor")]
    assert fleet.next_deadline is None
    assert fleet.exit_code is None


def test_a_process_that_ends_by_itself_without_error_starts_again_too():
    fleet = running_fleet()
    fleet.child_exited("gateway", 0, now=1.0)
    assert without_reports(fleet.tick(now=2.0)) == [Start("gateway")]


def test_delays_double_up_to_a_maximum():
    fleet = running_fleet(first_delay_s=1.0, max_delay_s=3.0, max_restarts=10, window_s=1000.0)
    now, delays = 0.0, []
    for _ in range(4):
        fleet.child_exited("scheduler", 1, now)
        delays.append(fleet.next_deadline - now)
        now = fleet.next_deadline
        fleet.tick(now)
    assert delays == [1.0, 2.0, 3.0, 3.0]


def test_an_exhausted_budget_ends_the_fleet_with_code_1():
    fleet = running_fleet(max_restarts=1, window_s=60.0)
    fleet.child_exited("executor", 1, now=0.0)
    fleet.tick(now=1.0)
    actions = fleet.child_exited("executor", 1, now=2.0)
    assert "giving up" in actions[0].text
    assert actions[1:] == [Terminate("gateway"), Terminate("scheduler")]
    fleet.child_exited("scheduler", 0, now=2.1)
    assert fleet.exit_code is None
    fleet.child_exited("gateway", 0, now=2.2)
    assert fleet.exit_code == 1


def test_restarts_long_ago_are_forgiven():
    fleet = running_fleet(max_restarts=1, window_s=60.0, first_delay_s=0.5)
    for now in (0.0, 100.0, 200.0):
        fleet.child_exited("executor", 1, now)
        assert fleet.next_deadline == now + 0.5
        fleet.tick(now + 0.5)
    assert fleet.exit_code is None


def test_each_process_has_a_budget_of_its_own():
    fleet = running_fleet(max_restarts=1)
    for name in NAMES:
        assert len(fleet.child_exited(name, 1, now=0.0)) == 1
    assert without_reports(fleet.tick(now=1.0)) == [Start(name) for name in NAMES]


@pytest.mark.parametrize("code", [2, 3])
def test_a_mistake_of_the_user_is_not_retried(code):
    fleet = running_fleet()
    assert fleet.child_exited("executor", code, now=0.0) == [Terminate("gateway"), Terminate("scheduler")]
    fleet.child_exited("gateway", 0, now=0.1)
    fleet.child_exited("scheduler", 0, now=0.1)
    assert fleet.exit_code == code


def test_an_orderly_stop_goes_from_the_gateway_inwards():
    fleet = running_fleet()
    assert without_reports(fleet.stop_requested(0.0, impatient_exit_code=143)) == [Terminate("gateway")]
    assert fleet.child_exited("gateway", 0, now=1.0) == [Terminate("scheduler")]
    assert fleet.child_exited("scheduler", 0, now=1.1) == [Terminate("executor")]
    assert fleet.exit_code is None
    assert fleet.child_exited("executor", 0, now=1.2) == []
    assert fleet.exit_code == 0


def test_a_process_that_ignores_the_request_is_killed_after_its_grace():
    fleet = running_fleet()
    fleet.stop_requested(0.0, impatient_exit_code=143)
    assert fleet.next_deadline == 35.0
    assert without_reports(fleet.tick(now=35.0)) == [Kill("gateway")]
    assert fleet.child_exited("gateway", -9, now=35.1) == [Terminate("scheduler")]


def test_a_signal_to_the_process_and_its_group_is_one_request():
    fleet = running_fleet()
    fleet.stop_requested(0.0, impatient_exit_code=143)
    assert fleet.stop_requested(0.1, impatient_exit_code=143) == []
    for name in GRACES:
        fleet.child_exited(name, 0, now=1.0)
    assert fleet.exit_code == 0


def test_a_second_request_kills_at_once():
    fleet = running_fleet()
    fleet.stop_requested(0.0, impatient_exit_code=130)
    actions = without_reports(fleet.stop_requested(1.0, impatient_exit_code=130))
    assert actions == [Kill("gateway"), Kill("scheduler"), Kill("executor")]
    for name in GRACES:
        fleet.child_exited(name, -9, now=1.1)
    assert fleet.exit_code == 130


def test_a_stop_cancels_a_restart_that_was_due():
    fleet = running_fleet()
    fleet.child_exited("gateway", -11, now=0.0)
    assert without_reports(fleet.stop_requested(0.01, impatient_exit_code=143)) == [Terminate("scheduler")]
    assert fleet.tick(now=1.0) == []


def test_what_dies_during_an_orderly_stop_starts_again_while_it_is_needed():
    fleet = running_fleet(first_delay_s=0.5)
    fleet.stop_requested(0.0, impatient_exit_code=143)
    assert without_reports(fleet.child_exited("executor", -9, now=1.0)) == []
    assert fleet.next_deadline == 1.5
    assert fleet.tick(now=1.5) == [Start("executor")]
    assert fleet.child_exited("gateway", 0, now=2.0) == [Terminate("scheduler")]
    assert fleet.child_exited("scheduler", 0, now=2.1) == [Terminate("executor")]
    fleet.child_exited("executor", 0, now=2.2)
    assert fleet.exit_code == 0


def test_a_restart_that_nobody_needs_any_more_is_dropped():
    fleet = running_fleet(first_delay_s=0.5)
    fleet.stop_requested(0.0, impatient_exit_code=143)
    fleet.child_exited("scheduler", -9, now=1.0)
    assert fleet.child_exited("gateway", 0, now=1.1) == [Terminate("executor")]
    assert fleet.child_exited("executor", 0, now=1.2) == []
    assert fleet.exit_code == 0


def test_a_mistake_of_the_user_is_not_retried_while_stopping_either():
    fleet = running_fleet()
    fleet.stop_requested(0.0, impatient_exit_code=143)
    assert fleet.child_exited("executor", 3, now=0.5) == []
    assert fleet.child_exited("gateway", 0, now=1.0) == [Terminate("scheduler")]
    assert fleet.child_exited("scheduler", 0, now=1.5) == []
    assert fleet.exit_code == 0


def test_impatience_ends_restarts_too():
    fleet = running_fleet(first_delay_s=0.5)
    fleet.stop_requested(0.0, impatient_exit_code=143)
    fleet.child_exited("executor", -9, now=1.0)
    assert without_reports(fleet.stop_requested(1.1, impatient_exit_code=143)) == [Kill("gateway"), Kill("scheduler")]
    for name in ("gateway", "scheduler"):
        fleet.child_exited(name, -9, now=1.2)
    assert fleet.exit_code == 143


STAGES = [
    {"smg": 5.0},
    {"gateway-0": 35.0, "gateway-1": 35.0},
    {"scheduler-0": 5.0, "scheduler-1": 5.0},
    {"executor-0": 5.0, "executor-1": 5.0},
]
OF_REPLICAS = [name for stage in reversed(STAGES) for name in stage]


def running_replicas():
    fleet = Fleet(STAGES, RestartPolicy(first_delay_s=0.5))
    fleet.start(OF_REPLICAS)
    return fleet


def test_a_process_of_one_replica_starts_again_alone():
    fleet = running_replicas()
    assert without_reports(fleet.child_exited("scheduler-1", -9, now=1.0)) == []
    assert fleet.tick(now=1.5) == [Start("scheduler-1")]


def test_the_replicas_stop_beside_each_other_and_stage_by_stage():
    fleet = running_replicas()
    told, *actions = fleet.stop_requested(0.0, impatient_exit_code=143)
    assert told == Report(
        "stopping: smg, then gateway-0 and gateway-1, then scheduler-0 and scheduler-1, then executor-0 and executor-1"
    )
    assert actions == [Terminate("smg")]
    assert fleet.child_exited("smg", 0, now=1.0) == [Terminate("gateway-0"), Terminate("gateway-1")]
    assert fleet.child_exited("gateway-1", 0, now=2.0) == []
    assert without_reports(fleet.tick(now=36.0)) == [Kill("gateway-0")]
    assert fleet.child_exited("gateway-0", -9, now=36.1) == [Terminate("scheduler-0"), Terminate("scheduler-1")]


def test_while_any_gateway_drains_every_executor_is_needed():
    fleet = running_replicas()
    fleet.stop_requested(0.0, impatient_exit_code=143)
    fleet.child_exited("smg", 0, now=1.0)
    fleet.child_exited("gateway-1", 0, now=2.0)
    fleet.child_exited("executor-0", -9, now=3.0)
    assert fleet.tick(now=3.5) == [Start("executor-0")]
    fleet.child_exited("gateway-0", 0, now=4.0)
    for name in ("scheduler-0", "scheduler-1", "executor-0", "executor-1"):
        assert fleet.exit_code is None
        fleet.child_exited(name, 0, now=5.0)
    assert fleet.exit_code == 0

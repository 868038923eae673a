"""Who is to blame for lost executors: by losses and progress alone."""

from headway_scheduler.cells.brake import LONGEST_PAUSE_S, MAX_SUSPICIONS, MAX_VERDICTS, Brake, FailurePause
from headway_scheduler.cells.live_sequences import Name

A, B, C = Name("a", 0), Name("b", 0), Name("c", 0)


def lost(brake: Brake, *in_flight: tuple[Name, int]) -> Name | None:
    """An executor is lost with these."""
    return brake.count_loss(list(in_flight), is_alone=len(in_flight) == 1)


def test_one_loss_makes_nobody_suspect() -> None:
    brake = Brake(num_trial_tokens=2)
    assert lost(brake, (A, 10), (B, 20)) is None
    assert not brake.has_suspects


def test_two_losses_without_progress_make_suspects_the_newest_first() -> None:
    brake = Brake(num_trial_tokens=2)
    lost(brake, (A, 10), (B, 20), (C, 5))
    lost(brake, (A, 11), (B, 22), (C, 5))
    assert brake.suspects == [C, A], "B has come further, so it was not what the executor was lost for"


def test_the_second_loss_alone_convicts_and_no_other_does() -> None:
    brake = Brake(num_trial_tokens=2)
    for _ in range(3):
        assert lost(brake, (A, 10), (B, 20), (C, 5)) is None
    assert brake.suspects == [C, B, A]
    assert lost(brake, (B, 20)) is None, "the plug may have been pulled while it happened to run"
    assert brake.suspects == [C, A, B], "the others run first"
    assert lost(brake, (A, 10)) is None
    assert brake.is_acquitted(A, 12)
    assert lost(brake, (B, 21)) == B


def test_who_is_alone_from_the_first_is_given_three_losses() -> None:
    brake = Brake(num_trial_tokens=2)
    assert [lost(brake, (A, 10)) for _ in range(3)] == [None, None, A]


def test_a_suspect_that_gets_its_tokens_is_acquitted() -> None:
    brake = Brake(num_trial_tokens=2)
    for _ in range(2):
        lost(brake, (A, 10), (B, 20))
    assert not brake.is_acquitted(B, 21)
    assert brake.is_acquitted(B, 22)
    assert brake.suspects == [A]
    lost(brake, (B, 22))
    assert brake.suspicion_of(B).num_losses == 1


def test_an_end_is_an_acquittal() -> None:
    brake = Brake(num_trial_tokens=2)
    for _ in range(2):
        lost(brake, (A, 10))
    brake.forget(A)
    assert not brake.has_suspects


def test_pauses_grow_until_something_is_answered() -> None:
    pause = FailurePause()
    pauses = [pause.count_failure() for _ in range(100)]
    assert pauses[0] == 0
    assert pauses[1] > 0
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S
    pause.count_answer()
    assert pause.count_failure() == 0


def test_memory_is_bounded() -> None:
    brake = Brake(num_trial_tokens=2)
    for _ in range(2):
        lost(brake, *((Name(str(number), 0), 1) for number in range(MAX_SUSPICIONS + 10)))
    assert len(brake.suspects) <= MAX_SUSPICIONS
    assert len(brake._suspicions) == MAX_SUSPICIONS


def test_verdicts_are_kept_for_the_names_found_guilty_last() -> None:
    brake = Brake(num_trial_tokens=3)
    names = [Name(str(number), 0) for number in range(MAX_VERDICTS + 1)]
    for name in names:
        brake.convict(name, f"{name.request_id} did it")
    assert brake.submitted(names[0], has_run=True) is None
    assert brake.submitted(names[-1], has_run=True) == f"{MAX_VERDICTS} did it"
    assert brake.submitted(names[-1], has_run=False) is None, "another request of this name"
    assert brake.submitted(names[-1], has_run=True) is None

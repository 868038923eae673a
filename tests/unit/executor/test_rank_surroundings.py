"""What the environment says about a rank, and how it is refused."""

import os
from pathlib import Path

import pytest

from headway.commands.keys import make_keys
from headway_executor.config import ExecutorConfig
from headway_executor.rank_processes.surroundings import keys_of, own_device, surroundings_of, take_cores

TWO = ExecutorConfig(backend="simulated", tensor_parallel=2)
HERE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "5000"}


def test_without_variables_a_process_is_rank_0_and_starts_the_others():
    alone, first = surroundings_of(ExecutorConfig(), {}), surroundings_of(TWO, {})
    assert (alone.place.size, alone.starts_others) == (1, False)
    assert (first.place.rank, first.place.size, first.starts_others, first.num_local) == (0, 2, True, 2)


def test_the_variables_of_torchrun_are_understood():
    around = surroundings_of(TWO, HERE | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert (around.place.rank, around.place.rendezvous) == (1, "127.0.0.1:5002")
    assert around.address == "tcp://127.0.0.1:5001"
    assert not around.starts_others
    assert (around.local_rank, around.num_local) == (1, 2)
    four = ExecutorConfig(backend="simulated", tensor_parallel=2, pipeline_parallel=2)
    around = surroundings_of(four, HERE | {"RANK": "3", "WORLD_SIZE": "4"})
    assert (around.place.stage, around.place.tensor_rank) == (0, 1)
    assert around.num_local == 1
    assert surroundings_of(ExecutorConfig(), {"RANK": "0", "WORLD_SIZE": "1"}).place.is_alone


def test_rank_0_listens_elsewhere_if_told_so(tmp_path: Path):
    make_keys(tmp_path)
    keys = str(tmp_path / "executor")
    config = ExecutorConfig(backend="simulated", tensor_parallel=2, ranks_address="tcp://10.0.0.1:70", curve_keys=keys)
    config.validate()
    around = surroundings_of(config, HERE)
    assert (around.field, around.address) == ("ranks_address", "tcp://10.0.0.1:70")
    found = keys_of(config, {})
    assert found is not None
    assert found.peer == found.public
    assert keys_of(TWO, {}) is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"WORLD_SIZE": "3"},
            "WORLD_SIZE: 3 is not allowed; allowed: 2, which is tensor_parallel 2 times pipeline_parallel 1",
        ),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: 'two' is not allowed; allowed: 1 to 65535, as torchrun sets it"),
        ({"RANK": "2"}, "RANK: '2' is not allowed; allowed: 0 to 1, as torchrun sets it"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: '' is not allowed together with RANK; allowed: as torchrun sets it"),
        ({"MASTER_PORT": "65534"}, "MASTER_PORT: '65534' is not allowed; allowed: 1 to 65533, as torchrun sets it"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK: '1' is not allowed; allowed: 0 to 0, as torchrun sets it"),
        (
            {"MASTER_ADDR": "10.0.0.1"},
            "MASTER_ADDR: 'tcp://10.0.0.1:5001' is not allowed; allowed: a loopback address, or any address together with curve_keys",
        ),
    ],
)
def test_variables_that_do_not_fit_are_refused_by_name(variables: dict[str, str], said: str):
    with pytest.raises(ValueError) as caught:
        surroundings_of(TWO, HERE | variables)
    assert str(caught.value) == said


def test_an_address_for_ranks_is_tcp_and_needs_keys_beyond_loopback():
    for address in ("ipc:///tmp/x/ranks", "tcp://10.0.0.1:70"):
        with pytest.raises(ValueError, match="ranks_address: "):
            ExecutorConfig(ranks_address=address).validate()


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch):
    taken: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7, 8})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: taken.append(list(cores)))
    first = surroundings_of(TWO, {})
    second = surroundings_of(TWO, HERE | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert [take_cores(TWO, around) for around in (first, second)] == [0, 0]
    assert taken == [[4, 5], [6, 7]]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4})
    assert take_cores(TWO, first) == 1
    assert take_cores(ExecutorConfig(tensor_parallel=2, num_threads=3), first) == 3
    assert take_cores(TWO, surroundings_of(TWO, HERE)) == 0, "one rank on each host"
    assert len(taken) == 2


def test_each_rank_of_a_host_takes_the_device_of_its_number():
    staged = ExecutorConfig(backend="triton", pipeline_parallel=2, device="cuda")
    first = surroundings_of(staged, {})
    second = surroundings_of(staged, HERE | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    elsewhere = surroundings_of(staged, HERE)
    assert [own_device(staged, around) for around in (first, second, elsewhere)] == ["cuda:0", "cuda:1", "cuda:0"]
    alone = ExecutorConfig(backend="triton", device="cuda")
    assert own_device(alone, surroundings_of(alone, {})) == "cuda"
    assert own_device(TWO, second) == "cpu"
    with pytest.raises(
        ValueError, match=r"device: 'cuda:1' is not allowed; allowed: cpu or cuda; of several ranks, each takes"
    ):
        ExecutorConfig(backend="triton", pipeline_parallel=2, device="cuda:1").validate()

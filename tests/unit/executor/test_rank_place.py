"""The places of the ranks of a group."""

import pytest

from headway_executor.rank_place import ALONE, RankPlace


def _places(tensor_parallel: int, pipeline_parallel: int) -> list[RankPlace]:
    size = tensor_parallel * pipeline_parallel
    return [
        RankPlace(rank=rank, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
        for rank in range(size)
    ]


def test_one_rank_does_everything() -> None:
    assert ALONE.is_alone
    assert ALONE.is_first_stage
    assert ALONE.is_last_stage
    assert ALONE.layers(7) == range(7)


@pytest.mark.parametrize("tensor_parallel", [1, 2, 4])
@pytest.mark.parametrize("pipeline_parallel", [1, 2, 3, 4])
@pytest.mark.parametrize("num_layers", [4, 7, 32])
def test_each_layer_is_in_one_stage_and_each_rank_has_one_place(
    tensor_parallel: int, pipeline_parallel: int, num_layers: int
) -> None:
    places = _places(tensor_parallel, pipeline_parallel)

    assert [place.rank_of(place.stage, place.tensor_rank) for place in places] == [place.rank for place in places]
    for tensor_rank in range(tensor_parallel):
        stages = sorted((place for place in places if place.tensor_rank == tensor_rank), key=lambda place: place.stage)
        layers = [list(place.layers(num_layers)) for place in stages]
        assert [index for stage in layers for index in stage] == list(range(num_layers))
        assert max(map(len, layers)) - min(map(len, layers)) <= 1
        assert len(layers[0]) >= len(layers[-1])


def test_rank_0_draws_the_tokens() -> None:
    assert [place.is_last_stage for place in _places(2, 3)] == [True, True, False, False, False, False]
    assert [place.is_first_stage for place in _places(2, 3)] == [False, False, False, False, True, True]

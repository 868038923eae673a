"""Stages of a model on the triton backend, each with a device of its own: the bits of one device."""

from functools import partial

import pytest

from checkpoints import make_checkpoint
from group_backend import InlineGroup, told
from headway_executor.backends.triton_backend import TritonBackend

pytestmark = pytest.mark.usefixtures("triton_interpreter")
SETTINGS = {"dtype": "float32", "max_model_len": 64, "max_num_batched_tokens": 64}
stages = partial(InlineGroup, kind=TritonBackend)


@pytest.mark.parametrize("family", ["llama3"])
def test_stages_give_the_bits_of_one_device(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert told(stages(pipeline_parallel=2), tmp_path, **SETTINGS) == told(TritonBackend(), tmp_path, **SETTINGS)

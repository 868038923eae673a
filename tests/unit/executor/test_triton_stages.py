"""Stages of a model on the triton backend, each with a device of its own: the bits of one device.

Where there is a device, both stages share it, as threads of one process, which could not record graphs at once.
"""

from functools import partial

import pytest
import torch

from checkpoints import make_checkpoint
from e2e.running_server import free_port
from group_backend import GroupBackend, InlineGroup, told
from headway_conformance import SCENARIOS, check
from headway_executor.backend import BackendConfig, BackendConfigError
from headway_executor.backends.triton_backend import TritonBackend
from headway_executor.gpu.preparation import record_graphs
from headway_executor.gpu.readback import Readback
from headway_executor.rank_place import RankPlace
from kept_graphs import KeptGraphs

pytestmark = pytest.mark.usefixtures("triton_interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = {"device": DEVICE, "dtype": "float32", "max_model_len": 64, "max_num_batched_tokens": 64}
SETTINGS |= {"options": {"graphs": "off"}}
QUICK = (
    "steps_in_flight_2",
    "a_row_changes_hands",
    "prompts_that_are_reported",
    "errors_stay_in_their_row",
)
ALSO_ON_A_DEVICE = ("test_stages_give_the_bits_of_one_device", "test_stages_conform")
stages = partial(InlineGroup, kind=TritonBackend)


@pytest.fixture(autouse=True)
def interpreted(request):
    if DEVICE == "cuda" and request.node.originalname not in ALSO_ON_A_DEVICE:
        pytest.skip("it interprets kernels")


class Late(TritonBackend):
    """Its results come on a thread of their own, as on a device."""

    def open(self, config):
        info = super().open(config)
        self._model._readback = self._model._readback or Readback()
        return info


class Recorded(Late):
    """Its steps are of sizes that were recorded, behind the largest step of all."""

    def open(self, config):
        info = super().open(config)
        parts = self._model.parts
        parts.target._graphs = KeptGraphs()
        with torch.inference_mode():
            record_graphs(parts)
        return info


def deep(*cases):
    return [pytest.param(case, marks=pytest.mark.deep) for case in cases]


@pytest.mark.parametrize(
    "family",
    [
        "gpt2",
        "laguna",
        "granitehybrid",
        *deep(
            "gemma2",
            "opt-350m",
            "cohere2",
            "llama4",
            "deepseek_v3",
            "falcon-40b",
            "mpt",
            "falcon_mamba",
            "gemma4-experts",
        ),
    ],
)
def test_stages_give_the_bits_of_one_device(family, tmp_path):
    make_checkpoint(tmp_path, family)
    assert told(stages(pipeline_parallel=2), tmp_path, **SETTINGS) == told(TritonBackend(), tmp_path, **SETTINGS)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"options": {"rank_transport": "gloo"}},
        *deep({"quantization": "int4"}, {"kv_cache_dtype": "fp8"}, {"options": {"rank_transport": "zmq"}}),
    ],
    ids=str,
)
def test_so_they_do_with_other_settings(settings, tmp_path):
    make_checkpoint(tmp_path, "qwen3-bias")
    alone = {name: value for name, value in settings.items() if name != "options"}
    group = stages(pipeline_parallel=2)
    assert told(group, tmp_path, **SETTINGS | settings) == told(TritonBackend(), tmp_path, **SETTINGS | alone)


@pytest.mark.parametrize("kind", [Late, Recorded])
def test_so_they_do_as_on_a_device(kind, tmp_path):
    make_checkpoint(tmp_path, "llama3")
    several, one = (InlineGroup(pipeline_parallel=count, kind=kind) for count in (3, 1))
    assert told(several, tmp_path, **SETTINGS) == told(one, tmp_path, **SETTINGS)


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(one, marks=() if one.name in QUICK else pytest.mark.deep) for one in SCENARIOS],
    ids=str,
)
def test_stages_conform(scenario, tmp_path):
    kind = {"device": DEVICE, "dtype": "float32", "options": {"graphs": "off"}}
    check(scenario, lambda: GroupBackend(pipeline_parallel=2, kind=Late), directory=tmp_path, **kind)


@pytest.mark.parametrize(
    ("degrees", "settings", "message"),
    [
        ((2, 1), {}, "tensor_parallel 2 is not allowed with this backend; allowed: 1 "),
        ((1, 2), {"speculation": "ngram"}, "speculation 'ngram' is not allowed with 2 ranks; allowed: off"),
        (
            (1, 2),
            {"adapters": {"one": "there"}},
            "adapter 'one' is not allowed with pipeline_parallel 2; allowed: pipe",
        ),
        ((1, 9), {}, "pipeline_parallel 9 is not allowed; the model has . layers, so allowed: 1 to ."),
    ],
)
def test_what_stages_cannot_have_is_refused_in_one_line(degrees, settings, message, tmp_path):
    make_checkpoint(tmp_path, "llama3")
    place = RankPlace(tensor_parallel=degrees[0], pipeline_parallel=degrees[1], rendezvous=f"127.0.0.1:{free_port()}")
    with pytest.raises(BackendConfigError, match=message):
        TritonBackend().open(BackendConfig(model=str(tmp_path), place=place, **SETTINGS | settings))

"""The built-in backends conform, and the conformance suite finds those that do not."""

import os
import subprocess
import sys
from collections.abc import Collection

import msgspec
import numpy as np
import pytest
from _pytest.mark import ParameterSet

import headway_conformance.__main__ as command
from broken_backends import BROKEN, WrappedBackend
from headway_conformance import SCENARIOS, SMALL, ConformanceFailure, Outcome, Scenario, check, oracles, scenario_named
from headway_conformance.answers import AskedStep, check_answer
from headway_conformance.checkpoints import write_checkpoint
from headway_conformance.scenarios import constraints, pooling
from headway_executor.backend import StepResult
from headway_executor.backends.simulated import SimulatedBackend
from headway_executor.startup.registry import create_backend
from headway_executor.startup.threaded_backend import ThreadedBackend
from headway_proto.columns import encode_floats
from headway_proto.sampling import SamplingParams
from headway_proto.step import BackendInfo, RowError, RowLogprobs, RowVector

replace = msgspec.structs.replace

# A backend is one line: its name and its options.
BACKENDS = {
    "simulated": ("simulated", {}),
    "torch-eager": ("torch", {"kernels": "eager"}),
    "torch-compiled": ("torch", {"kernels": "compiled"}),
}
SLOW_TWINS = {"steps_in_flight_1", "steps_in_flight_3"}
"""Beside depths 2 and 4, these say nothing more about a backend whose steps take effect at once."""
DEEP_IF_INTERPRETED = {
    "steps_in_flight_4",
    "preempted_and_computed_again",
    "the_same_twice",
    "every_split_of_a_prompt",
    "rows_of_an_earlier_epoch_later",
    "swapped_out_and_in",
    "moved_within_one_step",
    "host_blocks_keep_what_was_last_written",
    "host_blocks_of_a_new_epoch",
    "proposals_change_no_token",
    "constrained_rows_among_others",
    "family_llama",
    "family_mistral",
    "family_qwen2",
    "family_qwen3",
}
"""Each takes long where kernels are interpreted, and asks a kernel little that another scenario does not ask too, or a test
of the triton backend's own with transformers.
"""
NEEDS_A_MODEL = {
    "a_model_that_is_not_there",
    *(scenario.name for scenario in SCENARIOS if "family" in scenario.name),
    *(scenario.name for scenario in constraints.SCENARIOS),
}


NEEDS_VECTORS = {scenario.name for scenario in pooling.SCENARIOS}


def with_triton() -> list[ParameterSet]:
    """The scenarios for the triton backend; without a device, some of them only in ``make deep``."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return [
        pytest.param(
            scenario, marks=pytest.mark.deep if is_interpreted and scenario.name in DEEP_IF_INTERPRETED else ()
        )
        for scenario in SCENARIOS
        if scenario.name not in SLOW_TWINS
    ]


def expected_of(scenario: Scenario, lacking: Collection[str]) -> Outcome:
    """A silently skipped scenario would prove nothing."""
    return Outcome.NOT_APPLICABLE if scenario.name in lacking else Outcome.PASSED


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_built_in_backends(backend, scenario, checkpoints):
    name, options = BACKENDS[backend]
    outcome = check(scenario, lambda: create_backend(name), directory=checkpoints, options=options)
    assert outcome is expected_of(scenario, NEEDS_A_MODEL if name == "simulated" else set())


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("scenario", with_triton(), ids=str)
def test_the_triton_backend(scenario, checkpoints):
    device = "cuda" if os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
    outcome = check(scenario, lambda: create_backend("triton"), directory=checkpoints, device=device)
    assert outcome is expected_of(scenario, NEEDS_VECTORS)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_a_backend_that_executes_inline_conforms_on_a_thread_too(scenario, checkpoints):
    outcome = check(scenario, lambda: ThreadedBackend(SimulatedBackend()), directory=checkpoints)
    assert outcome is expected_of(scenario, NEEDS_A_MODEL)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["parameters_mixed_in_a_batch", "steps_in_flight_3", "family_qwen3", "the_same_twice", "a_seed_decides"]
)
def test_low_precision_is_held_to_log_probabilities(name, dtype, checkpoints):
    check(scenario_named(name), WrappedBackend, directory=checkpoints, dtype=dtype)


MOVES_OF_CODES = [
    "every_split_of_a_prompt",
    "prompts_beside_decodes",
    "a_prefix_that_is_there",
    "copied_blocks",
    "preempted_and_computed_again",
    "swapped_out_and_in",
    "moved_within_one_step",
    "steps_in_flight_2",
    "proposals_change_no_token",
]


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", MOVES_OF_CODES)
def test_a_kv_cache_of_8_bits_gives_each_request_the_tokens_that_it_gives_it_alone(
    backend, name, checkpoints, monkeypatch
):
    # Operators round by the size of a step.
    monkeypatch.setattr(oracles, "_without_row", lambda entry: None)

    def create():
        inner = create_backend(backend)
        original = inner.open
        inner.open = lambda config: original(replace(config, kv_cache_dtype="fp8"))
        return inner

    device = "cuda" if backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
    outcome = check(scenario_named(name), create, directory=checkpoints, device=device, numerics=False)
    assert outcome is Outcome.PASSED


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_backend_is_found(broken, checkpoints):
    for name in broken.found_by:
        with pytest.raises(ConformanceFailure, match=name):
            check(scenario_named(name), broken, directory=checkpoints, timeout_s=broken.timeout_s)


def test_the_wrapper_that_broken_backends_derive_from_works(checkpoints):
    for name in sorted({name for broken in BROKEN for name in broken.found_by}):
        check(scenario_named(name), WrappedBackend, directory=checkpoints)


@pytest.mark.parametrize("field", [field for field in SamplingParams.__struct_fields__ if field != "constraint"])
def test_a_backend_that_ignores_a_parameter_is_found(field, checkpoints):
    class Ignores(WrappedBackend):
        def execute(self, batch):
            neutral = {field: getattr(SamplingParams(), field)}
            new_rows = tuple(replace(new, sampling=replace(new.sampling, **neutral)) for new in batch.new_rows)
            return super().execute(replace(batch, new_rows=new_rows))

    with pytest.raises(ConformanceFailure, match="parameters_mixed_in_a_batch"):
        check(scenario_named("parameters_mixed_in_a_batch"), Ignores, directory=checkpoints)


def test_names_are_distinct_and_every_scenario_says_what_it_proves():
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    assert all(len(scenario.proves) > 30 and scenario.proves.endswith(".") for scenario in SCENARIOS)


def test_checkpoints_are_the_same_bytes_each_time(tmp_path):
    first, second = (write_checkpoint(tmp_path / name, "qwen2", SMALL) for name in "ab")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


INFO = BackendInfo(
    backend="b",
    device="d",
    dtype="float32",
    model_name="m",
    model_fingerprint="f",
    num_blocks=1,
    block_size=1,
    max_model_len=1,
    vocab_size=10,
    eos_token_ids=(),
    max_num_rows=9,
)
ASKED = AskedStep(where="here", rows=frozenset({1, 2, 5}), sampling_rows=(1, 5), num_logprobs=(-1, 2), has_moves=False)
GOOD = StepResult(
    sampled_token_ids=np.array([3, 4], dtype=np.int32), logprobs=(RowLogprobs(5, -0.5, (4, 7), (-0.5, -2.0)),)
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"errors": (RowError(2, "no"),)}, None),
        (
            {"sampled_token_ids": np.array([3, -1], dtype=np.int32), "logprobs": (), "errors": (RowError(5, "no"),)},
            None,
        ),
        ({"sampled_token_ids": np.array([3], dtype=np.int32)}, "1 tokens for 2 sampling rows"),
        ({"sampled_token_ids": np.array([3, 4])}, "not an int32 array"),
        ({"sampled_token_ids": [3, 4]}, "not an int32 array"),
        ({"sampled_token_ids": np.array([10, 4], dtype=np.int32)}, "row 1 drew token 10; allowed: 0 to 9"),
        ({"sampled_token_ids": np.array([-1, 4], dtype=np.int32)}, "row 1 drew token -1"),
        ({"errors": (RowError(5, "no"),)}, "row 5 is in errors and its token is 4"),
        ({"errors": (RowError(3, "no"),)}, r"did not run: \[3\]"),
        ({"errors": (RowError(2, ""),)}, "no message"),
        ({"errors": (RowError(2, "a"), RowError(2, "b"))}, "twice"),
        ({"logprobs": ()}, r"came for the rows \[\]; asked for by the rows \[5\]"),
        ({"logprobs": (RowLogprobs(5, -0.5, (4,), (-0.5,)),)}, "asked for 2"),
        ({"logprobs": (RowLogprobs(5, -0.5, (4, 4), (-0.5, -2.0)),)}, "a token twice"),
        ({"logprobs": (RowLogprobs(5, -0.5, (7, 4), (-2.0, -0.5)),)}, "best first"),
        ({"logprobs": (RowLogprobs(5, 0.5, (4, 7), (0.5, -2.0)),)}, "above 0"),
        ({"logprobs": (RowLogprobs(5, -0.5, (4, 7), (-0.4, -2.0)),)}, "two logprobs"),
        ({"logprobs": (RowLogprobs(5, float("nan"), (4, 7), (-0.4, -2.0)),)}, "not finite"),
        ({"device_time_us": -1}, "device_time_us is -1"),
        ({"move_time_us": 5}, "nothing was moved"),
        ({"errors": (RowError(np.int32(2), "no"),)}, "cannot be sent"),
        ({"vectors": (RowVector(1, encode_floats([1.0])),)}, r"vectors came for the rows \[1\]; asked for by \[\]"),
    ],
)
def test_the_form_of_an_answer(changes, message):
    result = replace(GOOD, **changes)
    if message is None:
        check_answer(ASKED, result, INFO)
        return
    with pytest.raises(ConformanceFailure, match=f"here.*{message}"):
        check_answer(ASKED, result, INFO)


def run_command(capsys, *arguments):
    code = command.main(arguments)
    return code, *capsys.readouterr()


def test_the_command_checks_an_installed_backend(capsys):
    code, out, _ = run_command(capsys, "--backend", "simulated")
    assert code == 0
    assert f"[ 1/{len(SCENARIOS)}] {SCENARIOS[0].name}" in out
    assert f"simulated: all {len(SCENARIOS)} hold" in out
    assert "not applicable" in out


def test_the_command_tells_what_failed_and_why(capsys, monkeypatch):
    monkeypatch.setattr(command, "create_backend", lambda _: BROKEN[0]())
    chosen = ("--scenario", BROKEN[0].found_by[0], "--scenario", "closed_twice")
    code, out, _ = run_command(capsys, "--backend", "mine", *chosen)
    assert code == 1
    assert "FAILED" in out
    assert f"mine: 1 of 2 failed: {BROKEN[0].found_by[0]}" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "no-such"), "backend: 'no-such' is not allowed; allowed: "),
        (("--backend", "simulated", "--backend-option", "x"), "--backend-option 'x' is not allowed"),
    ],
)
def test_the_command_refuses_in_one_line(capsys, arguments, message):
    code, _, err = run_command(capsys, *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--backend is needed; installed: "),
        (("--backend", "simulated", "--scenario", "no-such"), "--scenario 'no-such' is not allowed"),
    ],
)
def test_the_command_refuses_wrong_flags(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_lists_what_the_scenarios_prove(capsys):
    code, out, _ = run_command(capsys, "--list")
    assert code == 0
    assert all(scenario.name in out and scenario.proves in out for scenario in SCENARIOS)


def test_the_suite_loads_neither_torch_nor_pytest():
    program = (
        "import sys, headway_conformance; print([name for name in ('torch', 'pytest', 'grpc') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.strip() == "[]"

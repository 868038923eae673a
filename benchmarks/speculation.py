"""Speculative decoding on this CPU: whether the text stays the same, and the speed-up.

Owns: the loads, the alternation, the table and the result file. Must not know: who proposes, or why a row speculates.

One loaded model runs under two schedulers by turns, with and without speculation, one step in flight; the median of the
rounds' ratios counts. *Repetitive*: greedy answers to held-out passages, and of the random model to anything; small
models repeat themselves, which prompt lookup finds. *Random*: prompts and answers drawn at random, without repetition.
*Draft*: the demo model's first layers, untrained, so that nearly all proposals are refused; this shows the cost of
giving up.

    python benchmarks/speculation.py --json benchmarks/results/speculation.json
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import headway
from headway_executor.backend import BackendConfig
from headway_proto.sampling import SamplingParams
from program import count, parser_of, provenance, write_result
from speculative_engine import GREEDY, SpeculativeEngine, write_first_layers
from torch_cpu import write_checkpoint

DEMO_MODEL = Path(headway.__file__).parent / "demo_model"
DRAFT_LAYERS = 3

Prompts = list[list[int]]
Sampling = Callable[[int], SamplingParams]


def at_temperature_1(place: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=place)


def greedy(place: int) -> SamplingParams:
    del place
    return GREEDY


def random_prompts(rng: np.random.Generator, count: int, vocab_size: int) -> Prompts:
    return [rng.integers(3, vocab_size, size=100).tolist() for _ in range(count)]


def repetitive_prompts(rng: np.random.Generator, count: int, vocab_size: int) -> Prompts:
    """Return a passage of 25 tokens, four times."""
    return [rng.integers(3, vocab_size, size=25).tolist() * 4 for _ in range(count)]


def passages(count: int) -> Prompts:
    """Return paragraphs that the demo model has not seen, cut at 100 tokens."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    paragraphs = (DEMO_MODEL / "held_out.txt").read_text().split("\n\n")
    return [tokenizer.encode(text).ids[:100] for text in paragraphs if len(text) > 60][:count]


def exactness(engine: SpeculativeEngine, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Return whether the outputs of many prompts are equal, greedy and at temperature 1."""
    rng = np.random.default_rng(arguments.seed)
    prompts = random_prompts(rng, arguments.prompts // 2, 4096)
    prompts += repetitive_prompts(rng, arguments.prompts - len(prompts), 4096)
    results: list[dict[str, object]] = []
    for name, sampling in (("greedy", greedy), ("temperature 1", at_temperature_1)):
        before = tokens_proposed(engine)
        alone = engine.run(prompts, arguments.exact_output, speculates=False, sampling=sampling)
        again = engine.run(prompts, arguments.exact_output, speculates=True, sampling=sampling)
        num_equal = sum(mine == other for mine, other in zip(again, alone, strict=True))
        proposed, accepted = (after - start for after, start in zip(tokens_proposed(engine), before, strict=True))
        results.append(
            {"sampling": name, "prompts": len(prompts), "equal": num_equal, "proposed": proposed, "accepted": accepted}
        )
    return results


def tokens_proposed(engine: SpeculativeEngine) -> tuple[int, int]:
    counters = engine.counters()
    return counters.num_draft_tokens, counters.num_accepted_tokens


def compare(
    engine: SpeculativeEngine, prompts: Prompts, batch: int, sampling: Sampling, num_output: int, num_rounds: int
) -> dict[str, object]:
    """Return the speed-up for ``prompts`` with speculation, ``batch`` at once: the median of the rounds."""
    ratios = []
    groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]

    def seconds(*, speculates: bool) -> float:
        started = time.perf_counter()
        for group in groups:
            engine.run(group, num_output, speculates=speculates, sampling=sampling)
        return time.perf_counter() - started

    before = tokens_proposed(engine)
    seconds(speculates=True)
    seconds(speculates=False)
    for number in range(num_rounds):
        if number % 2:
            with_s = seconds(speculates=True)
            without_s = seconds(speculates=False)
        else:
            without_s = seconds(speculates=False)
            with_s = seconds(speculates=True)
        ratios.append(without_s / with_s)
    proposed, accepted = (after - start for after, start in zip(tokens_proposed(engine), before, strict=True))
    return {
        "batch": batch,
        "speed_up": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "proposed": proposed,
        "accepted": accepted,
    }


def speeds(
    name: str,
    config: BackendConfig,
    repetitive: Prompts,
    random: Prompts,
    num_output: int,
    arguments: argparse.Namespace,
) -> list[dict[str, object]]:
    """Measure one proposer on both loads with one model."""
    engine = SpeculativeEngine(config)
    cases: list[tuple[str, Prompts, int, Sampling]] = [
        ("repetitive", repetitive[: arguments.alone], 1, greedy),
        ("repetitive", repetitive, 16, greedy),
        ("random", random[: arguments.alone], 1, at_temperature_1),
        ("random", random, 16, at_temperature_1),
    ]
    results = []
    for load, prompts, batch, sampling in cases:
        result: dict[str, object] = {"model": name, "proposer": config.speculation, "load": load, "output": num_output}
        result |= compare(engine, prompts, batch, sampling, num_output, arguments.rounds)
        print(" ".join(f"{value!s:>12}" for value in result.values()), flush=True)
        results.append(result)
    return results


def config_of(model: Path, speculation: str, draft: Path | None = None) -> BackendConfig:
    return BackendConfig(
        model=str(model),
        max_model_len=512,
        max_num_seqs=32,
        num_kv_blocks=1024,
        speculation=speculation,
        draft_model="" if draft is None else str(draft),
    )


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--prompts", type=count, default=200, help="whose answers are compared token for token")
    parser.add_argument("--output", type=count, default=400, help="tokens of each answer of the demo model")
    parser.add_argument("--output-135m", type=count, default=64, help="tokens of each answer of the random model")
    parser.add_argument("--exact-output", type=count, default=64, help="tokens of the answers that are compared")
    parser.add_argument("--rounds", type=count, default=7)
    parser.add_argument("--alone", type=count, default=8, help="prompts that are answered one after another in a round")
    parser.add_argument("--skip-135m", action="store_true", help="leave out the random model of 135M parameters")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        draft = write_first_layers(DEMO_MODEL, Path(scratch) / "draft", DRAFT_LAYERS)
        engines = {"ngram": config_of(DEMO_MODEL, "ngram"), "draft": config_of(DEMO_MODEL, "draft", draft)}
        exact = {name: exactness(SpeculativeEngine(config), arguments) for name, config in engines.items()}
        for name, results in exact.items():
            for result in results:
                print(name, result, flush=True)
        columns = "model proposer load output batch speed_up lowest highest proposed accepted"
        print(" ".join(f"{column:>12}" for column in columns.split()), flush=True)
        rng = np.random.default_rng(arguments.seed)
        random = random_prompts(rng, 16, 4096)
        found = []
        for config in engines.values():
            found += speeds("demo", config, passages(16), random, arguments.output, arguments)
        if not arguments.skip_135m:
            write_checkpoint(Path(scratch) / "random", arguments.seed)
            config = config_of(Path(scratch) / "random", "ngram")
            random = random_prompts(rng, 16, 49152)
            found += speeds("135M random", config, random, random, arguments.output_135m, arguments)
    record = {
        "benchmark": "speculation",
        **provenance(arguments.seed),
        "load": {"prompt_tokens": 100, "rounds": arguments.rounds, "one_after_another": arguments.alone},
        "exactness": exact,
        "speeds": found,
    }
    write_result(arguments.json, record)


if __name__ == "__main__":
    main()

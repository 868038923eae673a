"""Two small tasks of lm-eval through Headway's HTTP API, beside the same tasks with transformers.

Owns: the tasks' items, the runs, the table and the result file. Must not know: how lm-eval scores.

lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) is unmodified, in an environment of its own:

    python -m venv lm-eval-venv && lm-eval-venv/bin/pip install 'lm-eval[api,hf]'

It asks as ``local-completions`` (prompts as token ids, and as text) and, for the task that generates, as
``local-chat-completions``; and it runs the checkpoint itself with transformers in float32, as ``hf``. Items are first
sentences of docstrings of Python's standard library. The same tokens are scored, so accuracies must be equal; chats have
a template around them, so theirs stands for itself.

    python benchmarks/lm_eval_http.py --lm-eval lm-eval-venv/bin/lm_eval --json benchmarks/results/lm_eval_http.json
"""

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.child_server import ChildServer
from program import count, parser_of, provenance, write_result
from served import DEMO_MODEL

TASKS = Path(__file__).parent / "lm_eval_tasks"
CHOICES, GENERATION = "docstring_ends", "next_words"
NUM_ENDS = 4
_LEAST_WORDS, _MOST_WORDS = 8, 24
_METRICS = {CHOICES: ("acc,none", "acc_norm,none"), GENERATION: ("exact_match,first_word",)}


def sentences() -> Iterator[str]:
    """First sentences of docstrings, of middling length."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if text.endswith(".") and _LEAST_WORDS <= len(text.split()) <= _MOST_WORDS:
                    yield text


def write_items(path: Path, num_items: int, seed: int) -> None:
    """Write the items of both tasks."""
    drawn = random.Random(seed)
    halves = []
    for text in drawn.sample(sorted(set(sentences())), num_items * 2)[:num_items]:
        words = text.split()
        middle = len(words) * 3 // 5
        halves.append((" ".join(words[:middle]), " ".join(words[middle:])))
    with path.open("w") as file:
        for place, (beginning, end) in enumerate(halves):
            others = [one for number, (_, one) in enumerate(halves) if number != place and one != end]
            ends = [*drawn.sample(others, NUM_ENDS - 1), end]
            drawn.shuffle(ends)
            item = {"beginning": beginning, "ends": ends, "answer": ends.index(end), "next_word": end.split()[0]}
            file.write(json.dumps(item) + "\n")


def evaluate(
    lm_eval: str, tasks: Path, names: Sequence[str], model: str, model_args: dict[str, object]
) -> dict[str, Any]:
    """Run lm-eval once; return metrics by task."""
    with tempfile.TemporaryDirectory() as out:
        words = ",".join(f"{name}={value}" for name, value in model_args.items())
        command = [lm_eval, "run"] if "run" in _help_of(lm_eval) else [lm_eval]
        command += ["--model", model, "--model_args", words, "--tasks", ",".join(names), "--include_path", str(tasks)]
        command += ["--output_path", out, "--device", "cpu"]
        command += ["--apply_chat_template"] if "chat" in model else []
        environment = {**os.environ, "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"lm-eval with {model} failed:\n{done.stderr[-4000:]}")
        report = json.loads(next(Path(out).rglob("results*.json")).read_text())
    return {name: {metric: report["results"][name][metric] for metric in _METRICS[name]} for name in names}


def _help_of(lm_eval: str) -> str:
    return subprocess.run([lm_eval, "--help"], capture_output=True, text=True, check=False).stdout


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Evaluate every way."""
    model = Path(arguments.model).resolve()
    both = (CHOICES, GENERATION)
    with tempfile.TemporaryDirectory() as parent:
        tasks = Path(parent)
        items = tasks / "items.jsonl"
        write_items(items, arguments.items, arguments.seed)
        for task in TASKS.glob("*.yaml"):
            (tasks / task.name).write_text(task.read_text().replace("ITEMS", str(items)))
        found = {
            "transformers": evaluate(arguments.lm_eval, tasks, both, "hf", {"pretrained": model, "dtype": "float32"})
        }
        print("transformers", found["transformers"], file=sys.stderr)
        flags = ["--grpc-address=127.0.0.1:0", "--http-address=127.0.0.1:0", "--log-level=warning", f"--model={model}"]
        server = ChildServer([*flags, "--dtype=float32"])
        try:
            url = f"{server.http_url}/v1"
            common = {"model": model.name, "tokenizer": model, "num_concurrent": 16, "max_retries": 1}
            ways: list[tuple[str, str, tuple[str, ...], dict[str, object]]] = [
                ("completions, token ids", "local-completions", both, {"tokenized_requests": True}),
                ("completions, text", "local-completions", (GENERATION,), {"tokenized_requests": False}),
                ("chat completions", "local-chat-completions", (GENERATION,), {}),
            ]
            for name, kind, names, own in ways:
                path = "chat/completions" if "chat" in kind else "completions"
                found[name] = evaluate(
                    arguments.lm_eval, tasks, names, kind, common | own | {"base_url": f"{url}/{path}"}
                )
                print(name, found[name], file=sys.stderr)
        finally:
            server.close()
    equal = all(
        found[name][task] == found["transformers"][task]
        for name in ("completions, token ids", "completions, text")
        for task in found[name]
    )
    return {"items": arguments.items, "model": model.name, "found": found, "equal": equal}


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return a line per way."""
    lines = []
    for way, tasks in found.items():
        values = [
            f"{task} {re.sub(',.*', '', name)} {value:.4f}" for task, of in tasks.items() for name, value in of.items()
        ]
        lines.append(f"{way:<24} {'   '.join(values)}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, seed=0)
    parser.add_argument("--lm-eval", required=True, metavar="PROGRAM", help="lm-eval's command")
    parser.add_argument("--model", default=str(DEMO_MODEL), help="checkpoint directory (default: the demo model)")
    parser.add_argument("--items", type=count, default=200, help="of each task (default: 200)")
    arguments = parser.parse_args(words)
    result = run(arguments)
    print(table(result["found"]))
    print("equal to transformers" if result["equal"] else "NOT equal to transformers")
    write_result(arguments.json, {**provenance(arguments.seed), **result})
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())

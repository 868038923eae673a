"""Libraries for structured output: the cost of a compile and of a mask, and the effect of hostile inputs.

Owns: the schemas, the vocabularies, the hostile inputs, and the result file. Must not know: Headway.

Measured for each library and vocabulary: seconds to read the tokenizer; milliseconds to compile each schema;
microseconds per mask over random allowed outputs (the same if the masks are the same); the speed of another Python
thread meanwhile against its speed alone (1: the interpreter lock is free); whether two compiles give the same masks.
Each hostile input runs in its own process for at most ``--patience`` seconds: a compile, then 40 masks.

    pip install --no-deps xgrammar apache-tvm-ffi pydantic pydantic-core annotated-types typing-inspection
    python benchmarks/constraint_libraries.py --json benchmarks/results/constraint_libraries.json

A library that is not installed is left out.
"""

# ruff: noqa: D102 (``Library`` describes the methods)

import argparse
import importlib.metadata
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

import headway
from headway_proto.wording import one_line
from program import count, parser_of, provenance, write_result
from random_tokenizer import random_tokenizer

SEED = 7
_OTHER_THREAD_S = 0.5
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}  # fmt: skip
SCHEMAS: dict[str, Any] = {
    "object": OBJECT,
    "nested": {
        "type": "array",
        "minItems": 50,
        "items": OBJECT | {"properties": OBJECT["properties"] | {"of": OBJECT}},
    },
    "enum of 500": {"enum": [f"name {number:04d}" for number in range(500)]},
    "100 properties": {
        "type": "object",
        "properties": {f"key{number}": {"type": "string"} for number in range(100)},
        "additionalProperties": False,
    },
    "pattern": {"type": "string", "pattern": "^([a-z]{3,12}-){4}[0-9]{4}$"},
    "any object": {"type": "object"},
}
HOSTILE: dict[str, Any] = {
    "2,000 optional properties": {
        "type": "object",
        "properties": {f"k{number}": {"type": "string"} for number in range(2000)},
    },
    "nested counts": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"},
    "exponential automaton": {"type": "string", "pattern": "^(a|b)*a(a|b){18}$"},
    "long string": {"type": "string", "minLength": 100_000, "maxLength": 1_000_000},
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000},
    "multiples": {"type": "integer", "multipleOf": 999_983},
    "wide integer range": {"type": "integer", "minimum": -(10**18), "maximum": 10**18},
    "doubling references": {
        "$defs": {
            **{f"d{n}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/d{n + 1}"} for k in "ab"}} for n in range(24)},
            "d24": {"type": "integer"},
        },
        "$ref": "#/$defs/d0",
    },
    "nested 400 deep": None,
}  # fmt: skip
for _ in range(400):
    HOSTILE["nested 400 deep"] = {"type": "array", "items": HOSTILE["nested 400 deep"] or {"type": "integer"}}


class Library(Protocol):
    """A library over one tokenizer. Masks are packed bits, int32."""

    def compile(self, schema: object) -> Any:
        """Compile a schema; raise if that is impossible."""
        ...

    def matcher(self, grammar: Any) -> Any:
        """Return the state at the beginning of an output."""
        ...

    def fill(self, matcher: Any, words: np.ndarray) -> None:
        """Write the mask."""
        ...

    def accept(self, matcher: Any, token_id: int) -> bool:
        """Advance; False if the output is over or the token does not follow."""
        ...


class Llguidance:
    """llguidance, with its own limits."""

    def __init__(self, tokenizer: str, vocab_size: int) -> None:
        from llguidance import LLMatcher, LLTokenizer

        self._matcher = LLMatcher
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=0)

    def compile(self, schema: object) -> Any:
        text = self._matcher.grammar_from_json_schema(json.dumps(schema), {"whitespace_flexible": False})
        matcher = self._matcher(self._tokenizer, text, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def matcher(self, grammar: Any) -> Any:
        return grammar.deep_copy()

    def fill(self, matcher: Any, words: np.ndarray) -> None:
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise ValueError(matcher.get_error())

    def accept(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.consume_token(token_id)) and not matcher.is_stopped()


class Xgrammar:
    """xgrammar, one compiling thread, no cache of its own."""

    def __init__(self, tokenizer: str, vocab_size: int) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        vocabulary = Tokenizer.from_str(tokenizer).get_vocab()
        info = xgrammar.TokenizerInfo(
            sorted(vocabulary, key=vocabulary.__getitem__),
            vocab_type=xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=vocab_size,
            stop_token_ids=[0],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._words: Any = None

    def compile(self, schema: object) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)

    def matcher(self, grammar: Any) -> Any:
        return self._xgrammar.GrammarMatcher(grammar)

    def fill(self, matcher: Any, words: np.ndarray) -> None:
        words[:] = -1
        matcher.fill_next_token_bitmask(words.reshape(1, -1))

    def accept(self, matcher: Any, token_id: int) -> bool:
        return bool(matcher.accept_token(token_id)) and not matcher.is_terminated()


LIBRARIES: dict[str, type[Llguidance | Xgrammar]] = {"llguidance": Llguidance, "xgrammar": Xgrammar}


def vocabularies() -> dict[str, tuple[str, int]]:
    """Return tokenizers by name: text and width."""
    demo = Path(headway.__file__).parent / "demo_model" / "tokenizer.json"
    return {"demo, 4k": (demo.read_text(encoding="utf-8"), 4096)} | {
        f"random, {size // 1024}k": (random_tokenizer(size, SEED), size) for size in (49_152, 131_072)
    }


def bits(words: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def walk(library: Library, grammar: Any, vocab_size: int, num_masks: int, seed: int) -> tuple[list[float], int]:
    """Return the seconds of each mask over random outputs, and a checksum of the masks."""
    draw, seconds, digest = np.random.default_rng(seed), [], 0
    words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    matcher = library.matcher(grammar)
    for _ in range(num_masks):
        began = time.perf_counter()
        library.fill(matcher, words)
        seconds.append(time.perf_counter() - began)
        digest = hash((digest, words.tobytes()))
        allowed = bits(words)
        if not len(allowed) or not library.accept(matcher, int(draw.choice(allowed))):
            matcher = library.matcher(grammar)
    return seconds, digest


def lets_go(work: Any) -> float:
    """Return the speed of another Python thread during ``work``, against its speed alone."""

    def count(seconds: float, during: Any) -> float:
        counted, stop = [0], threading.Event()

        def spin() -> None:
            while not stop.is_set():
                counted[0] += 1

        thread = threading.Thread(target=spin)
        thread.start()
        began = time.perf_counter()
        during() if during else time.sleep(seconds)
        elapsed = time.perf_counter() - began
        stop.set()
        thread.join()
        return counted[0] / elapsed

    return count(0.0, work) / count(_OTHER_THREAD_S, None)


def measure(name: str, tokenizer: str, vocab_size: int, num_masks: int) -> dict[str, object]:
    began = time.perf_counter()
    library: Library = LIBRARIES[name](tokenizer, vocab_size)
    opened_s = time.perf_counter() - began
    schemas: dict[str, object] = {}
    every_mask: list[float] = []
    for label, schema in SCHEMAS.items():
        times = []
        for _ in range(3):
            began = time.perf_counter()
            try:
                grammar = library.compile(schema)
            except Exception as error:  # noqa: BLE001 (each has its own)
                schemas[label] = {"refused": one_line(error, 100)}
                break
            times.append(time.perf_counter() - began)
        else:
            masks, first = walk(library, grammar, vocab_size, num_masks, SEED)
            _, again = walk(library, library.compile(schema), vocab_size, num_masks, SEED)
            every_mask += masks
            schemas[label] = {
                "compile_ms": round(1e3 * statistics.median(times), 3),
                "mask_us_mean": round(1e6 * statistics.fmean(masks), 1),
                "mask_us_p99": round(1e6 * float(np.quantile(masks, 0.99)), 1),
                "same_masks_twice": first == again,
            }
    grammar = library.compile(SCHEMAS["nested"])
    words = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def for_a_while(work: Any) -> None:
        until = time.perf_counter() + _OTHER_THREAD_S
        while time.perf_counter() < until:
            work()

    return {
        "open_s": round(opened_s, 3),
        "mask_us_mean": round(1e6 * statistics.fmean(every_mask), 1),
        "mask_us_p99": round(1e6 * float(np.quantile(every_mask, 0.99)), 1),
        "other_thread_while_compiling": round(
            lets_go(lambda: for_a_while(lambda: library.compile(SCHEMAS["100 properties"]))), 2
        ),
        "other_thread_while_masking": round(
            lets_go(lambda: for_a_while(lambda: library.fill(library.matcher(grammar), words))), 2
        ),
        "schemas": schemas,
    }


def try_hostile(name: str, label: str) -> None:
    """Print the result of one hostile input, in a process of its own."""
    tokenizer, vocab_size = vocabularies()["demo, 4k"]
    library: Library = LIBRARIES[name](tokenizer, vocab_size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    try:
        grammar = library.compile(HOSTILE[label])
        compile_s = time.perf_counter() - began
        masks, _ = walk(library, grammar, vocab_size, 40, SEED)
        outcome: dict[str, object] = {
            "compile_ms": round(1e3 * compile_s, 1),
            "worst_mask_ms": round(1e3 * max(masks), 2),
        }
    except Exception as error:  # noqa: BLE001 (each has its own)
        outcome = {
            "refused": one_line(error, 100),
            "after_ms": round(1e3 * (time.perf_counter() - began), 1),
        }
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps(outcome | {"memory_mib": grown // 1024}))


def hostile(name: str, label: str, patience_s: float) -> dict[str, object]:
    command = [sys.executable, __file__, "--hostile", name, label]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience_s + 10, check=False)
    except subprocess.TimeoutExpired:
        return {"no_end_after_s": patience_s}
    if done.returncode:
        return {"process_ended_with": done.returncode}
    outcome: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--masks", type=count, default=300, help="of each schema")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds for a hostile input, beside 10 to start")
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--vocabularies", nargs="*", help="names of those to measure; default: all")
    parser.add_argument("--hostile-inputs", type=int, default=len(HOSTILE), help="how many of them to try")
    parser.add_argument("--hostile", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.hostile:
        try_hostile(*arguments.hostile)
        return
    result: dict[str, Any] = {"provenance": provenance(SEED), "libraries": {}}
    for name in arguments.libraries.split(","):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: not installed")
            continue
        needs = [need for need in importlib.metadata.requires(name) or () if "extra ==" not in need]
        entry: dict[str, Any] = {"version": version, "needs": needs, "vocabularies": {}, "hostile": {}}
        for label, (tokenizer, vocab_size) in vocabularies().items():
            if arguments.vocabularies and label not in arguments.vocabularies:
                continue
            entry["vocabularies"][label] = measured = measure(name, tokenizer, vocab_size, arguments.masks)
            print(
                name, label, json.dumps({key: value for key, value in measured.items() if key != "schemas"}), flush=True
            )
        for label in list(HOSTILE)[: arguments.hostile_inputs]:
            entry["hostile"][label] = hostile(name, label, arguments.patience)
            print(name, label, json.dumps(entry["hostile"][label]), flush=True)
        result["libraries"][name] = entry
    write_result(arguments.json, result)


if __name__ == "__main__":
    main()

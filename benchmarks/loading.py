"""How long ``headway serve`` takes until it is ready, beside reading the model's file.

Owns: the random checkpoints, the page cache, the table and the result file. Must not know: how a model is loaded.

For each checkpoint, by turns: the file is read with plain reads, and ``headway serve`` is started; each with a page cache
that holds nothing of the file (*cold*) and with one that holds all of it (*warm*). The demo model's time, which is hardly
more than that of starting Python and PyTorch, stands beside them.

The checkpoints are random Llamas: 135M parameters in float32 (0.5 GB) and 1.1B in bfloat16 (2.2 GB). They are kept in
``--directory`` for the next run. ``--models "3.0B bfloat16"`` takes one of 6 GB, for which memory of 14 GB must be free.
``--model DIR`` adds one's own.

The host of a virtual machine may take back memory that was free for a while, and give it again more slowly than a disk
reads. A start needs twice the file's size, a plain read only what ``forget`` has just set free. With ``--memory-at-hand``
both find their memory: this process holds as much as the work needs, and gives it to the system as it is used.
"""

import argparse
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from program import count, parser_of, provenance, write_result
from served import DEMO_MODEL, served, write_random_model

_CHUNK_BYTES = 8 << 20
_HELD_BYTES = 64 << 20
_GIVEN_AHEAD = 512 << 20
_LOOK_S = 0.002
_OTHER_BYTES = 2 << 30
"""What the processes of a start need beside the weights."""
_SHAPE_1B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_SHAPE_3B = _SHAPE_1B | {
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
}


def models_in(directory: Path, names: Sequence[str]) -> list[tuple[str, Path]]:
    """Return the random checkpoints, made where they are missing."""
    import torch

    from torch_cpu import SHAPE_135M

    known: dict[str, tuple[dict[str, object], torch.dtype]] = {
        "135M float32": (dict(SHAPE_135M), torch.float32),
        "1.1B bfloat16": (dict(_SHAPE_1B), torch.bfloat16),
        "3.0B bfloat16": (dict(_SHAPE_3B), torch.bfloat16),
    }
    found = []
    for name in names:
        place = directory / name.replace(" ", "-")
        if not (place / "tokenizer.json").exists():
            print(f"making {place}", file=sys.stderr)
            shape, dtype = known[name]
            write_random_model(place, 0, shape, dtype)
        found.append((name, place))
    return found


def files_of(model: Path) -> list[Path]:
    """Return a checkpoint's weight files."""
    return sorted(model.glob("*.safetensors"))


def forget(model: Path) -> None:
    """Take a checkpoint's files out of the page cache."""
    for path in files_of(model):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(model: Path) -> float:
    """Return the seconds of plain reads."""
    buffer = bytearray(_CHUNK_BYTES)
    began = time.perf_counter()
    for path in files_of(model):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


def ready(model: Path, flags: Sequence[str]) -> float:
    """Return the seconds from the command to the readiness line."""
    began = time.perf_counter()
    with served("--model", str(model), *flags):
        return time.perf_counter() - began


@contextmanager
def memory_at_hand(num_bytes: int) -> Iterator[None]:
    """Hold memory, and give it to the system as others use it: so it is never free for long."""
    held = [_written(_HELD_BYTES) for _ in range(num_bytes // _HELD_BYTES)]
    least_free = _free_bytes() + _GIVEN_AHEAD
    is_over = Event()

    def give() -> None:
        while held and not is_over.wait(_LOOK_S):
            while held and _free_bytes() < least_free:
                held.pop().close()

    giving = Thread(target=give)
    giving.start()
    try:
        yield
    finally:
        is_over.set()
        giving.join()


def _written(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for place in range(0, num_bytes, mmap.PAGESIZE):
        memory[place] = 1
    return memory


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE


def measure(model: Path, flags: Sequence[str], rounds: int, *, at_hand: bool) -> dict[str, float]:
    """Return medians by turns. ``at_hand``: their memory is."""
    works: dict[str, tuple[bool, Callable[[], float]]] = {
        "read_cold_s": (True, lambda: read(model)),
        "ready_cold_s": (True, lambda: ready(model, flags)),
        "read_warm_s": (False, lambda: read(model)),
        "ready_warm_s": (False, lambda: ready(model, flags)),
    }
    num_bytes = sum(path.stat().st_size for path in files_of(model))
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, (is_cold, work) in works.items():
            if is_cold:
                forget(model)
            else:
                read(model)
            with memory_at_hand((2 if is_cold else 1) * num_bytes + _OTHER_BYTES if at_hand else 0):
                seconds[name].append(work())
            print(f"{model.name}: {name} {seconds[name][-1]:.2f}", file=sys.stderr)
    row = {name: statistics.median(each) for name, each in seconds.items()}
    row["gigabytes"] = num_bytes / 1e9
    return row


def table(rows: Sequence[dict[str, Any]], demo_s: float) -> str:
    lines = [
        f"demo model: ready after {demo_s:.2f} s",
        f"{'':<28}{'GB':>6}{'read cold':>11}{'ready':>8}{'ratio':>7}{'read warm':>11}{'ready':>8}{'over the demo':>15}",
    ]
    lines += [
        f"{row['model']:<28}{row['gigabytes']:>6.2f}{row['read_cold_s']:>11.2f}{row['ready_cold_s']:>8.2f}"
        f"{row['ready_cold_s'] / row['read_cold_s']:>7.2f}{row['read_warm_s']:>11.2f}{row['ready_warm_s']:>8.2f}"
        f"{row['ready_warm_s'] - demo_s:>15.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--directory", type=Path, default=Path("loading-models"), help="of the random checkpoints")
    parser.add_argument("--models", default="135M float32,1.1B bfloat16", help="of these, with commas between; or none")
    parser.add_argument("--model", type=Path, action="append", default=[], metavar="DIR", help="one more checkpoint")
    parser.add_argument(
        "--memory-at-hand", action="store_true", help="no waiting for a host that takes free memory back"
    )
    parser.add_argument("--flags", default="", help="more flags of headway serve, in one word")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "loading.json")
    arguments: argparse.Namespace = parser.parse_args()
    flags = arguments.flags.split()
    names = [] if arguments.models == "none" else arguments.models.split(",")
    models = [*(models_in(arguments.directory, names) if names else ()), *((str(one), one) for one in arguments.model)]
    demo_s = statistics.median(ready(DEMO_MODEL, flags) for _ in range(arguments.rounds))
    at_hand: bool = arguments.memory_at_hand
    rows = [
        {"model": name, **measure(place.resolve(), flags, arguments.rounds, at_hand=at_hand)} for name, place in models
    ]
    print(table(rows, demo_s))
    run = {"rounds": arguments.rounds, "flags": flags, "memory_at_hand": at_hand}
    write_result(arguments.output, {**provenance(seed=0), **run, "demo_ready_s": demo_s, "rows": rows})


if __name__ == "__main__":
    main()

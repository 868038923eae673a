"""Who takes part: the engines, in which precision, with which form of the weights, and how each is started.

Owns: command lines and environments. Must not know: what is measured.
"""

import functools
import os
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.planning.plan import without_settings
from served import READY, row_of_free_ports

HERE = Path(__file__).parent
ENGINES = ("headway", "vllm", "openvino", "llama.cpp")


@dataclass(frozen=True)
class Contender:
    """``form``: of the weights, in ``checkpoints.Forms``. ``detail``: Headway's ``--quantization``, option ``activations``
    and ``--dtype``, with colons between them; vLLM's ``--dtype``; OpenVINO's precision of inference. ``rival``: the Headway
    that it is compared with; empty: the first of its precision. ``has_loss``: whether the demo model comes in this form.
    """

    name: str
    engine: str
    form: str
    detail: str = ""
    has_server: bool = False
    rival: str = ""
    has_loss: bool = True


PRECISIONS: Mapping[str, tuple[Contender, ...]] = {
    "float32": (
        Contender("Headway", "headway", "float32", "none:auto:float32", has_server=True),
        Contender("vLLM", "vllm", "float32", "float32", has_server=True),
        Contender("OpenVINO GenAI", "openvino", "openvino:float32", "f32"),
    ),
    "bfloat16": (
        Contender("Headway", "headway", "bfloat16", "none:auto:bfloat16", has_server=True),
        Contender("vLLM", "vllm", "bfloat16", "bfloat16", has_server=True),
        Contender("OpenVINO GenAI", "openvino", "openvino:float32", "bf16"),
        Contender("Headway, computing in float32", "headway", "bfloat16", "none:auto:float32"),
    ),
    "mixture": (
        Contender("Headway", "headway", "mixture", "none:auto:bfloat16", has_loss=False),
        Contender("vLLM", "vllm", "mixture", "bfloat16", has_loss=False),
    ),
    "int8": (
        Contender("Headway, else bfloat16", "headway", "float32", "int8:auto:bfloat16", has_server=True),
        Contender("vLLM W8A8, else bfloat16", "vllm", "w8a8", "bfloat16", has_server=True),
        Contender("Headway, vLLM's W8A8 files, else bfloat16", "headway", "w8a8", "none:auto:bfloat16"),
        Contender("OpenVINO GenAI, else bfloat16", "openvino", "openvino:int8", "bf16"),
        Contender("Headway, else float32", "headway", "float32", "int8:auto:float32"),
        Contender("OpenVINO GenAI, else float32", "openvino", "openvino:int8", "f32", rival="Headway, else float32"),
        Contender("llama.cpp Q8_0", "llama.cpp", "gguf:Q8_0", rival="Headway, llama.cpp's Q8_0 file"),
        Contender("Headway, llama.cpp's Q8_0 file", "headway", "of_gguf:Q8_0", "none:int8:float32"),
        Contender("Headway, the same, exact", "headway", "of_gguf:Q8_0", "none:exact:float32"),
    ),
    "int4": (
        Contender("Headway, else bfloat16", "headway", "float32", "int4:auto:bfloat16"),
        Contender("OpenVINO GenAI, else bfloat16", "openvino", "openvino:int4", "bf16"),
        Contender("Headway, activations in bfloat16", "headway", "float32", "int4:bfloat16:bfloat16"),
        Contender("Headway, else float32", "headway", "float32", "int4:auto:float32"),
        Contender("OpenVINO GenAI, else float32", "openvino", "openvino:int4", "f32", rival="Headway, else float32"),
        Contender("llama.cpp Q4_0", "llama.cpp", "gguf:Q4_0", rival="Headway, llama.cpp's Q4_0 file"),
        Contender("Headway, llama.cpp's Q4_0 file", "headway", "of_gguf:Q4_0", "none:int8:float32"),
        Contender("Headway, the same, exact", "headway", "of_gguf:Q4_0", "none:exact:float32"),
    ),
}


def _has_avx2_alone() -> bool:
    """There OpenVINO has no attention over keys and values in bfloat16."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return "avx2" in flags and "avx512f" not in flags


def rival_of(precision: str, name: str) -> str:
    """The Headway that a contender is compared with; itself, if it is the first."""
    contenders = PRECISIONS[precision]
    return next((one.rival for one in contenders if one.name == name), "") or contenders[0].name


@dataclass(frozen=True)
class Installed:
    """Where the engines are; an empty text: that one is left out."""

    vllm_python: str
    openvino_python: str
    node_directory: str
    preload: str
    scratch: Path
    num_threads: int

    def left_out(self) -> dict[str, str]:
        """The engines that were not given, each with the flag that gives it."""
        flags = {
            "vllm": (self.vllm_python, "--vllm-python"),
            "openvino": (self.openvino_python, "--openvino-python"),
            "llama.cpp": (self.node_directory, "--node-directory"),
        }
        return {engine: flag for engine, (given, flag) in flags.items() if not given}

    def taking_part(self, precision: str) -> list[Contender]:
        """Return the contenders of a precision whose engines were given, and run it on this processor."""
        absent, is_refused = self.left_out(), _has_avx2_alone()
        return [
            one
            for one in PRECISIONS[precision]
            if one.engine not in absent and not (is_refused and (one.engine, one.detail) == ("openvino", "bf16"))
        ]

    def driver(self, one: Contender, model: Path) -> tuple[list[str], dict[str, str]]:
        """Return the command of an engine's driver, and its environment."""
        programs = {
            "headway": (sys.executable, "headway_driver.py"),
            "vllm": (self.vllm_python, "vllm_driver.py"),
            "openvino": (self.openvino_python, "openvino_driver.py"),
            "llama.cpp": ("node", "llama_cpp_driver.mjs"),
        }
        program, script = programs[one.engine]
        detail = [one.detail] if one.detail else []
        return [program, str(HERE / script), str(model), *detail, str(self.num_threads)], self._environment(one.engine)

    def server(self, one: Contender, model: Path) -> tuple[list[str], dict[str, str], Callable[[str], list[str]]]:
        """Return the command of a server, its environment, and ``Server``'s ``ready``."""
        environment = self._environment(one.engine)
        if one.engine == "headway":
            quantization, activations, dtype = one.detail.split(":")
            words = [
                *(sys.executable, "-m", "headway", "serve", "--model", str(model), "--log-level", "warning"),
                *("--grpc-address", "127.0.0.1:0", "--quantization", quantization, "--dtype", dtype),
                *("--backend-option", f"activations={activations}"),
                *("--num-threads", str(self.num_threads), "--max-model-len", "2048", "--num-kv-blocks", "1400"),
            ]
            return words, environment, _headway_is_ready
        port = row_of_free_ports(1)
        words = [
            *(self.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--dtype", one.detail, "--host", "127.0.0.1", "--port", str(port)),
            *("--max-model-len", "2048", "--max-num-seqs", "64"),
        ]
        return words, environment, functools.partial(_answers, f"http://127.0.0.1:{port}")

    def _environment(self, engine: str) -> dict[str, str]:
        plain = without_settings(os.environ)
        if engine == "headway":
            path = os.pathsep.join(filter(None, [str(HERE.parent), plain.get("PYTHONPATH", "")]))
            return {**plain, "PYTHONPATH": path}
        foreign = {name: value for name, value in plain.items() if name != "PYTHONPATH"}
        if engine == "vllm":
            return foreign | {
                "HF_HUB_OFFLINE": "1",
                "LD_PRELOAD": self.preload,
                "VLLM_CACHE_ROOT": str(self.scratch / "vllm-cache"),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{self.num_threads - 1}",
                "VLLM_LOGGING_LEVEL": "ERROR",
                "VLLM_NO_USAGE_STATS": "1",
            }
        return foreign | {"NODE_DIRECTORY": self.node_directory}


def _headway_is_ready(printed: str) -> list[str]:
    match = READY.search(printed)
    return ["--address", match["address"]] if match else []


def _answers(address: str, _: str) -> list[str]:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=1.0) as answer:  # noqa: S310 (of our own making)
            return ["--url", f"{address}/v1"] if answer.status == 200 else []
    except OSError:
        return []

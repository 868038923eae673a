"""The executor's configuration.

Owns: settings, help, ranges. Must not know: flags, files.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from headway_executor.backend import AUTOMATIC_SWAP_SPACE, BackendConfig
from headway_executor.rank_place import RankPlace
from headway_process.addresses import check_link_address, check_metrics_address, check_offered_address
from headway_process.ranges import check_ranges
from headway_process.settings import ExitWithParent, LogFormat, LogLevel, MetricsAddress, MetricsTokenFile
from headway_proto.adapters import ADAPTER_NAME_FORM, is_adapter_name
from headway_proto.wording import shown

SCHEDULER_PUBLIC_KEY = "scheduler.key"
EXECUTOR_SECRET_KEY = "executor.key_secret"  # noqa: S105 (a file's name)
CUDA = "cuda"

_MAX_NAME = 256
_MAX_BLOCK_SIZE = 1024


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one executor process."""

    step_address: Annotated[
        str, Meta(description="ZeroMQ address of the scheduler to connect to: ipc://PATH or tcp://HOST:PORT")
    ] = "tcp://127.0.0.1:50052"
    backend: Annotated[
        str, Meta(description="backend that runs the model: torch, triton (CUDA only), simulated, or an installed one")
    ] = "torch"
    model: Annotated[str, Meta(description="checkpoint directory")] = ""
    served_model_name: Annotated[
        str,
        Meta(
            description="name of the model to its clients, if they name one; without it the name that was given for the model: "
            "a hub's ORG/NAME, or a directory's or file's last part"
        ),
    ] = ""
    device: Annotated[str, Meta(description="device of the model: cpu, cuda or cuda:N")] = "cpu"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="dtype of weights and KV; auto: the backend decides"),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4", "fp8"],
        Meta(
            description="quantise the weights to 8 or 4 bits while loading; int4: not with torch operators, fp8: only with the "
            "triton backend"
        ),
    ] = "none"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(
            description="numbers of the KV cache; auto: those of the model, fp8: 8 bits and a power of two for each head and "
            "token, which takes half the memory of 16 bits; not with the CPU kernels"
        ),
    ] = "auto"
    block_size: Annotated[int, Meta(description="tokens per KV block, a power of two")] = 16
    num_kv_blocks: Annotated[int, Meta(description="KV blocks to reserve; 0: as many as fit into free memory")] = 0
    swap_space_mib: Annotated[
        int,
        Meta(
            description="MiB of main memory for KV blocks of preempted requests; 0: none; -1: as many blocks as the pool "
            "has, but at most a quarter of the free memory and, beside a GPU, 2048 MiB"
        ),
    ] = AUTOMATIC_SWAP_SPACE
    max_model_len: Annotated[int, Meta(description="tokens per request at most; 0: the model's context")] = 0
    max_num_seqs: Annotated[int, Meta(description="requests that may run at once")] = 256
    max_num_batched_tokens: Annotated[int, Meta(description="token budget of one step")] = 2048
    num_threads: Annotated[
        int,
        Meta(
            description="threads of a CPU backend; 0: the model's size decides, at most one per core, and no more than a container's CPU limit"
        ),
    ] = 0
    seed: Annotated[int, Meta(description="seed of a backend's own random numbers, for example of random weights")] = 0
    speculation: Annotated[
        Literal["off", "ngram", "draft"],
        Meta(
            description="source of proposed tokens, which one step verifies; ngram: the text so far (prompt lookup), "
            "draft: draft_model"
        ),
    ] = "off"
    draft_model: Annotated[
        str, Meta(description="checkpoint directory of the draft model, which must have the same tokens as the model")
    ] = ""
    num_speculative_tokens: Annotated[int, Meta(description="most tokens to propose for a request in one step")] = 8
    backend_options: Annotated[dict[str, str], Meta(description="the backend's own options")] = {}
    adapter: Annotated[
        dict[str, str],
        Meta(
            description="LoRA adapters to load at once, as NAME=DIRECTORY with PEFT's files; an operator can load and "
            "unload others later"
        ),
    ] = {}
    step_timeout_s: Annotated[
        float,
        Meta(
            description="seconds without a step's result after which the device counts as lost and the process ends; 0: never"
        ),
    ] = 300.0
    curve_keys: Annotated[
        str,
        Meta(
            description="directory with scheduler.key and executor.key_secret, as zmq.auth.create_certificates writes them"
        ),
    ] = ""
    host_pool: Annotated[
        Literal["shm", "private"],
        Meta(
            description="memory of KV blocks outside the device; shm: a file in /dev/shm, which other executors of this host "
            "and a later process can read; private: it ends with the process"
        ),
    ] = "shm"
    block_transports: Annotated[
        str,
        Meta(
            description="ways to reach KV blocks of other executors and to offer one's own, best first, comma-separated; "
            "empty: none"
        ),
    ] = "shm"
    block_address: Annotated[
        str,
        Meta(
            description="where the block transport tcp offers this executor's blocks: tcp://HOST:PORT, with a host that the "
            "others can reach; port 0 or *: any that is free; empty: nowhere, and tcp only pulls"
        ),
    ] = ""
    nixl_devices: Annotated[
        str,
        Meta(
            description="network devices of the block transport nixl, as UCX names them, for example mlx5_0:1; there "
            "NIXL asks nobody for a key"
        ),
    ] = "lo"
    tensor_parallel: Annotated[
        int,
        Meta(
            description="ranks that compute each layer together; see docs/executors.md for executors of several ranks"
        ),
    ] = 1
    pipeline_parallel: Annotated[
        int, Meta(description="stages of layers, one behind the other; each has tensor_parallel ranks")
    ] = 1
    ranks_address: Annotated[
        str,
        Meta(
            description="tcp://HOST:PORT where rank 0 listens for ranks that it has not started itself (RANK is set, as "
            "torchrun does); empty: MASTER_ADDR and the port behind MASTER_PORT"
        ),
    ] = ""
    metrics_address: MetricsAddress = ""
    metrics_token_file: MetricsTokenFile = ""
    log_level: LogLevel = "info"
    log_format: LogFormat = "console"
    exit_with_parent: ExitWithParent = False

    RANGES: ClassVar[Mapping[str, tuple[float, float]]] = {
        "block_size": (1, _MAX_BLOCK_SIZE),
        "num_kv_blocks": (0, 1 << 30),
        "swap_space_mib": (AUTOMATIC_SWAP_SPACE, 1 << 24),
        "max_model_len": (0, 1 << 24),
        "max_num_seqs": (1, 1 << 16),
        "max_num_batched_tokens": (1, 1 << 24),
        "num_threads": (0, 1024),
        "seed": (0, (1 << 64) - 1),
        "num_speculative_tokens": (1, 64),
        "step_timeout_s": (0, math.inf),
        "tensor_parallel": (1, 64),
        "pipeline_parallel": (1, 64),
    }

    def validate(self) -> None:
        """Check what types alone cannot.

        Raises:
            ValueError: one line with the field, its value and what is allowed.
        """
        check_link_address("step_address", self.step_address, has_keys=bool(self.curve_keys))
        check_metrics_address(self.metrics_address, self.metrics_token_file)
        if self.block_address:
            check_offered_address("block_address", self.block_address, has_keys=bool(self.curve_keys))
            if "tcp" not in self.block_transports.replace(" ", "").split(","):
                raise _refusal("block_address", self.block_address, "nothing, unless block_transports has tcp")
        if not _is_power_of_two(self.block_size) or self.block_size > _MAX_BLOCK_SIZE:
            raise _refusal("block_size", self.block_size, f"a power of two from 1 to {_MAX_BLOCK_SIZE}")
        check_ranges(self)
        _check_adapters(self.adapter)
        _check_name(self.served_model_name)
        _check_device(self.device, self.tensor_parallel * self.pipeline_parallel)
        if self.ranks_address:
            check_link_address("ranks_address", self.ranks_address, has_keys=bool(self.curve_keys))
            if not self.ranks_address.startswith("tcp://"):
                raise _refusal("ranks_address", self.ranks_address, "tcp://HOST:PORT")
        if self.curve_keys:
            for name in (SCHEDULER_PUBLIC_KEY, EXECUTOR_SECRET_KEY):
                if not (Path(self.curve_keys) / name).is_file():
                    raise _refusal("curve_keys", self.curve_keys, f"a directory with {name}")

    def backend_config(self) -> BackendConfig:
        """The settings for the backend, of rank 0 if there are several."""
        return BackendConfig(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            block_size=self.block_size,
            num_kv_blocks=self.num_kv_blocks,
            swap_space_mib=self.swap_space_mib,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_threads=self.num_threads,
            seed=self.seed,
            options=self.backend_options,
            speculation=self.speculation,
            draft_model=self.draft_model,
            num_speculative_tokens=self.num_speculative_tokens,
            adapters=self.adapter,
            place=RankPlace(tensor_parallel=self.tensor_parallel, pipeline_parallel=self.pipeline_parallel),
        )


def _refusal(field: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{field}: {shown(value)} is not allowed; allowed: {allowed}")


def _check_adapters(adapters: dict[str, str]) -> None:
    for name, directory in adapters.items():
        if not is_adapter_name(name) or not directory:
            raise _refusal("adapter", f"{name}={directory}", f"NAME=DIRECTORY, with a name of {ADAPTER_NAME_FORM}")


def _check_name(name: str) -> None:
    if not name.isprintable() or len(name) > _MAX_NAME:
        raise _refusal("served_model_name", name, f"at most {_MAX_NAME} printable characters")


def _is_power_of_two(value: int) -> bool:
    return value >= 1 and value & (value - 1) == 0


def _check_device(device: str, num_ranks: int) -> None:
    if not _is_device(device):
        raise _refusal("device", device, "cpu, cuda or cuda:N")
    if device.startswith(f"{CUDA}:") and num_ranks > 1:
        raise _refusal("device", device, "cpu or cuda; of several ranks, each takes the device of its number")


def _is_device(device: str) -> bool:
    kind, separator, index = device.partition(":")
    if not separator:
        return kind in {"cpu", CUDA}
    return kind == CUDA and index.isascii() and index.isdigit()

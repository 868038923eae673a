"""VllmEngine's load figures."""

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from headway_proto.operations import Status

_LEAST_INTERVAL_S = 0.5


class OutputRate:
    """Tokens per second."""

    def __init__(self) -> None:
        self._count = 0
        self._read_at: float | None = None
        self._rate = 0.0

    def read(self, count: int, now: float) -> float:
        """Return the rate, 0 at first and after a smaller count (a new scheduler)."""
        if self._read_at is None or count < self._count:
            self._count, self._read_at, self._rate = count, now, 0.0
        elif now - self._read_at >= _LEAST_INTERVAL_S:
            self._rate = (count - self._count) / (now - self._read_at)
            self._count, self._read_at = count, now
        return self._rate


def scheduler_load(status: Status, output_rate: float) -> vllm.SchedulerLoad:
    """Return the only rank's load."""
    used_blocks = status.num_total_blocks - status.num_free_blocks
    return vllm.SchedulerLoad(
        num_running_reqs=status.num_running,
        num_waiting_reqs=status.num_waiting,
        num_total_reqs=status.num_running + status.num_waiting,
        token_usage=used_blocks / status.num_total_blocks if status.num_total_blocks else 0.0,
        gen_throughput=output_rate,
        cache_hit_rate=status.recent_prefix_hit_rate,
        utilization=status.num_running / status.max_num_seqs if status.max_num_seqs else 0.0,
        max_running_requests=status.max_num_seqs,
    )

"""The place of one process in an executor of several ranks.

Owns: which rank computes which layers and which part of each. Must not know: processes, sockets, tensors.
"""

import msgspec


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Rank ``rank`` of ``pipeline_parallel`` stages of ``tensor_parallel`` ranks each.

    Rank 0 has the step link and the end of the pipeline: whoever draws tokens also answers for them, so that nothing but
    their ids goes to other stages. So ranks count from the last stage to the first. ``rendezvous`` is the HOST:PORT where
    the ranks meet.
    """

    rank: int = 0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    rendezvous: str = ""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def is_alone(self) -> bool:
        """Whether this is the only rank."""
        return self.size == 1

    @property
    def stage(self) -> int:
        """The stage; stage 0 has the embedding, the last one the head."""
        return self.pipeline_parallel - 1 - self.rank // self.tensor_parallel

    @property
    def tensor_rank(self) -> int:
        """This rank's part of each layer of its stage."""
        return self.rank % self.tensor_parallel

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits and draws tokens."""
        return self.stage == self.pipeline_parallel - 1

    def rank_of(self, stage: int, tensor_rank: int) -> int:
        """The rank with this place."""
        return (self.pipeline_parallel - 1 - stage) * self.tensor_parallel + tensor_rank

    def layers(self, num_layers: int) -> range:
        """The layers of this stage. Parts differ by one at most; early stages are longer, since the last has the head."""
        each, longer = divmod(num_layers, self.pipeline_parallel)
        first = self.stage * each + min(self.stage, longer)
        return range(first, first + each + (self.stage < longer))


ALONE = RankPlace()

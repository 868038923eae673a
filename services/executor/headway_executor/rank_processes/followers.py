"""What rank 0 knows of the other ranks.

Owns: who is there, what they have said, when one counts as lost, the comparison of their digests and failures. Must not
know: sockets, the scheduler.
"""

from collections import deque
from collections.abc import Callable

from headway_executor.host.ending import EXIT_BAD_CONFIGURATION
from headway_executor.host.metrics import GroupFigures
from headway_executor.rank_place import RankPlace
from headway_executor.rank_processes.messages import (
    SIGN_INTERVAL_S,
    Accepted,
    AdapterDropped,
    BlocksAgreed,
    GroupBreaks,
    GroupEnds,
    GroupLives,
    OfGroup,
    RankChangedAdapter,
    RankDigest,
    RankFailed,
    RankFetched,
    RankHello,
    RankLeaves,
    RankOpened,
    RankRefuses,
    Relayed,
    group_frame_writer,
    rank_frame_reader,
)
from headway_executor.rank_processes.refusal import Refusal
from headway_executor.rank_processes.silence import Silence
from headway_proto.adapters import AdapterChanged
from headway_proto.columns import Int32Array, decode_column, encode_column, encode_columns
from headway_proto.framing import Frame, FramingError
from headway_proto.step import BackendInfo
from headway_proto.wording import shown

_AGREE_S = 3.0
"""A step that failed on one rank must have failed on all after so long."""

_OWN_FIELDS = frozenset({"device", "swap_us_per_block", "supports_constraints", "host_pool", "block_addresses"})
"""Of ``BackendInfo``, and rank 0's count; all others are the same on all ranks."""


class Followers:
    """The ranks from 1 on. ``send`` gets a peer and a frame; peers are connections, named by the socket."""

    def __init__(self, place: RankPlace, send: Callable[[bytes, bytes], None]) -> None:
        self._place = place
        self._send = send
        self._reader = rank_frame_reader()
        self._writer = group_frame_writer()
        self._peers: dict[int, bytes] = {}
        self._sequences: dict[int, int] = {}
        self._silence = Silence()
        self._next_sign = float("-inf")
        self._opened: dict[int, BackendInfo] = {}
        self._fetched: dict[int, dict[int, Int32Array]] = {}
        self._digests: dict[tuple[int, int], dict[int, RankDigest]] = {}
        self._changed: dict[int, deque[AdapterChanged]] = {rank: deque() for rank in range(1, place.size)}
        self._failures: dict[int, set[int]] = {}
        self._failed_since: dict[int, float] = {}
        self._left: set[int] = set()
        self.broken = ""
        """Why the group cannot go on, in one line."""
        self.has_come_apart = False
        """Whether it is because a rank's state or tokens are others than rank 0's."""
        self.refusal: Refusal | None = None
        self._num_steps = dict.fromkeys(range(1, place.size), 0)
        self._num_answers = dict.fromkeys(range(1, place.size), 0)
        self._num_relayed_bytes = 0

    @property
    def next_deadline(self) -> float:
        """The time when ``look`` is due."""
        return float("-inf") if self.broken else min(self._next_sign, self._silence.next_look)

    @property
    def opened(self) -> dict[int, BackendInfo] | None:
        """What all of them announced, once they have."""
        return self._opened if len(self._opened) == self._place.size - 1 else None

    @property
    def figures(self) -> GroupFigures:
        """Counts for operators."""
        return GroupFigures(dict(self._num_steps), dict(self._num_answers), self._num_relayed_bytes)

    @property
    def have_left(self) -> bool:
        """Whether all that were there have said that they end."""
        return self._left >= self._peers.keys()

    def hear(self, peer: bytes, data: bytes, now: float) -> None:
        """Take a frame; never raise."""
        rank = next((rank for rank, known in self._peers.items() if known == peer), None)
        try:
            frame = self._reader.decode(data)
        except FramingError as error:
            if rank is not None:
                self._break(f"rank {rank}: a damaged frame: {error}")
            return
        if isinstance(frame.body, RankHello):
            self._greet(peer, frame.body)
            return
        if rank is None:
            return  # It belonged to a group that has ended.
        self._silence.heard(rank)
        if frame.sequence != self._sequences[rank]:
            self._break(f"rank {rank}: frame {frame.sequence} arrived where {self._sequences[rank]} was expected")
            return
        self._sequences[rank] += 1
        self._take(rank, frame, now)

    def look(self, now: float) -> None:
        """Give a sign of life where it is due, and look who is silent or alone with a failure."""
        if now >= self._next_sign:
            self._next_sign = now + SIGN_INTERVAL_S
            self.tell(GroupLives())
        silent = self._silence.look(now)
        if silent is not None:
            self._break(f"rank {silent} gives no sign of life")
        for number, since in self._failed_since.items():
            if now - since > _AGREE_S:
                ranks = ", ".join(map(str, sorted(self._failures[number])))
                self._break(f"a step failed on rank {ranks} alone")

    def lose(self, reason: str) -> None:
        """Note from elsewhere that a rank is lost."""
        self._break(reason)

    def relay(self, frame: bytes) -> None:
        """Pass a frame of the step link on."""
        self._silence.begin()
        self.tell(Relayed(frame))

    def agree(self, number: int, missing: Int32Array) -> None:
        """Let a step with pulls go on."""
        self._fetched.pop(number, None)
        self.tell(BlocksAgreed(number, encode_column(missing)))

    def accept(self, epoch: int, accepted_tokens: Int32Array) -> None:
        """Tell which proposals count."""
        self.tell(Accepted(epoch, encode_columns(accepted_tokens)))

    def end(self) -> None:
        """End in good order."""
        self.tell(GroupEnds())

    def give_up(self, reason: str, exit_code: int) -> None:
        """End all with this exit code."""
        self.tell(GroupBreaks(reason, exit_code))

    def tell(self, body: OfGroup) -> None:
        """Send to all that are there."""
        frame = self._writer.encode(body)
        self._num_relayed_bytes += len(frame) if isinstance(body, Relayed | BlocksAgreed | Accepted) else 0
        for peer in self._peers.values():
            self._send(peer, frame)

    def begin_epoch(self) -> None:
        """Digests of former epochs count no more."""
        self._digests.clear()

    def fetched_by_all(self, number: int) -> list[Int32Array] | None:
        """What each of the others lacks for the step with these pulls, once all have said it."""
        for former in [former for former in self._fetched if former < number]:
            del self._fetched[former]
        found = self._fetched.get(number, {})
        return list(found.values()) if len(found) == self._place.size - 1 else None

    def drop_adapter(self, name: str) -> None:
        """Let none keep an adapter that some could not load."""
        self.tell(AdapterDropped(name))

    def take_changed(self) -> dict[int, AdapterChanged] | None:
        """What each of the others answers to the next change of an adapter, once all have."""
        if not all(self._changed.values()):
            return None
        return {rank: answers.popleft() for rank, answers in self._changed.items()}

    def agrees_on(self, epoch: int, step: int, *, state: int, tokens: int) -> bool:
        """Whether all have answered for this step; an answer that differs breaks the group."""
        found = self._digests.get((epoch, step), {})
        for rank, digest in found.items():
            if digest.state != state or digest.tokens not in {None, tokens}:
                self.has_come_apart = True
                what = "tables and counters" if digest.state != state else "tokens"
                self._break(f"rank {rank} has other {what} than rank 0 after step {step} of epoch {epoch}")
        if self.broken or len(found) < self._place.size - 1:
            return False
        del self._digests[epoch, step]
        return True

    def note_failure(self, number: int, now: float, rank: int = 0) -> None:
        """A step of the backend failed on a rank: by its number."""
        failed = self._failures.setdefault(number, set())
        failed.add(rank)
        self._failed_since.setdefault(number, now)
        if len(failed) == self._place.size:
            del self._failures[number], self._failed_since[number]

    def check(self, info: BackendInfo) -> None:
        """Refuse ranks that announced anything else than rank 0, in ``refusal``."""
        for rank, other in sorted(self._opened.items()):
            for field in info.__struct_fields__:
                own, theirs = getattr(info, field), getattr(other, field)
                if field not in _OWN_FIELDS and own != theirs:
                    self.refusal = self.refusal or Refusal(
                        f"rank {rank}: {field} {shown(theirs)} is not allowed; allowed: {shown(own)}, as on rank 0; give all "
                        "ranks the same settings and model",
                        EXIT_BAD_CONFIGURATION,
                    )

    def _greet(self, peer: bytes, hello: RankHello) -> None:
        place = self._place
        degrees = (hello.tensor_parallel, hello.pipeline_parallel)
        if degrees != (place.tensor_parallel, place.pipeline_parallel) or not 0 < hello.rank < place.size:
            self.refusal = self.refusal or Refusal(
                f"rank {hello.rank}: tensor_parallel {degrees[0]} and pipeline_parallel {degrees[1]} are not allowed; "
                f"allowed: {place.tensor_parallel} and {place.pipeline_parallel}, as on rank 0, and ranks below {place.size}",
                EXIT_BAD_CONFIGURATION,
            )
        elif self._peers.get(hello.rank, peer) != peer:
            self._break(f"rank {hello.rank} has begun anew")
        elif hello.rank not in self._peers:
            self._peers[hello.rank] = peer
            self._sequences[hello.rank] = 1
            self._silence.heard(hello.rank)
            self._next_sign = float("-inf")

    def _take(self, rank: int, frame: Frame, now: float) -> None:
        body = frame.body
        match body:
            case RankOpened():
                self._opened[rank] = body.info
            case RankRefuses():
                self.refusal = self.refusal or Refusal(f"rank {rank}: {body.line}", body.exit_code)
            case RankFetched():
                self._fetched.setdefault(body.number, {})[rank] = decode_column(body.missing)
            case RankDigest():
                self._num_answers[rank] += 1
                self._digests.setdefault((body.epoch, body.step), {})[rank] = body
            case RankFailed():
                self.note_failure(body.number, now, rank)
            case RankChangedAdapter():
                self._changed[rank].append(body.answer)
            case RankLeaves():
                self._left.add(rank)
                self._break(f"rank {rank} leaves: {body.reason}")
            case _:
                self._num_steps[rank] = getattr(body, "num_steps", 0)

    def _break(self, reason: str) -> None:
        self.broken = self.broken or reason

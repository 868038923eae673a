"""What a client is told of one output: deltas however coalesced, one end, the right figures."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from headway_gateway.link.live_sequence import LiveSequence
from headway_gateway.text.continuation import Continuation, OutputText
from headway_gateway.text.detokenization import ByteLevelDetokenizer
from headway_proto import generation_pb2 as api
from headway_proto.ingress import (
    FINISH_ERROR,
    FINISH_LENGTH,
    REJECT_INVALID,
    Finished,
    Rejected,
    Submit,
    TokenLogprobs,
)
from headway_proto.sampling import SamplingParams

TABLE = [b"", b"a", b"b", b"ab", b"ba", b"abba", b"\xf0\x9f", b"\x99\x82", b" "]


def continuation(
    *, held: tuple[int, ...] = (), stops: tuple[str, ...] = (), min_tokens: int = 0
) -> tuple[Continuation, LiveSequence]:
    submission = Submit(
        handle=1,
        request_id="r",
        index=2,
        token_ids=b"",
        num_prompt_tokens=3,
        max_tokens=100,
        sampling=SamplingParams(),
    )
    sequence = LiveSequence(submission, held, lambda: None)
    text = OutputText(ByteLevelDetokenizer(TABLE), stops, min_tokens)
    text.push(list(held))
    return Continuation(sequence, text), sequence


def ended(count: int, reason: str = FINISH_LENGTH, **more: object) -> Finished:
    return Finished(handle=1, reason=reason, num_output_tokens=count, **more)


def reference(tokens: list[int], stops: tuple[str, ...], min_tokens: int) -> tuple[list[int], str, str | None]:
    """Token by token: the text of all so far, searched for the stop string that is complete first."""
    skipped = b"".join(TABLE[token] for token in tokens[:min_tokens]).decode(errors="ignore")
    for count in range(min_tokens + 1, len(tokens) + 1):
        so_far = b"".join(TABLE[token] for token in tokens[:count]).decode(errors="ignore")
        searched = so_far[len(skipped) :]
        for end in range(1, len(searched) + 1):
            for stop in sorted(stops, key=len, reverse=True):
                if searched[:end].endswith(stop):
                    return tokens[:count], skipped + searched[: end - len(stop)], stop
    return tokens, b"".join(TABLE[token] for token in tokens).decode(errors="replace"), None


def news_of(one: Continuation) -> list[api.GenerateResponse]:
    """What a generation sends of a continuation whenever it looks."""
    if one.is_over:
        assert one.take() is None
        return []
    delta = one.take()
    return ([] if delta is None else [delta]) + ([one.ending()] if one.is_over else [])


WHOLE_CHARACTERS = st.lists(
    st.one_of(st.sampled_from([[token] for token in (0, 1, 2, 3, 4, 5, 8)]), st.just([6, 7])), max_size=20
)


@settings(max_examples=300)
@given(
    tokens=WHOLE_CHARACTERS.map(lambda groups: [token for group in groups for token in group]),
    stops=st.lists(st.sampled_from(["ab", "bab", "aa", "🙂", "b🙂a", " "]), max_size=3, unique=True).map(tuple),
    min_tokens=st.integers(0, 4),
    sizes=st.lists(st.integers(0, 5), max_size=8),
)
def test_however_coalesced_the_client_gets_the_same_output(tokens, stops, min_tokens, sizes):
    one, sequence = continuation(stops=stops, min_tokens=min_tokens)
    expected_tokens, expected_text, expected_stop = reference(tokens, stops, min_tokens)
    responses: list[api.GenerateResponse] = []
    given_tokens = 0
    for size in [*sizes, len(tokens)]:
        sequence.tokens += tokens[given_tokens : given_tokens + size]
        given_tokens += size
        if given_tokens >= len(tokens):
            sequence.end = ended(len(tokens))
        responses += news_of(one)
        if one.is_over:
            break
    deltas = [response.delta for response in responses if response.HasField("delta")]
    assert [token for delta in deltas for token in delta.token_ids] == expected_tokens
    assert "".join(delta.text for delta in deltas) == expected_text
    for earlier, later in pairwise(deltas):
        assert later.first_token_index == earlier.first_token_index + len(earlier.token_ids)
    (finished,) = [response.finished for response in responses if response.HasField("finished")]
    assert responses[-1].HasField("finished")
    assert finished.usage.output_tokens == len(expected_tokens)
    assert (finished.stop or None) == expected_stop
    assert finished.reason == (api.FINISH_REASON_STOP if expected_stop else api.FINISH_REASON_LENGTH)
    assert news_of(one) == []


def test_nothing_new_means_nothing_to_tell():
    one, sequence = continuation()
    assert news_of(one) == []
    sequence.tokens.append(1)
    assert len(news_of(one)) == 1
    assert news_of(one) == []


def test_text_held_back_comes_with_the_end():
    one, sequence = continuation(stops=("ab!",))
    sequence.tokens += [1, 3]
    (first,) = news_of(one)
    assert first.delta.text == "a"
    sequence.end = ended(2)
    flush, finished = news_of(one)
    assert (flush.delta.text, list(flush.delta.token_ids), flush.delta.first_token_index) == ("ab", [], 2)
    assert finished.finished.index == 2


def test_resumed_output_goes_on_behind_what_is_held():
    one, sequence = continuation(held=(1, 6))
    sequence.tokens += [7, 2]
    sequence.logprobs += [TokenLogprobs(1, 2, -0.25, (7,), (-0.25,)), TokenLogprobs(1, 3, -0.5, (), ())]
    sequence.end = ended(4)
    response, finished = news_of(one)
    assert (response.delta.text, response.delta.first_token_index) == ("🙂b", 2)
    assert [(entry.token_id, entry.logprob) for entry in response.delta.logprobs] == [(7, -0.25), (2, -0.5)]
    assert finished.finished.usage == api.Usage(prompt_tokens=3, output_tokens=4)


def test_beginnings_refusals_and_errors():
    one, sequence = continuation()
    assert not one.has_begun
    sequence.num_cached_tokens = 2
    assert one.has_begun
    sequence.end = ended(0, FINISH_ERROR, error="not finite")
    (response,) = news_of(one)
    assert (response.finished.reason, response.finished.error) == (api.FINISH_REASON_ERROR, "not finite")
    assert response.finished.usage.cached_tokens == 2
    refused, sequence = continuation()
    sequence.end = Rejected(handle=1, reason=REJECT_INVALID, message="no")
    assert not refused.has_begun
    assert refused.refusal is sequence.end

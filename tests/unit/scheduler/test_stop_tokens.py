"""Which token ids end some running request."""

from headway_scheduler.core.state.stop_tokens import StopTokens


def test_an_id_counts_until_the_last_request_that_stops_at_it_has_left() -> None:
    stops = StopTokens(vocab_size=8)
    for token_ids in ({1, 2}, {2, 3}, {1, 2}, set()):
        stops.add(frozenset(token_ids))
    assert stops.ends_some.nonzero()[0].tolist() == [1, 2, 3]
    stops.remove(frozenset({1, 2}))
    assert stops.ends_some.nonzero()[0].tolist() == [1, 2, 3]
    stops.remove(frozenset({1, 2}))
    assert stops.ends_some.nonzero()[0].tolist() == [2, 3]
    stops.remove(frozenset({2, 3}))
    stops.remove(frozenset())
    assert not stops.ends_some.any()

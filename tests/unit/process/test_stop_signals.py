"""One wish to stop may come as two signals."""

from headway_process.stop_signals import ONE_REQUEST_S, StopRequests


def test_signals_that_come_together_are_one_request():
    requests = StopRequests()
    assert [requests.add(now) for now in (5.0, 5.0, 5.0 + 0.9 * ONE_REQUEST_S)] == [True, False, False]
    assert requests.count == 1
    assert requests.add(5.0 + ONE_REQUEST_S)
    assert requests.count == 2

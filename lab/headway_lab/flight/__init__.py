"""``headway replay``, ``explain`` and ``timeline``: reports from a flight log.

``source`` opens a log. ``life`` follows a request and ``explanation`` describes it. ``cells`` collects the rows of each
step for ``picture`` and ``perfetto``. ``policies`` simulates the same arrivals under other policies.
"""

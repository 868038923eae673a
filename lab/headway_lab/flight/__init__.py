"""``headway replay``, ``explain`` and ``timeline``: what a flight log tells, to people.

``source`` opens a log, ``life`` follows a request through a replay and ``explanation`` puts its life into words,
``cells`` gathers who ran in which step for ``picture`` and ``perfetto``, and ``policies`` runs the same arrivals otherwise.
"""

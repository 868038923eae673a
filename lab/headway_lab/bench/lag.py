"""The event loop's lag: latencies below it mean nothing."""

import asyncio

LOOK_INTERVAL_S = 0.01


class LagMeter:
    """Samples the event loop's lag in seconds."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []

    async def watch(self) -> None:
        """Sample until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + LOOK_INTERVAL_S
            await asyncio.sleep(LOOK_INTERVAL_S)
            self.lags_s.append(clock() - due)

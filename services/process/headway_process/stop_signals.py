"""The signals that ask a process to stop: SIGTERM, Ctrl-C, and the end of the terminal, unless nohup wants that ignored."""

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """Return them; call this before handling any of them."""
    hears_hang_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hears_hang_up else []))

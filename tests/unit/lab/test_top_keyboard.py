"""The mode of the terminal while single keys are read."""

import os
import pty
import termios

from headway_lab.top.keyboard import single_keys


def test_ctrl_s_is_a_key_that_stops_nothing_and_the_mode_is_restored() -> None:
    master, terminal = pty.openpty()
    try:
        before = termios.tcgetattr(terminal)
        assert before[0] & termios.IXON
        with single_keys(terminal):
            os.write(master, b"\x13")
            assert os.read(terminal, 8) == b"\x13"
            assert termios.tcgetattr(terminal)[3] & termios.ISIG, "Ctrl-C is a signal"
        assert termios.tcgetattr(terminal) == before
    finally:
        os.close(master)
        os.close(terminal)

"""``headway demo``: what a newcomer sees first."""

import re

from e2e.running_server import finished


def test_the_demonstration_streams_readable_answers_and_timings():
    demo = finished("demo", "--max-tokens", "12")
    text = "".join(demo.out)
    assert demo.process.returncode == 0, "".join(demo.err)
    assert demo.out[0].startswith("headway is ready on 127.0.0.1:")
    answers = re.findall(r"^\[\d+\] (.+)\n((?: {4}.*\n|\n)+)", text, re.MULTILINE)
    assert len(answers) >= 8
    assert all(re.search(r"[a-z]{2,}", answer) for _, answer in answers)
    assert re.search(
        r"^ *# +prompt tokens +output tokens +TTFT ms +mean ITL ms +tokens/s +ended +request$", text, re.MULTILINE
    )
    assert re.search(
        r"^total: \d+ requests; \d+ output tokens in [\d.]+ s, \d+ tokens/s; mean TTFT", text, re.MULTILINE
    )

"""A batch's lines are read or refused by number, and its answers on disk survive any death."""

import asyncio
import json
import os
import resource
import signal
from pathlib import Path

import httpx2
import msgspec
import pytest

from headway.batch.answers_file import AnswersFile, AnswersLostError
from headway.batch.lines import BatchLine, check, read_lines
from headway.batch.runner import Server, ServerGoneError, ServerRefusedError
from headway.flags.settings import ConfigurationError


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


OPENAI = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}


class TestLines:
    def test_both_forms_are_read(self, tmp_path: Path) -> None:
        path = written(tmp_path / "in", OPENAI, "", {"prompt": "x", "seed": 5}, {"input": "y"}, {"messages": []})
        lines = list(read_lines(path))
        assert [(line.number, line.custom_id, line.url) for line in lines] == [
            (1, "a", "/v1/chat/completions"),
            (3, "line-3", "/v1/completions"),
            (4, "line-4", "/v1/embeddings"),
            (5, "line-5", "/v1/chat/completions"),
        ]
        assert json.loads(lines[1].body) == {"prompt": "x", "seed": 5}
        assert json.loads(lines[2].body) == {"input": "y"}  # a vector needs no seed
        assert check(path) == 4

    def test_a_seed_follows_from_the_name(self, tmp_path: Path) -> None:
        first, again = (next(read_lines(written(tmp_path / "in", OPENAI, {"prompt": str(place)}))) for place in (1, 2))
        assert first.body == again.body
        other = next(read_lines(written(tmp_path / "in", OPENAI | {"custom_id": "b"})))
        assert json.loads(other.body)["seed"] != json.loads(first.body)["seed"]

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ("{", "line 2 of"),
            ("[1]", "Expected `object`, got `array`"),
            ({"text": "x"}, "it has 0 of the fields messages, prompt, input; allowed: one"),
            ({"prompt": "x", "input": "y"}, "it has 2 of the fields"),
            (OPENAI | {"url": "/v1/files"}, "url: '/v1/files' is not allowed; allowed: /v1/completions, "),
            (OPENAI | {"method": "GET"}, "method: 'GET' is not allowed; allowed: POST"),
            (OPENAI | {"colour": 1}, "unknown field `colour`"),
            ({"url": "/v1/completions", "body": {}}, "missing required field `custom_id`"),
            (OPENAI | {"body": 5}, "$.body"),
            ({"prompt": "x", "stream": True}, "stream: true is not allowed; allowed: unset"),
            (OPENAI, "custom_id: 'a' is that of line 1 too"),
        ],
    )
    def test_a_wrong_line_is_refused_by_its_number(self, tmp_path: Path, line: object, problem: str) -> None:
        with pytest.raises(ConfigurationError) as refused:
            check(written(tmp_path / "in", OPENAI, line))
        assert problem in str(refused.value)
        assert "line 2 of" in str(refused.value)
        assert "\n" not in str(refused.value)

    def test_files_of_other_systems_are_read(self, tmp_path: Path) -> None:
        path = tmp_path / "in"
        path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
        assert [line.number for line in read_lines(path)] == [1, 3]

    def test_no_file_and_no_line_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"^FILE: cannot read .*: No such file"):
            check(tmp_path / "none")
        with pytest.raises(ConfigurationError, match="has no line"):
            check(written(tmp_path / "empty", ""))

    def test_what_cannot_be_read_again_is_refused(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
            with pytest.raises(ConfigurationError, match=r"^FILE: .* is not allowed; allowed: a regular file"):
                check(path)


LINES = [BatchLine(number, f"line-{number}", "/v1/completions", b"{}") for number in range(1, 6)]


def answer_to(line: BatchLine) -> dict[str, object]:
    response = {"status_code": 200 + line.number // 5, "text": "é" * line.number}
    return {"id": line.answer_id, "custom_id": line.custom_id, "response": response}


class TestAnswersFile:
    def test_it_goes_on_behind_the_last_whole_line_wherever_a_death_cut_it(self, tmp_path: Path) -> None:
        whole = tmp_path / "whole"
        with AnswersFile(whole) as answers:
            assert not answers.resume(LINES)
            for line in LINES:
                answers.append(answer_to(line))
            answers.finish()
        content = whole.read_bytes()
        for cut in range(len(content) + 1):
            path = tmp_path / f"out{cut}"
            path.with_name(path.name + ".part").write_bytes(content[:cut])
            with AnswersFile(path) as answers:
                statuses = answers.resume(LINES)
                num_answered = content[:cut].count(b"\n")
                assert statuses.total() == num_answered
                assert statuses[201] == num_answered // 5
                for line in LINES[num_answered:]:
                    answers.append(answer_to(line))
                answers.finish()
            assert path.read_bytes() == content

    def test_answers_to_other_requests_are_not_continued(self, tmp_path: Path) -> None:
        with AnswersFile(tmp_path / "out") as answers:
            answers.append(answer_to(LINES[1]))
            with pytest.raises(ConfigurationError, match="answers to other requests"):
                answers.resume(LINES)

    @pytest.mark.parametrize("change", [{"body": b'{"prompt":"x"}'}, {"url": "/v1/embeddings"}])
    def test_a_line_that_has_changed_under_its_name_is_not_passed_over(self, tmp_path: Path, change) -> None:
        with AnswersFile(tmp_path / "out") as answers:
            answers.append(answer_to(LINES[0]))
        changed = [msgspec.structs.replace(LINES[0], **change), *LINES[1:]]
        with AnswersFile(tmp_path / "out") as answers:
            with pytest.raises(ConfigurationError, match=r"answers to other requests \(its line 1\)"):
                answers.resume(changed)
            assert answers.resume(LINES).total() == 1

    def test_two_runs_do_not_write_one_file(self, tmp_path: Path) -> None:
        with AnswersFile(tmp_path / "out"), pytest.raises(ConfigurationError, match="written by another run"):
            AnswersFile(tmp_path / "out")

    def test_a_run_that_another_has_just_finished_is_not_begun_anew(self, tmp_path: Path, monkeypatch) -> None:
        path = tmp_path / "out"
        first = AnswersFile(path)

        def finished(file: object, flags: int) -> None:
            del file, flags
            first.finish()

        monkeypatch.setattr("headway.batch.answers_file.fcntl.flock", finished)
        with pytest.raises(ConfigurationError, match="there already"):
            AnswersFile(path)
        first.__exit__(None, None, None)

    def test_a_full_disk_is_told_in_one_line_and_what_is_whole_stays(self, tmp_path: Path) -> None:
        path = tmp_path / "out"
        with AnswersFile(path) as answers:
            answers.append(answer_to(LINES[0]))
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            full = (tmp_path / "out.part").stat().st_size + 10
            before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (full, limits[1]))
            try:
                with pytest.raises(AnswersLostError, match=r"out.part' cannot be written: File too large$"):
                    answers.append(answer_to(LINES[1]))
                answers.__exit__(None, None, None)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                signal.signal(signal.SIGXFSZ, before)
        with AnswersFile(path) as answers:
            assert answers.resume(LINES).total() == 1

    def test_what_is_there_already_is_left_alone(self, tmp_path: Path) -> None:
        path = written(tmp_path / "out", "mine")
        with pytest.raises(ConfigurationError, match="there already"):
            AnswersFile(path)
        assert path.read_text() == "mine\n"


async def answered(respond, *, retry_s: float = 5.0, concurrency: int = 3, lines=LINES) -> list[dict]:
    server = Server(
        "http://x", token="t", concurrency=concurrency, retry_s=retry_s, transport=httpx2.MockTransport(respond)
    )
    try:
        return [answer async for answer in server.answers(lines)]
    finally:
        await server.close()


class TestRunner:
    async def test_refusals_that_pass_are_tried_again_and_others_are_answers(self) -> None:
        seen: list[int] = []

        def respond(request: httpx2.Request) -> httpx2.Response:
            assert request.headers["authorization"] == "Bearer t"
            seen.append(1)
            if len(seen) == 1:
                raise httpx2.ConnectError("not yet")
            if len(seen) in {2, 3}:
                return httpx2.Response(503 if len(seen) == 2 else 429, headers={"retry-after": "0"})
            if len(seen) == 4:
                return httpx2.Response(400, json={"error": {"message": "no"}})
            return httpx2.Response(200, json={"usage": {}}, headers={"x-request-id": "r"})

        answers = await answered(respond)
        assert [answer["custom_id"] for answer in answers] == [line.custom_id for line in LINES]
        assert sorted(answer["response"]["status_code"] for answer in answers) == [200, 200, 200, 200, 400]
        assert len(seen) == 8

    async def test_a_server_that_is_gone_ends_the_run(self) -> None:
        with pytest.raises(ServerGoneError, match=r"no answer from http://x.* \(status 503\)"):
            await answered(lambda _: httpx2.Response(503), retry_s=0.0)

    @pytest.mark.parametrize("code", ["constraint_not_judged", "chat_not_rendered"])
    async def test_a_line_that_is_never_judged_is_an_answer_at_last_and_holds_up_no_other(self, code: str) -> None:
        lines = [msgspec.structs.replace(line, body=b"%d" % line.number) for line in LINES]
        num_asked = 0

        def respond(request: httpx2.Request) -> httpx2.Response:
            nonlocal num_asked
            if request.content != b"1":
                return httpx2.Response(200, json={})
            num_asked += 1
            return httpx2.Response(503, headers={"retry-after": "0"}, json={"error": {"message": "m", "code": code}})

        answers = await answered(respond, retry_s=0.5, lines=lines)
        assert [answer["response"]["status_code"] for answer in answers] == [503] + [200] * (len(LINES) - 1)
        assert num_asked > 2
        assert answers[0]["response"]["body"]["error"]["code"] == code

    async def test_an_answer_that_takes_longer_than_the_patience_is_tried_again_when_it_breaks(self) -> None:
        broken: list[int] = []

        async def respond(_: httpx2.Request) -> httpx2.Response:
            if not broken:
                broken.append(1)
                await asyncio.sleep(0.4)
                raise httpx2.ReadError("the gateway died")
            return httpx2.Response(200, json={})

        assert len(await answered(respond, retry_s=0.3, concurrency=1)) == len(LINES)

    @pytest.mark.parametrize(("code", "is_answer"), [("already_exists", False), ("cancelled", True)])
    async def test_behind_a_broken_connection_its_request_may_still_have_the_id(
        self, code: str, is_answer: bool
    ) -> None:
        seen: list[int] = []

        def respond(_: httpx2.Request) -> httpx2.Response:
            seen.append(1)
            if len(seen) == 1:
                raise httpx2.ReadError("the connection broke")
            if len(seen) == 2:
                return httpx2.Response(409, json={"error": {"message": "request_id: 'x' is ...", "code": code}})
            return httpx2.Response(200, json={})

        answers = await answered(respond, concurrency=1)
        assert [answer["response"]["status_code"] for answer in answers] == [409 if is_answer else 200, *[200] * 4]

    @pytest.mark.parametrize("had_failed", [False, True])
    async def test_an_id_that_another_request_has_is_an_answer_sooner_or_later(self, had_failed: bool) -> None:
        seen: list[int] = []

        def respond(_: httpx2.Request) -> httpx2.Response:
            seen.append(1)
            if had_failed and len(seen) == 1:
                raise httpx2.ReadError("the connection broke")
            return httpx2.Response(409, json={"error": {"message": "x", "code": "already_exists"}})

        answers = await answered(respond, retry_s=0.3, concurrency=1)
        assert [answer["response"]["status_code"] for answer in answers] == [409] * len(LINES)

    async def test_a_wrong_token_ends_the_run_at_once(self) -> None:
        with pytest.raises(ServerRefusedError, match="status 401: who are you"):
            await answered(lambda _: httpx2.Response(401, json={"error": {"message": "who are you"}}))

    async def test_a_foreign_page_is_an_answer_that_says_so(self) -> None:
        answers = await answered(lambda _: httpx2.Response(418, text="<html>teapot"))
        assert answers[0]["response"]["body"]["error"]["message"] == "<html>teapot"

"""The token file: its forms, what is wrong with one in words that show no token, and reading it again."""

import contextlib
import hashlib
import os
import time
from pathlib import Path

import pytest
import structlog.testing
from hypothesis import given
from hypothesis import strategies as st

from headway_gateway.access.credentials import SOLE_CALLER, TokenFile, TokenTable, parse_tokens
from headway_gateway.calls.tenant_rates import MAX_TENANTS, TenantRates

SECRET = "correct-horse-battery-staple"
DIGEST = hashlib.sha256(SECRET.encode()).hexdigest()


def table(text: str) -> TokenTable:
    return TokenTable(parse_tokens(text))


@pytest.mark.parametrize("token", [SECRET, f"sha256:{DIGEST}", f"sha256:{DIGEST.upper()}"])
def test_a_token_is_known_openly_or_by_its_digest(token: str) -> None:
    callers = table(f"# who may call\n\nalice generate {token} tenant=blue  # until May\nops generate,admin other\n")
    alice = callers.find(SECRET)
    assert alice is not None
    assert (alice.name, alice.roles, alice.tenant) == ("alice", {"generate"}, "blue")
    ops = callers.find("other")
    assert ops is not None
    assert (ops.roles, ops.tenant) == ({"generate", "admin"}, None)
    for guess in ("", SECRET[:-1], SECRET + "x", f"sha256:{DIGEST}", DIGEST, "\udcff", "é"):
        assert callers.find(guess) is None


def test_one_word_alone_may_do_everything() -> None:
    caller = table(f"  {SECRET}\n").find(SECRET)
    assert caller is not None
    assert caller.roles == {"generate", "admin"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 tokens; allowed: 1 to"),
        ("# only a comment\n", "0 tokens"),
        (f"alice {SECRET}\n", "line 1: 2 words; allowed: NAME ROLE"),
        (f"\nalice generate {SECRET} tenant=a more\n", "line 2: 5 words"),
        (f"{SECRET}\n{SECRET}2\n", "line 1: 1 words"),
        (f"alice {SECRET} generate\n", "line 1: the second word is not a list of roles; allowed: generate, admin"),
        (f"alice generate,root {SECRET}\n", "not a list of roles"),
        (f"alice generate {SECRET} blue\n", "line 1: wrong fourth word; allowed: tenant=NAME"),
        (f"alice generate {SECRET} tenant=\n", "wrong fourth word"),
        (f"alice generate {SECRET} tenant={'x' * 129}\n", "1 to 128 bytes"),
        (f"alice generate,admin {SECRET} tenant=a\n", "a tenant's token cannot have the role admin"),
        (f"alice generate {SECRET}\nbob generate sha256:{DIGEST}\n", "line 2: another line has the same token"),
        (f"alice generate sha256:{DIGEST[:-1]}\n", "64 hexadecimal digits"),
        (f"alice generate {SECRET}é\n", "not printable ASCII"),
        (f"{'a' * 65} generate {SECRET}\n", "a name of 65 characters"),
    ],
)
def test_what_is_wrong_is_told_without_showing_a_token(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(ValueError) as refusal:
        TokenFile(str(tmp_path / "tokens"))
    message = str(refusal.value)
    assert words in message
    assert message.startswith("auth_token_file: ")
    assert SECRET not in message
    assert DIGEST[:16] not in message
    assert "\n" not in message


def test_a_change_is_in_force_soon_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("old\n")
    tokens = TokenFile(str(path))
    path.write_text("alice generate new\n")
    deadline = time.monotonic() + 5
    while tokens.table().find("new") is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert tokens.table().find("old") is None
    replacement = tmp_path / "replacement"
    replacement.write_text("alice nonsense new\n")
    replacement.replace(path)
    assert not tokens.reload()
    assert tokens.problem is not None
    assert tokens.table().find("new") is not None
    path.unlink()
    assert not tokens.reload()
    assert tokens.table().find("new") is not None
    path.write_text("alice generate last\n")
    assert tokens.reload()
    assert (tokens.problem, tokens.table().find("new")) == (None, None)


def test_the_log_counts_the_tokens_of_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("old\n")
    tokens = TokenFile(str(path), {b"digest": SOLE_CALLER})
    with structlog.testing.capture_logs() as told:
        assert tokens.reload()
    assert [(line["event"], line["tokens"]) for line in told] == [("tokens read again", 1)]


def test_one_word_alone_is_not_read_where_lines_had_roles(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("sole\n")
    tokens = TokenFile(str(path))
    for text in ("default generate,admin token\n", "default generate token\n"):
        path.write_text(text)
        assert tokens.reload()
        path.write_text("alice\n")
        assert not tokens.reload()
        assert "a single word, but the file had roles before" in (tokens.problem or "")
        assert tokens.table().find("alice") is None
        assert tokens.table().find("token") is not None


words = st.text(alphabet="abgs256:,=#", min_size=1, max_size=8).filter(lambda word: "#" not in word)
lines = st.one_of(
    st.just("# who may call"),
    st.builds(
        "{} {} {}{}".format,
        words,
        st.sampled_from(["generate", "admin,generate"]),
        st.one_of(words, st.just(f"sha256:{DIGEST}")),
        st.sampled_from(["", " tenant=blue", "  # until May"]),
    ),
)


@given(lines=st.one_of(st.lists(lines, min_size=1, max_size=4), st.lists(words, min_size=1, max_size=1)))
def test_no_beginning_of_a_file_grants_what_the_whole_does_not(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "cut-tokens"
    text = "\n".join(lines) + "\n"
    try:
        whole = parse_tokens(text)
    except ValueError:
        return
    path.write_text(text)
    running = TokenFile(str(path))
    with structlog.testing.capture_logs():
        for length in range(len(text)):
            path.write_text(text[:length])
            running.reload()
            assert set(running.table()._callers) <= set(whole.items()), text[:length]
            with contextlib.suppress(ValueError):
                assert set(TokenFile(str(path)).table()._callers) <= set(whole.items()), text[:length]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.write_bytes(b""), "0 tokens"),
        (lambda path: path.write_bytes(b"ops generate,admin new"), "no newline at its end"),
        (lambda path: path.write_bytes(b"ops generate,admin new tenant=a\0\0\n"), "a zero byte"),
        (lambda path: path.write_bytes(b"\xff\n"), "not UTF-8"),
        (lambda path: path.chmod(0o646), "mode 0646"),
        (lambda path: path.unlink(), "No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "directory"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "no regular file"),
    ],
)
def test_what_cannot_be_trusted_changes_nothing_and_is_told_once(tmp_path: Path, spoil, words: str) -> None:
    path = tmp_path / "tokens"
    path.write_text("alice generate old\n")
    tokens = TokenFile(str(path))
    spoil(path)
    with structlog.testing.capture_logs() as told:
        for _ in range(3):
            tokens._looked_at = float("-inf")
            assert tokens.table().find("old") is not None
            assert tokens.table().find("new") is None
    assert [line["event"] for line in told] == ["tokens not read again"]
    assert words in told[0]["reason"]
    with pytest.raises(ValueError, match=r"^auth_token_file: "):
        TokenFile(str(path))


def test_a_file_that_is_mended_by_its_mode_alone_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("alice generate old\n")
    tokens = TokenFile(str(path))
    path.write_text("alice generate new\n")
    path.chmod(0o666)
    tokens._looked_at = float("-inf")
    assert tokens.table().find("new") is None
    path.chmod(0o600)
    tokens._looked_at = float("-inf")
    assert tokens.table().find("new") is not None


def test_a_tenant_begins_so_many_requests_a_second() -> None:
    rates = TenantRates(2.0)
    assert [rates.take("a", 0.0) for _ in range(4)] == [0.0, 0.0, 0.5, 0.5]
    assert rates.take("b", 0.0) == 0.0
    assert rates.take("a", 0.4) > 0
    assert rates.take("a", 0.5) == 0.0
    assert rates.take("a", 60.0) == rates.take("a", 60.0) == 0.0
    assert rates.take("a", 60.0) > 0
    for number in range(2 * MAX_TENANTS):
        rates.take(str(number), 61.0)
    assert len(rates._buckets) == MAX_TENANTS
    assert TenantRates(0.0).take("a", 0.0) == 0.0

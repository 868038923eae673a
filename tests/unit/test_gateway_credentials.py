"""The token file: its forms, what is wrong with one in words that show no token, and reading it again."""

import hashlib
import time
from pathlib import Path

import pytest

from headway_gateway.credentials import TokenFile, TokenTable, parse_tokens
from headway_gateway.tenant_rates import MAX_TENANTS, TenantRates

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
        (f"alice {SECRET} generate\n", "line 1: the second word is no list of roles; allowed: generate, admin"),
        (f"alice generate,root {SECRET}\n", "no list of roles"),
        (f"alice generate {SECRET} blue\n", "line 1: the fourth word; allowed: tenant=NAME"),
        (f"alice generate {SECRET} tenant=\n", "the fourth word"),
        (f"alice generate {SECRET} tenant={'x' * 129}\n", "1 to 128 bytes"),
        (f"alice generate,admin {SECRET} tenant=a\n", "a tenant's token with role admin"),
        (f"alice generate {SECRET}\nbob generate sha256:{DIGEST}\n", "line 2: this token is on another line too"),
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
    path.write_text("last\n")
    assert tokens.reload()
    assert (tokens.problem, tokens.table().find("new")) == (None, None)


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

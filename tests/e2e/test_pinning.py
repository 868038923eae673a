"""Pinning through the public API: gateway, scheduler and the simulated executor."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway
from headway.client import Client, InvalidRequestError, NotFoundError
from headway_executor.backend import BackendConfig
from headway_executor.backends.simulated import SimulatedBackend
from headway_scheduler.core.state.limits import SchedulerLimits
from threaded_headway import running

DEMO = Path(headway.__file__).parent / "demo_model"
CONFIG = BackendConfig(model=str(DEMO), block_size=4, num_kv_blocks=256, max_num_seqs=4, options={"real_time": "false"})
SYSTEM = {"role": "system", "content": "You are a terse assistant that knows the library of Python by heart."}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with (
        tempfile.TemporaryDirectory(prefix="hw") as directory,
        running(Path(directory), DEMO, SimulatedBackend(), CONFIG, SchedulerLimits()) as headway_server,
        Client(headway_server.address) as connected,
    ):
        connected.wait_ready()
        yield connected


def test_the_beginning_of_chats_is_pinned_as_far_as_they_have_it_in_common(client: Client) -> None:
    pinned = client.pin_prefix("system", [SYSTEM])
    chats = [[SYSTEM, {"role": "user", "content": content}] for content in ("What is a list?", "12", "- a")]
    prompts = [client.tokenize(chat) for chat in chats]
    common = next(place for place, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)
    assert pinned.num_tokens == common
    assert (pinned.num_blocks, pinned.num_resident_blocks) == (common // 4, 0)
    for chat in chats:
        client.generate(chat, max_tokens=2, tenant="t").result()
    (listed,) = client.pinned_prefixes()
    assert (listed.name, listed.num_resident_blocks) == ("system", common // 4)
    status = client.status()
    assert status.num_pinned_blocks == common // 4
    assert (status.num_prefix_queries, status.num_prefix_hits) == (3, 2)
    assert [(use.tenant, use.num_hit_tokens) for use in status.tenants] == [("t", status.num_prefix_hit_tokens)]
    client.unpin_prefix("system")
    assert client.pinned_prefixes() == []


def test_texts_and_token_ids_are_pinned_as_prompts_are_tokenized(client: Client) -> None:
    text = "A dictionary is a mapping of keys to values. " * 2
    assert client.pin_prefix("text", text).num_tokens == len(client.tokenize(text))
    assert client.pin_prefix("ids", list(range(9))).num_blocks == 2
    assert [pin.name for pin in client.pinned_prefixes()] == ["text", "ids"]
    for name in ("text", "ids"):
        client.unpin_prefix(name)


def test_what_cannot_be_pinned_is_refused(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="name: '' is not allowed; allowed: 1 to 128 bytes"):
        client.pin_prefix("", "x")
    with pytest.raises(InvalidRequestError, match="text: the prefix is empty"):
        client.pin_prefix("a", "")
    with pytest.raises(InvalidRequestError, match=r"token_ids.ids\[1\]: -1 is not a token id"):
        client.pin_prefix("a", [1, -1])
    with pytest.raises(InvalidRequestError, match="prefix: 1 tokens fill no block"):
        client.pin_prefix("a", [1])
    with pytest.raises(InvalidRequestError, match="prefix: 260 tokens fill 65 blocks; allowed: 64 more pinned blocks"):
        client.pin_prefix("a", [1] * 260)
    with pytest.raises(InvalidRequestError, match="tenant: 't' is not allowed"):
        client.pin_prefix("a", [1] * 8, tenant="t")
    with pytest.raises(NotFoundError, match="name: nothing is pinned as 'a'"):
        client.unpin_prefix("a")

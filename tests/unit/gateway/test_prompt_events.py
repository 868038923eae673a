"""The events of a prompt: in messages that are made one by one, each with few log probabilities."""

from types import SimpleNamespace

import numpy as np

from headway_gateway.calls.prompt_events import PromptEvents
from headway_proto.columns import encode_column, encode_floats
from headway_proto.prompt_logprobs import PromptLogprobColumns

MOST_LOGPROBS = 1 << 11


def test_each_message_has_few_log_probabilities_and_is_made_when_it_is_asked_for() -> None:
    num_tokens, num_alternatives = 3000, 20
    ids = list(range(num_tokens))
    tops = np.arange((num_tokens - 1) * num_alternatives) % 100
    part = PromptLogprobColumns(
        1, encode_floats([-1.0] * (num_tokens - 1)), encode_column(tops.tolist()), encode_floats([-2.0] * len(tops))
    )
    parts = [part]
    events = PromptEvents(ids, "text", SimpleNamespace(prompt_logprobs=parts)).take()
    first = next(events).prompt
    parts.clear()  # All that follows is of the part that was taken.
    prompts = [first, *(event.prompt for event in events)]
    assert [token for prompt in prompts for token in prompt.token_ids] == ids
    assert [prompt.first_token_index for prompt in prompts] == [
        sum(len(before.token_ids) for before in prompts[:place]) for place in range(len(prompts))
    ]
    assert [entry.token_id for prompt in prompts for entry in prompt.logprobs] == ids[1:]
    sizes = [sum(1 + len(entry.top) for entry in prompt.logprobs) for prompt in prompts]
    assert max(sizes) <= MOST_LOGPROBS
    assert sum(sizes) == (num_tokens - 1) * (1 + num_alternatives)

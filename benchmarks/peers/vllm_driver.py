"""vLLM's turns, under its own Python: ``LLM.generate`` with token ids.

vllm_driver.py MODEL DTYPE THREADS
"""

import sys

import vllm
from turns import redirected_output, take_turns, windows
from vllm import LLM, SamplingParams


class VllmEngine:
    """See ``Engine``."""

    version = vllm.__version__

    def __init__(self, model: str, dtype: str) -> None:
        self._llm = LLM(
            model=model,
            dtype=dtype,
            max_model_len=1024,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            seed=0,
        )

    def generate(self, prompts: list[list[int]], num_output: int) -> None:
        """See ``Engine``."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        answers = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        assert all(len(answer.outputs[0].token_ids) == num_output for answer in answers)

    def nats(self, token_ids: list[int], window: int) -> tuple[float, int]:
        """See ``Engine``."""
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        total, count = 0.0, 0
        for part in windows(token_ids, window):
            (answer,) = self._llm.generate([{"prompt_token_ids": part}], sampling, use_tqdm=False)
            for token_id, found in list(zip(part, answer.prompt_logprobs, strict=True))[1:]:
                total -= found[token_id].logprob
                count += 1
        return total, count


if __name__ == "__main__":
    output = redirected_output()
    take_turns(VllmEngine(sys.argv[1], sys.argv[2]), output)

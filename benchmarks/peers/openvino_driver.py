"""OpenVINO GenAI's turns, under its own Python: ``ContinuousBatchingPipeline`` with token ids.

openvino_driver.py MODEL INFERENCE_PRECISION THREADS

The loss comes from the same model and precision without the pipeline, which gives no logits.
"""

import sys

import numpy as np
import openvino
import openvino_genai
from turns import redirected_output, take_turns, windows


class OpenvinoEngine:
    """See ``Engine``."""

    version = openvino_genai.__version__

    def __init__(self, model: str, precision: str, num_threads: int) -> None:
        self._model = model
        self._properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": num_threads,
        }
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = 1
        scheduling.max_num_batched_tokens = 2048
        scheduling.max_num_seqs = 64
        scheduling.enable_prefix_caching = False
        scheduling.dynamic_split_fuse = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduling, "CPU", self._properties)

    def generate(self, prompts: list[list[int]], num_output: int) -> None:
        """See ``Engine``."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_output
        config.ignore_eos, config.do_sample = True, False
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        answers = self._pipeline.generate(inputs, [config] * len(prompts))
        assert all(len(answer.m_generation_ids[0]) == num_output for answer in answers)

    def nats(self, token_ids: list[int], window: int) -> tuple[float, int]:
        """See ``Engine``."""
        compiled = openvino.Core().compile_model(f"{self._model}/openvino_model.xml", "CPU", self._properties)
        request = compiled.create_infer_request()
        total, count = 0.0, 0
        for part in windows(token_ids, window):
            seen = np.array([part[:-1]], dtype=np.int64)
            request.reset_state()
            inputs = {
                "input_ids": seen,
                "attention_mask": np.ones_like(seen),
                "position_ids": np.arange(seen.shape[1], dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
            logits = request.infer(inputs)["logits"][0].astype(np.float64)
            logits -= logits.max(axis=1, keepdims=True)
            chosen = logits[np.arange(seen.shape[1]), part[1:]]
            total += float((np.log(np.exp(logits).sum(axis=1)) - chosen).sum())
            count += seen.shape[1]
        return total, count


if __name__ == "__main__":
    output = redirected_output()
    take_turns(OpenvinoEngine(sys.argv[1], sys.argv[2], int(sys.argv[3])), output)

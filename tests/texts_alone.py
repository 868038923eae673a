"""Texts of checkpoints of several models, as models of their own, which transformers does not have.

What ``wholes`` makes is transformers' own. These are for the tests that a family has with models of text alone.
"""

from torch import Tensor, nn
from transformers import GenerationMixin, MuseGlimmerPreTrainedModel, MuseGlimmerTextConfig, MuseGlimmerTextModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class MuseGlimmerForCausalLM(MuseGlimmerPreTrainedModel, GenerationMixin):
    """Logits as ``MuseGlimmerForConditionalGeneration`` makes them."""

    config: MuseGlimmerTextConfig

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **more: object) -> CausalLMOutputWithPast:
        """Without losses."""
        outputs = self.model(input_ids, **more)
        config, logits = self.config, self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:])
        cap = config.final_logit_softcapping
        bounded = (logits * config.output_multiplier / cap).tanh() * cap
        return CausalLMOutputWithPast(logits=bounded, past_key_values=outputs.past_key_values)

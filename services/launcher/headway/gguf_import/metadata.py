"""The metadata of a GGUF file's model, by the keys of its architecture.

Owns: typed values, rope scaling. Must not know: families, tensors' places.

Keys and what they mean when they are absent are llama.cpp's (``src/llama-model.cpp``, ``src/llama-hparams.h``).
"""

import math
from typing import Any

import torch

from headway.flags.settings import ConfigurationError
from headway.gguf_import.file import GgufFile
from headway_proto.wording import shown

_NO_DEFAULT = object()
_MOST = (1 << 31) - 1
_MOST_LAYERS = 9999
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA_3 = {"low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
_HIGH_FREQ_FACTORS = (4.0, 1.0)
"""Of Llama 3, and of Llama 4, where each frequency is stretched or not."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.sliding_window": (0,),
    "attention.scale": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.temperature_scale": (0.0,),
    "attention.causal": (True,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}
"""Keys that change what a model computes, and the values with which they do not."""


class Metadata:
    """Values by the key behind the architecture's name. ``read`` collects the keys that somebody asked for."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.value("general.architecture"))
        self.read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self.read.add(key)
        return f"{self.architecture}.{key}" in self.file

    def value(self, key: str, default: Any = _NO_DEFAULT) -> Any:
        """Any value; without a ``default`` it has to be there."""
        if key not in self and default is not _NO_DEFAULT:
            return default
        return self.file.value(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.value(key, _NO_DEFAULT if default is None else default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refuse(key, "a number above 0")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """An integer from ``low`` on, of 31 bits."""
        value = self.value(key, _NO_DEFAULT if default is None else default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= _MOST:
            raise self.refuse(key, f"an integer from {low} to {_MOST}")
        return value

    def refuse(self, key: str, allowed: str) -> ConfigurationError:
        """Return an error about a value."""
        name = f"{self.architecture}.{key}"
        return self.file.refuse(f"{name} {shown(self.file.value(name))} is not supported; allowed: {allowed}")

    def refuse_unless(self, key: str, allowed: object) -> None:
        """A key that may be absent or have one value."""
        if self.value(key, allowed) != allowed:
            raise self.refuse(key, str(allowed))

    def refuse_unread(self) -> None:
        """Refuse what changes the model and nobody has asked for."""
        for key, neutral in _NEUTRAL.items():
            if key not in self.read and self.value(key, neutral[0]) not in neutral:
                raise self.refuse(key, "none")
        if "rope.freq_base_swa" not in self.read:
            self.refuse_unless("rope.freq_base_swa", self.value("rope.freq_base", 10_000.0))

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor."""
        return name in self.file.tensor_names

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.integer("attention.key_length", self.integer("embedding_length") // self.num_heads)

    @property
    def attends(self) -> bool:
        """Whether there is any attention, which a feed-forward is behind."""
        return bool(self.integer("attention.head_count", low=0))

    @property
    def num_heads(self) -> int:
        """Heads of queries."""
        return self.integer("attention.head_count")

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and of values, of layers that have some."""
        some = set(self.kv_heads) - {0}
        if len(some) != 1:
            raise self.refuse("attention.head_count_kv", "one number of heads")
        return some.pop()

    @property
    def kv_heads(self) -> list[int]:
        """Heads of keys and of values of each layer; 0: it has something else."""
        return self._of_layers("attention.head_count_kv", self.num_heads)

    @property
    def inner_size(self) -> int:
        """Columns of feed-forwards, of layers that have one."""
        some = set(self.inner_sizes) - {0}
        if len(some) != 1:
            raise self.refuse("feed_forward_length", "one number of columns")
        return some.pop()

    @property
    def inner_sizes(self) -> list[int]:
        """Columns of the feed-forward of each layer; 0: it has none."""
        return self._of_layers("feed_forward_length", self.integer("expert_feed_forward_length", 0, low=0) or None)

    def _of_layers(self, key: str, default: int | None) -> list[int]:
        """One number of all layers, or one of each."""
        if not isinstance(self.value(key, 0), list):
            return [self.integer(key, default)] * self.num_layers
        counts = self.file.each(f"{self.architecture}.{key}", int)
        if len(counts) != self.num_layers or any(count < 0 for count in counts):
            raise self.refuse(key, f"a number, or a list of {self.num_layers}")
        return counts

    @property
    def num_layers(self) -> int:
        """How many layers."""
        count = self.integer("block_count")
        if count > _MOST_LAYERS:
            raise self.refuse("block_count", f"1 to {_MOST_LAYERS}")
        return count

    @property
    def read_layers(self) -> int:
        """How many layers without those that predict further tokens, which are the last."""
        further = self.integer("nextn_predict_layers", 0, low=0)
        if further >= self.num_layers:
            raise self.refuse("nextn_predict_layers", f"0 to {self.num_layers - 1}")
        return self.num_layers - further

    def rope(self) -> dict[str, object]:
        """``rope_parameters`` of config.json."""
        theta = {"rope_theta": self.number("rope.freq_base", 10_000.0)}
        if self.has_tensor(_ROPE_FACTORS):
            self.refuse_unless("rope.scaling.type", "none")
            self.refuse_unless("rope.scaling.factor", 1.0)
            return theta | self._llama_3_rope()
        kind = self.value("rope.scaling.type", "linear" if "rope.scaling.factor" in self else "none")
        if kind == "none":
            return theta | {"rope_type": "default"}
        if kind not in ("linear", "yarn"):
            raise self.refuse("rope.scaling.type", "none, linear, yarn")
        factor = self.number("rope.scaling.factor", 1.0)
        if kind == "linear":
            return theta | ({"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor})
        context = self.integer("context_length")
        scaled = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.integer("rope.scaling.original_context_length", context),
            "beta_fast": self.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": self.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        if "rope.scaling.yarn_attn_factor" in self:
            scaled["attention_factor"] = self.number("rope.scaling.yarn_attn_factor")
        return theta | scaled

    def _llama_3_rope(self) -> dict[str, object]:
        """The factors of Llama 3.1 and later are stored one by one; the largest is the one that they come from."""
        if self.file.shape(_ROPE_FACTORS) != (self.head_dim // 2,):
            raise self._refuse_rope_factors()
        stored = self.file.wide(_ROPE_FACTORS).double()
        factor, context = float(stored.max()), float(_LLAMA_3["original_max_position_embeddings"])
        low = _LLAMA_3["low_freq_factor"]
        theta = self.number("rope.freq_base", 10_000.0)
        turns = context / (2 * math.pi * theta ** (torch.arange(0, self.head_dim, 2).double() / self.head_dim))
        for high in _HIGH_FREQ_FACTORS:
            share = ((turns - low) / (high - low)).clamp(0, 1)
            if torch.allclose(stored, 1 / ((1 - share) / factor + share), rtol=1e-3):
                return {"rope_type": "llama3", "factor": factor, "high_freq_factor": high, **_LLAMA_3}
        raise self._refuse_rope_factors()

    def _refuse_rope_factors(self) -> ConfigurationError:
        return self.file.refuse(f"{_ROPE_FACTORS} is not supported; allowed: the factors of Llama 3")

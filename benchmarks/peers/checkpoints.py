"""One set of weights in the formats of all engines.

Owns: the files of each form, each written once. Must not know: what is measured.

All forms come from one checkpoint of float32 values: a random one, or any Llama. ``w8a8`` is compressed-tensors with
eight bits, a scale for each output, and activations that are rounded per token; its embedding, which is the head too, is
bfloat16. GGUF files have every matrix in one kind, the embedding as well, as rounded by the ``gguf`` package. Q4_K is not
among them: its blocks have 256 inputs, and rows of 576 are no multiple of that. ``mixture`` is another model and always
random: Qwen3-MoE in bfloat16, 12 layers of 32 experts, 4 of them for each token.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from headway.__main__ import main as headway
from random_tokenizer import END_TOKEN, random_tokenizer
from torch_cpu import SHAPE_135M, write_checkpoint

OPENVINO_GROUP = 64
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_TENSORS = "model.safetensors"
_SHAPE = SHAPE_135M | {
    "model_type": "llama",
    "head_dim": 64,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "pad_token_id": 0,
}
_MIXTURE = {
    **_SHAPE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 12,
    "moe_intermediate_size": 384,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "torch_dtype": "bfloat16",
}
_W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}
_PLACES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTSIDE_LAYERS = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


class Forms:
    """The forms of one model's weights below ``directory``. Without ``source``, the weights are random."""

    def __init__(self, directory: Path, *, source: Path | None, seed: int, openvino_python: str) -> None:
        self._directory = directory
        self._source = source
        self._seed = seed
        self._openvino_python = openvino_python

    def path(self, form: str) -> Path:
        """Return where a form is; it is written first if it is not there yet."""
        kind, _, detail = form.partition(":")
        path = self._directory / kind / detail
        if path.exists():
            return path
        partial = self._directory / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        self._directory.mkdir(parents=True, exist_ok=True)
        if kind == "openvino":
            self._export_openvino(partial)
            partial.rename(self._directory / kind)
            return path
        self._writers()[kind](partial, detail)
        path.parent.mkdir(exist_ok=True)
        partial.rename(path)
        return path

    def _writers(self) -> Mapping[str, Callable[[Path, str], None]]:
        return {
            "float32": self._write_float32,
            "bfloat16": self._write_bfloat16,
            "mixture": self._write_mixture,
            "w8a8": self._write_w8a8,
            "gguf": self._write_gguf,
            "of_gguf": self._write_of_gguf,
        }

    def _write_float32(self, target: Path, _: str) -> None:
        if self._source is None:
            self._write_random(target, _SHAPE, torch.float32)
            return
        tensors = {name: tensor.float() for name, tensor in load_file(self._source / _TENSORS).items()}
        _write(target, self._source, tensors, {"torch_dtype": "float32", "dtype": "float32"})

    def _write_mixture(self, target: Path, _: str) -> None:
        self._write_random(target, _MIXTURE, torch.bfloat16)

    def _write_random(self, target: Path, shape: Mapping[str, object], dtype: torch.dtype) -> None:
        write_checkpoint(target, self._seed, dict(shape), dtype=dtype)
        (target / "tokenizer.json").write_text(random_tokenizer(int(str(shape["vocab_size"])), self._seed))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_TOKEN, "model_max_length": 2048}
        (target / "tokenizer_config.json").write_text(json.dumps(settings))

    def _write_bfloat16(self, target: Path, _: str) -> None:
        tensors = {name: tensor.bfloat16() for name, tensor in self._tensors().items()}
        _write(target, self.path("float32"), tensors, {"torch_dtype": "bfloat16", "dtype": "bfloat16"})

    def _write_w8a8(self, target: Path, _: str) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self._tensors().items():
            if tensor.dim() == 2 and "embed" not in name:
                scales = tensor.abs().amax(dim=1, keepdim=True) / 127
                tensors[name] = (tensor / scales).round().clamp(-127, 127).to(torch.int8)
                tensors[f"{name}_scale"] = scales
            else:
                tensors[name] = tensor.bfloat16()
        changes = {"torch_dtype": "bfloat16", "dtype": "bfloat16", "quantization_config": _W8A8}
        _write(target, self.path("float32"), tensors, changes)

    def _write_gguf(self, target: Path, kind: str) -> None:
        source = self.path("float32")
        writer = gguf.GGUFWriter(target, "llama")
        config = json.loads((source / "config.json").read_text())
        _add_settings(writer, config)
        _add_tokenizer(writer, source, int(config["vocab_size"]))
        for name, tensor in self._tensors().items():
            values = _in_order(name, tensor.numpy(), config)
            if values.ndim == 1:
                writer.add_tensor(_name_in_gguf(name), values)
            else:
                form = gguf.GGMLQuantizationType[kind]
                writer.add_tensor(_name_in_gguf(name), gguf.quants.quantize(values, form), raw_dtype=form)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def _write_of_gguf(self, target: Path, kind: str) -> None:
        """The checkpoint that Headway makes of a GGUF file: the same blocks."""
        if headway(["gguf", str(self.path(f"gguf:{kind}")), str(target)]):
            raise SystemExit(f"headway gguf failed on {kind}")

    def _export_openvino(self, target: Path) -> None:
        script = Path(__file__).with_name("openvino_export.py")
        words = [self._openvino_python, str(script), str(self.path("float32")), str(target), str(OPENVINO_GROUP)]
        subprocess.run(words, check=True, stdout=sys.stderr)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.path("float32") / _TENSORS)


def _write(target: Path, source: Path, tensors: dict[str, torch.Tensor], changes: Mapping[str, object]) -> None:
    target.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config, indent=1))
    for name in _TOKENIZER_FILES:
        shutil.copy(source / name, target / name)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / _TENSORS, {"format": "pt"})


def _name_in_gguf(name: str) -> str:
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    index, _, inside = name.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{_PLACES[inside.removesuffix('.weight')]}.weight"


def _in_order(name: str, values: NDArray[np.float32], config: Mapping[str, int]) -> NDArray[np.float32]:
    """As llama.cpp orders rows of Llama's queries and keys: channel i beside channel i + half."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for projection, count in heads.items():
        if projection in name:
            return values.reshape(config[count], 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    return values


def _add_settings(writer: gguf.GGUFWriter, config: Mapping[str, int]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path, vocab_size: int) -> None:
    found = json.loads((source / "tokenizer.json").read_text())
    ids = found["model"]["vocab"] | {added["content"]: added["id"] for added in found["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    special = {added["content"] for added in found["added_tokens"]}
    tokens += [f"<unused {number}>" for number in range(vocab_size - len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in found["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)

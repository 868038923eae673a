"""The configuration of encoders of the BERT family.

Owns: the fields of their config.json. Must not know: tensors.
"""

from dataclasses import dataclass
from pathlib import Path

from headway_executor.checkpoint.fields import CONFIG_FILE, ConfigFields, read_json_object
from headway_executor.models.families.reading import architecture_of

PAIRS_HEAD = "ForSequenceClassification"
RERANKERS = {f"Bert{PAIRS_HEAD}": "bert.", f"Roberta{PAIRS_HEAD}": "roberta.", f"XLMRoberta{PAIRS_HEAD}": "roberta."}
"""Those with a head for pairs of texts, and what the names of their encoder's tensors begin with."""

ENCODERS = {"BertModel", "RobertaModel", "XLMRobertaModel"} | RERANKERS.keys()
"""The architectures; those with another head are refused."""

_SIGMOID, _IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
_DEFAULT_LABELS = 2


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """``context``: the most tokens of an input. ``padding_id``: None where positions count from 0.

    ``prefix``: of the encoder's tensors. ``is_logistic``: a reranker's score is a probability.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    num_positions: int
    num_types: int
    padding_id: int | None
    prefix: str = ""
    is_logistic: bool = False

    @property
    def scores_pairs(self) -> bool:
        """Whether it has the head of a reranker, beside which the encoder's tensors have a name in front."""
        return bool(self.prefix)

    @property
    def marks_parts(self) -> bool:
        """Whether the two texts of a pair differ in the type of their tokens."""
        return self.scores_pairs and self.padding_id is None and self.num_types > 1

    @property
    def context(self) -> int:
        """The most tokens of one input."""
        return self.num_positions - (0 if self.padding_id is None else self.padding_id + 1)


def is_encoder(directory: Path) -> bool:
    """Whether a checkpoint is one of these; a missing or damaged one is not."""
    path = directory / CONFIG_FILE
    return path.is_file() and architecture_of(read_json_object(path)) in ENCODERS


def read_encoder_config(directory: Path) -> EncoderConfig:
    """Read and check the configuration.

    Raises:
        ModelFilesError: a value cannot be served.
    """
    fields = read_json_object(directory / CONFIG_FILE)
    _refuse_others(fields)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.refuse("num_attention_heads", f"a divisor of hidden_size {hidden_size}")
    architecture = architecture_of(fields)
    is_roberta, scores_pairs = "Roberta" in architecture, architecture in RERANKERS
    if scores_pairs:
        _require_one_label(fields)
    config = EncoderConfig(
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        num_positions=fields.integer("max_position_embeddings"),
        num_types=fields.integer("type_vocab_size", 2),
        padding_id=fields.integer("pad_token_id", 1, low=0) if is_roberta else None,
        prefix=RERANKERS.get(architecture, ""),
        is_logistic=scores_pairs and _is_logistic(fields),
    )
    if config.context < 1:
        raise fields.refuse(
            "max_position_embeddings", f"above pad_token_id + 1, {config.num_positions - config.context}"
        )
    return config


def _require_one_label(fields: ConfigFields) -> None:
    labels = fields.section("id2label")
    num_labels = len(labels.values) if labels else fields.integer("num_labels", _DEFAULT_LABELS)
    if num_labels != 1:
        raise fields.refuse("id2label" if labels else "num_labels", "one label, as a reranker has")


def _is_logistic(fields: ConfigFields) -> bool:
    """What sentence-transformers makes of the head's number; a sigmoid unless the file says otherwise."""
    section, field = fields.section("sentence_transformers"), "activation_fn"
    if section is None or field not in section.values:
        section, field = fields, "sbert_ce_default_activation_function"
    name = section.values.get(field)
    if name not in (None, _SIGMOID, _IDENTITY):
        raise section.refuse(field, f"{_SIGMOID}, {_IDENTITY}, or absent")
    return name != _IDENTITY


def _refuse_others(fields: ConfigFields) -> None:
    for field, allowed in (
        ("hidden_act", "gelu"),
        ("position_embedding_type", "absolute"),
        ("is_decoder", False),
        ("is_causal", False),
        ("add_cross_attention", False),
        ("auto_map", None),
        ("quantization_config", None),
    ):
        value = fields.values.get(field)
        if value is not None and value != allowed:
            raise fields.refuse(field, "absent" if allowed is None else repr(allowed))

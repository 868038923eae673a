"""The model of a GGUF file, as config.json and tensors of a checkpoint directory.

Owns: the fields that families share, reading tensors into their places. Must not know: one family, files that are written,
how text is cut into tokens.
"""

import re
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import chain
from typing import NamedTuple

from torch import Tensor

from headway.gguf_import.families import FAMILIES
from headway.gguf_import.family import Family
from headway.gguf_import.file import GgufFile
from headway.gguf_import.layout import Joined, Layout
from headway.gguf_import.metadata import Metadata
from headway.gguf_import.tokenizer import end_tokens_of
from headway_proto.wording import shown

_OF_PICTURES = "clip"
_MOST_NAMED, _MOST_COMPARED = 6, 64
_FLOATS = ("f32", "f16", "bf16")
_WITH_BOOKS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
_BLOCKS = (
    *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    *("iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "mxfp4", "nvfp4"),
    *_WITH_BOOKS,
)
_NO_POOLING = 0
_POOLINGS = {_NO_POOLING: None, 1: "mean", 2: "cls", 3: "lasttoken"}
_ROPE_FACTORS = "rope_freqs.weight"


def config_of(file: GgufFile) -> dict[str, object]:
    """The fields of config.json. Raises ``ConfigurationError``: a model that cannot be served."""
    metadata = _metadata_of(file)
    family = FAMILIES[metadata.architecture](metadata)
    fields = {**_usual_fields(metadata, family), **family.fields}
    if "intermediate_size" not in fields and metadata.attends:
        fields["intermediate_size"] = metadata.inner_size
    if "rope_parameters" not in fields:
        fields["rope_parameters"] = metadata.rope()
    _check_widths(metadata)
    metadata.refuse_unread()
    return fields


def pooling_of(file: GgufFile) -> str | None:
    """How vectors are made, in the word of sentence-transformers; None: the file does not say.

    Raises:
        ConfigurationError: in a way that is not served.
    """
    metadata = _metadata_of(file)
    kind = metadata.integer("pooling_type", _NO_POOLING, low=0)
    if kind not in _POOLINGS:
        raise metadata.refuse("pooling_type", "0 (none), 1 (mean), 2 (cls), 3 (last)")
    return _POOLINGS[kind]


def tensors_of(file: GgufFile) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the checkpoint, each read when it is its turn; blocks as they are, and the books of their codes.

    Raises:
        ConfigurationError: some other tensor, before the first is read.
    """
    metadata = _metadata_of(file)
    layout = FAMILIES[metadata.architecture](metadata).layout
    pieces = list(_pieces_of(file, layout))
    kinds = {file.kind(tensor) for tensors, _ in pieces for tensor in tensors}
    books = [(f"gguf.{kind}", file.book(kind)) for kind in _WITH_BOOKS if kind in kinds]
    return chain(books, chain.from_iterable(_read(file, tensors, at, layout) for tensors, at in pieces))


class _At(NamedTuple):
    """Where a tensor stands: ``prefix`` of the layer, its ``place`` in the file and ``name`` in the checkpoint."""

    prefix: str
    place: str
    name: str
    end: str
    joined: Joined | None


def _metadata_of(file: GgufFile) -> Metadata:
    name = file.value("general.architecture")
    if name == _OF_PICTURES:
        raise file.refuse("it sees or hears for a model (mmproj); allowed: the file of the text, which is served alone")
    if not isinstance(name, str) or name not in FAMILIES:
        near = get_close_matches(str(name)[:_MOST_COMPARED], FAMILIES, _MOST_NAMED, cutoff=0.0)
        raise file.refuse(
            f"general.architecture {shown(name)} is not supported; allowed: one of the {len(FAMILIES)} in the table of "
            f"docs/models.md, such as {', '.join(near)}"
        )
    return Metadata(file)


def _usual_fields(metadata: Metadata, family: Family) -> dict[str, object]:
    file = metadata.file
    eps, eps_key = family.eps
    return {
        "architectures": [family.architecture],
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.num_layers,
        **(_widths(metadata, family) if metadata.attends else {}),
        eps: metadata.number(eps_key),
        "max_position_embeddings": metadata.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensor_names,
        "attention_bias": "blk.0.attn_q.bias" in file.tensor_names,
        "bos_token_id": file.index("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens_of(file),
        "dtype": _dtype_of(file),
        "quantization_config": {"quant_method": "gguf"},
    }


def _widths(metadata: Metadata, family: Family) -> dict[str, object]:
    return {
        "num_attention_heads": metadata.num_heads,
        # Layers may differ, of which the family tells.
        "num_key_value_heads": family.fields.get("num_key_value_heads") or metadata.num_kv_heads,
        "head_dim": metadata.head_dim,
    }


def _dtype_of(file: GgufFile) -> str:
    """What a GPU computes in: float16 as the scales of blocks, unless the weights do not fit it."""
    return "bfloat16" if any(file.kind(tensor) == "bf16" for tensor in file.tensor_names) else "float16"


def _check_widths(metadata: Metadata) -> None:
    """All of a head is rotated, and values are as wide as keys, unless the family has read these widths."""
    for key in ("rope.dimension_count", "attention.value_length"):
        if key not in metadata.read and key in metadata:
            metadata.refuse_unless(key, metadata.head_dim)


def _place_of(file: GgufFile, tensor: str, layout: Layout) -> _At | None:
    """None: nothing needs it. Raises ``ConfigurationError``: it is unknown."""
    stem, _, end = tensor.rpartition(".")
    if end not in ("weight", "bias"):
        stem, end = tensor, ""
    of_layer = re.match(r"blk\.(\d{1,4})\.", stem)
    if layout.num_layers is not None and of_layer is not None and int(of_layer[1]) >= layout.num_layers:
        return None
    inside = re.fullmatch(r"blk\.(\d{1,4})\.([\w.]+)", stem)
    place = stem if inside is None else inside[2]
    if place in layout.ignored:
        return None
    if inside is None and stem in layout.outside and end:
        return _At("", stem, layout.outside[stem], end, None)
    at = None if inside is None else _place_inside(layout, layout.layer.format(int(inside[1])), place, end)
    if at is not None:
        return at
    raise file.refuse(f"tensor {tensor[:64]} is not supported; allowed: those of a decoder")


def _place_inside(layout: Layout, prefix: str, place: str, end: str) -> _At | None:
    """Of a layer; None: it is unknown."""
    for places, joined in layout.joined.items():
        if place in places:
            return _At(prefix, place, joined.name, end, joined)
    if place in layout.endless:
        end = end or "weight"
    if place in layout.inside and (end or layout.inside[place] in layout.bare):
        return _At(prefix, place, layout.inside[place], end, None)
    return _At(prefix, place, "", end, None) if place in layout.splits and end else None


def _pieces_of(file: GgufFile, layout: Layout) -> Iterator[tuple[list[str], _At]]:
    """The tensors of the file that go together."""
    waiting: dict[tuple[str, Joined, str], dict[str, str]] = {}
    for tensor in file.tensor_names:
        if tensor == _ROPE_FACTORS:
            continue
        kind = file.kind(tensor)
        if kind not in (*_FLOATS, *_BLOCKS):
            raise file.refuse(f"tensor {tensor} is of kind {kind}; allowed: {', '.join((*_FLOATS, *_BLOCKS))}")
        at = _place_of(file, tensor, layout)
        if at is None:
            continue
        if at.joined is None:
            yield [tensor], at
            continue
        parts = waiting.setdefault((at.prefix, at.joined, at.end), {})
        parts[at.place] = tensor
        places = next(places for places, joined in layout.joined.items() if joined is at.joined)
        if len(parts) == len(places):
            yield [parts[place] for place in places], at
            del waiting[at.prefix, at.joined, at.end]
    for parts in waiting.values():
        raise file.refuse(f"tensor {next(iter(parts.values()))} is there without its other parts; allowed: all of them")


def _read(file: GgufFile, tensors: list[str], at: _At, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    try:
        if at.joined is None:
            yield from _at_one_place(file, tensors[0], at, layout)
        else:
            yield _joined(file, tensors, at, at.joined)
    except (RuntimeError, ValueError) as error:  # PyTorch's, of shapes that do not go together
        shapes = ", ".join(f"{tensor} {list(file.shape(tensor))}" for tensor in tensors)
        raise file.refuse(f"a shape does not fit the metadata: {shapes} ({str(error)[:64]})") from error


def _at_one_place(file: GgufFile, tensor: str, at: _At, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    kind = file.kind(tensor)
    found = file.floats(tensor) if kind in _FLOATS else file.blocks(tensor)
    is_norm = at.place.endswith("norm") and at.place not in layout.plain_norms
    if layout.norm_offset and at.end == "weight" and is_norm:
        found = found.float() - layout.norm_offset
    if at.place in layout.orders:
        found = layout.orders[at.place](found)
    end = "" if at.name in layout.bare else f".{at.end if kind in _FLOATS else kind}"
    if at.place in layout.splits:
        for name, rows in layout.splits[at.place](found).items():
            yield f"{at.prefix}{name}{end}", rows.contiguous()
        return
    if "{}" not in at.name:
        yield f"{at.prefix}{at.name}{end}", found.contiguous()
        return
    for number, of_expert in enumerate(found):
        yield f"{at.prefix}{at.name.format(number)}{end}", of_expert.clone()


def _joined(file: GgufFile, tensors: list[str], at: _At, joined: Joined) -> tuple[str, Tensor]:
    """Blocks of one kind stay blocks, if rows do."""
    kinds = {file.kind(tensor) for tensor in tensors}
    kind = kinds.pop() if len(kinds) == 1 and not joined.is_wide else ""
    is_block = kind in _BLOCKS
    parts = [file.blocks(tensor) if is_block else file.wide(tensor) for tensor in tensors]
    name, whole = joined.tensor(parts, kind if is_block else "", end=at.end)
    return f"{at.prefix}{name}", whole.contiguous()

"""Trains the embedded demo model and writes its checkpoint directory.

Owns: everything about `services/launcher/headway/demo_model/`: its text (only the documentation inside the CPython that
runs this script), tokenizer, weights, held-out loss and model card. Nothing at run time imports it.

    python tools/train_demo_model.py train            # gather, train, evaluate, write
    python tools/train_demo_model.py card             # re-write README.md with fresh samples

The result is a Hugging Face `LlamaForCausalLM` checkpoint in bfloat16. Training uses a small model of its own, with
dropout on the residual stream, which the Llama class of transformers lacks; parameter names are those of the
checkpoint. Before anything is replaced, transformers loads the checkpoint and its logits are compared.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import importlib
import inspect
import io
import itertools
import json
import math
import os
import platform
import random
import re
import shutil
import sys
import sysconfig
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT_OUTPUT = REPOSITORY / "services" / "launcher" / "headway" / "demo_model"

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Standard library parts that are tests, vendored programs, or documentation of no general use.
SKIPPED_PACKAGES = frozenset(
    {"__phello__", "idlelib", "lib2to3", "site-packages", "dist-packages", "test", "tests"}
    | {"turtledemo", "pydoc_data", "_bundled", "_vendor"}
)
# Modules whose import has side effects (a browser, a poem, a window toolkit).
NEVER_IMPORTED = frozenset({"antigravity", "this", "idlelib", "turtle", "turtledemo", "tkinter"})
# Modules that people ask about first: their documents also appear as chat more often.
CORE_MODULES = frozenset(
    {"argparse", "asyncio", "bisect", "builtins", "collections", "contextlib", "copy", "csv"}
    | {"dataclasses", "datetime", "enum", "functools", "glob", "heapq", "itertools", "json"}
    | {"logging", "math", "operator", "os", "os.path", "pathlib", "random", "re", "shutil"}
    | {"statistics", "string", "subprocess", "sys", "tempfile", "textwrap", "threading", "time"}
)
MAX_HELD_OUT_DOCUMENT_CHARS = 12_000
MAX_HELD_OUT_BYTES = 145_000
EVALUATION_WINDOW = 512
CARD_SAMPLE_TOKENS = 64

# Prompts of the model card, best first; a leading "? " marks a chat question.
DEMO_PROMPTS = (
    "Return a list of",
    "The subprocess.run function",
    "To open a file",
    "The str.split method",
    "The os.path.join function",
    "The logging module",
    "The asyncio.run function",
    "The pathlib.Path class",
    "class Thread",
    "? What does str.split do?",
    "? What does os.path.join do?",
    "? What is collections.Counter?",
)


# --------------------------------------------------------------------------------------------
# Text
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """One piece of documentation, before it is rendered as reference text or as chat."""

    kind: str  # "module", "class", "function", "method" or "topic"
    module: str
    name: str  # qualified name, without "builtins."
    signature: str  # "" where there is none worth showing
    body: str

    @property
    def is_public(self) -> bool:
        """Whether no part of the name has a leading underscore."""
        return not any(part.startswith("_") for part in self.name.split("."))


def normalise(text: str) -> str:
    """Cleans a docstring: no common indentation, no trailing blanks, short underlines."""
    text = inspect.cleandoc(text.encode("utf-8", "replace").decode("utf-8")).expandtabs(4)
    text = re.sub(r" at 0x[0-9a-fA-F]+", "", text)  # an address is another in each process
    text = re.sub(r"([*=~^_#-])\1{4,}", r"\1\1\1\1", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text).strip()
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "")
    return text


def stdlib_directory() -> Path:
    """The folder of the standard library's Python files."""
    return Path(sysconfig.get_paths()["stdlib"])


def module_name_of(path: Path, root: Path) -> str:
    """The dotted name of a source file of the standard library."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def documents_in_source(module: str, tree: ast.Module) -> Iterator[Document]:
    """Module, class, function and method docstrings of one parsed source file."""
    docstring = ast.get_docstring(tree)
    if docstring:
        yield Document("module", module, module, "", normalise(docstring))

    def visit(node: ast.AST, prefix: str, inside_class: bool) -> Iterator[Document]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                name = f"{prefix}.{child.name}"
                bases = ", ".join(ast.unparse(base) for base in child.bases)
                text = ast.get_docstring(child)
                if text:
                    signature = f"class {child.name}({bases})" if bases else ""
                    yield Document("class", module, name, signature, normalise(text))
                yield from visit(child, name, True)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(child)
                if text:
                    name = f"{prefix}.{child.name}"
                    decorators = {ast.unparse(item) for item in child.decorator_list}
                    shown = name.removeprefix(f"{module}.")
                    signature = f"{shown}({ast.unparse(child.args)})"
                    if "property" in decorators or len(signature) > 200:
                        signature = ""
                    kind = "method" if inside_class else "function"
                    yield Document(kind, module, name, signature, normalise(text))
            elif isinstance(child, ast.If | ast.Try):
                yield from visit(child, prefix, inside_class)

    yield from visit(tree, module, False)


def gather_from_sources() -> Iterator[Document]:
    """Docstrings of the standard library's Python files, found without importing them."""
    root = stdlib_directory()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_PACKAGES.intersection(parts) or any(p.startswith("config-") for p in parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        yield from documents_in_source(module_name_of(path, root), tree)


def text_signature(obj: object, name: str) -> str:
    """The signature of a C implementation; "" if it has none, or none that reads well."""
    try:
        signature = f"{name}{inspect.signature(obj)}"  # type: ignore[arg-type]
    except (TypeError, ValueError, NameError, AttributeError):  # not all are well-formed
        return ""
    signature = re.sub(r" at 0x[0-9a-fA-F]+", "", signature)
    return signature if len(signature) <= 200 else ""


def members_in_c(owner: type) -> Iterator[tuple[str, object, str]]:
    """Name, object and docstring of a class's documented members in C."""
    for name, member in sorted(vars(owner).items()):
        if inspect.isfunction(member):
            continue
        text = getattr(member, "__doc__", None)
        if (inspect.isroutine(member) or inspect.isgetsetdescriptor(member)) and isinstance(text, str):
            yield name, member, text


def documents_in_module(module: ModuleType, module_name: str) -> Iterator[Document]:
    """Documents of what an imported module has from C."""
    prefix = "" if module is builtins else f"{module_name}."

    def document(kind: str, name: str, obj: object, text: str) -> Document:
        return Document(kind, module_name, prefix + name, text_signature(obj, name), normalise(text))

    if module.__doc__ and not getattr(module, "__file__", "x.so").endswith(".py"):
        yield Document("module", module_name, module_name, "", normalise(module.__doc__))
    public = sorted(name for name in vars(module) if not name.startswith("_"))
    for name in public:
        obj = vars(module)[name]
        text = getattr(obj, "__doc__", None)
        if inspect.isclass(obj) and obj.__module__ in {module_name, f"_{module_name}"}:
            if text:
                yield document("class", name, obj, text)
            for member_name, member, member_text in members_in_c(obj):
                yield document("method", f"{name}.{member_name}", member, member_text)
        elif inspect.isbuiltin(obj) and isinstance(text, str):
            yield document("function", name, obj, text)


def gather_from_runtime() -> Iterator[Document]:
    """Docstrings of what CPython implements in C (`str.split`, `math.sqrt`), by introspection."""
    names = sorted(n for n in sys.stdlib_module_names if not n.startswith("_"))
    for name in ["builtins", *(n for n in names if n not in NEVER_IMPORTED), "os.path"]:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                module = importlib.import_module(name)
        except ImportError:  # a module of another platform, or one that this CPython was built without
            continue
        yield from documents_in_module(module, name)


def gather_topics() -> Iterator[Document]:
    """The language-reference topics that `help()` shows."""
    topics = importlib.import_module("pydoc_data.topics").topics
    for name, text in sorted(topics.items()):
        yield Document("topic", "", name, "", normalise(text))


def gather_documents() -> list[Document]:
    """All documents, each body once; public names win over private ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated modules are documented, too
        found = [*gather_from_runtime(), *gather_from_sources()]
    found.sort(key=lambda document: not document.is_public)  # stable
    by_body: dict[str, Document] = {}
    for document in [*gather_topics(), *found]:
        if len(document.body) >= 20:
            by_body.setdefault(document.body, document)
    return list(by_body.values())


def seeded(seed: int) -> random.Random:
    """A generator per purpose, so that one cannot shift another's numbers."""
    return random.Random(seed)  # noqa: S311 - nothing secret


def long_paragraphs(document: Document) -> set[str]:
    """Paragraphs that are too long to be equal in two documents by chance."""
    return {p for p in document.body.split("\n\n") if len(p) >= 60}


def split_held_out(documents: list[Document], share: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Splits at document level; no long paragraph of the held-out part is in the other part."""
    shuffled = list(documents)
    seeded(seed).shuffle(shuffled)
    occurrences = Counter(p for document in shuffled for p in long_paragraphs(document))
    train: list[Document] = []
    held_out: list[Document] = []
    size = 0
    for document in shuffled:
        length = len(document.body.encode())
        unique = all(occurrences[p] == 1 for p in long_paragraphs(document))
        wanted = len(held_out) < share * len(shuffled) and size + length < MAX_HELD_OUT_BYTES * 0.9
        if wanted and unique and length <= MAX_HELD_OUT_DOCUMENT_CHARS:
            held_out.append(document)
            size += length
        else:
            train.append(document)
    return train, held_out


def render_reference(document: Document, rng: random.Random) -> str:
    """The document as reference text, with one of three light headers."""
    if document.kind == "topic":
        return document.body
    title = f"The {document.name} {document.kind}"
    style = rng.random()
    if style < 0.4:
        header = title if not document.signature else f"{title}\n\n    {document.signature}"
        return f"{header}\n\n{document.body}"
    if style < 0.75:
        return f"{document.signature or document.name}\n\n{document.body}"
    return f"{title}: {document.body}"


def short_answer(document: Document, limit: int = 700) -> str:
    """The first paragraphs of a document, as a chat answer; "" if none reads as one."""
    paragraphs = document.body.split("\n\n")
    if document.kind == "topic":
        paragraphs = paragraphs[1:]  # the first is the title and its underline
    answer = ""
    for paragraph in paragraphs:
        candidate = f"{answer}\n\n{paragraph}" if answer else paragraph
        if len(candidate) > limit:
            break
        answer = candidate
    return answer


def question_about(document: Document, rng: random.Random) -> str:
    """A question that the document answers."""
    name = document.name
    asked = {
        "module": (f"What is the {name} module for?", f"What does the {name} module do?"),
        "class": (f"What is {name}?", f"What is the {name} class?", f"How do I use {name}?"),
        "function": (f"What does {name} do?", f"What does the {name} function do?"),
        "method": (f"What does {name} do?", f"What does the {name} method do?"),
        "topic": (f"Tell me about {name} in Python.",),
    }[document.kind]
    if document.kind == "topic":
        title = document.body.split("\n", 1)[0]
        asked = (*asked, f"Explain: {title}")
    elif document.kind in {"function", "method"}:
        asked = (*asked, f"How do I use {name}?")
    return rng.choice([*asked, f"Explain {name}."])


def render_chat(documents: Iterable[Document], rng: random.Random) -> str:
    """One conversation, a question and its answer per document, as the chat template writes it."""
    turns: list[tuple[str, str]] = []
    if rng.random() < 0.2:
        turns.append(("system", "You are a helpful assistant."))
    for document in documents:
        turns.append(("user", question_about(document, rng)))
        turns.append(("assistant", short_answer(document)))
    return "".join(f"{TURN_START}{role}\n{text}{TURN_END}\n" for role, text in turns)


def render_epoch(documents: list[Document], rng: random.Random) -> tuple[list[str], int]:
    """All reference texts plus a share of chats, shuffled; and how many of them are chats."""
    texts = [render_reference(document, rng) for document in documents]
    answering = [document for document in documents if document.is_public]
    answering = [d for d in answering if len(short_answer(d)) >= 20]
    chosen = [d for d in answering if rng.random() < (0.8 if d.module in CORE_MODULES else 0.2)]
    rng.shuffle(chosen)
    chats: list[str] = []
    while chosen:
        turns = 2 if rng.random() < 0.15 else 1
        chats.append(render_chat(chosen[:turns], rng))
        del chosen[:turns]
    texts += chats
    rng.shuffle(texts)
    return texts, len(chats)


# --------------------------------------------------------------------------------------------
# Tokens
# --------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer whose first ids are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, each ending with the end-of-text token."""
    end = SPECIAL_TOKENS.index(END_OF_TEXT)
    return [[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts)]


def pack_rows(documents: list[list[int]], length: int) -> Iterator[list[int]]:
    """Rows of `length` + 1 tokens.

    A document continues in the next row, unless very little of it is left: then the row begins with a new document.
    """
    row: list[int] = []
    for ids in documents:
        position = 0
        while position < len(ids):
            taken = ids[position : position + length + 1 - len(row)]
            row += taken
            position += len(taken)
            if len(row) == length + 1:
                yield row
                row = []
                if len(ids) - position < length // 4:
                    break


class Batches:
    """An endless stream of training batches: each epoch renders and shuffles the text anew."""

    def __init__(self, documents: list[Document], tokenizer: Tokenizer, seed: int) -> None:
        self._documents = documents
        self._tokenizer = tokenizer
        self._rng = seeded(seed)
        self._rows: Iterator[list[int]] = iter(())
        self._length = 0
        self.epochs = 0

    def next(self, length: int, rows: int) -> Tensor:
        """A batch of `rows` rows of `length` + 1 tokens."""
        if length != self._length:
            self._length, self._rows = length, iter(())
        batch: list[list[int]] = []
        while len(batch) < rows:
            row = next(self._rows, None)
            if row is None:
                texts, _ = render_epoch(self._documents, self._rng)
                self._rows = pack_rows(encode_documents(self._tokenizer, texts), length)
                self.epochs += 1
            else:
                batch.append(row)
        return torch.tensor(batch)


# --------------------------------------------------------------------------------------------
# Model
# --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    max_positions: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a learned scale."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and shared key/value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        kv_size = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix the tokens of each row; `cos` and `sin` are the rotary tables."""
        batch, length, hidden = x.shape
        shape = self.shape

        def heads(projected: Tensor, count: int) -> Tensor:
            return projected.view(batch, length, count, shape.head_dim).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            first, second = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-second, first), dim=-1) * sin

        query = rotate(heads(self.q_proj(x), shape.heads))
        key = rotate(heads(self.k_proj(x), shape.kv_heads))
        value = heads(self.v_proj(x), shape.kv_heads)
        groups = shape.heads // shape.kv_heads
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return result


class MLP(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each token alone."""
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class Layer(nn.Module):
    """One decoder layer, with dropout before the residual stream."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = MLP(shape)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add the attention and the feed-forward part to the residual stream."""
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        result: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return result


class Model(nn.Module):
    """The Llama architecture with tied embeddings; parameters are named as in the checkpoint."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, dropout) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)
        inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_positions).float(), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = (2 * shape.layers) ** -0.5 if into_stream else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the token after each of `ids`."""
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled("cpu"):
            x = x.bfloat16()
        cos = self.cos[: ids.shape[1]].to(x.dtype)  # type: ignore[index]
        sin = self.sin[: ids.shape[1]].to(x.dtype)  # type: ignore[index]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, rows: Tensor, reduction: str = "mean") -> Tensor:
        """Nats per token of predicting each row's tokens but the first."""
        logits = self(rows[:, :-1]).float().flatten(0, 1)
        return functional.cross_entropy(logits, rows[:, 1:].flatten(), reduction=reduction)


# --------------------------------------------------------------------------------------------
# Training and evaluation
# --------------------------------------------------------------------------------------------


def log(message: str) -> None:
    """Print a progress line."""
    print(f"[{time.strftime('%H:%M:%S')}] {message}", flush=True)


def learning_rate(progress: float, peak: float, warmup: float = 0.03, floor: float = 0.03) -> float:
    """Linear warm-up, then cosine decay to a floor; `progress` runs from 0 to 1."""
    if progress < warmup:
        return peak * (0.02 + 0.98 * progress / warmup)
    along = (progress - warmup) / (1 - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(along, 1.0))))


@torch.inference_mode()
def evaluate(model: Model, ids: list[int]) -> float:
    """Mean nats per token over consecutive windows of the held-out stream.

    Each window of `EVALUATION_WINDOW` + 1 tokens starts at the last token of the one before: every token but the first
    is predicted once.
    """
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, EVALUATION_WINDOW):
        rows = torch.tensor([ids[start : start + EVALUATION_WINDOW + 1]])
        total += model.loss(rows, reduction="sum").item()
        count += rows.shape[1] - 1
    model.train(was_training)
    return total / count


def unigram_loss(train: Iterable[int], held_out: list[int], vocabulary: int) -> float:
    """Nats per token of the training unigram distribution with add-one smoothing."""
    counts = Counter(train)
    total = sum(counts.values()) + vocabulary
    return -sum(math.log((counts[i] + 1) / total) for i in held_out[1:]) / (len(held_out) - 1)


@dataclass
class Progress:
    """A training run's figures, for the model card."""

    steps: int = 0
    tokens: int = 0
    epochs: int = 0
    seconds: float = 0.0
    stopped_by_time: bool = False


def optimizer_of(model: Model, arguments: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    decayed = [p for p in model.parameters() if p.dim() == 2]
    plain = [p for p in model.parameters() if p.dim() != 2]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": arguments.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=arguments.lr,
        betas=(0.9, 0.95),
        fused=True,
    )


def fit(model: Model, batches: Batches, held_out: list[int], arguments: argparse.Namespace) -> Progress:
    """Train for the wanted steps, or until the time limit.

    The learning rate follows whichever is further along, so it has decayed at the end of either.
    """
    optimizer = optimizer_of(model, arguments)
    loss_of = torch.compile(model.loss, dynamic=False) if arguments.compile else model.loss
    progress = Progress()
    started = time.monotonic()
    limit = arguments.max_minutes * 60
    recent: list[float] = []
    while True:
        progress.seconds = time.monotonic() - started
        along = max(progress.steps / arguments.steps, progress.seconds / limit)
        if along >= 1:
            break
        long_rows = along >= 1 - arguments.long_share
        length = model.shape.max_positions if long_rows else arguments.context
        rows = batches.next(length, max(1, arguments.batch_tokens // length))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(along, arguments.lr)
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.autocast):
            loss = loss_of(rows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress.steps += 1
        progress.tokens += rows[:, 1:].numel()
        recent.append(loss.item())
        if progress.steps % arguments.log_every == 0:
            seconds = time.monotonic() - started
            reached = max(progress.steps / arguments.steps, seconds / limit)
            log(
                f"step {progress.steps}  loss {sum(recent) / len(recent):.3f}  "
                f"epoch {batches.epochs}  {progress.tokens / seconds:.0f} tokens/s  "
                f"elapsed {seconds / 60:.1f} min  ETA {seconds * (1 / reached - 1) / 60:.1f} min"
            )
            recent.clear()
        if progress.steps % arguments.evaluate_every == 0:
            log(f"step {progress.steps}  held-out {evaluate(model, held_out):.4f} nats/token")
    progress.epochs = batches.epochs
    progress.stopped_by_time = progress.steps < arguments.steps
    return progress


# --------------------------------------------------------------------------------------------
# The checkpoint directory
# --------------------------------------------------------------------------------------------


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_checkpoint(directory: Path, model: Model, tokenizer: Tokenizer, held_out_text: str) -> None:
    """Writes the Hugging Face layout, weights in bfloat16; no `lm_head`, as it is tied."""
    shape = model.shape
    end, turn_end = SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(TURN_END)
    write_json(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": end,
            "dtype": "bfloat16",
            "eos_token_id": end,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "hidden_size": shape.hidden,
            "initializer_range": 0.02,
            "intermediate_size": shape.intermediate,
            "max_position_embeddings": shape.max_positions,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": shape.heads,
            "num_hidden_layers": shape.layers,
            "num_key_value_heads": shape.kv_heads,
            "pad_token_id": end,
            "rms_norm_eps": shape.norm_eps,
            "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
            "rope_theta": shape.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": shape.vocabulary,
        },
    )
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": end, "eos_token_id": [end, turn_end], "pad_token_id": end},
    )
    write_json(
        directory / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_eos_token": False,
            "bos_token": END_OF_TEXT,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": END_OF_TEXT,
            "extra_special_tokens": [TURN_START, TURN_END],
            "model_max_length": shape.max_positions,
            "pad_token": END_OF_TEXT,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    save_file(
        {f"model.{name}": p.detach().bfloat16().contiguous() for name, p in model.named_parameters()},
        str(directory / "model.safetensors"),
        metadata={"format": "pt"},
    )
    (directory / "held_out.txt").write_text(held_out_text, encoding="utf-8")
    licence = stdlib_directory() / "LICENSE.txt"
    if not licence.exists():
        raise FileNotFoundError("this CPython has no LICENSE.txt beside its standard library")
    shutil.copyfile(licence, directory / "LICENSE.python.txt")


@torch.inference_mode()
def check_checkpoint(directory: Path, model: Model, ids: list[int]) -> float:
    """Loads the directory with transformers; returns the largest difference in its logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rows = torch.tensor([ids[:256]])
    difference: float = (loaded(rows).logits - model(rows)).abs().max().item()
    text = tokenizer.decode(ids[:256])
    if tokenizer.encode(text, add_special_tokens=False) != ids[:256]:
        raise RuntimeError("the tokenizer that transformers loads encodes differently")
    question = [{"role": "user", "content": "What is a list?"}]
    chat = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    if chat != "<|im_start|>user\nWhat is a list?<|im_end|>\n<|im_start|>assistant\n":
        raise RuntimeError(f"unexpected chat template result: {chat!r}")
    if difference > 1e-2:
        raise RuntimeError(f"transformers computes other logits (difference {difference:.3g})")
    return difference


def sample(directory: Path, prompts: Iterable[str], tokens: int, temperature: float) -> list[str]:
    """Continuations of the prompts by the checkpoint as transformers runs it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(0)
    results = []
    for prompt in prompts:
        if prompt.startswith("? "):
            question = [{"role": "user", "content": prompt[2:]}]
            text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        else:
            text = prompt
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        options: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0}
        output = model.generate(**inputs, max_new_tokens=tokens, **options)
        new = output[0, inputs["input_ids"].shape[1] :]
        results.append(tokenizer.decode(new, skip_special_tokens=True))
    return results


def markdown_sample(prompt: str, continuation: str) -> str:
    """One demo prompt of the model card, with what the model makes of it."""
    if prompt.startswith("? "):
        title, shown = f"`{prompt[2:]}` (chat)", f"{prompt[2:]}\n-> {continuation}"
    else:
        title, shown = f"`{prompt}`", prompt + continuation
    body = "\n".join(f"  {line}".rstrip() for line in shown.strip().split("\n"))
    return f"- {title}\n\n  ```text\n{body}\n  ```\n"


def write_card(directory: Path, report: dict[str, Any]) -> None:
    """README.md: purpose, origin, quality and command of the model."""
    shape, data, run, quality = (report[k] for k in ("shape", "data", "run", "quality"))
    greedy = sample(directory, DEMO_PROMPTS, CARD_SAMPLE_TOKENS, 0.0)
    samples = "\n".join(map(markdown_sample, DEMO_PROMPTS, greedy))
    ended = "stopped by the time limit" if run["stopped_by_time"] else "all that were asked for"
    text = f"""\
# Headway demo model

A very small Llama model, trained from nothing on the documentation inside CPython, so that Headway can be tried
without downloading weights. It writes text that looks like Python documentation. It is no source of facts: what it
says is often wrong.

| | |
|---|---|
| Architecture | `LlamaForCausalLM`, tied embeddings, bfloat16 |
| Parameters | {report["parameters"]:,} |
| Hidden / layers / intermediate | {shape["hidden"]} / {shape["layers"]} / {shape["intermediate"]} |
| Attention heads / KV heads / head size | {shape["heads"]} / {shape["kv_heads"]} / {shape["hidden"] // shape["heads"]} |
| Vocabulary | {shape["vocabulary"]} (byte-level BPE) |
| Longest sequence | {shape["max_positions"]} tokens |
| Held-out loss | {quality["nats_per_token"]:.4f} nats per token, {quality["bits_per_byte"]:.4f} bits per byte |
| Uniform baseline | {quality["uniform_nats_per_token"]:.4f} nats per token |
| Unigram baseline | {quality["unigram_nats_per_token"]:.4f} nats per token |

## Training

- Text: docstrings of the standard library of CPython {data["python"]} (Python sources by `ast`, C implementations by
  introspection) and the topics of `pydoc_data`; nothing else. {data["train_documents"]:,} documents,
  {data["train_bytes"]:,} bytes as reference text ({data["train_tokens"]:,} tokens). An epoch adds about
  {data["chat_documents"]:,} chats made of the same documents and then has {data["epoch_tokens"]:,} tokens.
- Run: {run["steps"]:,} steps ({ended}), {run["tokens"]:,} tokens ({run["tokens"] / data["epoch_tokens"]:.1f} epochs),
  {run["seconds"] / 60:.1f} minutes on {run["hardware"]}.
- AdamW, peak learning rate {run["lr"]}, cosine decay, weight decay {run["weight_decay"]}, dropout {run["dropout"]};
  {run["batch_tokens"]} tokens per step in rows of {run["context"]} tokens ({shape["max_positions"]} in the last \
{run["long_share"]:.0%} of the run).
- The last weights are the ones written: nothing was chosen by the held-out part.

The whole command:

    {report["command"]}

The number of steps within a time limit depends on the machine, so a second run gives a similar model, not the same
bytes. `python tools/train_demo_model.py card` writes this file again from `training_report.json`.

## Held-out text

`held_out.txt` has {data["held_out_documents"]} documents ({data["held_out_bytes"]:,} bytes, \
{data["held_out_tokens"]:,} tokens) that were in no training text; none of their longer
paragraphs occurs in another document. The loss above is that of this whole file as the checkpoint stands (bfloat16
weights, computed in float32): encode it; cut it into windows of {EVALUATION_WINDOW + 1} tokens, each of which starts at the last token
of the one before; predict all tokens of a window but its first; take the mean over all predicted tokens. Bits per byte
is the sum in bits over the bytes of the file without its `{END_OF_TEXT}` marks.

## Demo prompts

Those that read best of the ones that were tried, with greedy continuations of at most {CARD_SAMPLE_TOKENS} tokens; the last ones
are chat questions. The documents they allude to may have been in the training text.

{samples}
## Licence

The training text and `held_out.txt` are parts of CPython, under the Python Software Foundation License
(`LICENSE.python.txt`, as it came with the CPython that was used): {data["python_copyright"]}
All Rights Reserved. The weights derive from that text.
"""
    (directory / "README.md").write_text(text, encoding="utf-8")


def move_into_place(source: Path, target: Path) -> None:
    """Replaces the files of the target one by one; each replacement is atomic."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        path.chmod(0o644)
        path.replace(target / path.name)


def describe_hardware() -> str:
    """The processor, in words, for the model card."""
    model_names: list[str] = []
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        model_names = re.findall(r"model name\s*:\s*(.+)", cpu_info.read_text())
    name = model_names[0] if model_names else platform.processor() or platform.machine()
    amx = " with AMX" if cpu_info.exists() and "amx_bf16" in cpu_info.read_text() else ""
    return f"{torch.get_num_threads()} cores of an {name}{amx}, without a GPU"


class Texts(NamedTuple):
    """The texts of one training run, and the figures about them for the report."""

    train: list[Document]
    train_tokens: list[list[int]]
    tokenizer: Tokenizer
    held_out_text: str
    held_out_tokens: list[int]
    figures: dict[str, Any]


def prepare_texts(arguments: argparse.Namespace) -> Texts:
    """Gather the documents, train the tokenizer and encode everything."""
    documents = gather_documents()
    train, held_out = split_held_out(documents, arguments.held_out_share, arguments.seed)
    kinds = ", ".join(f"{n} {k}" for k, n in Counter(d.kind for d in documents).most_common())
    log(f"{len(documents)} documents ({kinds}); {len(held_out)} of them held out")

    rng = seeded(arguments.seed)
    train_texts = [render_reference(document, rng) for document in train]
    held_out_text = "".join(render_reference(d, rng) + END_OF_TEXT for d in held_out)
    tokenizer = train_tokenizer(train_texts, arguments.vocabulary)
    train_tokens = encode_documents(tokenizer, train_texts)
    held_out_tokens = tokenizer.encode(held_out_text).ids
    epoch_texts, chats = render_epoch(train, seeded(arguments.seed))
    figures: dict[str, Any] = {
        "python": platform.python_version(),
        "python_copyright": sys.copyright.split("\n", 1)[0],
        "train_documents": len(train),
        "train_bytes": sum(len(text.encode()) for text in train_texts),
        "train_tokens": sum(map(len, train_tokens)),
        "chat_documents": chats,
        "epoch_tokens": sum(map(len, encode_documents(tokenizer, epoch_texts))),
        "held_out_documents": len(held_out),
        "held_out_bytes": len(held_out_text.replace(END_OF_TEXT, "").encode()),
        "held_out_tokens": len(held_out_tokens),
    }
    log(f"data: {figures}")
    return Texts(train, train_tokens, tokenizer, held_out_text, held_out_tokens, figures)


def measure_quality(model: Model, texts: Texts) -> dict[str, float]:
    """Round the weights to bfloat16, as they are written, and measure the held-out loss."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    model.eval()
    loss = evaluate(model, texts.held_out_tokens)
    bits = loss * (texts.figures["held_out_tokens"] - 1) / math.log(2)
    vocabulary = model.shape.vocabulary
    every_token = itertools.chain.from_iterable(texts.train_tokens)
    return {
        "nats_per_token": loss,
        "bits_per_byte": bits / texts.figures["held_out_bytes"],
        "uniform_nats_per_token": math.log(vocabulary),
        "unigram_nats_per_token": unigram_loss(every_token, texts.held_out_tokens, vocabulary),
    }


def command_train(arguments: argparse.Namespace) -> None:
    """The `train` command: from the text to the checkpoint directory."""
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    texts = prepare_texts(arguments)
    shape = Shape(
        vocabulary=texts.tokenizer.get_vocab_size(),
        hidden=arguments.hidden,
        layers=arguments.layers,
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        intermediate=arguments.intermediate,
        max_positions=arguments.max_positions,
    )
    model = Model(shape, arguments.dropout)
    parameters = sum(p.numel() for p in model.parameters())
    log(f"{parameters:,} parameters, {2 * parameters / 1e6:.2f} MB in bfloat16")
    batches = Batches(texts.train, texts.tokenizer, arguments.seed)
    progress = fit(model, batches, texts.held_out_tokens, arguments)
    quality = measure_quality(model, texts)
    log(f"{progress.steps} steps in {progress.seconds / 60:.1f} min; quality: {quality}")

    shown = ("lr", "weight_decay", "dropout", "batch_tokens", "context", "long_share", "seed")
    report = {
        "parameters": parameters,
        "shape": asdict(shape),
        "data": texts.figures,
        "run": asdict(progress)
        | {name: getattr(arguments, name) for name in shown}
        | {"hardware": describe_hardware(), "torch": torch.__version__},
        "quality": quality,
        "command": " ".join(["python tools/train_demo_model.py", *arguments.given]),
    }
    write_result(arguments.output, model, texts, report)


def write_result(output: Path, model: Model, texts: Texts, report: dict[str, Any]) -> None:
    """Write and check the checkpoint, then move it into place."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        write_checkpoint(directory, model, texts.tokenizer, texts.held_out_text)
        difference = check_checkpoint(directory, model, texts.held_out_tokens)
        log(f"transformers loads the checkpoint; logits differ by at most {difference:.2g}")
        write_json(directory / "training_report.json", report)
        write_card(directory, report)
        move_into_place(directory, output)
    size = sum(path.stat().st_size for path in output.iterdir())
    log(f"wrote {output} ({size / 1e6:.2f} MB)")


def command_card(arguments: argparse.Namespace) -> None:
    """The `card` command: write README.md again, and samples on standard output."""
    report = json.loads((arguments.output / "training_report.json").read_text(encoding="utf-8"))
    write_card(arguments.output, report)
    for temperature in (0.0, 0.7):
        prompts = arguments.prompt or DEMO_PROMPTS
        for prompt, text in zip(prompts, sample(arguments.output, prompts, arguments.tokens, temperature), strict=True):
            print(f"--- {prompt!r} (temperature {temperature})\n{text}\n")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line; `given` is the text as typed, for the model card."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="gather, train, evaluate and write the checkpoint")
    train.set_defaults(run=command_train)
    train.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    train.add_argument("--seed", type=int, default=20)
    train.add_argument("--held-out-share", type=float, default=0.03)
    train.add_argument("--vocabulary", type=int, default=4096)
    train.add_argument("--hidden", type=int, default=256)
    train.add_argument("--layers", type=int, default=6)
    train.add_argument("--heads", type=int, default=8)
    train.add_argument("--kv-heads", type=int, default=4)
    train.add_argument("--intermediate", type=int, default=640)
    train.add_argument("--max-positions", type=int, default=1024)
    train.add_argument("--context", type=int, default=512, help="tokens per training row")
    train.add_argument("--long-share", type=float, default=0.1, help="last part of the run, in full-length rows")
    train.add_argument("--batch-tokens", type=int, default=4096)
    train.add_argument("--steps", type=int, default=3000)
    train.add_argument("--max-minutes", type=float, default=31.0)
    train.add_argument("--lr", type=float, default=2e-3)
    train.add_argument("--weight-decay", type=float, default=0.1)
    train.add_argument("--dropout", type=float, default=0.05)
    train.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    train.add_argument("--log-every", type=int, default=25)
    train.add_argument("--evaluate-every", type=int, default=250)
    train.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=True)
    train.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    card = commands.add_parser("card", help="write README.md again and print samples")
    card.set_defaults(run=command_card)
    card.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    card.add_argument("--prompt", action="append", help="print samples of these prompts instead")
    card.add_argument("--tokens", type=int, default=120)
    arguments = parser.parse_args(argv)
    arguments.given = argv
    return arguments


if __name__ == "__main__":
    parsed = parse_arguments(sys.argv[1:])
    parsed.run(parsed)

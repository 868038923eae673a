"""From text to token ids and back with the checkpoint's own files.

It trusts neither checkpoint nor prompt: the template runs in its own process, and a text that cannot fit is refused by
its length.
"""

import json
import re
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from headway_gateway.text.conversation import Conversation
from headway_gateway.text.detokenization import REPLACEMENT, Detokenizer, bytes_of_part, detokenizer_factory
from headway_gateway.text.template_process import ChatTemplate, TemplateError, TemplateUnavailableError
from headway_proto.wording import one_line, shown

_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILE = "tokenizer_config.json"
_MODEL_CONFIG_FILE = "config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_TEMPLATES_OF_PROCESSORS = (_PROCESSOR_FILES[0], "chat_template.json")
"""Where a checkpoint that has a processor, of pictures say, may have its template, before the places of tokenizers."""
_TEXT_CONFIG = "text_config"
_TEMPLATE_DIRECTORY = "additional_chat_templates"
_DEFAULT_TEMPLATE, _TOOLS_TEMPLATE = "default", "tool_use"
_USED_TEMPLATES = (_DEFAULT_TEMPLATE, _TOOLS_TEMPLATE)
_SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_ADDED_TOKENS = "added_tokens_decoder"
_TOKEN_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
_IS_ID = re.compile(r"[0-9]{1,10}")
_SPECIAL_SUFFIX = "_token"
_NAMED_SPECIAL_TOKENS = ("extra_special_tokens", "model_specific_special_tokens")
_UNLIKE_CONTENTS = ("0", "A")
_LETTERS = ("a", "\u2581a")
"""Tokens of which every vocabulary of words has one, where \u2581 stands for a space."""
_MOST_SAID = 200
_NOT_UNICODE = "the text holds a lone surrogate; allowed: valid Unicode"


class TokenizerFilesError(Exception):
    """The tokenizer files are unusable."""


class PromptError(ValueError):
    """The prompt is wrong, or its ``part`` alone."""

    def __init__(self, message: str, part: str = "") -> None:
        super().__init__(message)
        self.part = part


class PromptTooLongError(PromptError):
    """It has more tokens than may be."""


class PromptUnavailableError(Exception):
    """The prompt could not be encoded this time."""


class TextModel:
    """A tokenizer with its chat template. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        *,
        template_fault: str = "",
        template_source: str = "",
        tools_template_source: str = "",
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self.template_fault = template_fault
        """Why the chat template cannot be used, in one line; else empty."""
        self.template_source = template_source
        """The chat template as it is written; else empty."""
        self.tools_template_source = tools_template_source
        """That of chats with tools, most often the same."""
        self._make_detokenizer = detokenizer_factory(tokenizer)
        self.vocab_size = _width(tokenizer)
        """See ``_width``."""
        self._longest_token = max(map(len, tokenizer.get_vocab()), default=1)
        # Some decoders drop a space before the first word, others put one between words.
        letters = map(tokenizer.token_to_id, _LETTERS)
        self._before_a_token = [token_id for token_id in letters if token_id is not None]
        added = tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = frozenset(token.content for token in added if token.special)
        """The texts of tokens that are left out of an output's text unless they are asked for."""

    @property
    def has_chat_template(self) -> bool:
        """Whether chats can be rendered."""
        return self._chat_template is not None

    def new_detokenizer(self, *, keeps_special_tokens: bool = False, behind: Sequence[int] = ()) -> Detokenizer:
        """Return one output's detokeniser; see ``DetokenizerFactory``."""
        return self._make_detokenizer(keeps_special_tokens=keeps_special_tokens, behind=behind)

    def require_plausible_length(self, num_characters: int, max_tokens: int) -> None:
        """Refuse a text that cannot fit.

        Raises:
            PromptTooLongError: it exceeds ``max_tokens`` of the longest tokens.
        """
        # The margin is for normalisers that shorten a text, such as NFC on decomposed accents.
        most = 4 * self._longest_token * max_tokens
        if num_characters > most:
            raise PromptTooLongError(f"{num_characters} characters cannot fit; allowed: at most {max_tokens} tokens")

    def encode(self, text: str) -> list[int]:
        """Tokenise a text; add special tokens.

        Raises:
            PromptError: it is not valid Unicode.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_plain(self, text: str) -> list[int]:
        """Tokenise a text that stands behind another; add no special tokens.

        Raises:
            PromptError: it is not valid Unicode.
        """
        return self._encode(text, add_special_tokens=False)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Tokenise two texts as a pair; add special tokens.

        Raises:
            PromptError: one is not valid Unicode, or the first holds the separator.
        """
        encoding = self._encoding((first, second), add_special_tokens=True)
        ids: list[int] = encoding.ids
        types: list[int] = encoding.type_ids
        # Executors find the second text by the separator that ends both.
        if any(types) and ids[-1] in ids[: types.index(1) - 1]:
            raise PromptError(f"it holds {shown(self.text_of_token(ids[-1]))}, which separates the texts of a pair")
        return ids

    def first_tokens(self, text: str, most: int) -> str:
        """Return what the first ``most`` tokens of a text stand for, without special tokens.

        Raises:
            PromptError: it is not valid Unicode.
        """
        try:
            (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as error:
            raise PromptError(_NOT_UNICODE) from error
        return text if len(encoding.ids) <= most else text[: encoding.offsets[most][0]]

    def encode_chat(self, chat: Conversation, *, max_tokens: int) -> list[int]:
        """Render and tokenise a chat.

        Raises:
            PromptError: see ``render_chat``; or more than ``max_tokens``.
            PromptUnavailableError: see ``render_chat``.
        """
        text = self.render_chat(chat)
        self.require_plausible_length(len(text), max_tokens)
        return self._encode(text, add_special_tokens=False)

    def encode_chat_prefix(self, chat: Conversation, *, max_tokens: int) -> list[int]:
        """Return the tokens common to all chats that begin with these messages and continue with a user's.

        Two continuations are compared, because only template and tokenizer know where the next message begins.

        Raises:
            PromptError: as ``encode_chat``.
        """
        chats = [
            self.encode_chat(chat.followed_by(("user", content)), max_tokens=max_tokens) for content in _UNLIKE_CONTENTS
        ]
        shortest = min(map(len, chats))
        end = next((place for place in range(shortest) if chats[0][place] != chats[1][place]), shortest)
        return chats[0][:end]

    def render_chat(self, chat: Conversation) -> str:
        """Return the text of a chat.

        Raises:
            PromptError: no usable template, or it refuses these messages.
            PromptUnavailableError: the template took too long.
        """
        if self.template_fault:
            raise PromptError(
                f"this model's chat template cannot be used ({self.template_fault}); send text or token_ids"
            )
        if self._chat_template is None:
            raise PromptError("this model has no chat template; send text or token_ids")
        try:
            return self._chat_template.render(chat)
        except TemplateUnavailableError as error:
            raise PromptUnavailableError(f"the chat template {error}") from error
        except TemplateError as error:
            raise PromptError(f"the chat template {error}", error.part) from error

    def decode(self, token_ids: Sequence[int], *, keeps_special_tokens: bool = False) -> str:
        """Return the text."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not keeps_special_tokens)

    def text_of_token(self, token_id: int) -> str:
        """Return one token's text inside a text. Special tokens have theirs; U+FFFD stands for a part of a character."""
        detokenizer = self._make_detokenizer(keeps_special_tokens=True, behind=self._before_a_token)
        return detokenizer.push((token_id,)) + detokenizer.finish()

    def token_named(self, text: str) -> int | None:
        """Return the token with this text in the vocabulary, such as a special token; None if there is none."""
        return self._tokenizer.token_to_id(text)

    def bytes_of_token(self, token_id: int) -> bytes:
        """Return one token's text by itself in UTF-8, also if it is a part of a character."""
        text = self.text_of_token(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        return bytes_of_part(self._tokenizer.id_to_token(token_id) or "")

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._encoding(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _encoding(self, text: str | tuple[str, str], *, add_special_tokens: bool) -> Encoding:
        try:
            # The batch call leaves out character offsets, which are not needed here.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # the library's versions raise different errors
            raise PromptError(_NOT_UNICODE) from error
        return encoding


def load_text_model(directory: Path) -> TextModel:
    """Load the files of a Hugging Face model directory.

    An unusable template becomes a ``template_fault``, because plain texts need none.

    Raises:
        TokenizerFilesError: a file is missing or unusable.
    """
    path = directory / _TOKENIZER_FILE
    try:
        if not directory.is_dir():
            raise TokenizerFilesError(
                f"model: {shown(directory)} is not a directory; allowed: one with {_TOKENIZER_FILE}"
            )
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerFilesError(
            f"{path}: cannot be read ({_reason(error)}); allowed: a Hugging Face tokenizer file"
        ) from error
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the library raises bare Exception for every defect of the file
        raise TokenizerFilesError(f"{path}: not a usable tokenizer ({one_line(error, _MOST_SAID)})") from error
    _require_width(directory, tokenizer)
    config = _read_config(directory / _CONFIG_FILE)
    special = _special_tokens(directory, config)
    _complete_added_tokens(tokenizer, config, special.values())
    try:
        file, templates = _templates(directory, config)
        source = templates.get(_DEFAULT_TEMPLATE)
        if source is None:
            return TextModel(tokenizer, None)
        for_tools = templates.get(_TOOLS_TEMPLATE)
        compiled = _compiled(file, source, special, for_tools)
        return TextModel(tokenizer, compiled, template_source=source, tools_template_source=for_tools or source)
    except _TemplateFaultError as error:
        return TextModel(tokenizer, None, template_fault=str(error))


def _require_width(directory: Path, tokenizer: Tokenizer) -> None:
    config = _read_config(directory / _MODEL_CONFIG_FILE)
    text = config.get(_TEXT_CONFIG)
    width = (text if isinstance(text, dict) else config).get("vocab_size")
    most = _width(tokenizer)
    if isinstance(width, int) and most > width:
        raise TokenizerFilesError(
            f"{directory / _TOKENIZER_FILE}: {most} token ids; allowed: at most {width}, the logits in {_MODEL_CONFIG_FILE}"
        )


def _width(tokenizer: Tokenizer) -> int:
    """One more than the largest token id.

    Added tokens may be more than the model knows, such as that of images in Gemma 3's models of text. A prompt with one
    is refused.
    """
    return max(tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) + 1


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokenizerFilesError(f"{path}: cannot be read ({_reason(error)})") from error
    except (ValueError, RecursionError) as error:
        raise TokenizerFilesError(f"{path}: not readable JSON ({one_line(error, _MOST_SAID)})") from error
    if not isinstance(config, dict):
        raise TokenizerFilesError(f"{path}: holds a {type(config).__name__}; allowed: a JSON object")
    return config


class _TemplateFaultError(Exception):
    """The chat template is unusable."""


def _templates(directory: Path, config: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Where the chat templates are, and those that are used, by name. As in transformers, files win over the configuration,
    and a processor has its own.
    """
    has_processor = any((directory / name).exists() for name in _PROCESSOR_FILES)
    for name in _TEMPLATES_OF_PROCESSORS if has_processor else ():
        if (of_processor := _read_config(directory / name).get("chat_template")) is not None:
            return name, _named_templates(name, of_processor)
    folder = directory / _TEMPLATE_DIRECTORY
    files = {_DEFAULT_TEMPLATE: directory / _TEMPLATE_FILE} if (directory / _TEMPLATE_FILE).exists() else {}
    files |= {path.stem: path for path in folder.glob("*.jinja")}
    if files:
        if _DEFAULT_TEMPLATE not in files:
            raise _TemplateFaultError(f"{_TEMPLATE_DIRECTORY}: no template is called {_DEFAULT_TEMPLATE}")
        used = {name: files[name] for name in _USED_TEMPLATES if name in files}
        return files[_DEFAULT_TEMPLATE].name, {name: _text_of(path) for name, path in used.items()}
    return _CONFIG_FILE, _named_templates(_CONFIG_FILE, config.get("chat_template"))


def _named_templates(file: str, entry: object) -> dict[str, str]:
    """Of a field, which may be one template or several by name."""
    if isinstance(entry, list):
        entry = {item.get("name"): item.get("template") for item in entry if _is_named(item)}
    if isinstance(entry, dict):
        if _DEFAULT_TEMPLATE not in entry:
            raise _TemplateFaultError(f"{file}: no chat template is called {_DEFAULT_TEMPLATE}")
    else:
        entry = {_DEFAULT_TEMPLATE: entry}
    found: dict[str, str] = {}
    for name in _USED_TEMPLATES:
        source = entry.get(name)
        if isinstance(source, str):
            found[name] = source
        elif source is not None:
            raise _TemplateFaultError(f"{file}: chat_template is a {type(source).__name__}; allowed: a string")
    return found


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _TemplateFaultError(f"{path.name}: cannot be read ({_reason(error)})") from None


def _is_named(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("name"), str)


def _compiled(file: str, source: str, special: dict[str, str], for_tools: str | None) -> ChatTemplate:
    try:
        return ChatTemplate(source, special, for_tools=for_tools)
    except TemplateError as error:
        raise _TemplateFaultError(f"{file}: it {one_line(error, _MOST_SAID)}") from None


def _special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """As in transformers: every name that ends in ``_token``, and named extra ones.

    The file of older checkpoints wins, unless the configuration lists its added tokens.
    """
    entries = dict(config)
    if _ADDED_TOKENS not in config:
        entries |= _read_config(directory / _SPECIAL_TOKENS_FILE)
    named = {name: entry for name, entry in entries.items() if name.endswith(_SPECIAL_SUFFIX)}
    for more in map(entries.get, _NAMED_SPECIAL_TOKENS):
        named |= more if isinstance(more, dict) else {}
    contents = {name: entry.get("content") if isinstance(entry, dict) else entry for name, entry in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _complete_added_tokens(tokenizer: Tokenizer, config: dict[str, Any], special: Iterable[str]) -> None:
    """As in transformers: the configuration may say more of added tokens, and what it names is special.

    Fine-tuned checkpoints end with such tokens, which would stand in every output's text.
    """
    vocabulary = tokenizer.get_vocab()
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    width = max(vocabulary.values(), default=-1) + 1
    changed: dict[str, AddedToken] = {}
    for token_id, token in _listed_tokens(config):
        known = added.get(token.content)
        token.special = token.special or (known is not None and known.special)
        if vocabulary.get(token.content, width) != token_id or repr(token) == repr(known):
            continue  # an id that would leave a gap, or nothing new
        changed[token.content] = token
        if token.content not in vocabulary:
            vocabulary[token.content], width = width, width + 1
    for content in special:
        if content in vocabulary:
            token = changed.get(content) or added.get(content) or AddedToken(content, normalized=False)
            if not token.special:
                token.special = True
                changed[content] = token
    tokenizer.add_tokens(list(changed.values()))  # one call, since each sorts all tokens anew


def _listed_tokens(config: dict[str, Any]) -> list[tuple[int, AddedToken]]:
    entries = config.get(_ADDED_TOKENS)
    if not isinstance(entries, dict):
        return []
    listed = [
        (int(token_id), AddedToken(entry["content"], **{flag: entry[flag] for flag in _TOKEN_FLAGS if flag in entry}))
        for token_id, entry in entries.items()
        if _IS_ID.fullmatch(token_id) and _is_added_token(entry)
    ]
    return sorted(listed, key=itemgetter(0))


def _is_added_token(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("content"), str)
        and all(isinstance(entry.get(flag, False), bool) for flag in _TOKEN_FLAGS)
    )


def _reason(error: Exception) -> str:
    return (error.strerror or one_line(error, _MOST_SAID)) if isinstance(error, OSError) else "not UTF-8"

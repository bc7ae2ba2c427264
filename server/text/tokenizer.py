"""The model's tokenizer and chat template, loaded from its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from spot.errors import InvalidRequest, ShuntyardError

# What `apply_chat_template` is told by us; a request's chat_template_kwargs are for the template.
_RESERVED_KWARGS = frozenset(
    {
        "self",
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "tokenizer_kwargs",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
    }
)
# A template is a program, and the conversation its input: what either may run into.
_TEMPLATE_ERRORS = (
    TemplateError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class TokenizerError(ShuntyardError):
    """The folder holds no tokenizer that can be used here."""


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, from character to byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    shifted = 256
    for byte in range(256):
        if byte not in printable:
            alphabet[chr(shifted)] = byte
            shifted += 1
    return alphabet


class ChatTokenizer:
    """Text to ids, ids to text, conversations to prompts.

    hf: the transformers tokenizer, for templates and for vLLM's parsers.
    rust: its backend, which does the hot work.
    """

    def __init__(self, hf: PreTrainedTokenizerBase, *, chat_template: str | None = None) -> None:
        rust = getattr(hf, "backend_tokenizer", None)
        if not isinstance(rust, RustTokenizer):
            raise TokenizerError(
                "This model has no fast tokenizer (tokenizer.json), which Shuntyard needs."
            )
        self.hf = hf
        self.rust: RustTokenizer = rust
        self.chat_template = chat_template
        self.eos_token_id: int | None = hf.eos_token_id
        added = rust.get_added_tokens_decoder()
        self.added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocab = rust.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.max_token_chars = max(map(len, vocab))
        decoder = rust.decoder
        self._byte_level = "ByteLevel" in (repr(decoder) if decoder is not None else "")
        self._alphabet = _byte_level_alphabet()
        self.token_text = lru_cache(maxsize=65536)(self._token_text)
        self.token_bytes = lru_cache(maxsize=65536)(self._token_bytes)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        chat_template: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> ChatTokenizer:
        """Raises TokenizerError if the folder holds no usable tokenizer."""
        try:
            hf = AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=trust_remote_code, revision=revision
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise TokenizerError(f"Cannot load a tokenizer from {folder}: {error}") from None
        return cls(hf, chat_template=chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequest for text that is not Unicode (lone surrogates)."""
        try:
            # The batch call leaves the offsets out, which saves a quarter of the time.
            encoded = self.rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoded[0].ids
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequest("The text holds characters that are not valid Unicode.") from None
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str = self.rust.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def decode_stream(
        self, prompt_token_ids: Sequence[int] | None = None, *, skip_special_tokens: bool = True
    ) -> DecodeStream:
        """A stream that continues after the prompt."""
        ids = None if prompt_token_ids is None else list(prompt_token_ids[-8:])
        return DecodeStream(ids=ids, skip_special_tokens=skip_special_tokens)

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary spells it (`Ġsea`), empty for an id without a token."""
        return self.rust.id_to_token(token_id) or ""

    def _token_text(self, token_id: int) -> str:
        """One token on its own; U+FFFD where it is only a part of a character."""
        added = self.added.get(token_id)
        if added is not None:
            return added
        return self._token_bytes(token_id).decode("utf-8", "replace")

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for."""
        added = self.added.get(token_id)
        if added is not None:
            return added.encode()
        piece = self.rust.id_to_token(token_id)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(self._alphabet.get(char, 0x3F) for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return str(piece).replace("\u2581", " ").encode()

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None or bool(getattr(self.hf, "chat_template", None))

    def knows_role(self, role: str) -> bool:
        """Whether the chat template mentions the role."""
        template = self.chat_template or getattr(self.hf, "chat_template", None)
        return role in str(template)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. Raises InvalidRequest if the template objects."""
        template = chat_template or self.chat_template
        if template is None and not self.has_chat_template:
            raise InvalidRequest(
                "This model has no chat template; start the server with --chat-template, "
                "or use /v1/completions.",
                param="messages",
            )
        given = template_kwargs or {}
        kwargs = {name: given[name] for name in given if name not in _RESERVED_KWARGS}
        try:
            text = self.hf.apply_chat_template(
                messages,
                tools=tools,
                documents=documents,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **kwargs,
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"The chat template refused the conversation: {str(error)[:300]}", param="messages"
            ) from None
        return str(text)


def read_chat_template(argument: str) -> str:
    """`--chat-template`: a file's content, or the template itself. Raises TokenizerError."""
    if any(mark in argument for mark in ("{%", "{{", "\n")):
        return argument
    path = Path(argument)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerError(
            f"--chat-template: {argument} is neither a template nor a readable file: {error}"
        ) from None


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The model's own sampling defaults and end-of-sequence ids; empty if it has none."""
    try:
        config = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}

"""Text to ids and back, single tokens, templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.tokenizer import (
    ChatTokenizer,
    TokenizerError,
    read_chat_template,
    read_generation_config,
)
from spot.errors import InvalidRequest
from tests.harness import demo_tokenizer

CONVERSATION = [{"role": "user", "content": "Hi"}]


@given(st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"]), max_size=40))
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(text: str) -> None:
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode(text)
    if tokenizer.decode(ids) != text:
        return  # the demo model lacks a byte for it
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_every_token_has_text_and_bytes(tokenizer: ChatTokenizer) -> None:
    for token_id in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token_id)
        assert raw
        assert tokenizer.token_text(token_id) == raw.decode("utf-8", "replace")


def test_a_part_of_a_character_is_shown_as_one(tokenizer: ChatTokenizer) -> None:
    parts = [i for i in tokenizer.encode("🦩") if tokenizer.token_text(i) == "\ufffd"]
    assert parts


def test_an_unknown_id_is_nothing(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    assert tokenizer.token_text(tokenizer.vocab_size + 5) == ""


def test_special_tokens_are_known(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.eos_token_id == 2
    assert tokenizer.added[2] == "<|im_end|>"
    assert {0, 1, 2} <= tokenizer.special_ids <= set(tokenizer.added)
    assert tokenizer.decode([1, *tokenizer.encode("x"), 2]) == "<|im_start|>x<|im_end|>"
    assert tokenizer.decode([1, *tokenizer.encode("x"), 2], skip_special_tokens=True) == "x"


def test_text_that_is_not_unicode_is_refused(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(InvalidRequest):
        tokenizer.encode("lone \ud800")


def test_the_template_renders_with_and_without_a_generation_prompt(
    tokenizer: ChatTokenizer,
) -> None:
    prompted = tokenizer.render_chat(CONVERSATION)
    assert prompted.endswith("<|im_start|>assistant\n")
    plain = tokenizer.render_chat(CONVERSATION, add_generation_prompt=False)
    assert prompted == plain + "<|im_start|>assistant\n"


def test_a_final_message_can_be_continued(tokenizer: ChatTokenizer) -> None:
    messages = [*CONVERSATION, {"role": "assistant", "content": "Hello th"}]
    text = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nHello th")


def test_a_template_of_the_server_or_the_request_wins(tokenizer: ChatTokenizer) -> None:
    own = ChatTokenizer(tokenizer.hf, chat_template="{{ messages[0].content }} by server {{ x }}")
    assert own.render_chat(CONVERSATION, template_kwargs={"x": 1}) == "Hi by server 1"
    assert own.render_chat(CONVERSATION, chat_template="by request") == "by request"
    assert own.has_chat_template


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{% if %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ 'x' * messages }}",
        "{{ undefined_function() }}",
        "{% include 'x' %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_objects_is_the_callers_error(
    tokenizer: ChatTokenizer, template: str
) -> None:
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        tokenizer.render_chat(CONVERSATION, chat_template=template)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"tokenize": True},
        {"return_dict": True},
        {"return_tensors": "pt"},
        {"messages": []},
        {"conversation": []},
        {"add_generation_prompt": True},
        {"chat_template": "evil"},
        {"tools": None},
    ],
)
def test_template_arguments_cannot_take_over(
    tokenizer: ChatTokenizer, kwargs: dict[str, Any]
) -> None:
    expected = tokenizer.render_chat(CONVERSATION)
    assert tokenizer.render_chat(CONVERSATION, template_kwargs=kwargs) == expected


def test_a_model_without_a_template_says_so(tokenizer: ChatTokenizer) -> None:
    class Bare:
        def __getattr__(self, name: str) -> Any:
            return None if name == "chat_template" else getattr(tokenizer.hf, name)

    bare = ChatTokenizer(Bare())  # type: ignore[arg-type]
    assert not bare.has_chat_template
    with pytest.raises(InvalidRequest, match="--chat-template"):
        bare.render_chat(CONVERSATION)


def test_a_template_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages }}", encoding="utf-8")
    assert read_chat_template(str(path)) == "{{ messages }}"
    assert read_chat_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(TokenizerError, match="neither a template nor a readable file"):
        read_chat_template(str(tmp_path / "missing.jinja"))


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="Cannot load a tokenizer"):
        ChatTokenizer.load(tmp_path)


@pytest.mark.parametrize("text", [None, "nonsense", "[1]"])
def test_a_missing_generation_config_is_empty(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text, encoding="utf-8")
    assert read_generation_config(tmp_path) == {}


def test_a_generation_config_is_read(tmp_path: Path) -> None:
    config = {"temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_generation_config(tmp_path) == config

"""vLLM's parsers behind our interface: the same result however the output is cut."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spot.engines.vllm_compat.parsers import (
    ParserFactory,
    VllmParser,
    cut_at_tags,
    load_parser_factory,
    remaining_arguments,
)
from spot.errors import InvalidRequest
from spot.parsed import ParsedDelta

# The parsers' own protocol module warns about its deprecated fields when they are copied.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated in favor of.*:DeprecationWarning")

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
WITH_TOOLS: dict[str, Any] = {"tools": [TOOL], "tool_choice": "auto"}
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token per byte, and the tags that reasoning models have."""
    alphabet = {character: i for i, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    bytewise = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>")
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"])
    return made


def run(
    factory: ParserFactory, body: dict[str, Any], tokenizer: Any, text: str, size: int
) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls of a text that arrives `size` tokens at a time."""
    parser = factory.new(body, PROMPT)
    ids = tokenizer.encode(text, add_special_tokens=False)
    chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
    deltas = [
        parser.feed(tokenizer.decode(chunk), chunk, number == len(chunks) - 1)
        for number, chunk in enumerate(chunks)
    ]
    return (
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        joined_calls(deltas),
    )


def joined_calls(deltas: list[ParsedDelta]) -> list[tuple[str, str]]:
    names: list[str] = []
    arguments: list[str] = []
    for piece in (call for delta in deltas for call in delta.tool_calls):
        if piece.index == len(names):
            assert piece.id
            assert piece.name
            names.append(piece.name)
            arguments.append("")
        arguments[piece.index] += piece.arguments
    return list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("size", [*range(1, 9), 1000])
def test_hermes_calls(tokenizer: Any, size: int) -> None:
    factory = load_parser_factory("hermes", None, tokenizer)
    text = 'Hm. <tool_call>{"name": "f", "arguments": {"trigger": true}}</tool_call>'
    assert run(factory, WITH_TOOLS, tokenizer, text, size) == (
        "",
        "Hm. ",
        [("f", '{"trigger": true}')],
    )


@pytest.mark.parametrize("size", [*range(1, 9), 1000])
def test_hermes_calls_behind_reasoning(tokenizer: Any, size: int) -> None:
    factory = load_parser_factory("hermes", "deepseek_r1", tokenizer)
    text = '<think>what now?</think>Hm. <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert run(factory, WITH_TOOLS, tokenizer, text, size) == ("what now?", "Hm. ", [("f", "{}")])


@pytest.mark.parametrize("size", [*range(1, 9), 1000])
def test_calls_by_a_parser_of_vllm(tokenizer: Any, size: int) -> None:
    factory = load_parser_factory("llama3_json", None, tokenizer)
    text = '{"name": "f", "parameters": {"trigger": true, "n": [1, 2]}}'
    _, content, calls = run(factory, WITH_TOOLS, tokenizer, text, size)
    assert content == ""
    assert calls == [("f", '{"trigger": true, "n": [1, 2]}')]


@pytest.mark.parametrize("size", [*range(1, 9), 1000])
def test_reasoning_alone(tokenizer: Any, size: int) -> None:
    factory = load_parser_factory(None, "deepseek_r1", tokenizer)
    assert run(factory, {}, tokenizer, "<think>why</think>because", size) == ("why", "because", [])


def test_without_tools_nothing_is_a_call(tokenizer: Any) -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for body in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        factory = load_parser_factory("hermes", None, tokenizer)
        assert run(factory, body, tokenizer, text, 3) == ("", text, [])
    factory = load_parser_factory("llama3_json", None, tokenizer)
    text = '{"name": "f", "parameters": {}}'
    assert run(factory, {}, tokenizer, text, 3) == ("", text, [])


def test_reasoning_is_left_out_if_not_wanted(tokenizer: Any) -> None:
    factory = load_parser_factory(None, "deepseek_r1", tokenizer)
    body = {"include_reasoning": False}
    assert run(factory, body, tokenizer, "<think>why</think>because", 4) == ("", "because", [])


def test_unknown_names_are_errors_that_list_the_known(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown tool call parser 'hermess'.*llama3_json"):
        load_parser_factory("hermess", None, tokenizer)
    with pytest.raises(ValueError, match=r"unknown reasoning parser 'r1'.*deepseek_r1"):
        load_parser_factory(None, "r1", tokenizer)


def test_a_tokenizer_without_the_parsers_tokens_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="cannot be used with the tokenizer"):
        load_parser_factory("mistral", None, tokenizer)


def test_tags_must_not_be_skipped(tokenizer: Any) -> None:
    factory = load_parser_factory("hermes", None, tokenizer)
    assert factory.adjust(WITH_TOOLS) == {"skip_special_tokens": False}
    assert factory.adjust({}) is None


def test_what_vllms_parsers_want_changed_is_told(tokenizer: Any) -> None:
    factory = load_parser_factory("jamba", None, tokenizer_with(tokenizer, "<tool_calls>"))
    assert factory.adjust(WITH_TOOLS) == {"skip_special_tokens": False}
    assert factory.adjust({}) is None


def tokenizer_with(tokenizer: Any, tag: str) -> Any:
    tokenizer.add_tokens([tag, tag.replace("<", "</")])
    return tokenizer


def test_where_reasoning_ends_decides_where_a_constraint_starts(tokenizer: Any) -> None:
    factory = load_parser_factory(None, "deepseek_r1", tokenizer)
    end = tokenizer.encode("</think>", add_special_tokens=False)
    assert factory.reasoning_ended({}, PROMPT) is False
    assert factory.reasoning_ended({}, PROMPT + end) is True
    assert load_parser_factory("hermes", None, tokenizer).reasoning_ended({}, PROMPT) is None


def test_a_body_that_vllm_cannot_read_is_the_requests_fault(tokenizer: Any) -> None:
    factory = load_parser_factory("llama3_json", None, tokenizer)
    with pytest.raises(InvalidRequest, match="cannot read"):
        factory.new({"tools": [{"type": "function"}], "tool_choice": "auto"}, PROMPT)


class ForgetfulParser:
    """Streams half of what it finds in the whole."""

    tool_parser = object()

    def set_prompt_token_ids(self, ids: list[int]) -> None: ...

    def parse_delta(self, text: str, *args: Any, finished: bool) -> None:
        if text == "break":
            raise RuntimeError("a bug")

    def parse(self, text: str, *args: Any, **options: Any) -> Any:
        from vllm.entrypoints.generate.base.protocol import FunctionCall

        return None, "", [FunctionCall(id="x", name="f", arguments='{"a": 1}')]


class Request:
    tools = (TOOL,)
    include_reasoning = True


def test_a_call_that_streaming_missed_is_added_at_the_end() -> None:
    parser = VllmParser(lambda request: ForgetfulParser(), Request(), PROMPT, {})
    assert parser.feed("a", [1], False) == ParsedDelta()
    (call,) = parser.feed("b", [2], True).tool_calls
    assert (call.index, call.name, call.arguments) == (0, "f", '{"a": 1}')


def test_a_failing_parser_costs_no_text() -> None:
    parser = VllmParser(lambda request: ForgetfulParser(), Request(), PROMPT, {})
    assert parser.feed("break", [1], False).content == "break"


@pytest.mark.parametrize(
    ("text", "token_ids", "parts"),
    [
        ("", [], [("", [])]),
        ("ab", [1, 2], [("ab", [1, 2])]),
        ("<t>", [9], [("<t>", [9])]),
        ("ab<t>c", [1, 2, 9, 3], [("ab", [1, 2]), ("<t>", [9]), ("c", [3])]),
        ("<t><t>", [9, 9], [("<t>", [9]), ("<t>", [9])]),
        ("ab", [1, 9, 2], [("ab", [1, 9, 2])]),
        ("<t>", [1, 2, 3], [("<t>", [1, 2, 3])]),
    ],
)
def test_pieces_are_cut_at_tags(
    text: str, token_ids: list[int], parts: list[tuple[str, list[int]]]
) -> None:
    assert cut_at_tags(text, token_ids, {9: "<t>"}) == parts


@pytest.mark.parametrize(
    ("streamed", "final", "rest"),
    [
        ("", '{"a": 1}', '{"a": 1}'),
        ('{"a": 1}', '{"a": 1}', ""),
        ('{"a"', '{"a": true}', ": true}"),
        ('{"a":1}', '{"a": 1}', ""),
        ('{"a":', '{"a": true}', " true}"),
        ('{ "a" :[1,', '{"a": [1, 2]}', " 2]}"),
        ('{"a b', '{"a b": 1}', '": 1}'),
        ('{"a":"x\\"y', '{"a": "x\\"y z"}', ' z"}'),
        ('{"a  b', '{"a b": 1}', None),
        ('{"b"', '{"a": 1}', None),
        ('{"a": 2}', '{"a": 1}', None),
    ],
)
def test_remaining_arguments(streamed: str, final: str, rest: str | None) -> None:
    assert remaining_arguments(streamed, final) == rest

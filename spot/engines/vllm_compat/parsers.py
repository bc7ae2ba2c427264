"""vLLM's tool call and reasoning parsers, for use in the gateway's process.

The Hermes format is parsed by ours, which needs no vLLM; with anything else vLLM is imported here
(seconds, and hundreds of megabytes).
"""

from __future__ import annotations

import json
import logging
from typing import Any

from spot.engines.hermes import HermesParser, new_tool_call_id
from spot.errors import InvalidRequest
from spot.parsed import ChainedParser, OutputParser, ParsedDelta, ToolCallDelta

logger = logging.getLogger(__name__)

_HERMES = "hermes"

# What a parser may look at in a request besides its messages, and what it may change.
_READ_FIELDS = (
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "include_reasoning",
    "reasoning_effort",
    "response_format",
    "structured_outputs",
    "skip_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
)
_CHANGED_FIELDS = (
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "structured_outputs",
    "response_format",
)


class ParserFactory:
    """Makes the parsers of one model. Build it with `load_parser_factory`."""

    def __init__(
        self, parser_cls: Any, tokenizer: Any, model_config: Any, *, is_hermes: bool
    ) -> None:
        self._parser_cls = parser_cls
        self._tokenizer = tokenizer
        self._model_config = model_config
        self._is_hermes = is_hermes
        self._tags: dict[int, str] = {}
        if parser_cls is not None:
            self._tags = {number: tag for tag, number in tokenizer.get_added_vocab().items()}

    def new(self, body: dict[str, Any], prompt_token_ids: list[int]) -> OutputParser:
        """A parser for one choice of a chat request.

        Raises InvalidRequest for a body that vLLM's parsers cannot read.
        """
        parser: OutputParser | None = None
        if self._parser_cls is not None:
            parser = VllmParser(self._make, _request(body), prompt_token_ids, self._tags)
        if self._is_hermes and _wants_tools(body):
            return HermesParser() if parser is None else ChainedParser(parser, HermesParser())
        return parser or _PlainParser()

    def adjust(self, body: dict[str, Any]) -> dict[str, Any] | None:
        """The fields of the request that the parsers want changed, or None if there are none."""
        changes: dict[str, Any] = {}
        if self._parser_cls is not None:
            request = _request(body)
            before = _changeable(request)
            after = _changeable(self._make(request).adjust_request(request))
            changes = {name: value for name, value in after.items() if value != before[name]}
        if self._is_hermes and _wants_tools(body) and body.get("skip_special_tokens") is not False:
            changes["skip_special_tokens"] = False  # the tags are special tokens in some models
        return changes or None

    def reasoning_ended(self, body: dict[str, Any], prompt_token_ids: list[int]) -> bool | None:
        """Whether the output starts behind the reasoning; None without a reasoning parser.

        For `Generation.reasoning_ended`: a constraint on the output holds from there on.
        """
        if self._parser_cls is None:
            return None
        request = _request(body)
        ended: bool | None = request.resolve_reasoning_ended(self._make(request), prompt_token_ids)
        return ended

    def _make(self, request: Any) -> Any:
        return self._parser_cls(
            self._tokenizer,
            request.tools,
            model_config=self._model_config,
            chat_template_kwargs=request.chat_template_kwargs or {},
        )


def load_parser_factory(
    tool_parser: str | None,
    reasoning_parser: str | None,
    tokenizer: Any,
    model_config: Any = None,
) -> ParserFactory:
    """The factory for the parsers of these names.

    tokenizer: the model's transformers tokenizer.
    Raises ValueError for an unknown name, listing the known ones, and for a tokenizer that lacks
    what the parser needs.
    """
    is_hermes = tool_parser == _HERMES
    vllm_tool_parser = None if is_hermes else tool_parser
    if not vllm_tool_parser and not reasoning_parser:
        return ParserFactory(None, tokenizer, model_config, is_hermes=is_hermes)
    _check_names(vllm_tool_parser, reasoning_parser)
    from vllm.parser import ParserManager
    from vllm.tokenizers.hf import get_cached_tokenizer

    cached = get_cached_tokenizer(tokenizer)
    try:
        parser_cls = ParserManager.get_parser(
            tool_parser_name=vllm_tool_parser,
            reasoning_parser_name=reasoning_parser,
            enable_auto_tools=vllm_tool_parser is not None,
            model_name=tokenizer.name_or_path or "this model",
            tokenizer=cached,
        )
    except TypeError as error:
        raise ValueError(str(error)) from error
    return ParserFactory(parser_cls, cached, model_config, is_hermes=is_hermes)


def _check_names(tool_parser: str | None, reasoning_parser: str | None) -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for kind, name, known in (
        ("tool call", tool_parser, ToolParserManager.list_registered()),
        ("reasoning", reasoning_parser, ReasoningParserManager.list_registered()),
    ):
        if name and name not in known:
            raise ValueError(
                f"unknown {kind} parser {name!r}; known are {', '.join(sorted(known))}"
            )


class VllmParser:
    """One of vLLM's parsers over one output. A `spot.parsed.OutputParser`.

    Streams what vLLM's streaming parser finds. Many of them look for tags as single tokens, so a
    piece is cut there first. At the end the whole output is parsed once more, and what streaming
    missed of the tool calls is added. So the result does not depend on the pieces.

    tags: the added tokens of the tokenizer, by their numbers.
    """

    def __init__(
        self, make: Any, request: Any, prompt_token_ids: list[int], tags: dict[int, str]
    ) -> None:
        self._make = make
        self._request = request
        self._prompt_token_ids = prompt_token_ids
        self._tags = tags
        self._parser = make(request)
        self._parser.set_prompt_token_ids(prompt_token_ids)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._calls: dict[int, _StreamedCall] = {}

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ParsedDelta:
        self._text.append(text)
        self._token_ids += token_ids
        parts = cut_at_tags(text, token_ids, self._tags)
        parsed = ParsedDelta()
        for number, (part, part_ids) in enumerate(parts, 1):
            _add(parsed, self._stream(part, part_ids, finished and number == len(parts)))
        if finished and self._may_call_tools:
            self._complete(parsed)
        return parsed

    def parse(self, text: str, token_ids: list[int]) -> ParsedDelta:
        """What vLLM finds in a whole output."""
        parser = self._make(self._request)
        parser.set_prompt_token_ids(self._prompt_token_ids)
        reasoning, content, calls = parser.parse(
            text, self._request, enable_auto_tools=True, model_output_token_ids=token_ids
        )
        return ParsedDelta(
            content=content or "",
            reasoning=(reasoning or "") if self._request.include_reasoning else "",
            tool_calls=[
                ToolCallDelta(index, call.id or new_tool_call_id(), call.name, call.arguments or "")
                for index, call in enumerate(calls or ())
            ],
        )

    @property
    def _may_call_tools(self) -> bool:
        return bool(self._request.tools) and self._parser.tool_parser is not None

    def _stream(self, text: str, token_ids: list[int], finished: bool) -> ParsedDelta:
        try:
            delta = self._parser.parse_delta(
                text, token_ids, self._request, self._prompt_token_ids, finished=finished
            )
        except Exception:  # a parser's bug must not cost the text
            logger.exception("a parser failed; the text is passed on as content")
            return ParsedDelta(content=text)
        if delta is None:
            return ParsedDelta()
        return ParsedDelta(
            content=delta.content or "",
            reasoning=delta.reasoning or "",
            tool_calls=[self._call_delta(call) for call in delta.tool_calls or ()],
        )

    def _call_delta(self, delta: Any) -> ToolCallDelta:
        """One of vLLM's pieces, with the index counted from 0 and arguments as text."""
        call = self._calls.get(delta.index)
        is_new = call is None
        if call is None:
            call = self._calls[delta.index] = _StreamedCall(len(self._calls))
        function = delta.function
        arguments = _as_text(function.arguments) if function is not None else ""
        call.arguments += arguments
        name = function.name if function is not None else None
        tool_call_id = (delta.id or new_tool_call_id()) if is_new else None
        return ToolCallDelta(call.index, tool_call_id, name, arguments)

    def _complete(self, parsed: ParsedDelta) -> None:
        """Add to the last delta what streaming missed."""
        try:
            whole = self.parse("".join(self._text), self._token_ids).tool_calls
        except Exception:  # the streamed calls stand
            logger.exception("a parser failed on a whole output")
            return
        streamed = sorted(self._calls.values(), key=lambda call: call.index)
        for call, final in zip(streamed, whole, strict=False):
            rest = remaining_arguments(call.arguments, final.arguments)
            if rest is None:
                logger.warning("streamed tool arguments differ from those of the whole output")
            elif rest:
                parsed.tool_calls.append(ToolCallDelta(call.index, arguments=rest))
        parsed.tool_calls += whole[len(streamed) :]


class _StreamedCall:
    def __init__(self, index: int) -> None:
        self.index = index
        self.arguments = ""


class _PlainParser:
    """Everything is content."""

    def feed(self, text: str, token_ids: list[int], finished: bool) -> ParsedDelta:
        return ParsedDelta(content=text)


def cut_at_tags(
    text: str, token_ids: list[int], tags: dict[int, str]
) -> list[tuple[str, list[int]]]:
    """A piece of output in parts, so that every tag that is one token is a part of its own.

    A tag whose text is not there (skipped, or held back) does not cut.
    """
    parts: list[tuple[str, list[int]]] = []
    start = 0
    for position, token_id in enumerate(token_ids):
        tag = tags.get(token_id)
        if tag is None or tag not in text:
            continue
        before, _, text = text.partition(tag)
        if before or position > start:
            parts.append((before, token_ids[start:position]))
        parts.append((tag, [token_id]))
        start = position + 1
    if text or start < len(token_ids) or not parts:
        parts.append((text, token_ids[start:]))
    return parts


def _add(parsed: ParsedDelta, later: ParsedDelta) -> None:
    """Append `later` to `parsed`, in place."""
    parsed.content += later.content
    parsed.reasoning += later.reasoning
    parsed.tool_calls += later.tool_calls


def remaining_arguments(streamed: str, final: str) -> str | None:
    """What `streamed` lacks to be the JSON text `final`; None if it is the beginning of another.

    Spaces between the tokens of the two may differ.
    """
    if final.startswith(streamed):
        return final[len(streamed) :]
    try:
        return "" if json.loads(streamed) == json.loads(final) else None
    except ValueError:
        pass
    position = 0
    in_string = escaped = False
    for character in streamed:
        if not in_string and character.isspace():
            continue
        while not in_string and position < len(final) and final[position].isspace():
            position += 1
        if position >= len(final) or final[position] != character:
            return None
        position += 1
        if in_string and not escaped and character == "\\":
            escaped = True
            continue
        if character == '"' and not escaped:
            in_string = not in_string
        escaped = False
    return final[position:]


def _as_text(arguments: Any) -> str:
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _wants_tools(body: dict[str, Any]) -> bool:
    return bool(body.get("tools")) and body.get("tool_choice") != "none"


def _request(body: dict[str, Any]) -> Any:
    """The part of a chat request that parsers read, as vLLM's request object.

    Of the messages only the tool calls matter (some models number their calls through).
    """
    import pydantic
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    messages = [
        {"role": "assistant", "content": "", "tool_calls": message["tool_calls"]}
        for message in body.get("messages", ())
        if isinstance(message, dict) and message.get("tool_calls")
    ]
    fields = {name: body[name] for name in _READ_FIELDS if body.get(name) is not None}
    if not fields.get("tools"):
        fields.pop("tools", None)
        fields.pop("tool_choice", None)
    try:
        return ChatCompletionRequest.model_validate(
            {"messages": [*messages, {"role": "user", "content": ""}], **fields}
        )
    except (pydantic.ValidationError, ValueError) as error:
        raise InvalidRequest(f"the parser cannot read this request: {error}"[:900]) from error


def _changeable(request: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = request.model_dump(mode="json", include=set(_CHANGED_FIELDS))
    return dumped

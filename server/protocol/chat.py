"""The body of `POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag

from server.protocol.sampling import INT64_MAX, MAX_TOP_LOGPROBS, SamplingBody

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
MAX_TOOLS = 128

ToolName = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class TextPart(_Part):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(_Part):
    type: Literal["refusal"]
    refusal: str


class ThinkingPart(_Part):
    type: Literal["thinking"]
    thinking: str


class MediaPart(_Part):
    """Images, audio, video and files: known kinds, refused by models that read text only."""

    type: Literal[
        "image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "image"
    ]


def _part_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if not isinstance(kind, str) and isinstance(value, dict) and isinstance(value.get("text"), str):
        return "text"
    kinds = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
    if isinstance(kind, str) and kind in ("text", "thinking"):
        return kind
    return kinds.get(str(kind), "media")


ContentPart = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[RefusalPart, Tag("refusal")]
    | Annotated[ThinkingPart, Tag("thinking")]
    | Annotated[MediaPart, Tag("media")],
    Discriminator(_part_kind),
]
Content = str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)]


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: str | None = None


class SystemMessage(_Message):
    role: Literal["system"]
    content: Content


class DeveloperMessage(_Message):
    role: Literal["developer"]
    content: Content


class UserMessage(_Message):
    role: Literal["user"]
    content: Content


class FunctionCall(BaseModel):
    """A call in the history. `arguments` is a JSON string; an object is taken as well."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(_Message):
    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = Field(default=None, fail_fast=True)
    function_call: FunctionCall | None = None


class ToolMessage(_Message):
    role: Literal["tool"]
    content: Content | None = None
    tool_call_id: str | None = None


class FunctionMessage(_Message):
    role: Literal["function"]
    content: Content | None = None
    name: str


Message = Annotated[
    SystemMessage
    | DeveloperMessage
    | UserMessage
    | AssistantMessage
    | ToolMessage
    | FunctionMessage,
    Field(discriminator="role"),
]


class FunctionDefinition(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    name: str


class NamedToolChoice(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(SamplingBody):
    """`POST /v1/chat/completions`: OpenAI's fields and vLLM's extras."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    """The conversation so far."""
    max_tokens: int | None = Field(default=None, ge=1, le=INT64_MAX)
    """The older name of `max_completion_tokens`."""
    max_completion_tokens: int | None = Field(default=None, ge=1, le=INT64_MAX)
    """Limit of the output, reasoning included; by default what the context leaves."""
    logprobs: bool | None = None
    """Answer with the log probability of each output token."""
    top_logprobs: int | None = Field(default=None, ge=-1, le=MAX_TOP_LOGPROBS)
    """So many alternatives at each position; only with `logprobs`."""
    tools: list[Tool] | None = Field(
        default=None, min_length=1, max_length=MAX_TOOLS, fail_fast=True
    )
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    """none: no calls; auto: the model decides; required: at least one call; or one function."""
    parallel_tool_calls: bool | None = None
    """false: at most one call in an answer."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    """How much to think, for chat templates that take it."""
    include_reasoning: bool | None = True
    """false leaves the reasoning out of the answer."""
    service_tier: str | None = None
    """Accepted; the answer says `default`."""
    modalities: list[Literal["text"]] | None = Field(default=None, fail_fast=True)
    """What the answer consists of: text only."""
    audio: None = None
    """Not supported: text only."""

    echo: bool | None = False
    """Begin the answer with the last message, where that is continued."""
    add_generation_prompt: bool | None = None
    """Let the template open the answer's turn."""
    continue_final_message: bool | None = False
    """Go on with the last message instead of opening a new turn."""
    add_special_tokens: bool | None = False
    """Add special tokens to what the template renders."""
    chat_template: str | None = None
    """A template for this request; needs `--trust-request-chat-template`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the chat template, for instance `enable_thinking`."""
    documents: list[dict[str, Any]] | None = Field(default=None, fail_fast=True)
    """Documents for templates that take them."""

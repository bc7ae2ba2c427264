"""The body of `POST /v1/responses`: OpenAI's fields and vLLM's extras."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
)
from pydantic.json_schema import SkipJsonSchema

from server.protocol.chat import MAX_TOOLS, Content, ToolName
from server.protocol.sampling import (
    INT64_MAX,
    MAX_TOP_LOGPROBS,
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingBody,
    TextFormat,
)

MAX_ITEMS = 10_000
MAX_METADATA = 16

ItemId = Annotated[str, StringConstraints(min_length=1, max_length=256)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class _Item(_Part):
    """id, status: as an earlier answer had them; a client may leave them out."""

    id: ItemId | None = None
    status: ItemStatus | None = None


class MessageItem(_Item):
    """One turn: input of the caller, or an earlier output of the model."""

    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(_Item):
    """An earlier call by the model. `arguments` is JSON text."""

    type: Literal["function_call"]
    call_id: ItemId
    name: str
    arguments: str


class FunctionCallOutputItem(_Item):
    """What the function that was called has returned."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: Content


class ReasoningPart(_Part):
    type: Literal["reasoning_text", "summary_text"] | None = None
    text: str


class ReasoningItem(_Item):
    """Earlier thinking. Only its text is used, where the chat template wants it."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None


class ItemReference(_Part):
    """An item of a response that is stored here."""

    type: Literal["item_reference"] | None = "item_reference"
    id: ItemId


def _refuse_kind(kind: str) -> str:
    raise ValueError(f"'{kind[:64]}' is not supported here")


class OtherKind(_Part):
    """Whatever else there is (hosted tools, computers, files): refused by its name."""

    type: Annotated[str, AfterValidator(_refuse_kind)]


_ITEM_KINDS = {"message", "function_call", "function_call_output", "reasoning", "item_reference"}


def _item_kind(value: Any) -> str:
    if not isinstance(value, dict):
        return str(getattr(value, "type", None) or "other")
    kind = value.get("type")
    if kind is None:
        return "message" if "role" in value else "item_reference" if "id" in value else "other"
    return kind if isinstance(kind, str) and kind in _ITEM_KINDS else "other"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")]
    | SkipJsonSchema[Annotated[OtherKind, Tag("other")]],
    Discriminator(_item_kind),
]
Items = Annotated[list[Item], Field(max_length=MAX_ITEMS, fail_fast=True)]


class FunctionTool(_Part):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "function" if kind == "function" else "other"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | SkipJsonSchema[Annotated[OtherKind, Tag("other")]],
    Discriminator(_tool_kind),
]


class NamedFunctionChoice(_Part):
    type: Literal["function"]
    name: str


class JsonSchemaTextFormat(JsonSchemaFormat):
    type: Literal["json_schema"]


class TextConfig(_Part):
    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaTextFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(_Part):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


def _refused(reason: str) -> BeforeValidator:
    """For what asks for another kind of answer: absent, null or false is fine."""

    def check(value: object) -> object:
        if value is not None and value is not False:
            raise ValueError(reason)
        return value

    return BeforeValidator(check)


Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
LOGPROBS: Includable = "message.output_text.logprobs"


class ResponseRequest(SamplingBody):
    """`POST /v1/responses`. One answer per request."""

    input: Annotated[
        Annotated[str, Tag("text")] | Annotated[Items, Tag("items")],
        Discriminator(lambda value: "items" if isinstance(value, list) else "text"),
    ]
    """Text, or items: messages, calls, their outputs, reasoning, references to stored items."""
    instructions: str | None = None
    """A system message before the input; not carried over to later responses."""
    max_output_tokens: int | None = Field(default=None, ge=1, le=INT64_MAX)
    """Limit of the output, reasoning included; by default what the context leaves."""
    max_tool_calls: int | None = Field(default=None, ge=1, le=INT64_MAX)
    """Accepted without effect."""
    previous_response_id: str | None = None
    """Go on from this stored response."""
    store: bool | None = None
    """false: do not keep the response for later requests."""
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    """Up to 16 texts by name; echoed."""
    include: Annotated[list[Includable], Field(fail_fast=True)] | None = None
    """`message.output_text.logprobs` adds log probabilities; the others have no effect."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    """So many alternatives at each position; with `include`."""
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionChoice | None = None
    """none: no calls; auto: the model decides; required: at least one call; or one function."""
    parallel_tool_calls: bool | None = None
    """false: at most one call in an answer."""
    text: TextConfig | None = None
    """The form of the answer's text: plain, JSON, or a JSON schema."""
    reasoning: ReasoningConfig | None = None
    """How much to think, for chat templates that take it."""
    truncation: Literal["auto", "disabled"] | None = None
    """auto: drop the oldest turns of a conversation that is too long; disabled: refuse it."""
    service_tier: str | None = None
    """Accepted; the answer says `default`."""
    safety_identifier: str | None = None
    """Accepted without effect."""
    prompt_cache_key: str | None = None
    """Accepted without effect."""
    background: Annotated[
        Literal[False] | None, _refused("responses in the background are not supported")
    ] = None
    """Not supported."""
    conversation: Annotated[
        None, _refused("conversations are not supported; use previous_response_id")
    ] = None
    """Not supported; use `previous_response_id`."""
    prompt: Annotated[None, _refused("stored prompts are not supported; use input")] = None
    """Not supported; use `input`."""

    include_reasoning: bool | None = True
    """false leaves the reasoning out of the answer."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Arguments for the chat template, for instance `enable_thinking`."""

    n: Literal[1] | None = None
    """One answer per request."""
    response_format: Annotated[None, _refused("use text.format instead")] = None
    """Not supported; use `text.format`."""
    prompt_logprobs: Annotated[None, _refused("there are no prompt_logprobs here")] = None
    """Not supported."""

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

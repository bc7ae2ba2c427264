"""What `/v1/responses` answers, as models for the OpenAPI document and for tests.

As in `server.protocol.responses`, nothing is built from these while serving.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from server.protocol.responses import ResponseBody, TopLogprob
from server.protocol.responses_api import NamedFunctionChoice

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(ResponseBody):
    type: Literal["input_text"]
    text: str


class OutputLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class OutputText(ResponseBody):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[OutputLogprob] | None = None


class OutputRefusal(ResponseBody):
    type: Literal["refusal"]
    refusal: str


class ReasoningText(ResponseBody):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(ResponseBody):
    type: Literal["summary_text"]
    text: str


class OutputMessage(ResponseBody):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[Annotated[OutputText | OutputRefusal, Field(discriminator="type")]]


class InputMessage(ResponseBody):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["user", "system", "developer"]
    content: list[InputText]


class ReasoningOutput(ResponseBody):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[SummaryText]
    content: list[ReasoningText]


class FunctionCallOutput(ResponseBody):
    """A call of the model. `arguments` is JSON text, as it wrote it."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class FunctionResult(ResponseBody):
    id: str
    type: Literal["function_call_output"]
    status: ItemStatus
    call_id: str
    output: str | list[InputText]


OutputItem = Annotated[
    OutputMessage | ReasoningOutput | FunctionCallOutput, Field(discriminator="type")
]
StoredInputItem = (
    InputMessage | OutputMessage | ReasoningOutput | FunctionCallOutput | FunctionResult
)


class ResponseFunctionTool(ResponseBody):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ResponseFailure(ResponseBody):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(ResponseBody):
    reason: Literal["max_output_tokens"]


class ReasoningSettings(ResponseBody):
    effort: str | None
    summary: str | None


class ResponseTextFormat(ResponseBody):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(ResponseBody):
    format: ResponseTextFormat
    verbosity: Literal["low", "medium", "high"]


class InputTokensDetails(ResponseBody):
    cached_tokens: int = Field(ge=0)
    cache_write_tokens: int = Field(ge=0)


class OutputTokensDetails(ResponseBody):
    reasoning_tokens: int = Field(ge=0)


class ResponseUsage(ResponseBody):
    input_tokens: int = Field(ge=0)
    input_tokens_details: InputTokensDetails
    output_tokens: int = Field(ge=0)
    output_tokens_details: OutputTokensDetails
    total_tokens: int = Field(ge=0)


class ResponseObject(ResponseBody):
    """An answer with all that was asked for. `usage` is there once it has ended well."""

    id: str = Field(pattern="^resp_")
    object: Literal["response"]
    created_at: int = Field(ge=0)
    completed_at: int | None
    status: Status
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextSettings
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionChoice
    tools: list[ResponseFunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


class DeletedResponse(ResponseBody):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(ResponseBody):
    """A page of the items that the model was given."""

    object: Literal["list"]
    data: list[StoredInputItem]
    first_id: str
    last_id: str
    has_more: bool


class _Event(ResponseBody):
    """sequence_number: counts the events of a stream from 0."""

    sequence_number: int = Field(ge=0)


class ResponseStateEvent(_Event):
    """The response as it begins or ends; one of the last three is the last event."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class OutputItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int = Field(ge=0)
    item: OutputItem


class _InItem(_Event):
    item_id: str
    output_index: int = Field(ge=0)


class _InPart(_InItem):
    content_index: int = Field(ge=0)


class ContentPartEvent(_InPart):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class OutputTextDelta(_InPart):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[OutputLogprob]


class OutputTextDone(_InPart):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[OutputLogprob]


class ReasoningTextDelta(_InPart):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningTextDone(_InPart):
    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDelta(_InItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_InItem):
    type: Literal["response.function_call_arguments.done"]
    arguments: str


class StreamErrorEvent(_Event):
    """A failure after the first byte; `response.failed` follows."""

    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


class ResponseEvent(
    RootModel[
        Annotated[
            ResponseStateEvent
            | OutputItemEvent
            | ContentPartEvent
            | OutputTextDelta
            | OutputTextDone
            | ReasoningTextDelta
            | ReasoningTextDone
            | ArgumentsDelta
            | ArgumentsDone
            | StreamErrorEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of a streamed response. Its type is also in the line `event:`."""

"""Bodies of `/v1/workflows` and of its `llm` nodes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from server.protocol.base import RequestBody
from server.protocol.chat import ChatCompletionRequest
from server.protocol.responses import ResponseBody
from workflows.run_progress import NodeStatus, RunStatus
from workflows.spec import MAX_NODES, Node


class RunOptions(RequestBody):
    """What of a run's request is not the workflow. All other fields are the workflow's document."""

    workflow: str | None = None
    """A workflow template by name (`rag`, or `rag@2` for one version), in place of `nodes`."""
    inputs: dict[str, Any] = Field(default_factory=dict)
    """The values that templates read as `inputs.NAME`."""
    stream: bool | None = None
    """Answer with the run's events as they happen."""
    background: bool | None = None
    """Answer at once; the run goes on, and can be asked for by its id."""
    on_disconnect: Literal["cancel", "continue"] | None = None
    """What happens to the run when the client leaves before its end: `cancel` by default, and
    `continue` where the request has an `Idempotency-Key`."""


def _messages_or_prompt(schema: dict[str, Any]) -> None:
    schema.pop("required")
    schema["oneOf"] = [{"required": ["messages"]}, {"required": ["prompt"]}]


class LlmParams(ChatCompletionRequest):
    """A chat request; `prompt` stands for one user message. Unknown fields are errors here."""

    model_config = ConfigDict(extra="forbid", json_schema_extra=_messages_or_prompt)

    prompt: str | None = None
    """One user message, in place of `messages`."""
    n: Literal[1] | None = None
    """A node has one answer."""

    @model_validator(mode="before")
    @classmethod
    def _prompt_as_message(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("prompt") is None:
            return data
        if "messages" in data:
            raise ValueError("prompt and messages exclude each other")
        return {**data, "messages": [{"role": "user", "content": data["prompt"]}]}


class WorkflowDocument(RequestBody):
    """A workflow, as documented; `workflows.checked` reads it piece by piece."""

    name: str | None = None
    """For people who look at the list of runs."""
    description: str | None = None
    """For people who read the workflow."""
    nodes: list[Node] = Field(min_length=1, max_length=MAX_NODES, fail_fast=True)
    """In any order; each starts when what it depends on has ended."""
    outputs: str | Annotated[list[str], Field(fail_fast=True)] | dict[str, Any] | None = None
    """A node's id, several, or any value with templates by name."""
    input_schema: dict[str, Any] | None = None
    """A JSON Schema of `inputs`; the `default`s of its properties stand in for missing ones."""
    deadline_s: float | None = None
    """For the whole run; one that takes longer ends as `incomplete`."""


class WorkflowRequest(WorkflowDocument, RunOptions):
    """A workflow, or the name of one, and how to run it."""

    nodes: list[Node] | None = Field(  # type: ignore[assignment]
        default=None, min_length=1, max_length=MAX_NODES, fail_fast=True
    )
    """In any order; each starts when what it depends on has ended. Needed without `workflow`."""


class RunError(ResponseBody):
    """Why a node or a run failed."""

    code: str
    message: str
    node_id: str | None


class RunNode(ResponseBody):
    """One node of a run."""

    status: NodeStatus
    output: dict[str, Any] | None
    error: RunError | None
    attempts: int
    started_at: float | None
    finished_at: float | None
    usage: dict[str, int]
    shared: Literal["none", "inflight", "cache", "item"]


class RunHead(ResponseBody):
    """What the list says of a run."""

    id: str
    object: Literal["workflow.run"]
    name: str | None
    status: RunStatus
    created_at: float
    finished_at: float | None
    error: RunError | None


class WorkflowRun(RunHead):
    """One run. Times are seconds since 1970."""

    outputs: dict[str, Any] | None
    nodes: dict[str, RunNode]
    usage: dict[str, int]


class RunList(ResponseBody):
    """has_more: whether older ones follow; `after` with the last id asks for them."""

    object: Literal["list"]
    data: list[RunHead]
    has_more: bool


class ExplainedTurn(ResponseBody):
    """A wish for slots, and what the scheduler made of it.

    started_at: null while it waits. batch_mates: other wishes in the same batch. split: batches it
    was cut into at once. priority: among turns of one moment lower went first. remaining_s: what
    the run still needed, as predicted; null once the turn has ended, as the last two.
    """

    resource: str
    items: int
    asked_at: float
    waited_s: float
    started_at: float | None
    finished_at: float | None
    batch_mates: int
    split: int
    priority: int | None
    remaining_s: float | None
    is_heavy: bool | None
    is_urgent: bool | None


class ExplainedNode(ResponseBody):
    """shared: whose work the result is: its own, that of an equal node then running, or kept.

    turns: the slots that its last try asked for; none where another node's work was shared.
    """

    status: NodeStatus
    shared: Literal["none", "inflight", "cache", "item"]
    reason: str
    turns: list[ExplainedTurn]


class RunExplanation(ResponseBody):
    id: str
    object: Literal["workflow.run.explanation"]
    nodes: dict[str, ExplainedNode]


class ValidatedNode(ResponseBody):
    id: str
    op: str
    depends_on: list[str]


class WorkflowValidation(ResponseBody):
    """A workflow that can run: its nodes in an order in which they could."""

    object: Literal["workflow.validation"]
    valid: Literal[True]
    nodes: list[ValidatedNode]


class WorkflowEvent(ResponseBody):
    """Something that happened in a run; what else it holds depends on its type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
    run_id: str
    created_at: float
    node_id: str | None = None


class WorkflowSchema(ResponseBody):
    """A JSON Schema, draft 2020-12."""

    dialect: str = Field(alias="$schema")
    definitions: dict[str, Any] = Field(alias="$defs")
    title: str
    description: str
    type: Literal["object"]
    properties: dict[str, Any]
    required: list[str]
    additional: bool = Field(alias="additionalProperties")


class TemplateCard(ResponseBody):
    """A workflow template. version: 0 for one that ships. created_at: unix seconds, then null."""

    object: Literal["workflow.template"] = "workflow.template"
    name: str
    version: int
    description: str | None
    created_at: float | None


class WorkflowTemplate(TemplateCard):
    """document: the workflow, as `POST /v1/workflows` takes it."""

    document: dict[str, Any]


class TemplateList(ResponseBody):
    object: Literal["list"] = "list"
    data: list[TemplateCard]


class DeletedTemplate(ResponseBody):
    object: Literal["workflow.template"] = "workflow.template"
    name: str
    deleted: Literal[True] = True

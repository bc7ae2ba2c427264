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

    inputs: dict[str, Any] = Field(default_factory=dict)
    """The values that templates read as `inputs.NAME`."""
    stream: bool | None = None
    """Answer with the run's events as they happen."""
    background: bool | None = None
    """Answer at once; the run goes on, and can be asked for by its id."""
    on_disconnect: Literal["cancel", "continue"] | None = None
    """What happens to the run when the client leaves before its end: `cancel` by default, and
    `continue` where the request has an `Idempotency-Key`."""


class LlmParams(ChatCompletionRequest):
    """A chat request; `prompt` stands for one user message. Unknown fields are errors here."""

    model_config = ConfigDict(extra="forbid")

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


class WorkflowRequest(RunOptions):
    """A workflow and how to run it, as documented; `workflows.checked` reads it piece by piece."""

    name: str | None = None
    """For people who look at the list of runs."""
    description: str | None = None
    """For people who read the workflow."""
    nodes: list[Node] = Field(min_length=1, max_length=MAX_NODES, fail_fast=True)
    """In any order; each starts when what it depends on has ended."""
    outputs: str | Annotated[list[str], Field(fail_fast=True)] | dict[str, Any] | None = None
    """A node's id, several, or any value with templates by name."""
    input_schema: dict[str, Any] | None = None
    """A JSON Schema of `inputs`."""
    deadline_s: float | None = None
    """For the whole run; one that takes longer ends as `incomplete`."""


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
    shared: Literal["none", "inflight", "cache"]


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


class ExplainedNode(ResponseBody):
    """shared: whose work the result is: its own, that of an equal node then running, or kept."""

    status: NodeStatus
    shared: Literal["none", "inflight", "cache"]
    reason: str


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

"""The document that describes a workflow: what may stand where."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_NODES = 1000

NodeId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,63}$")]


class Document(BaseModel):
    """A part of the document. Unknown fields are errors: a misspelt one must not be ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Retry(Document):
    """Further tries of a node that failed for a reason that may pass.

    The n-th waits backoff_s · 2^(n−1), at most max_backoff_s, less up to `jitter` of it at random.
    """

    max_attempts: Annotated[int, Field(ge=1, le=20)] = 3
    backoff_s: Annotated[float, Field(ge=0, le=3600)] = 0.5
    max_backoff_s: Annotated[float, Field(ge=0, le=3600)] = 30.0
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.5


ShareScope = Literal["none", "run", "workflow", "tenant", "public"]


class Share(Document):
    """With whom equal work may be shared, and when two nodes are equal.

    scope: with nobody; inside the run; among the tenant's runs of an equal workflow; among all of
    the tenant's; among all tenants'. salt: nodes with different ones are never the same. sampled:
    one random sample may serve several nodes; without it only deterministic work is shared.
    """

    scope: ShareScope = "tenant"
    salt: Annotated[str, StringConstraints(max_length=256)] = ""
    sampled: bool = False


class Cache(Document):
    """ttl_s: a result of equal work that is no older may be used again."""

    ttl_s: Annotated[float, Field(gt=0, le=86400 * 30)]


class Node(Document):
    """One node. Strings in `params` are templates.

    depends_on: nodes that must end first; those that templates refer to are known without it.
    when: an expression; the node is skipped where it is false.
    timeout_s: of each try. priority: lower goes first, down to the engine. on_error: what a failure
    does to the run; with `default` it goes on, and the field `default` is the node's output.
    effects: whether the node changes something outside; by default as its operator says.
    on_interrupt: what becomes of a node with effects whose work the server's end interrupted.
    """

    id: NodeId
    op: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    params: dict[str, Any] = Field(default_factory=dict)
    depends_on: list[str] = Field(default_factory=list, max_length=MAX_NODES, fail_fast=True)
    when: str | None = None
    share: Share = Field(default_factory=Share)
    cache: Cache | None = None
    retry: Retry = Field(default_factory=lambda: Retry(max_attempts=1))
    timeout_s: Annotated[float, Field(gt=0, le=86400)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    on_error: Literal["fail", "skip", "default"] = "fail"
    default: dict[str, Any] | None = None
    effects: Literal["none", "write"] | None = None
    on_interrupt: Literal["repeat", "fail"] = "repeat"


class Workflow(Document):
    """A whole workflow.

    nodes: read one by one, see `workflows.checked`. input_schema: a JSON Schema of `inputs`.
    outputs: a node's id, several, or any value with templates by name; by default, the nodes that
    nothing depends on. deadline_s: for a run, from its start.
    """

    name: Annotated[str, StringConstraints(max_length=128)] | None = None
    description: Annotated[str, StringConstraints(max_length=4096)] | None = None
    input_schema: dict[str, Any] | None = None
    nodes: Annotated[list[Any], Field(min_length=1, max_length=MAX_NODES)]
    outputs: str | Annotated[list[str], Field(fail_fast=True)] | dict[str, Any] | None = None
    deadline_s: Annotated[float, Field(gt=0, le=86400)] | None = None

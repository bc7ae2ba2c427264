"""What an operator is: one kind of work that a node can do.

A new operator is a class that implements `Operator`, in a file of its own, and a line where the
server puts its operators together.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from pydantic import BaseModel

if TYPE_CHECKING:
    from workflows.job import Job

JsonType = Literal["string", "number", "integer", "boolean", "object", "array", "any"]
Output = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class NodeResult:
    """output: JSON, with the fields that the operator declares. usage: tokens by name.

    may_be_kept: whether the result is whole, so that it can answer equal work later.
    num_shared_items: pieces of it that were computed for another node.
    """

    output: Output
    usage: dict[str, int] = field(default_factory=dict)
    may_be_kept: bool = True
    num_shared_items: int = 0


async def _nothing_nested(
    inputs: Mapping[str, Any], added: Mapping[str, Any], key: str
) -> NodeResult:
    raise AssertionError("this operator has no nested workflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeContext:
    """Where a node's work happens.

    tenant: whose run it is. workflow_digest: equal for runs of equal workflows. idempotency_key:
    the same for every try of this node in this run, also after a restart of the server, and for
    none else. job: asks for slots of the operator's resources. attempt: from 1. emit: takes the
    text of the output as it is made, piece by piece: together they are how `output.text` begins.
    pass_on: takes the same for nodes that can begin with it, also where nobody watches; operators
    use `emit`. note_shared: is told when the node waits for equal work, or finds it done.
    run_nested: runs the workflow that stands in the node's parameters; its result is that run's
    outputs and usage. It takes inputs, others that are left out where the workflow declares its
    inputs without them, and what names the run among those of the node: what a run of that name had
    done when it was interrupted is not done again. Raises NodeFailed.
    """

    run_id: str
    node_id: str
    tenant: str
    idempotency_key: str
    job: Job
    workflow_digest: Callable[[], str] = lambda: ""
    attempt: int = 1
    emit: Callable[[str], None] = lambda _: None
    pass_on: Callable[[str], None] = lambda _: None
    note_shared: Callable[[str], None] = lambda _: None
    run_nested: Callable[[Mapping[str, Any], Mapping[str, Any], str], Awaitable[NodeResult]] = (
        _nothing_nested
    )

    def emitting(self, emit: Callable[[str], None]) -> NodeContext:
        """The same with another taker of the text."""
        return replace(self, emit=emit)


class Operator(Protocol):
    """One kind of work.

    params: what a node's `params` must be once templates are rendered.
    outputs: the fields of its output and their JSON types; None if only a run can tell.

    One that takes slots names their resources in the order in which it takes them, in an attribute
    `resources`; see `workflows.planning`.
    """

    @property
    def name(self) -> str: ...

    @property
    def params(self) -> type[BaseModel]: ...

    @property
    def outputs(self) -> Mapping[str, JsonType] | None: ...

    async def run(self, params: Any, context: NodeContext) -> NodeResult:
        """Does the work. params: an instance of `self.params`. Raises NodeFailed."""
        ...


@runtime_checkable
class Writing(Protocol):
    """An operator whose work may change something outside, so that it matters how often it is done.

    Of such work the start is on record before it, and the result before anything that follows.
    """

    def writes(self, params: Any) -> bool:
        """Whether the work of these parameters does."""
        ...


@runtime_checkable
class ReadingOwn(Protocol):
    """An operator whose result depends on what belongs to the tenant, beside its parameters. It,
    and what is made of its output, is never shared with another tenant."""

    @property
    def reads_own(self) -> Literal[True]: ...


@runtime_checkable
class Nesting(Protocol):
    """An operator with a workflow in its parameters, which is checked and not rendered.

    nested_param: the parameter that holds it.
    """

    @property
    def nested_param(self) -> str: ...


@runtime_checkable
class FeedingBack(Protocol):
    """A nesting operator that gives what its workflow has put out to that workflow again."""

    @property
    def feeds_back(self) -> Literal[True]: ...


@runtime_checkable
class Foreseeing(Protocol):
    """An operator that can do a part of its work before all of its parameters are known."""

    async def foresee(self, params: Mapping[str, Any], *, tenant: str) -> None:
        """Get ready for work whose prompt begins as `params` says. Says nothing of failures.

        params: rendered; the text of the last message may be cut.
        """
        ...

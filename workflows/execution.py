"""One try of one node: parameters checked, time limited, equal work shared."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import anyio
from anyio.abc import TaskGroup
from pydantic import BaseModel, ValidationError

from workflows.complaints import complaints, shown_path
from workflows.errors import NodeFailed
from workflows.json_values import check_json
from workflows.operators.base import NodeContext, NodeResult, Writing
from workflows.run_state import StartNode
from workflows.shared_work import Emit, Shared, SharedWork, Source
from workflows.signature import Identity, Shareable, signature
from workflows.spec import ShareScope

logger = logging.getLogger(__name__)

_SHARED: dict[Source, Shared] = {
    "none": "none",
    "inflight": "inflight",
    "held": "cache",
    "cache": "cache",
}
_REASONS: dict[Source, str] = {
    "none": "no equal work was there: it ran itself",
    "inflight": "equal work was running",
    "held": "equal work was done before, and a run that has used it is active",
    "cache": "equal work was done before, no longer ago than cache.ttl_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A node's result. shared: whose work it was; reason: why. is_write: it changed something."""

    result: NodeResult
    shared: Shared
    reason: str
    is_write: bool = False


async def _unrecorded() -> None:
    """Where nothing outlives the process, nothing is to be recorded."""


class NodeExecutor:
    """Does the work of nodes, equal work once.

    tasks: where shared work runs.
    """

    def __init__(self, work: SharedWork, tasks: TaskGroup) -> None:
        self._work = work
        self._tasks = tasks
        self._secret = secrets.token_bytes(32)

    async def execute(
        self,
        start: StartNode,
        context: NodeContext,
        *,
        recorded: Callable[[], Awaitable[None]] = _unrecorded,
    ) -> Outcome:
        """Raises NodeFailed, and nothing else.

        recorded: waits until the start of this try will be known whatever happens; it is awaited
        before work that changes something.
        """
        params = _checked_params(start)
        spec, operator = start.node.spec, start.node.operator
        is_write = _is_write(start, params)
        if is_write:
            if start.is_restart and spec.on_interrupt == "fail":
                message = "was interrupted; nobody knows whether it had its effect"
                raise NodeFailed(message, code="interrupted", is_retryable=False)
            await recorded()
        identity = operator.identity(params) if isinstance(operator, Shareable) else None
        context = context.emitting(_taker(context, identity))
        with anyio.move_on_after(spec.timeout_s):
            reason = "it has effects" if is_write else _why_not(start, identity)
            if reason or identity is None:
                context.job.join(context.job.node)
                try:
                    result = await _run(start, params, context, context.emit)
                finally:
                    context.job.leave(context.job.node)
                return replace(_own(result, reason), is_write=is_write)
            return await self._shared(start, params, context, identity)
        message = f"took longer than {spec.timeout_s:g} s"
        raise NodeFailed(message, code="timeout", is_retryable=True)

    async def _shared(
        self,
        start: StartNode,
        params: Any,
        context: NodeContext,
        identity: Identity,
    ) -> Outcome:
        share = start.node.spec.share
        key = signature(
            start.node.operator.name,
            identity,
            scope=_shared_among(share.scope, context),
            salt=share.salt,
            secret=self._secret,
        )

        async def work(emit: Emit) -> NodeResult:
            return await _run(start, params, context, emit)

        cache = start.node.spec.cache
        ttl_s = None if cache is None else cache.ttl_s
        expected = _SHARED[self._work.source(key, ttl_s=ttl_s)]
        if expected != "none":
            context.note_shared(expected)
        result, source = await self._work.result(
            key,
            work,
            job=context.job,
            emit=context.emit,
            ttl_s=ttl_s,
            is_pure=identity.is_pure,
            tasks=self._tasks,
        )
        shared, reason = _SHARED[source], _REASONS[source]
        if shared != "none":
            return Outcome(result=_without_cost(result), shared=shared, reason=reason)
        return _own(result, reason)


def _shared_among(scope: ShareScope, context: NodeContext) -> str:
    """The name of those who may share. A tenant's name comes last, since it may be anything."""
    match scope:
        case "public":
            return "public"
        case "workflow":
            return f"workflow {context.workflow_digest()} of tenant {context.tenant}"
        case "run":
            return f"run {context.run_id} of tenant {context.tenant}"
    return f"tenant {context.tenant}"


def _taker(context: NodeContext, identity: Identity | None) -> Emit:
    """Who takes what a node says: nodes that can begin with it, and watchers if it streams."""
    if identity is not None and not identity.wants_deltas:
        return context.pass_on

    def emit(text: str) -> None:
        context.emit(text)
        context.pass_on(text)

    return emit


def _own(result: NodeResult, reason: str) -> Outcome:
    """Of a node that did its own work, but perhaps not all of it."""
    if not result.num_shared_items:
        return Outcome(result=result, shared="none", reason=reason)
    count = result.num_shared_items
    return Outcome(result=result, shared="item", reason=f"{count} of its items were being computed")


def _is_write(start: StartNode, params: Any) -> bool:
    """Whether the work changes something: as the node says, or else its operator."""
    effects, operator = start.node.spec.effects, start.node.operator
    if effects is not None:
        return effects == "write"
    return isinstance(operator, Writing) and operator.writes(params)


def _why_not(start: StartNode, identity: Identity | None) -> str:
    """Why a node's work is its own; empty if it may be shared."""
    share = start.node.spec.share
    if share.scope == "none":
        return "share.scope is none"
    if identity is None:
        return f"{start.node.operator.name} has nothing to share"
    return "" if share.sampled else identity.sampled


def _checked_params(start: StartNode) -> BaseModel:
    """The rendered parameters as the operator takes them. Raises NodeFailed."""
    model = start.node.operator.params
    try:
        check_json(start.params)
    except ValueError as error:
        raise NodeFailed(f"params: {error}", code="invalid_params", is_retryable=False) from None
    try:
        return model.model_validate(start.params)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
    found = complaints(errors, start.params, model)
    message = "; ".join(
        f"{shown_path(('params', *one.path))}: {one.message}" for one in islice(found, 5)
    )
    raise NodeFailed(message, code="invalid_params", is_retryable=False)


async def _run(start: StartNode, params: Any, context: NodeContext, emit: Emit) -> NodeResult:
    """The operator's own work. Raises NodeFailed."""
    try:
        result = await start.node.operator.run(params, context.emitting(emit))
    except NodeFailed:
        raise
    except Exception:
        # The boundary of an operator's own code: its bug ends the node, not the server.
        logger.exception("node %s of run %s failed", context.node_id, context.run_id)
        raise NodeFailed("internal error", code="internal_error", is_retryable=False) from None
    try:
        check_json(result.output)
    except ValueError as error:
        message = f"its output cannot be kept: {error}"
        raise NodeFailed(message, code="invalid_output", is_retryable=False) from None
    return result


def _without_cost(result: NodeResult) -> NodeResult:
    """For one who shared: what it cost is counted where it was done."""
    usage = dict.fromkeys(result.usage, 0)
    usage["shared_tokens"] = result.usage.get("total_tokens", 0)
    return NodeResult(output=result.output, usage=usage, may_be_kept=result.may_be_kept)

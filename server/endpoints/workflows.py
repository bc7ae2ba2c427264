"""`/v1/workflows`: run a DAG, watch it, ask for it later, stop it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs

import anyio
import orjson
from starlette.convertors import StringConvertor
from starlette.types import Receive, Scope, Send

from server.asgi import ClientGone, header, send_json, until_disconnect
from server.endpoints.base import JsonEndpoint
from server.errors import BadWorkflow, RunMissing
from server.gateway import Gateway, wall_s
from server.protocol.workflows import RunOptions
from server.record import RequestRecord, record_of
from server.sse import DONE, EventStream
from spot.errors import InvalidRequest, Overloaded
from workflows.checked import CheckedWorkflow, check_workflow
from workflows.errors import InvalidWorkflow, RunNotFound, TooManyRuns
from workflows.operators.base import Operator
from workflows.run_events import RunEvent
from workflows.run_state import Failure, NodeState
from workflows.service import Run
from workflows.slots import Slots

_OPTIONS = frozenset(RunOptions.model_fields)


class RunIdConvertor(StringConvertor):
    """What can be a run's id in a path; other words are names of other endpoints."""

    regex = "run_[^/]+"


class WorkflowEndpoint(JsonEndpoint[RunOptions]):
    """A `POST` whose body is a workflow and the options of its run."""

    body_type = RunOptions

    def __init__(self, gateway: Gateway, operators: Mapping[str, Operator]) -> None:
        super().__init__(gateway)
        self._operators = operators

    def checked(self, raw: dict[str, Any]) -> CheckedWorkflow:
        """The workflow of a body. Raises InvalidWorkflow."""
        document = {name: value for name, value in raw.items() if name not in _OPTIONS}
        return check_workflow(document, self._operators)


class Workflows(WorkflowEndpoint):
    """`POST /v1/workflows`: answers when the run has ended, or with its events, or at once.

    `GET`: the tenant's runs, the newest first, without their outputs.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await super().__call__(scope, receive, send)
            return
        runs = self.gateway.workflows.runs(tenant=record_of(scope).tenant)
        await send_json(send, {"object": "list", "data": [_head(run) for run in runs]})

    async def answer(
        self, body: RunOptions, raw: dict[str, Any], record: RequestRecord, send: Send
    ) -> None:
        if body.stream and body.background:
            raise InvalidRequest(
                "stream and background exclude each other; a background run's events are at "
                "/v1/workflows/{id}/events.",
                param="background",
            )
        service = self.gateway.workflows
        with _as_http():
            run = service.submit(
                self.checked(raw), body.inputs, tenant=record.tenant, wall_s=wall_s()
            )
        if body.background:
            await send_json(send, run_object(run))
            return
        try:
            if body.stream:
                await stream_events(self.gateway, record, run, 0, send)
            else:
                await run.ended.wait()
                await send_json(send, run_object(run))
        finally:
            if body.on_disconnect == "cancel":
                service.cancel(run)


class ValidateWorkflow(WorkflowEndpoint):
    """`POST /v1/workflows/validate`: what a run would be refused for. Nothing runs."""

    async def answer(
        self, body: RunOptions, raw: dict[str, Any], record: RequestRecord, send: Send
    ) -> None:
        with _as_http():
            workflow = self.checked(raw)
        nodes = [
            {"id": name, "op": node.spec.op, "depends_on": sorted(node.dependencies)}
            for name, node in workflow.nodes.items()
        ]
        await send_json(send, {"object": "workflow.validation", "valid": True, "nodes": nodes})


class OneRun:
    """`GET /v1/workflows/{id}`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, run_object(_asked_for(self._gateway, scope)))


class ExplainRun:
    """`GET /v1/workflows/{id}/explain`: of each node, whose work its result is, and why; and what
    the scheduler made of its wishes for slots."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = _asked_for(self._gateway, scope)
        slots = self._gateway.workflows.slots
        nodes = {
            name: {
                "status": node.status,
                "shared": node.shared,
                "reason": node.shared_reason,
                "turns": _turns(run, name, slots),
            }
            for name, node in run.state.nodes.items()
        }
        explained = {"id": run.id, "object": "workflow.run.explanation", "nodes": nodes}
        await send_json(send, explained)


def _turns(run: Run, node_id: str, slots: Slots) -> list[dict[str, Any]]:
    """The slots that a node's last try asked for, in order. Ranks are of the present moment."""
    job = run.slots.jobs.get(node_id)
    now_s = anyio.current_time()
    turns = []
    for turn in [] if job is None else job.turns:
        standing = slots.standing(turn)
        until_s = now_s if turn.started_s is None else turn.started_s
        turns.append(
            {
                "resource": turn.resource,
                "items": turn.num_items,
                "asked_at": _wall(run, turn.asked_s),
                "waited_s": round(until_s - turn.asked_s, 6),
                "started_at": _wall(run, turn.started_s),
                "finished_at": _wall(run, turn.ended_s),
                "batch_mates": turn.num_together - 1,
                "split": turn.split,
                "priority": turn.priority if turn.started_s is not None else None,
                "remaining_s": None if standing is None else round(standing.remaining_s, 3),
                "is_heavy": None if standing is None else standing.is_heavy,
                "is_urgent": None if standing is None else standing.is_urgent,
            }
        )
    return turns


class CancelRun:
    """`POST /v1/workflows/{id}/cancel`: answers when all of its work has stopped."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = _asked_for(self._gateway, scope)
        self._gateway.workflows.cancel(run)
        await run.ended.wait()
        await send_json(send, run_object(run))


class RunEventStream:
    """`GET /v1/workflows/{id}/events?starting_after=N`: what happened since, and what happens."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = _asked_for(self._gateway, scope)
        number = _starting_after(scope)

        async def work() -> None:
            await stream_events(self._gateway, record_of(scope), run, number, send)

        await until_disconnect(receive, work)


async def stream_events(
    gateway: Gateway, record: RequestRecord, run: Run, number: int, send: Send
) -> None:
    """Send a run's events after `number` until its last one."""
    record.stream = True
    stream = EventStream(send, poke=lambda: None, now_s=anyio.current_time)
    with anyio.CancelScope() as scope:
        stream.abandon = scope.cancel
        gateway.keeper.add(stream)
        try:
            await _pump(run, number, stream)
        finally:
            gateway.keeper.remove(stream)
    if scope.cancelled_caught:
        raise ClientGone


async def _pump(run: Run, number: int, stream: EventStream) -> None:
    while True:
        events: list[RunEvent] | None = None
        with anyio.CancelScope() as waiting:
            stream.poke = waiting.cancel
            events = await run.events.after(number)
        if events is None:
            await stream.keep_alive()
        elif events:
            number = events[-1].sequence_number
            await stream.write(b"".join([_frame(run, event) for event in events]))
        else:
            await stream.finish(DONE)
            return


def _frame(run: Run, event: RunEvent) -> bytes:
    data: dict[str, Any] = {
        "type": event.type,
        "sequence_number": event.sequence_number,
        "run_id": run.id,
        "created_at": _wall(run, event.at_s),
    }
    if event.node_id is not None:
        data["node_id"] = event.node_id
    kind = event.type.encode()
    payload = orjson.dumps({**data, **event.data})
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (event.sequence_number, kind, payload)


def run_object(run: Run) -> dict[str, Any]:
    """A run as the API shows it."""
    state = run.state
    return {
        **_head(run),
        "outputs": state.outputs,
        "nodes": {name: _node_object(run, node) for name, node in state.nodes.items()},
        "usage": state.usage,
    }


def _head(run: Run) -> dict[str, Any]:
    state = run.state
    return {
        "id": run.id,
        "object": "workflow.run",
        "name": state.workflow.spec.name,
        "status": state.status,
        "created_at": _wall(run, state.created_s),
        "finished_at": _wall(run, state.finished_s),
        "error": _error(state.failure),
    }


def _node_object(run: Run, node: NodeState) -> dict[str, Any]:
    return {
        "status": node.status,
        "output": node.output,
        "error": _error(node.failure),
        "attempts": node.attempt,
        "started_at": _wall(run, node.started_s),
        "finished_at": _wall(run, node.finished_s),
        "usage": node.usage,
        "shared": node.shared,
    }


def _error(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {"code": failure.code, "message": failure.message, "node_id": failure.node_id}


def _wall(run: Run, at_s: float | None) -> float | None:
    """A time of the event loop's clock as people read it."""
    return None if at_s is None else round(run.wall_at(at_s), 3)


def _asked_for(gateway: Gateway, scope: Scope) -> Run:
    with _as_http():
        run_id = str(scope["path_params"]["run_id"])
        return gateway.workflows.find(run_id, tenant=record_of(scope).tenant)


def _starting_after(scope: Scope) -> int:
    """The number of the last event that the client has. Raises InvalidRequest."""
    query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    text = query.get("starting_after", [None])[-1]
    if text is None:
        text = (header(scope, b"last-event-id") or b"0").decode("latin-1")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest(
            "starting_after is the sequence_number of an event, 0 or more.", param="starting_after"
        )
    return int(text)


@contextmanager
def _as_http() -> Iterator[None]:
    """Errors of workflows as the edge knows them."""
    try:
        yield
    except InvalidWorkflow as error:
        details = [
            {"path": one.path, "code": one.code, "message": one.message} for one in error.problems
        ]
        raise BadWorkflow(error.message, details=details) from None
    except RunNotFound as error:
        raise RunMissing(error.message) from None
    except TooManyRuns as error:
        raise Overloaded(error.message) from None

"""`/v1/workflows`: run a DAG, watch it, ask for it later, stop it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

import anyio
import orjson
from starlette.convertors import StringConvertor
from starlette.types import Receive, Scope, Send

from server.asgi import header, send_bytes, send_json, until_disconnect
from server.endpoints.base import JsonEndpoint
from server.endpoints.event_pump import pump_events
from server.endpoints.workflow_errors import as_http
from server.gateway import Gateway, wall_s
from server.protocol.workflows import RunOptions
from server.record import RequestRecord, record_of
from spot.errors import InvalidRequest
from workflows.checked import CheckedWorkflow, check_workflow
from workflows.json_schema import document_schema
from workflows.library import Library
from workflows.operators.base import Operator
from workflows.picture import PictureNode, picture
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
    accepts_yaml = True

    def __init__(
        self, gateway: Gateway, operators: Mapping[str, Operator], library: Library
    ) -> None:
        super().__init__(gateway)
        self._operators = operators
        self._library = library

    async def checked(
        self, body: RunOptions, raw: dict[str, Any], *, tenant: str
    ) -> CheckedWorkflow:
        """The workflow of a body: what stands in it, or what it names. Raises HttpErrors."""
        document = {name: value for name, value in raw.items() if name not in _OPTIONS}
        with as_http():
            if body.workflow is None:
                return check_workflow(document, self._operators)
            if document:
                raise InvalidRequest(
                    "workflow names a template: there can be no "
                    f"{next(iter(document))[:80]!r} beside it.",
                    param="workflow",
                )
            template = await self._library.find(tenant, body.workflow)
            return check_workflow(template.document, self._operators)


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
        workflow = await self.checked(body, raw, tenant=record.tenant)
        with as_http():
            run = service.submit(workflow, body.inputs, tenant=record.tenant, wall_s=wall_s())
        if body.background:
            await send_json(send, run_object(run))
            return
        try:
            if body.stream:
                await pump_events(self.gateway, record, run, 0, send, RunEventWriter(run))
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
        workflow = await self.checked(body, raw, tenant=record.tenant)
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


class RunPicture:
    """`GET /v1/workflows/{id}/graph.svg`: the run's nodes and what each waits for."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = _asked_for(self._gateway, scope)
        nodes = {name: _picture_node(name, node) for name, node in run.state.nodes.items()}
        body = picture(nodes).encode()
        await send_bytes(send, 200, body, headers=[(b"content-type", b"image/svg+xml")])


class DocumentSchema:
    """`GET /v1/workflows/schema`: the JSON Schema of a workflow's document."""

    def __init__(self, operators: Mapping[str, Operator]) -> None:
        self._schema = document_schema(operators)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._schema)


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
            writer = RunEventWriter(run)
            await pump_events(self._gateway, record_of(scope), run, number, send, writer)

        await until_disconnect(receive, work)


class RunEventWriter:
    """A run's events as they are."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def frames(self, event: RunEvent) -> bytes:
        return _frame(self._run, event)


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


def _picture_node(name: str, node: NodeState) -> PictureNode:
    label = node.node.spec.op
    if node.started_s is not None and node.finished_s is not None:
        label += f" · {node.finished_s - node.started_s:.2f} s"
    if node.shared != "none":
        label += f" · {node.shared}"
    failure = "" if node.failure is None else f": {node.failure.message}"
    return PictureNode(
        dependencies=sorted(node.node.dependencies),
        label=label,
        status=node.status,
        title=f"{name} ({node.node.spec.op}) is {node.status}{failure}",
    )


def _error(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {"code": failure.code, "message": failure.message, "node_id": failure.node_id}


def _wall(run: Run, at_s: float | None) -> float | None:
    """A time of the event loop's clock as people read it."""
    return None if at_s is None else round(run.wall_at(at_s), 3)


def _asked_for(gateway: Gateway, scope: Scope) -> Run:
    with as_http():
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

"""`/v1/workflows`: run a DAG, watch it, ask for it later, stop it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import anyio
import orjson
from starlette.convertors import StringConvertor
from starlette.types import Receive, Scope, Send

from server.asgi import header, query, send_bytes, send_json, until_disconnect
from server.endpoints.base import JsonEndpoint
from server.endpoints.event_pump import pump_events
from server.endpoints.workflow_errors import as_http
from server.errors import ShuttingDown, describe
from server.gateway import Gateway, wall_s
from server.protocol.workflows import RunOptions
from server.record import RequestRecord, record_of
from server.sse import DONE, frame
from spot.errors import InvalidRequest
from workflows.checked import CheckedNode, CheckedWorkflow, check_workflow
from workflows.input_schema import complete_inputs
from workflows.json_schema import document_schema
from workflows.library import Library
from workflows.operators.base import Operator
from workflows.past_run import PastRun
from workflows.picture import PictureNode, picture
from workflows.run import Run, RunKey
from workflows.run_events import RunEvent
from workflows.run_history import RunHistory
from workflows.run_progress import Failure, NodeProgress
from workflows.slots import Slots

MAX_KEY_CHARS = 255
DEFAULT_LIMIT, MAX_LIMIT = 100, 1000
_OPTIONS = frozenset(RunOptions.model_fields)
_DELIVERY = _OPTIONS - {"inputs", "workflow"}


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

    def __init__(
        self, gateway: Gateway, operators: Mapping[str, Operator], library: Library
    ) -> None:
        super().__init__(gateway, operators, library)
        self._history = RunHistory(gateway.workflows)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            record_of(scope).idempotency_key = _idempotency_key(scope)
            await super().__call__(scope, receive, send)
            return
        limit, after = _page(scope)
        with as_http():
            runs = await self._history.page(
                tenant=record_of(scope).tenant, limit=limit + 1, after=after
            )
        page = [_head(run) for run in runs[:limit]]
        await send_json(send, {"object": "list", "data": page, "has_more": len(runs) > limit})

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
        with as_http():
            run = await self._submitted(body, raw, record)
            if body.background:
                await self._kept(run)
        if body.background:
            await send_json(send, run_object(run))
            return
        try:
            if body.stream:
                await pump_events(self.gateway, record, run, 0, send, RunEventWriter(run))
            else:
                # Who names a run by a key may come back for it, and must find what it was told.
                ended = await _ended(run, is_recorded=record.idempotency_key is not None)
                await send_json(send, run_object(ended))
        finally:
            leaving = body.on_disconnect or ("continue" if record.idempotency_key else "cancel")
            if leaving == "cancel" and isinstance(run, Run):
                service.cancel(run)

    async def _submitted(
        self, body: RunOptions, raw: dict[str, Any], record: RequestRecord
    ) -> Run | PastRun:
        """The run that a request is for."""
        service = self.gateway.workflows
        workflow = await self.checked(body, raw, tenant=record.tenant)
        if record.idempotency_key is None:
            await service.ready()
            return service.submit(workflow, body.inputs, tenant=record.tenant, wall_s=wall_s())
        return await service.submit_once(
            workflow,
            body.inputs,
            tenant=record.tenant,
            wall_s=wall_s(),
            key=RunKey(text=record.idempotency_key, request_hash=_request_hash(raw)),
        )

    async def _kept(self, run: Run | PastRun) -> None:
        """Wait until a background run is on record: its client relies on it from now on."""
        if isinstance(run, PastRun):
            return
        try:
            await self.gateway.workflows.written(run)
        except BaseException:
            self.gateway.workflows.cancel(run)
            raise


class ValidateWorkflow(WorkflowEndpoint):
    """`POST /v1/workflows/validate`: what a run would be refused for; its inputs too, if there are
    any. Nothing runs."""

    async def answer(
        self, body: RunOptions, raw: dict[str, Any], record: RequestRecord, send: Send
    ) -> None:
        workflow = await self.checked(body, raw, tenant=record.tenant)
        if "inputs" in raw:
            with as_http():
                complete_inputs(workflow.spec, body.inputs)
        nodes = [
            {"id": name, "op": node.spec.op, "depends_on": sorted(node.dependencies)}
            for name, node in workflow.nodes.items()
        ]
        await send_json(send, {"object": "workflow.validation", "valid": True, "nodes": nodes})


class RunEndpoint:
    """An endpoint of one run."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._history = RunHistory(gateway.workflows)

    async def asked_for(self, scope: Scope, *, whole: bool = False) -> Run | PastRun:
        """The run of the path. whole: only one that all is known of here."""
        run_id, tenant = str(scope["path_params"]["run_id"]), record_of(scope).tenant
        look_up = self._history.look_up_here if whole else self._history.look_up
        with as_http():
            return await look_up(run_id, tenant=tenant)


class OneRun(RunEndpoint):
    """`GET /v1/workflows/{id}`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = await self.asked_for(scope)
        await run.events.until_all_shown()
        await send_json(send, run_object(run))


class ExplainRun(RunEndpoint):
    """`GET /v1/workflows/{id}/explain`: of each node, whose work its result is, and why; and what
    the scheduler made of its wishes for slots."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = await self.asked_for(scope)
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


class RunPicture(RunEndpoint):
    """`GET /v1/workflows/{id}/graph.svg`: the run's nodes and what each waits for."""

    def __init__(self, gateway: Gateway, operators: Mapping[str, Operator]) -> None:
        super().__init__(gateway)
        self._operators = operators

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = await self.asked_for(scope)
        if isinstance(run, Run):
            workflow = run.state.workflow
        else:
            with as_http():
                workflow = check_workflow(run.document, self._operators)
        nodes = {
            name: _picture_node(node, run.state.nodes[name])
            for name, node in workflow.nodes.items()
        }
        body = picture(nodes).encode()
        await send_bytes(send, 200, body, headers=[(b"content-type", b"image/svg+xml")])


class DocumentSchema:
    """`GET /v1/workflows/schema`: the JSON Schema of a workflow's document, which may have what a
    request has beside it."""

    def __init__(self, operators: Mapping[str, Operator]) -> None:
        options = RunOptions.model_json_schema()["properties"]
        beside = {name: one for name, one in options.items() if name != "workflow"}
        self._schema = document_schema(operators, beside)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._schema)


def _turns(run: Run | PastRun, node_id: str, slots: Slots) -> list[dict[str, Any]]:
    """The slots that a node's last try asked for, in order. Ranks are of the present moment."""
    job = run.slots.jobs.get(node_id) if isinstance(run, Run) and run.slots else None
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


class CancelRun(RunEndpoint):
    """`POST /v1/workflows/{id}/cancel`: answers when all of its work has stopped."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = await self.asked_for(scope, whole=True)
        if isinstance(run, Run):
            self._gateway.workflows.cancel(run)
        await send_json(send, run_object(await _ended(run, is_recorded=True)))


class RunEventStream(RunEndpoint):
    """`GET /v1/workflows/{id}/events?starting_after=N`: what happened since, and what happens."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run = await self.asked_for(scope, whole=True)
        number = _starting_after(scope)

        async def work() -> None:
            writer = RunEventWriter(run)
            await pump_events(self._gateway, record_of(scope), run, number, send, writer)

        await until_disconnect(receive, work)


async def _ended(run: Run | PastRun, *, is_recorded: bool) -> Run | PastRun:
    """The run, once it has ended, and that is on record too. Raises ShuttingDown."""
    if isinstance(run, Run):
        await run.ended.wait()
    if is_recorded:
        await run.events.until_all_shown()
    if isinstance(run, Run) and run.is_suspended:
        raise ShuttingDown(goes_on(run))
    return run


def goes_on(run: Run) -> str:
    """What a client is told whose run was interrupted by the server's end."""
    return (
        f"The server is shutting down; run {run.id} goes on when it is back. Ask for it at "
        f"/v1/workflows/{run.id}."
    )


class RunEventWriter:
    """A run's events as they are."""

    def __init__(self, run: Run | PastRun) -> None:
        self._run = run

    def frames(self, event: RunEvent) -> bytes:
        return _frame(self._run, event)

    def ending(self) -> bytes:
        if isinstance(self._run, Run) and self._run.is_suspended:
            return frame(describe(ShuttingDown(goes_on(self._run))).body())
        return DONE


def _frame(run: Run | PastRun, event: RunEvent) -> bytes:
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


def run_object(run: Run | PastRun) -> dict[str, Any]:
    """A run as the API shows it."""
    state = run.state
    return {
        **_head(run),
        "outputs": state.outputs,
        "nodes": {name: _node_object(run, node) for name, node in state.nodes.items()},
        "usage": state.usage,
    }


def _head(run: Run | PastRun) -> dict[str, Any]:
    state = run.state
    return {
        "id": run.id,
        "object": "workflow.run",
        "name": run.name,
        "status": state.status,
        "created_at": _wall(run, state.created_s),
        "finished_at": _wall(run, state.finished_s),
        "error": _error(state.failure),
    }


def _node_object(run: Run | PastRun, node: NodeProgress) -> dict[str, Any]:
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


def _picture_node(node: CheckedNode, state: NodeProgress) -> PictureNode:
    label = node.spec.op
    if state.started_s is not None and state.finished_s is not None:
        label += f" · {state.finished_s - state.started_s:.2f} s"
    if state.shared != "none":
        label += f" · {state.shared}"
    failure = "" if state.failure is None else f": {state.failure.message}"
    return PictureNode(
        dependencies=sorted(node.dependencies),
        label=label,
        status=state.status,
        title=f"{node.spec.id} ({node.spec.op}) is {state.status}{failure}",
    )


def _error(failure: Failure | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {"code": failure.code, "message": failure.message, "node_id": failure.node_id}


def _wall(run: Run | PastRun, at_s: float | None) -> float | None:
    """A time of the event loop's clock as people read it."""
    return None if at_s is None else round(run.wall_at(at_s), 3)


def _idempotency_key(scope: Scope) -> str | None:
    """Raises InvalidRequest."""
    given = header(scope, b"idempotency-key")
    if given is None:
        return None
    text = given.decode("latin-1")
    if not (0 < len(text) <= MAX_KEY_CHARS and text.isascii() and text.isprintable()):
        raise InvalidRequest(
            f"An Idempotency-Key is 1 to {MAX_KEY_CHARS} printable ASCII characters.",
            param="Idempotency-Key",
        )
    return text


def _request_hash(raw: dict[str, Any]) -> bytes:
    """Of a run's request, however it is to be answered."""
    run = {name: value for name, value in raw.items() if name not in _DELIVERY}
    return hashlib.sha256(orjson.dumps(run, option=orjson.OPT_SORT_KEYS)).digest()


def _page(scope: Scope) -> tuple[int, str | None]:
    """How many runs are asked for, and behind which. Raises InvalidRequest."""
    asked = query(scope)
    text = asked.get("limit", [str(DEFAULT_LIMIT)])[-1]
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_LIMIT))
    if not (is_number and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidRequest(f"limit is a number from 1 to {MAX_LIMIT}.", param="limit")
    after = asked.get("after", [None])[-1]
    if after is not None and not (after.isascii() and after.isprintable()):
        raise InvalidRequest("after is the id of a run.", param="after")
    return int(text), after


def _starting_after(scope: Scope) -> int:
    """The number of the last event that the client has. Raises InvalidRequest."""
    asked = query(scope)
    text = asked.get("starting_after", [None])[-1]
    if text is None:
        text = (header(scope, b"last-event-id") or b"0").decode("latin-1")
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest(
            "starting_after is the sequence_number of an event, 0 or more.", param="starting_after"
        )
    return int(text)

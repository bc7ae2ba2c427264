"""A workflow template as a model: `model="workflow:rag"` in a chat completion.

The template's inputs come from the request: what `input_schema` declares and the request has, by
name (`messages`, `temperature`, `max_tokens`, …); `question` and `text` are the text of the last
user message; the field `inputs` of the request names any others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.types import Send

from server.asgi import send_json
from server.endpoints.event_pump import pump_events
from server.endpoints.workflow_errors import as_http
from server.errors import ModelNotFound, ShuttingDown, WorkflowFailed, describe
from server.gateway import Gateway, unix_s, wall_s
from server.protocol.chat import ChatCompletionRequest
from server.record import RequestRecord
from server.sampling import check_stream_options
from server.sse import DONE, frame
from server.text.conversation import template_messages
from spot.errors import InvalidRequest
from workflows.answer import Answer, answer_of
from workflows.checked import check_workflow
from workflows.errors import TemplateNotFound
from workflows.library import Library
from workflows.operators.base import Operator
from workflows.run import Run
from workflows.run_events import RunEvent
from workflows.run_progress import Failure

PREFIX = "workflow:"
_ASKED = ("question", "text")


class WorkflowChat:
    """Answers chat requests with workflows."""

    def __init__(
        self, gateway: Gateway, operators: Mapping[str, Operator], library: Library
    ) -> None:
        self._gateway = gateway
        self._operators = operators
        self._library = library

    async def answer(
        self, body: ChatCompletionRequest, raw: dict[str, Any], record: RequestRecord, send: Send
    ) -> None:
        """Raises HttpErrors, InvalidRequest."""
        name = record.model = body.model or ""
        check_stream_options(body)
        _check_choices(body)
        document = await self._document(name, record.tenant)
        with as_http():
            workflow = check_workflow(document, self._operators)
        answer = answer_of(workflow)
        if body.stream and answer.node_id is not None:
            with as_http():
                workflow = check_workflow(_streaming(document, answer.node_id), self._operators)
        inputs = _inputs(body, raw, workflow.spec.input_schema)
        service = self._gateway.workflows
        with as_http():
            await service.ready()
            run = service.submit(workflow, inputs, tenant=record.tenant, wall_s=wall_s())
        head = {
            "id": f"chatcmpl-{run.id}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": unix_s(),
            "model": name,
            "system_fingerprint": self._gateway.fingerprint,
        }
        try:
            if body.stream:
                writer = _ChatStream(head, run, answer, body)
                await pump_events(self._gateway, record, run, 0, send, writer)
            else:
                await run.ended.wait()
                await send_json(send, _whole(head, run, answer))
        finally:
            service.cancel(run)

    async def _document(self, name: str, tenant: str) -> Mapping[str, Any]:
        with as_http():
            try:
                template = await self._library.find(tenant, name.removeprefix(PREFIX))
            except TemplateNotFound as error:
                raise ModelNotFound(f"The model {name[:200]!r} does not exist: {error}.") from None
        return template.document


def _check_choices(body: ChatCompletionRequest) -> None:
    """Raises InvalidRequest for what the answer of a workflow cannot have."""
    if body.n not in (None, 1):
        raise InvalidRequest("A workflow has one answer.", param="n")
    if body.logprobs:
        raise InvalidRequest("The answer of a workflow has no logprobs.", param="logprobs")


def _streaming(document: Mapping[str, Any], node_id: str) -> dict[str, Any]:
    """The document with the text of an `llm` node as events."""
    nodes = [
        {**node, "params": {**node.get("params", {}), "stream": True}}
        if node["id"] == node_id and node["op"] == "llm"
        else node
        for node in document["nodes"]
    ]
    return {**document, "nodes": nodes}


def _inputs(
    body: ChatCompletionRequest, raw: Mapping[str, Any], schema: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Raises InvalidRequest."""
    given = raw.get("inputs", {})
    if not isinstance(given, dict):
        raise InvalidRequest("inputs must be an object: values by name.", param="inputs")
    messages = template_messages(body.messages, knows_developer=True)
    asked = next((one["content"] for one in reversed(messages) if one["role"] == "user"), "")
    offered = {**raw, **dict.fromkeys(_ASKED, asked), "messages": messages}
    if schema is None:
        names = ["question", "messages"]
    else:
        names = [name for name in schema.get("properties", {}) if offered.get(name) is not None]
    return {**{name: offered[name] for name in names}, **given}


def _whole(head: dict[str, Any], run: Run, answer: Answer) -> dict[str, Any]:
    """Raises WorkflowFailed."""
    outputs = _outputs(run)
    message = {"role": "assistant", "content": answer.text(outputs), "refusal": None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": _finish_reason(run, answer),
    }
    return {**head, "choices": [choice], "usage": _usage(run), "workflow_run_id": run.id}


class _ChatStream:
    """A run's events as chunks of a chat completion."""

    def __init__(
        self, head: dict[str, Any], run: Run, answer: Answer, body: ChatCompletionRequest
    ) -> None:
        self._head = {**head, "workflow_run_id": run.id}
        self._run = run
        self._answer = answer
        self._wants_usage = body.wants_usage
        self._said: str | None = None
        self._attempt = ""

    def frames(self, event: RunEvent) -> bytes:
        """Raises WorkflowFailed as long as nothing was said."""
        if event.node_id is not None and event.node_id == self._answer.node_id:
            if event.type == "node.delta":
                self._attempt += str(event.data["text"])
                return self._say(self._attempt)
            if event.type == "node.retrying":
                self._attempt = ""
            return b""
        if event.node_id is not None or event.type == "run.created":
            return b""
        try:
            return self._end()
        except WorkflowFailed as error:
            if self._said is None:
                raise
            return frame(describe(error).body())

    def ending(self) -> bytes:
        """Raises ShuttingDown as long as nothing was said."""
        if not self._run.is_suspended:
            return DONE
        error = ShuttingDown("The server is shutting down.")
        if self._said is None:
            raise error
        return frame(describe(error).body()) + DONE

    def _end(self) -> bytes:
        """Raises WorkflowFailed."""
        text = self._answer.text(_outputs(self._run))
        if not text.startswith(self._said or ""):
            raise _failed(Failure(code="changed_answer", message="another try answers otherwise"))
        data = self._say(text)
        data += self._chunk({}, _finish_reason(self._run, self._answer))
        if self._wants_usage:
            data += frame(orjson.dumps({**self._head, "choices": [], "usage": _usage(self._run)}))
        return data

    def _say(self, text: str) -> bytes:
        """What of `text` was not said yet; nothing where another try begins otherwise."""
        data = b""
        if self._said is None:
            self._said = ""
            data = self._chunk({"role": "assistant", "content": ""}, None)
        if text.startswith(self._said) and text != self._said:
            data += self._chunk({"content": text[len(self._said) :]}, None)
            self._said = text
        return data

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        chunk = {**self._head, "choices": [choice]}
        if self._wants_usage:
            chunk["usage"] = None
        return frame(orjson.dumps(chunk))


def _outputs(run: Run) -> dict[str, Any]:
    """Of a run that has ended. Raises WorkflowFailed, and ShuttingDown if it was interrupted."""
    if run.is_suspended:
        raise ShuttingDown("The server is shutting down.")
    if run.state.outputs is None:
        raise _failed(run.state.failure or Failure(code="cancelled", message="it was cancelled"))
    return run.state.outputs


def _failed(failure: Failure) -> WorkflowFailed:
    node = f"node {failure.node_id}: " if failure.node_id else ""
    return WorkflowFailed(f"The workflow failed: {node}{failure.message}", code=failure.code)


def _finish_reason(run: Run, answer: Answer) -> str:
    node = None if answer.node_id is None else run.state.nodes[answer.node_id].output
    reason = (node or {}).get("finish_reason")
    return "length" if reason == "length" else "stop"


def _usage(run: Run) -> dict[str, Any]:
    """Of all nodes together."""
    counts = run.state.usage
    prompt, completion = counts.get("prompt_tokens", 0), counts.get("completion_tokens", 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": counts.get("cached_tokens", 0)},
    }

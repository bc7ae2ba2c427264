"""One answer of `POST /v1/responses`: the response object, and the events of its stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from pydantic import BaseModel

from server.endpoints.chat import ChatJob
from server.endpoints.streaming import ChunkWriter
from server.errors import ErrorReply
from server.gateway import unix_s
from server.generation_run import GenerationRun
from server.protocol.responses_api import ResponseRequest
from server.record import RequestRecord
from server.responses_store import ResponsesStore, StoredItem, StoredResponse, joined
from server.text.assembler import Piece, TokenEntry
from server.text.items import KnownItem, items_of_json, new_id, stored_form
from server.text.output_items import Event, OutputItems
from server.text.tokenizer import ChatTokenizer

JsonObject = dict[str, Any]


def text_format(body: ResponseRequest) -> JsonObject | None:
    """`text.format` as it was asked for."""
    if body.text is None or body.text.format is None:
        return None
    return body.text.format.model_dump(by_alias=True, exclude_none=True)


@dataclass(slots=True)
class Context:
    """What a request is about: items of earlier responses, then its own."""

    earlier: tuple[StoredItem, ...]
    own: list[KnownItem]
    items: list[KnownItem] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.items = [*items_of_json(joined(self.earlier)), *self.own]

    def stored(self) -> tuple[StoredItem, ...]:
        return (*self.earlier, *[StoredItem.of(stored_form(item)) for item in self.own])


class Answer:
    """One response, from its start to its end."""

    def __init__(
        self,
        body: ResponseRequest,
        context: Context,
        job: ChatJob,
        record: RequestRecord,
        store: ResponsesStore,
        tokenizer: ChatTokenizer,
    ) -> None:
        self._body = body
        self._context = context
        self._job = job
        self._record = record
        self._store = store
        self._id = new_id("resp")
        self._is_cut = False
        formatter = job.formatter

        def logprobs(entries: Sequence[TokenEntry]) -> list[JsonObject]:
            return [] if formatter is None else list(formatter.chat(entries)["content"])

        self.output = OutputItems(
            logprobs=logprobs if formatter is not None else None,
            count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
            show_reasoning=body.include_reasoning is not False,
        )

    def push(self, piece: Piece) -> list[Event]:
        """Take the next piece; with the last one the items are complete."""
        events = self.output.push(piece)
        if piece.finish_reason is not None:
            reason = self._job.finish_reason(0, piece.finish_reason)
            self._record.finish_reasons.append(reason)
            self._is_cut = piece.finish_reason == "length"
            events += self.output.finish(is_cut=self._is_cut)
        return events

    def started(self) -> JsonObject:
        """The response before there is any output."""
        return self._render("in_progress", [])

    def finished(self) -> JsonObject:
        """The response at its end; from now on it can be retrieved."""
        status = "incomplete" if self._is_cut else "completed"
        response = self._render(status, self.output.items, usage=self._usage())
        if self._is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = unix_s()
        self._keep(response)
        return response

    def failed(self, reply: ErrorReply) -> JsonObject:
        """The response when it broke off."""
        response = self._render("failed", self.output.items)
        response["error"] = {"code": "server_error", "message": reply.message}
        self._keep(response)
        return response

    def _usage(self) -> JsonObject:
        record = self._record
        reasoning = {"reasoning_tokens": self.output.num_reasoning_tokens}
        return {
            "input_tokens": record.num_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": record.num_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": record.num_output_tokens,
            "output_tokens_details": reasoning,
            "total_tokens": record.num_prompt_tokens + record.num_output_tokens,
        }

    def _render(
        self, status: str, output: list[JsonObject], *, usage: JsonObject | None = None
    ) -> JsonObject:
        body, job = self._body, self._job
        sampling = job.generations[0].sampling
        choice = body.tool_choice
        reasoning = body.reasoning
        form = text_format(body)
        return {
            "id": self._id,
            "object": "response",
            "created_at": job.created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": job.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {
                "effort": reasoning.effort if reasoning else None,
                "summary": reasoning.summary if reasoning else None,
            },
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {
                "format": form or {"type": "text"},
                "verbosity": (body.text and body.text.verbosity) or "medium",
            },
            "tool_choice": choice.model_dump()
            if isinstance(choice, BaseModel)
            else choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": usage,
            "user": body.user,
        }

    def _keep(self, response: JsonObject) -> None:
        if self._body.store is False:
            return
        stored = StoredResponse(
            id=self._id,
            json=orjson.dumps(response),
            context=self._context.stored(),
            output=tuple(StoredItem.of(item) for item in response["output"]),
        )
        self._store.put(self._record.tenant, stored)


class ResponseEventWriter(ChunkWriter):
    """Writes typed events, numbered from 0. The last says how it ended; there is no `[DONE]`."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._num_events = 0

    def _event(self, kind: str, fields: JsonObject) -> bytes:
        event = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps(event))

    def opening(self) -> bytes:
        response = self._answer.started()
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._event(kind, {"response": response}) for kind in kinds])

    def piece(self, index: int, piece: Piece, run: GenerationRun) -> bytes:
        return b"".join([self._event(kind, item) for kind, item in self._answer.push(piece)])

    def closing(self) -> bytes:
        response = self._answer.finished()
        return self._event(f"response.{response['status']}", {"response": response})

    def failure(self, reply: ErrorReply) -> bytes:
        opening = self.opening() if not self._num_events else b""
        error = {"code": reply.code, "message": reply.message, "param": reply.param}
        failed = {"response": self._answer.failed(reply)}
        return opening + self._event("error", error) + self._event("response.failed", failed)

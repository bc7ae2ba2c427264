"""`/v1/responses`: create, retrieve, delete, cancel, and the items that went in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from server.asgi import JSON_HEADER, query, send_bytes, send_json
from server.endpoints.base import JsonEndpoint
from server.endpoints.chat import ChatCompletions, ChatJob
from server.endpoints.response_answer import Answer, Context, ResponseEventWriter, text_format
from server.endpoints.streaming import stream_run
from server.errors import ResponseNotFound
from server.gateway import Gateway
from server.generation_run import GenerationRun
from server.protocol.base import parse_body
from server.protocol.chat import ChatCompletionRequest
from server.protocol.responses_api import ItemReference, MessageItem, ResponseRequest
from server.protocol.sampling import SamplingBody
from server.record import RequestRecord, record_of
from server.responses_store import ResponsesStore, StoredItem, StoredResponse, joined
from server.sampling import check_stream_options
from server.text.items import KnownItem, items_of_json, messages_of
from spot.errors import ContextLengthExceeded, InvalidRequest

JsonObject = dict[str, Any]

# Fields that mean the same in a chat request, and are handed on as they came.
_SHARED = {*SamplingBody.model_fields, "chat_template_kwargs"} - {
    "n",
    "stream_options",
    "response_format",
    "prompt_logprobs",
    "request_id",
    "return_token_ids",
    "return_tokens_as_token_ids",
}

# What a field of the chat request is called here, for errors.
_NAMES = (
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("tool_choice.function", "tool_choice"),
    (".function.parameters", ".parameters"),
)


def chat_request(body: ResponseRequest, raw: JsonObject, messages: list[JsonObject]) -> JsonObject:
    """The chat request that asks the same."""
    fields = {name: raw[name] for name in _SHARED if name in raw}
    fields["messages"] = messages
    fields["max_completion_tokens"] = body.max_output_tokens
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    choice = body.tool_choice
    if choice is not None and (body.tools or choice != "auto"):
        fields["tool_choice"] = (
            choice
            if isinstance(choice, str)
            else {"type": "function", "function": {"name": choice.name}}
        )
    form = text_format(body)
    if form is not None:
        kind = form.pop("type")
        fields["response_format"] = {"type": kind, **({"json_schema": form} if form else {})}
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return fields


class Responses(JsonEndpoint[ResponseRequest]):
    """`POST /v1/responses`: a chat completion in another form, and remembered."""

    body_type = ResponseRequest

    def __init__(self, gateway: Gateway, store: ResponsesStore) -> None:
        super().__init__(gateway)
        self._store = store
        self._chat = ChatCompletions(gateway)

    async def answer(
        self, body: ResponseRequest, raw: JsonObject, record: RequestRecord, send: Send
    ) -> None:
        check_stream_options(body)
        context = self._context(body, record.tenant)
        job = await self._prepare(body, raw, context, record)
        interval = body.stream_interval or self.gateway.limits.stream_interval
        run = GenerationRun(
            self.gateway,
            record,
            job.generations,
            job.assemblers,
            num_prompt_tokens=len(job.prompt_token_ids),
            stream_interval=interval if body.stream else 1,
        )
        answer = Answer(body, context, job, record, self._store, self.gateway.model.tokenizer)
        with run:
            if body.stream:
                await stream_run(self.gateway, record, run, ResponseEventWriter(answer), send)
                return
            while not run.is_done:
                for _, piece in await run.pieces():
                    answer.push(piece)
            await send_json(send, answer.finished())

    def _context(self, body: ResponseRequest, tenant: str) -> Context:
        """Raises InvalidRequest for a response or an item that is not stored."""
        earlier: tuple[StoredItem, ...] = ()
        if body.previous_response_id is not None:
            previous = self._store.get(tenant, body.previous_response_id)
            if previous is None:
                raise InvalidRequest(
                    f"Previous response with id '{body.previous_response_id[:80]}' not found.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            earlier = (*previous.context, *previous.output)
        if isinstance(body.input, str):
            return Context(earlier, [MessageItem(role="user", content=body.input)])
        own: list[KnownItem] = []
        for position, item in enumerate(body.input):
            if isinstance(item, ItemReference):
                found = self._store.item(tenant, item.id)
                if found is None:
                    raise InvalidRequest(
                        f"Item with id '{item.id[:80]}' not found.", param=f"input.{position}.id"
                    )
                own += items_of_json(joined([found]))
            elif isinstance(item, KnownItem):
                own.append(item)
        return Context(earlier, own)

    async def _prepare(
        self, body: ResponseRequest, raw: JsonObject, context: Context, record: RequestRecord
    ) -> ChatJob:
        """The job; with `truncation: auto` of as much of the conversation as fits."""
        messages = messages_of(context.items, num_earlier=len(context.earlier))
        if not messages:
            raise InvalidRequest("The input holds no message.", param="input")
        instructions = []
        if body.instructions is not None:
            instructions = [{"role": "developer", "content": body.instructions}]

        async def job_of(start: int) -> ChatJob:
            kept = [m for m in messages[:start] if m["role"] in ("system", "developer")]
            conversation = [*instructions, *kept, *messages[start:]]
            return await self._job(chat_request(body, raw, conversation), record)

        try:
            return await job_of(0)
        except ContextLengthExceeded:
            if body.truncation != "auto":
                raise
        return await self._shortened(body, messages, job_of)

    async def _shortened(
        self,
        body: ResponseRequest,
        messages: list[JsonObject],
        job_of: Callable[[int], Awaitable[ChatJob]],
    ) -> ChatJob:
        """The job of as many of the last turns as leave room for an answer, or of the last one.

        job_of: makes the job of the messages from a position on.
        Raises ContextLengthExceeded if not even the last turn fits.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
        limit = self.gateway.model.max_model_len
        room = min(body.max_output_tokens or limit, limit // 4)
        found: ChatJob | None = None
        low, high = 0, len(turns) - 1
        while low < high:
            middle = (low + high) // 2
            try:
                job = await job_of(turns[middle])
                fits = len(job.prompt_token_ids) + room <= limit
            except ContextLengthExceeded:
                fits = False
            if fits:
                found, high = job, middle
            else:
                low = middle + 1
        return found or await job_of(turns[-1] if turns else 0)

    async def _job(self, request: JsonObject, record: RequestRecord) -> ChatJob:
        try:
            body = parse_body(ChatCompletionRequest, request)
            return await self._chat.prepare(body, request, record)
        except InvalidRequest as error:
            _rename(error)
            raise


def _rename(error: InvalidRequest) -> None:
    """Let an error speak of the fields that this request has."""
    if error.param is not None and error.param.partition(".")[0] == "messages":
        error.param = "input"
    for name, here in _NAMES:
        error.message = error.message.replace(name, here)
        error.param = error.param and error.param.replace(name, here)


class StoredResponses:
    """`GET` and `DELETE /v1/responses/{id}`."""

    def __init__(self, store: ResponsesStore) -> None:
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, response_id = record_of(scope).tenant, scope["path_params"]["response_id"]
        response = _found(self._store, tenant, response_id)
        if scope["method"] == "DELETE":
            self._store.delete(tenant, response_id)
            await send_json(send, {"id": response_id, "object": "response", "deleted": True})
            return
        if _query(scope).get("stream", "false") != "false":
            raise InvalidRequest("A stored response cannot be streamed.", param="stream")
        await send_bytes(send, 200, response.json, headers=[JSON_HEADER])


class CancelResponse:
    """`POST /v1/responses/{id}/cancel`: only background responses can be, and there are none."""

    def __init__(self, store: ResponsesStore) -> None:
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _found(self._store, record_of(scope).tenant, scope["path_params"]["response_id"])
        raise InvalidRequest(
            "Only responses created with background=true can be cancelled; to stop one, close its "
            "connection.",
            param="response_id",
        )


class InputItems:
    """`GET /v1/responses/{id}/input_items`: all that the model was given, page by page."""

    def __init__(self, store: ResponsesStore) -> None:
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = _found(self._store, record_of(scope).tenant, scope["path_params"]["response_id"])
        asked = _query(scope)
        limit = asked.get("limit", "20")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= 100):
            raise InvalidRequest("limit must be a number from 1 to 100.", param="limit")
        order = asked.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be 'asc' or 'desc'.", param="order")
        items = list(response.context) if order == "asc" else list(response.context)[::-1]
        if "after" in asked:
            ids = [item.id for item in items]
            if asked["after"] not in ids:
                raise InvalidRequest("There is no item with this id.", param="after")
            items = items[ids.index(asked["after"]) + 1 :]
        page = items[: int(limit)]
        head = {
            "object": "list",
            "first_id": page[0].id if page else "",
            "last_id": page[-1].id if page else "",
            "has_more": len(items) > len(page),
        }
        body = orjson.dumps(head)[:-1] + b',"data":' + joined(page) + b"}"
        await send_bytes(send, 200, body, headers=[JSON_HEADER])


def _found(store: ResponsesStore, tenant: str, response_id: str) -> StoredResponse:
    response = store.get(tenant, response_id)
    if response is None:
        raise ResponseNotFound(f"Response with id '{response_id[:80]}' not found.")
    return response


def _query(scope: Scope) -> dict[str, str]:
    """The query's parameters; of several with one name the last."""
    pairs = query(scope)
    return {name: values[-1] for name, values in pairs.items()}

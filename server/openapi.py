"""The OpenAPI 3.1 document, made from a table of operations and the models of their bodies.

The routes are plain ASGI endpoints, of which the framework knows only the paths; so the table says
what each takes and answers. An operation is in the document when its route is in the application.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.routing import BaseRoute, Route

from server.protocol.admin import DrainOrder, NewPipeline, PipelineCard, PipelineChanges
from server.protocol.base import RequestBody
from server.protocol.chat import ChatCompletionRequest
from server.protocol.collections import (
    CollectionCard,
    CollectionList,
    DeletedCollection,
    DeletedCollections,
    DeletedDocuments,
)
from server.protocol.completions import CompletionRequest
from server.protocol.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from server.protocol.response_object import (
    DeletedResponse,
    InputItemList,
    ResponseEvent,
    ResponseObject,
)
from server.protocol.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    DetokenizeResponse,
    EmbeddingList,
    ErrorResponse,
    LoadResponse,
    ModelCard,
    ModelCards,
    ReadyResponse,
    RerankResponse,
    ScoreResponse,
    TokenizeResponse,
    VersionResponse,
)
from server.protocol.responses_api import ResponseRequest
from server.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from server.protocol.workflows import (
    DeletedTemplate,
    RunExplanation,
    RunList,
    TemplateList,
    WorkflowDocument,
    WorkflowEvent,
    WorkflowRequest,
    WorkflowRun,
    WorkflowSchema,
    WorkflowTemplate,
    WorkflowValidation,
)

JsonObject = dict[str, Any]
Models = Mapping[Any, JsonObject]

OPENAI, RANKING, TOKENS, WORKFLOWS = "OpenAI", "Ranking", "Tokens", "Workflows"
OPERATIONS, ADMIN, COLLECTIONS = "Operations", "Admin", "Collections"
JSON, YAML, SSE = "application/json", "application/yaml", "text/event-stream"
METRICS_TEXT = "text/plain; version=0.0.4"

_ANY = (405, 500)
_BODY = (400, 404, 408, 413, 415, 429, 503, *_ANY)
_STORE = (503, *_ANY)
_ADMIN = (401, 403, *_ANY)
_ADMIN_BODY = (400, 408, 413, 415, *_ADMIN)

_ERRORS = {
    400: "The request cannot be served as it stands; `param` names the field.",
    401: "No key, or one that is not known.",
    403: "Not from here: without an admin key the admin API is for its own machine.",
    404: "There is no such model, response, run, template or collection.",
    405: "The path exists, for other methods.",
    408: "The body did not arrive in time.",
    409: "The answer that `Last-Event-ID` speaks of cannot be continued (with `--journal`).",
    413: "The body is over the limit. The connection is closed.",
    415: "The content type is not JSON.",
    429: "Too much work is queued; try again later.",
    500: "The server had an error.",
    503: "No work is taken now: the engine is starting or gone, or the server is shutting down.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    answer: the body of success: a model, a media type for text, or None for an empty body.
    event: what the events of a streamed answer hold, where the request can ask for a stream.
    typed_events: whether events are named, and the last says how it ended, instead of `[DONE]`.
    query: parameters in the query string.
    errors: statuses besides success that can occur; 401 is added where keys are asked for.
    may_be_empty: whether the request may have no body.
    many: whether success is a list of `answer`.
    accepts_yaml: whether the body may be YAML as well.
    """

    method: str
    path: str
    id: str
    tag: str
    summary: str
    answer: type[BaseModel] | str | None
    request: type[RequestBody] | None = None
    event: type[BaseModel] | None = None
    typed_events: bool = False
    query: tuple[JsonObject, ...] = ()
    example: JsonObject | None = None
    errors: tuple[int, ...] = _ANY
    success: int = 200
    may_be_empty: bool = False
    many: bool = False
    accepts_yaml: bool = False


_RERANK_EXAMPLE = {"query": "A pet", "documents": ["A car", "A cat"]}

_WORKFLOW_EXAMPLE = {
    "nodes": [
        {"id": "idea", "op": "llm", "params": {"prompt": "A title about {{ inputs.topic }}"}},
        {"id": "text", "op": "llm", "params": {"prompt": "{{ nodes.idea.output.text }}"}},
    ],
    "inputs": {"topic": "rain"},
}

_PAGE: tuple[JsonObject, ...] = (
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    },
    {
        "name": "order",
        "in": "query",
        "schema": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    },
    {
        "name": "after",
        "in": "query",
        "description": "The id of the item before the page.",
        "schema": {"type": "string"},
    },
)

TABLE = (
    Operation(
        "POST",
        "/v1/chat/completions",
        "createChatCompletion",
        OPENAI,
        "Answer a conversation",
        answer=ChatCompletion,
        request=ChatCompletionRequest,
        event=ChatCompletionChunk,
        example={"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32},
        errors=(409, *_BODY),
    ),
    Operation(
        "POST",
        "/v1/completions",
        "createCompletion",
        OPENAI,
        "Continue a text",
        answer=Completion,
        request=CompletionRequest,
        event=CompletionChunk,
        example={"prompt": "Once upon a time", "max_tokens": 32},
        errors=(409, *_BODY),
    ),
    Operation(
        "POST",
        "/v1/responses",
        "createResponse",
        OPENAI,
        "Answer a conversation, and remember it",
        answer=ResponseObject,
        request=ResponseRequest,
        event=ResponseEvent,
        typed_events=True,
        example={"input": "Hello!", "max_output_tokens": 32},
        errors=_BODY,
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}",
        "getResponse",
        OPENAI,
        "A stored response",
        answer=ResponseObject,
        query=({"name": "stream", "in": "query", "schema": {"const": "false"}},),
        errors=(400, 404, *_ANY),
    ),
    Operation(
        "DELETE",
        "/v1/responses/{response_id}",
        "deleteResponse",
        OPENAI,
        "Forget a stored response",
        answer=DeletedResponse,
        errors=(404, *_ANY),
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}/input_items",
        "listInputItems",
        OPENAI,
        "What the model was given for a stored response",
        answer=InputItemList,
        query=_PAGE,
        errors=(400, 404, *_ANY),
    ),
    Operation(
        "POST",
        "/v1/responses/{response_id}/cancel",
        "cancelResponse",
        OPENAI,
        "For clients that ask: there are no background responses that it could cancel",
        answer=ResponseObject,
        errors=(400, 404, *_ANY),
    ),
    Operation(
        "POST",
        "/v1/workflows",
        "runWorkflow",
        WORKFLOWS,
        "Run a workflow",
        answer=WorkflowRun,
        request=WorkflowRequest,
        accepts_yaml=True,
        event=WorkflowEvent,
        example=_WORKFLOW_EXAMPLE,
        errors=(409, *_BODY),
    ),
    Operation(
        "POST",
        "/v1/workflows/validate",
        "validateWorkflow",
        WORKFLOWS,
        "Everything that is wrong with a workflow, without running it",
        answer=WorkflowValidation,
        request=WorkflowRequest,
        accepts_yaml=True,
        example=_WORKFLOW_EXAMPLE,
        errors=_BODY,
    ),
    Operation(
        "GET",
        "/v1/workflows",
        "listRuns",
        WORKFLOWS,
        "The runs that are active or kept, the newest first",
        answer=RunList,
        query=(
            {
                "name": "limit",
                "in": "query",
                "description": "How many at most.",
                "schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
            },
            {
                "name": "after",
                "in": "query",
                "description": "The id of a run: those that come behind it in the list.",
                "schema": {"type": "string"},
            },
        ),
        errors=(400, 404, *_STORE),
    ),
    Operation(
        "GET",
        "/v1/workflows/{run_id}",
        "getRun",
        WORKFLOWS,
        "One run with its nodes and outputs",
        answer=WorkflowRun,
        errors=(404, *_STORE),
    ),
    Operation(
        "GET",
        "/v1/workflows/{run_id}/events",
        "watchRun",
        WORKFLOWS,
        "What happened in a run and what happens, as server-sent events; `Last-Event-ID` is known",
        answer=None,
        event=WorkflowEvent,
        query=(
            {
                "name": "starting_after",
                "in": "query",
                "description": "The `sequence_number` of the last event that the client has.",
                "schema": {"type": "integer", "minimum": 0, "default": 0},
            },
        ),
        errors=(400, 404, 409, *_STORE),
    ),
    Operation(
        "GET",
        "/v1/workflows/{run_id}/graph.svg",
        "drawRun",
        WORKFLOWS,
        "A run as a picture: its nodes, their state and what each waits for",
        answer="image/svg+xml",
        errors=(404, *_ANY),
    ),
    Operation(
        "GET",
        "/v1/workflows/schema",
        "workflowSchema",
        WORKFLOWS,
        "The JSON Schema of a workflow's document",
        answer=WorkflowSchema,
    ),
    Operation(
        "GET",
        "/v1/workflows/{run_id}/explain",
        "explainRun",
        WORKFLOWS,
        "Of each node, whether its work was shared, and why",
        answer=RunExplanation,
        errors=(404, *_STORE),
    ),
    Operation(
        "POST",
        "/v1/workflows/{run_id}/cancel",
        "cancelRun",
        WORKFLOWS,
        "Stop a run; answers when all of its work has stopped",
        answer=WorkflowRun,
        errors=(404, 409, *_STORE),
    ),
    Operation(
        "GET",
        "/v1/workflow-templates",
        "listTemplates",
        WORKFLOWS,
        "The workflows that can be run by name: those that ship and the tenant's own",
        answer=TemplateList,
        errors=(503, *_ANY),
    ),
    Operation(
        "GET",
        "/v1/workflow-templates/{name}",
        "getTemplate",
        WORKFLOWS,
        "The newest version of a workflow template, or the one that is asked for",
        answer=WorkflowTemplate,
        query=(
            {
                "name": "version",
                "in": "query",
                "description": "By default the newest; 0 is the one that ships.",
                "schema": {"type": "integer", "minimum": 0},
            },
        ),
        errors=(400, 404, 503, *_ANY),
    ),
    Operation(
        "GET", "/v1/models", "listModels", OPENAI, "The models that are served", answer=ModelCards
    ),
    Operation(
        "GET",
        "/v1/models/{model_id}",
        "retrieveModel",
        OPENAI,
        "One of the models; its name may hold slashes",
        answer=ModelCard,
        errors=(404, *_ANY),
    ),
    Operation(
        "POST",
        "/v1/embeddings",
        "createEmbedding",
        OPENAI,
        "Texts to vectors",
        answer=EmbeddingList,
        request=EmbeddingRequest,
        example={"input": ["Hello!", "Good bye."]},
        errors=_BODY,
    ),
    Operation(
        "POST",
        "/v1/rerank",
        "rerank",
        RANKING,
        "Sort documents by their relevance to a query",
        answer=RerankResponse,
        request=RerankRequest,
        example=_RERANK_EXAMPLE,
        errors=_BODY,
    ),
    Operation(
        "POST",
        "/v2/rerank",
        "rerankV2",
        RANKING,
        "The same, where Cohere's clients look for it",
        answer=RerankResponse,
        request=RerankRequest,
        example=_RERANK_EXAMPLE,
        errors=_BODY,
    ),
    Operation(
        "POST",
        "/v1/score",
        "score",
        RANKING,
        "How well texts go together, pair by pair",
        answer=ScoreResponse,
        request=ScoreRequest,
        example={"text_1": "A cat", "text_2": ["A kitten", "A car"]},
        errors=_BODY,
    ),
    Operation(
        "POST",
        "/tokenize",
        "tokenize",
        TOKENS,
        "A text or a conversation to token ids",
        answer=TokenizeResponse,
        request=TokenizeRequest,
        example={"prompt": "Hello!"},
        errors=_BODY,
    ),
    Operation(
        "POST",
        "/detokenize",
        "detokenize",
        TOKENS,
        "Token ids to text",
        answer=DetokenizeResponse,
        request=DetokenizeRequest,
        example={"tokens": [1, 2, 3]},
        errors=_BODY,
    ),
    Operation(
        "GET",
        "/health",
        "health",
        OPERATIONS,
        "Whether the engine is alive",
        answer=None,
        errors=(503, *_ANY),
    ),
    Operation(
        "GET",
        "/ready",
        "ready",
        OPERATIONS,
        "Whether requests would be served now",
        answer=ReadyResponse,
        errors=(503, *_ANY),
    ),
    Operation("GET", "/load", "load", OPERATIONS, "Requests being answered", answer=LoadResponse),
    Operation("GET", "/version", "version", OPERATIONS, "The version", answer=VersionResponse),
    Operation("GET", "/metrics", "metrics", OPERATIONS, "Prometheus metrics", answer=METRICS_TEXT),
)

ADMIN_TABLE = (
    Operation(
        "GET",
        "/admin/pipelines",
        "listPipelines",
        ADMIN,
        "The pipelines, with state, weight and load",
        answer=PipelineCard,
        many=True,
        errors=_ADMIN,
    ),
    Operation(
        "POST",
        "/admin/pipelines",
        "addPipeline",
        ADMIN,
        "Start one more pipeline",
        answer=PipelineCard,
        request=NewPipeline,
        example={"upstream": "http://a:8000", "weight": 3},
        errors=_ADMIN_BODY,
        success=201,
    ),
    Operation(
        "GET",
        "/admin/pipelines/{pipeline_id}",
        "getPipeline",
        ADMIN,
        "One pipeline",
        answer=PipelineCard,
        errors=(404, *_ADMIN),
    ),
    Operation(
        "PATCH",
        "/admin/pipelines/{pipeline_id}",
        "changePipeline",
        ADMIN,
        "Change a pipeline's weight",
        answer=PipelineCard,
        request=PipelineChanges,
        example={"weight": 2},
        errors=(404, *_ADMIN_BODY),
    ),
    Operation(
        "DELETE",
        "/admin/pipelines/{pipeline_id}",
        "removePipeline",
        ADMIN,
        "Stop a pipeline now; what runs on it goes on elsewhere",
        answer=PipelineCard,
        errors=(404, *_ADMIN),
    ),
    Operation(
        "POST",
        "/admin/pipelines/{pipeline_id}/drain",
        "drainPipeline",
        ADMIN,
        "Take no more work on a pipeline; what runs finishes, or moves in time",
        answer=PipelineCard,
        request=DrainOrder,
        example={"deadline_s": 120},
        errors=(404, *_ADMIN_BODY),
        success=202,
        may_be_empty=True,
    ),
    Operation(
        "GET",
        "/admin/events",
        "watchPipelines",
        ADMIN,
        "What happens to pipelines, as server-sent events with ids; `Last-Event-ID` is known",
        answer=SSE,
        errors=_ADMIN,
    ),
)

_ALL = {
    "name": "all",
    "in": "query",
    "required": True,
    "description": "Must be `true`: this deletes every collection.",
    "schema": {"type": "string", "enum": ["true"]},
}
_DOCUMENT_IDS = {
    "name": "id",
    "in": "query",
    "required": True,
    "description": "A document's id; may be given several times.",
    "schema": {"type": "array", "items": {"type": "string"}, "minItems": 1},
}

STORE_TABLE = (
    Operation(
        "GET",
        "/v1/collections",
        "listCollections",
        COLLECTIONS,
        "The tenant's collections, with their sizes",
        answer=CollectionList,
        errors=_STORE,
    ),
    Operation(
        "DELETE",
        "/v1/collections",
        "deleteCollections",
        COLLECTIONS,
        "Delete all collections of the tenant",
        answer=DeletedCollections,
        query=(_ALL,),
        errors=(400, *_STORE),
    ),
    Operation(
        "GET",
        "/v1/collections/{name}",
        "getCollection",
        COLLECTIONS,
        "One collection",
        answer=CollectionCard,
        errors=(404, *_STORE),
    ),
    Operation(
        "DELETE",
        "/v1/collections/{name}",
        "deleteCollection",
        COLLECTIONS,
        "Delete a collection with all that is in it",
        answer=DeletedCollection,
        errors=(404, *_STORE),
    ),
    Operation(
        "DELETE",
        "/v1/collections/{name}/documents",
        "deleteDocuments",
        COLLECTIONS,
        "Delete documents of a collection",
        answer=DeletedDocuments,
        query=(_DOCUMENT_IDS,),
        errors=(400, 404, *_STORE),
    ),
    Operation(
        "PUT",
        "/v1/workflow-templates/{name}",
        "storeTemplate",
        WORKFLOWS,
        "Store a workflow under a name; a changed one becomes the newest version",
        answer=WorkflowTemplate,
        request=WorkflowDocument,
        accepts_yaml=True,
        example={"nodes": _WORKFLOW_EXAMPLE["nodes"]},
        errors=(503, *_BODY),
    ),
    Operation(
        "DELETE",
        "/v1/workflow-templates/{name}",
        "deleteTemplate",
        WORKFLOWS,
        "Delete all versions of a stored workflow template",
        answer=DeletedTemplate,
        errors=(404, 503, *_ANY),
    ),
)


def openapi_of(
    app: FastAPI, *, keyed: bool, open_paths: Collection[str]
) -> Callable[[], JsonObject]:
    """What makes the document of an application, once, when it is first asked for.

    keyed: whether requests need a key, other than those for `open_paths`.
    """

    @cache
    def openapi() -> JsonObject:
        routed = _routed(app.routes)
        operations = [
            i for i in (*TABLE, *STORE_TABLE, *ADMIN_TABLE) if (i.method, i.path) in routed
        ]
        document = describe(operations, open_paths=open_paths if keyed else None)
        info = {"title": app.title, "summary": app.summary, "version": app.version}
        return {"openapi": "3.1.0", "info": info, **document}

    return openapi


def _routed(routes: Iterable[BaseRoute]) -> set[tuple[str, str]]:
    return {
        (method, template(route.path))
        for route in routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }


def template(path: str) -> str:
    """A route's path as OpenAPI writes it: `{id:path}` is `{id}`."""
    return re.sub(r":\w+}", "}", path)


def describe(operations: Iterable[Operation], *, open_paths: Collection[str] | None) -> JsonObject:
    """Paths and components. open_paths: those that need no key, or None when none does."""
    operations = list(operations)
    models, definitions = models_json_schema(
        _models(operations), ref_template="#/components/schemas/{model}"
    )
    paths: JsonObject = {}
    for operation in operations:
        is_open = operation.tag == ADMIN or operation.path in (open_paths or ())
        guarded = open_paths is not None and not is_open
        methods = paths.setdefault(operation.path, {})
        methods[operation.method.lower()] = _operation(operation, models, guarded=guarded)
    statuses = {status for operation in operations for status in operation.errors}
    return {
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "responses": {_error_name(s): _error(s, models) for s in sorted(statuses | {401, 403})},
            "headers": _HEADERS,
            "securitySchemes": _SECURITY,
        },
    }


def _models(operations: Iterable[Operation]) -> list[tuple[type[BaseModel], JsonSchemaMode]]:
    found: dict[tuple[type[BaseModel], JsonSchemaMode], None] = {
        (ErrorResponse, "serialization"): None
    }
    for operation in operations:
        if operation.request is not None:
            found[operation.request, "validation"] = None
        for answer in (operation.answer, operation.event):
            if isinstance(answer, type):
                found[answer, "serialization"] = None
    return list(found)


def _operation(operation: Operation, models: Models, *, guarded: bool) -> JsonObject:
    result: JsonObject = {
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", operation.path)
    ]
    if parameters or operation.query:
        result["parameters"] = [*parameters, *operation.query]
    if operation.request is not None:
        content: JsonObject = {"schema": models[operation.request, "validation"]}
        if operation.example is not None:
            content["example"] = operation.example
        required = not operation.may_be_empty
        bodies = {JSON: content, **({YAML: content} if operation.accepts_yaml else {})}
        result["requestBody"] = {"required": required, "content": bodies}
    errors = sorted({*operation.errors, 401} if guarded else operation.errors)
    result["responses"] = {
        str(operation.success): _success(operation, models),
        **{str(status): _ref("responses", _error_name(status)) for status in errors},
    }
    if guarded:
        result["security"] = [{name: []} for name in _SECURITY]
    return result


def _success(operation: Operation, models: Models) -> JsonObject:
    content: JsonObject = {}
    if isinstance(operation.answer, str):
        content[operation.answer] = {"schema": {"type": "string"}}
    elif operation.answer is not None:
        schema = models[operation.answer, "serialization"]
        content[JSON] = {"schema": {"type": "array", "items": schema} if operation.many else schema}
    if operation.event is not None:
        event = models[operation.event, "serialization"]
        content[SSE] = _typed_events(event) if operation.typed_events else _events(event, models)
    result: JsonObject = {"description": "Success", "headers": _header_refs()}
    if content:
        result["content"] = content
    return result


def _events(event: JsonObject, models: Models) -> JsonObject:
    """An event stream, as OpenAPI 3.2 and the framework describe one: `itemSchema` is an event."""
    chunk = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": [event, models[ErrorResponse, "serialization"]]},
    }
    description = (
        "Sent for `stream: true`. The last event is `[DONE]`; after a failure the one before it "
        "holds an error. Lines that begin with a colon keep the connection alive."
    )
    return {
        "itemSchema": {
            "type": "object",
            "description": description,
            "properties": {"data": {"anyOf": [chunk, {"const": "[DONE]"}]}},
            "required": ["data"],
        }
    }


def _typed_events(event: JsonObject) -> JsonObject:
    """A stream of named events."""
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": event}
    description = (
        "Sent for `stream: true`. `event` is the type of what `data` holds. The last event is "
        "`response.completed`, `response.incomplete` or `response.failed`. Lines that begin with "
        "a colon keep the connection alive."
    )
    return {
        "itemSchema": {
            "type": "object",
            "description": description,
            "properties": {"event": {"type": "string"}, "data": data},
            "required": ["event", "data"],
        }
    }


def _error(status: int, models: Models) -> JsonObject:
    return {
        "description": _ERRORS[status],
        "headers": _header_refs(*_ERROR_HEADERS.get(status, ())),
        "content": {JSON: {"schema": models[ErrorResponse, "serialization"]}},
    }


def _error_name(status: int) -> str:
    return f"Error{status}"


_HEADERS: JsonObject = {
    name: {"description": text, "required": True, "schema": {"type": kind}}
    for name, kind, text in (
        (
            "x-request-id",
            "string",
            "The caller's id if it is printable and short, else one of ours.",
        ),
        ("openai-processing-ms", "integer", "Time until the answer began, in milliseconds."),
        ("retry-after", "integer", "Seconds after which another try makes sense."),
        ("allow", "string", "The methods that the path has."),
        ("www-authenticate", "string", "How to authenticate."),
    )
}
_ERROR_HEADERS = {
    401: ("www-authenticate",),
    405: ("allow",),
    429: ("retry-after",),
    503: ("retry-after",),
}
_SECURITY: JsonObject = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key of this server."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "api-key"},
}


def _header_refs(*further: str) -> JsonObject:
    names = ("x-request-id", "openai-processing-ms", *further)
    return {name: _ref("headers", name) for name in names}


def _ref(kind: str, name: str) -> JsonObject:
    return {"$ref": f"#/components/{kind}/{name}"}

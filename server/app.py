"""The one function that builds the application from its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fastapi import FastAPI
from starlette.convertors import register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from server.endpoints.chat import ChatCompletions
from server.endpoints.completions import Completions
from server.endpoints.models import ModelList
from server.endpoints.operations import Health, Load, MetricsPage, Readiness, Version
from server.endpoints.responses import CancelResponse, InputItems, Responses, StoredResponses
from server.endpoints.tokenization import Detokenize, Tokenize
from server.endpoints.workflow_chat import WorkflowChat
from server.endpoints.workflow_templates import OneTemplate, Templates
from server.endpoints.workflows import (
    CancelRun,
    DocumentSchema,
    ExplainRun,
    OneRun,
    RunEventStream,
    RunIdConvertor,
    RunPicture,
    ValidateWorkflow,
    Workflows,
)
from server.errors import MethodNotAllowed, RouteNotFound
from server.gateway import Gateway
from server.logs import RequestLog
from server.middleware import ApiKeys, ErrorBoundary, RequestContext
from server.openapi import openapi_of
from server.responses_store import ResponsesStore
from server.tracing import RequestTracer
from server.workflow_operators import operators_of
from server.workflow_resources import WorkflowResources
from workflows.library import Library
from workflows.operators.base import Operator

OPEN_PATHS = ("/health", "/version", "/ready")
ADMIN_PREFIX = "/admin/"


@dataclass(slots=True)
class HttpOptions:
    """What of HTTP is configurable. api_keys: tenant names by key."""

    api_keys: Mapping[str, str] = field(default_factory=dict)
    open_metrics: bool = True
    docs: bool = True
    root_path: str = ""
    allowed_origins: Sequence[str] = ()
    allowed_methods: Sequence[str] = ("*",)
    allowed_headers: Sequence[str] = ("*",)
    allow_credentials: bool = False


def build_app(
    gateway: Gateway,
    *,
    options: HttpOptions | None = None,
    log: RequestLog | None = None,
    tracer: RequestTracer | None = None,
    further_routes: Sequence[BaseRoute] = (),
    further_models: Sequence[tuple[str, int]] = (),
    resources: WorkflowResources | None = None,
    operators: Mapping[str, Operator] | None = None,
) -> FastAPI:
    """The ASGI application. Its parts (engine, stream keeper) are entered by the caller.

    operators: those of the runs that are gone on with; without them, new ones.
    """
    options = options or HttpOptions()
    app = FastAPI(
        title="Shuntyard",
        version=gateway.version,
        summary="OpenAI-compatible inference server",
        root_path=options.root_path,
        docs_url="/docs" if options.docs else None,
        redoc_url="/redoc" if options.docs else None,
        openapi_url="/openapi.json" if options.docs else None,
        redirect_slashes=False,
    )
    if operators is None:
        operators = {one.name: one for one in operators_of(gateway, resources)}
    routes = _routes(gateway, further_models, resources, operators)
    app.router.routes.extend(routes)
    app.router.routes.extend(further_routes)
    app.add_exception_handler(HTTPException, _raise_as_ours)
    open_paths = [*OPEN_PATHS, *(["/metrics"] if options.open_metrics else [])]
    app.openapi = openapi_of(  # type: ignore[method-assign]
        app, keyed=bool(options.api_keys), open_paths=open_paths
    )
    # Added last is outermost.
    app.add_middleware(Shortcut, routes=routes)
    app.add_middleware(
        ApiKeys, keys=options.api_keys, open_paths=open_paths, open_prefix=ADMIN_PREFIX
    )
    app.add_middleware(ErrorBoundary)
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.allowed_origins),
            allow_methods=list(options.allowed_methods),
            allow_headers=list(options.allowed_headers),
            allow_credentials=options.allow_credentials,
            expose_headers=[
                "x-request-id",
                "openai-processing-ms",
                "retry-after",
                "x-shuntyard-migrations",
                "x-shuntyard-shared",
            ],
        )
    app.add_middleware(
        RequestContext, metrics=gateway.metrics, log=log or RequestLog(), tracer=tracer
    )
    return app


def _routes(
    gateway: Gateway,
    further_models: Sequence[tuple[str, int]],
    resources: WorkflowResources | None,
    operators: Mapping[str, Operator],
) -> list[BaseRoute]:
    library = Library(None if resources is None else resources.templates)
    models = ModelList(gateway, further_models, library)
    chat = ChatCompletions(gateway, WorkflowChat(gateway, operators, library))
    store = ResponsesStore()
    routes: list[BaseRoute] = []
    for prefix in ("/v1", ""):
        routes += [
            post(f"{prefix}/chat/completions", chat),
            post(f"{prefix}/completions", Completions(gateway)),
            post(f"{prefix}/responses", Responses(gateway, store)),
            KnownRoute(
                f"{prefix}/responses/{{response_id}}",
                endpoint=StoredResponses(store),
                methods=["GET", "DELETE"],
            ),
            get(f"{prefix}/responses/{{response_id}}/input_items", InputItems(store)),
            post(f"{prefix}/responses/{{response_id}}/cancel", CancelResponse(store)),
            get(f"{prefix}/models", models),
            get(f"{prefix}/models/{{model_id:path}}", models),
        ]
    return [
        *routes,
        *_workflow_routes(gateway, operators, library),
        post("/tokenize", Tokenize(gateway)),
        post("/detokenize", Detokenize(gateway)),
        get("/health", Health(gateway)),
        get("/ready", Readiness(gateway)),
        get("/load", Load(gateway)),
        get("/version", Version(gateway)),
        get("/metrics", MetricsPage(gateway)),
    ]


def _workflow_routes(
    gateway: Gateway, operators: Mapping[str, Operator], library: Library
) -> list[BaseRoute]:
    register_url_convertor("run", RunIdConvertor())
    workflows = Workflows(gateway, operators, library)
    validate = ValidateWorkflow(gateway, operators, library)
    schema = DocumentSchema(operators)
    template = OneTemplate(gateway, operators, library)
    methods = ["GET"] if library.store is None else ["GET", "PUT", "DELETE"]
    routes: list[BaseRoute] = []
    for prefix in ("/v1/workflow-templates", "/workflow-templates"):
        routes += [
            get(prefix, Templates(library)),
            KnownRoute(f"{prefix}/{{name}}", endpoint=template, methods=methods),
        ]
    for prefix in ("/v1/workflows", "/workflows"):
        run = f"{prefix}/{{run_id:run}}"
        routes += [
            KnownRoute(prefix, endpoint=workflows, methods=["GET", "POST"]),
            post(f"{prefix}/validate", validate),
            get(f"{prefix}/schema", schema),
            get(f"{run}/graph.svg", RunPicture(gateway, operators)),
            get(run, OneRun(gateway)),
            get(f"{run}/events", RunEventStream(gateway)),
            get(f"{run}/explain", ExplainRun(gateway)),
            post(f"{run}/cancel", CancelRun(gateway)),
        ]
    return routes


class KnownRoute(Route):
    """A route that leaves itself in the scope, so that metrics can name the endpoint."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        if match is not Match.NONE:
            child_scope["route"] = self
        return match, child_scope


class Shortcut:
    """Leads a POST with a fixed path straight to its endpoint; all else goes on to the router.

    The framework's router, exit stack and exception layer take a twelfth of a request's time and
    wrap each send of a stream once more; our endpoints use none of them.
    """

    def __init__(self, app: ASGIApp, *, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._posts = {
            route.path: route
            for route in routes
            if isinstance(route, KnownRoute)
            and "POST" in (route.methods or ())
            and "{" not in route.path
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self._posts.get(scope["path"])
            if route is not None:
                scope["route"] = route
                await route.endpoint(scope, receive, send)
                return
        await self._app(scope, receive, send)


def post(path: str, endpoint: ASGIApp) -> Route:
    return KnownRoute(path, endpoint=endpoint, methods=["POST"])


def get(path: str, endpoint: ASGIApp) -> Route:
    return KnownRoute(path, endpoint=endpoint, methods=["GET"])


async def _raise_as_ours(request: Request, error: Exception) -> Response:
    """Turns the framework's errors into ours; the boundary answers them."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:200]
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        raise MethodNotAllowed(
            f"{request.method} is not allowed for {path}; allowed: {allow}.", allow=allow
        )
    raise RouteNotFound(f"There is no endpoint {path}. See /openapi.json for what there is.")

"""`shuntyard serve`: builds the parts, joins them, and runs until told to stop."""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import uvicorn
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from server.app import HttpOptions, build_app
from server.endpoints.admin import AdminGate, admin_routes
from server.endpoints.collections import collection_routes
from server.endpoints.pooling import pooling_routes
from server.errors import ShuttingDown
from server.gateway import Gateway
from server.heap import freeze_heap
from server.http_protocol import http_protocol
from server.logs import RequestLog, configure_logging, is_json
from server.parts import Parts, build_parts
from server.settings import Settings, SettingsError
from server.tracing import RequestTracer
from spot.errors import EngineFailed, EngineMisconfigured
from spot.fleet import Fleet
from workflows.profile_file import ProfileFile

logger = logging.getLogger("shuntyard")
console = Console(stderr=True, highlight=False, soft_wrap=True)

_QUIET_PATHS = ("/health", "/ready", "/metrics", "/load")
_WANTED_OPEN_FILES = 65536
_POLL_S = 0.05
_LAST_WORDS_S = 1.0


def serve(settings: Settings, engine_flags: list[str]) -> int:
    """Run the server. Returns the exit code. Raises SettingsError and ShuntyardError before it
    serves."""
    configure_logging(form=settings.log_format, level=settings.log_level)
    _check_together(settings)
    _raise_file_limit()
    listener = _bind(settings)
    parts = build_parts(settings, engine_flags, say)
    freeze_heap()
    return anyio.run(partial(_run, settings, parts, listener), backend_options={"use_uvloop": True})


def say(text: str) -> None:
    """One line of progress: for people on a terminal, for the logs elsewhere."""
    if sys.stderr.isatty():
        console.print(f"[dim]shuntyard:[/dim] {text}", markup=True)
    else:
        logger.info(Text.from_markup(text).plain)


def _check_together(settings: Settings) -> None:
    if settings.enable_auto_tool_choice and not settings.tool_call_parser:
        raise SettingsError("--enable-auto-tool-choice needs --tool-call-parser")
    if settings.chat_cache_ttl and not settings.share_equal_requests:
        raise SettingsError("--chat-cache-ttl does not go with --no-share-equal-requests")
    if (settings.ssl_keyfile is None) != (settings.ssl_certfile is None):
        raise SettingsError("--ssl-keyfile and --ssl-certfile belong together")
    for name in ("ssl_keyfile", "ssl_certfile"):
        path = getattr(settings, name)
        if path is not None and not path.is_file():
            raise SettingsError(f"--{name.replace('_', '-')}: there is no file {path}")


def _raise_file_limit() -> None:
    """Each connection is a file; the usual 1,024 are soon gone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bind(settings: Settings) -> socket.socket:
    """The listening socket, bound before the model is loaded: a taken port is known at once."""
    if settings.uds is not None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if Path(settings.uds).is_socket():  # left behind by an earlier run
            Path(settings.uds).unlink()
        address: Any = settings.uds
    else:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = (settings.host, settings.port)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        shown = settings.uds or f"{settings.host}:{settings.port}"
        raise SettingsError(
            f"cannot listen on {shown}: {error.strerror}; choose another with --port "
            "(SHUNTYARD_PORT) or --host (SHUNTYARD_HOST)"
        ) from None
    return listener


class _Server(uvicorn.Server):
    """uvicorn, with an end that no client mistakes for success.

    At shutdown what comes new is told so, and what runs may finish within the time limit; then it
    is ended with an error event, and only then does the listener close.
    """

    def __init__(
        self, config: uvicorn.Config, gateway: Gateway, *, shutdown_timeout_s: float
    ) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._shutdown_timeout_s = shutdown_timeout_s
        self._is_hurried = False
        self._stop_asked = anyio.Event()

    def stop(self) -> None:
        """Begin to shut down."""
        self.should_exit = True
        self._stop_asked.set()

    async def main_loop(self) -> None:
        """Set the date of answers once a second, until it is time to stop.

        uvicorn's own loop wakes ten times a second for it.
        """
        while not await self.on_tick(0):
            with anyio.move_on_after(1.0):
                await self._stop_asked.wait()

    def hurry(self) -> int:
        """Give running answers no more time. Returns how many there are."""
        self._is_hurried = True
        return len(self._gateway.live)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by `_run`, which outlives this server."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.admission.closed = True
        if num_live := len(self._gateway.live):
            say(f"finishing {_answers(num_live)}")
        with anyio.move_on_after(self._shutdown_timeout_s):
            await self._answered(lambda: self._is_hurried)
        await self._cut()
        await super().shutdown(sockets)

    async def _answered(self, or_else: Callable[[], bool]) -> None:
        """Wait until no request is being answered, or `or_else`."""
        while self._gateway.admission.num_requests and not or_else():  # noqa: ASYNC110
            await anyio.sleep(_POLL_S)  # what is counted has no event

    async def _cut(self) -> None:
        """End what still runs: with an error event, and by force where nobody reads that.

        Runs that are journaled are not ended, but left as they are.
        """
        await self._gateway.workflows.suspend()
        self._gateway.end_all(ShuttingDown("The server is shutting down."))
        with anyio.move_on_after(_LAST_WORDS_S):
            await self._answered(lambda: False)
        for connection in list(self.server_state.connections):
            cycle = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                connection.transport.abort()


async def _run(settings: Settings, parts: Parts, listener: socket.socket) -> int:
    exit_code = 0
    gateway, engine = parts.gateway, parts.fleet
    async with AsyncExitStack() as stack:
        if gateway.journal is not None:
            stack.callback(gateway.journal.close)
        tracer = None
        if settings.otlp_traces_endpoint is not None:
            tracer = stack.enter_context(RequestTracer(settings.otlp_traces_endpoint))
        app = build_app(
            gateway,
            options=_http_options(settings),
            log=_request_log(settings),
            tracer=tracer,
            further_routes=[
                *pooling_routes(gateway, parts.pools, parts.pooling_metrics),
                *collection_routes(parts.resources.store),
                *admin_routes(engine, AdminGate(settings.admin_key), parts.new_pipeline),
            ],
            further_models=parts.pools.cards,
            resources=parts.resources,
            operators=parts.operators,
        )
        server = _Server(
            _uvicorn_config(settings, app), gateway, shutdown_timeout_s=settings.shutdown_timeout
        )
        signals = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(signals.cancel_scope.cancel)
        signals.start_soon(_stop_on_signal, server)
        await stack.enter_async_context(engine)
        for pooling_engine in parts.pooling_engines:
            await stack.enter_async_context(pooling_engine)
        await stack.enter_async_context(gateway.keeper)
        await stack.enter_async_context(parts.resources)
        await stack.enter_async_context(
            ProfileFile(gateway.workflows.slots.profiler, settings.workflow_profile_file)
        )
        await stack.enter_async_context(gateway.workflows)

        async def announce() -> None:
            nonlocal exit_code
            watching = anyio.CancelScope()
            group.start_soon(_say_progress, engine, watching)
            try:
                await _announce_when_ready(settings, parts, listener)
            except EngineMisconfigured as error:
                say(f"[red]the engine cannot start:[/red] {escape(error.message)}")
                exit_code = 2
                server.stop()
            except EngineFailed as error:
                for line in parts.last_lines:
                    print(line, file=sys.stderr)
                say(f"[red]the engine cannot start:[/red] {escape(error.message)}")
                exit_code = 1
                server.stop()
            finally:
                watching.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(announce)
            await server.serve(sockets=[listener])
            group.cancel_scope.cancel()
    return exit_code


async def _stop_on_signal(server: _Server) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for number in signals:
            if server.should_exit:
                say(f"stopping now, {_answers(server.hurry())} cut")
            else:
                server.stop()
                say(f"stopping ({signal.Signals(number).name}); once more to stop at once")


def _answers(count: int) -> str:
    return f"{count} running answer{'' if count == 1 else 's'}"


async def _announce_when_ready(settings: Settings, parts: Parts, listener: socket.socket) -> None:
    await parts.fleet.wait_ready()
    for pooling_engine in parts.pooling_engines:
        await pooling_engine.wait_ready()
    name = parts.gateway.model.names[0]
    if settings.uds:
        say(f"[green]{name} is ready[/green] on {settings.uds}")
        return
    host, port = listener.getsockname()[:2]
    url = f"{'https' if settings.ssl_keyfile else 'http'}://{host}:{port}"
    say(f"[green]{name} is ready[/green] at {url}/v1   (docs: {url}/docs)")
    key = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key else ""
    say(
        f"try: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' "
        '-d \'{"max_tokens":50,"messages":\\[{"role":"user","content":"Hello!"}]}\''
    )


async def _say_progress(fleet: Fleet, watching: anyio.CancelScope) -> None:
    """Say what the engines are doing, whenever that changes, until `watching` is cancelled."""
    said: dict[str, str] = {}
    with watching:
        while True:
            details = {name: status.detail for name, status in fleet.statuses().items()}
            for line in start_news(details, said):
                say(escape(line))
            await anyio.sleep(0.2)


def start_news(details: Mapping[str, str], said: dict[str, str]) -> list[str]:
    """What engines are doing and have not said; where there are several, each line begins with
    whose it is.

    details: by pipeline. said: what was said last, brought up to date.
    """
    news = {name: detail for name, detail in details.items() if detail != said.get(name, "")}
    said.update(news)
    return [
        f"{'engine' if len(details) == 1 else name}: {detail}"
        for name, detail in news.items()
        if detail
    ]


def _request_log(settings: Settings) -> RequestLog:
    return RequestLog(
        enabled=settings.log_requests,
        only_failures=settings.log_level in ("warning", "error"),
        quiet_paths=_QUIET_PATHS,
        json_stream=sys.stderr.buffer if is_json(settings.log_format) else None,
    )


def _http_options(settings: Settings) -> HttpOptions:
    return HttpOptions(
        api_keys=settings.keys_by_tenant,
        open_metrics=settings.open_metrics,
        docs=settings.docs,
        root_path=settings.root_path,
        allowed_origins=settings.allowed_origins,
        allowed_methods=settings.allowed_methods,
        allowed_headers=settings.allowed_headers,
        allow_credentials=settings.allow_credentials,
    )


def _uvicorn_config(settings: Settings, app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="none",
        http=http_protocol(idle_s=settings.keep_alive_timeout, arrival_s=settings.body_timeout),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=settings.log_level,
        access_log=False,
        server_header=False,
        backlog=min(4096, os.sysconf("SC_OPEN_MAX")),
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        root_path=settings.root_path,
    )

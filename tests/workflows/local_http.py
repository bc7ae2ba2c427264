"""A real HTTP server on a loopback port, and what it was asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class LocalHttp:
    """requests: what came, as (method, path with query, headers by lower-case name, body)."""

    port: int = 0
    routes: dict[str, web.StreamResponse | str] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)

    def url(self, path: str = "/", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _, _ in self.requests]


@asynccontextmanager
async def local_http(handler: object) -> AsyncIterator[LocalHttp]:
    """handler: `async (request) -> response`, asked after the request was noted."""
    server = LocalHttp()

    async def noted(request: web.BaseRequest) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        server.requests.append((request.method, request.path_qs, headers, await request.read()))
        return await handler(request)  # type: ignore[operator, no-any-return]

    runner = web.ServerRunner(web.Server(noted), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()

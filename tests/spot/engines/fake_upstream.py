"""A small vLLM API server for tests: scripted tokens, and faults on demand."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import anyio
import orjson
from aiohttp import web

MODEL = "m"
VOCAB_SIZE = 1000
MAX_LOGPROBS = 5


@dataclass(slots=True)
class FakeUpstream:
    """Its behaviour may be changed while it runs.

    tokens: what each generation says, one token per chunk.
    token_s: time between two chunks.
    status: if not 200, the answer to each generation, with `error_body`.
    faults at a chunk's number: cut (the connection), stall, malformed, error (an error event),
        no_finish (the stream ends properly, but early).
    """

    tokens: list[int] = field(default_factory=lambda: [11, 12, 13])
    finish_reason: str = "length"
    stop_reason: int | None = None
    token_s: float = 0.0
    header_s: float = 0.0
    status: int = 200
    error_body: dict[str, Any] = field(default_factory=dict)
    cut_at: int | None = None
    stall_at: int | None = None
    malformed_at: int | None = None
    error_at: int | None = None
    no_finish_at: int | None = None
    health_status: int = 200
    health_s: float = 0.0
    models: list[dict[str, Any]] = field(
        default_factory=lambda: [{"id": MODEL, "root": MODEL, "max_model_len": 64}]
    )
    has_generate: bool = True
    sends_token_ids: bool = True
    tells_limits: bool = True
    metrics: str | None = None
    api_key: str | None = None
    url: str = ""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    num_running: int = 0
    num_disconnected: int = 0
    ports: set[int] = field(default_factory=set)

    @property
    def asked(self) -> list[tuple[str, dict[str, Any]]]:
        """The generations that were asked for, without the probe's: path and body."""
        return [(path, body) for path, body in self.requests if _prompt(body) != [0]]

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._check_key])
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/inference/v1/generate", self._generate)
        return app

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.headers = dict(request.headers)
        given = request.headers.get("Authorization")
        is_open = request.path == "/health"
        if self.api_key is not None and not is_open and given != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)  # type: ignore[no-any-return]

    async def _health(self, request: web.Request) -> web.Response:
        await anyio.sleep(self.health_s)
        return web.Response(status=self.health_status)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": self.models})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0", "instance": "fake", "upstreams": ["behind"]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self.metrics is None:
            return web.Response(status=404)
        return web.Response(text=self.metrics)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        self.requests.append((request.path, body))
        assert request.transport is not None
        self.ports.add(request.transport.get_extra_info("peername")[1])
        is_generate = request.path.startswith("/inference")
        if is_generate and not self.has_generate:
            return web.json_response({"error": {"message": "disabled"}}, status=403)
        sampling = body["sampling_params"] if is_generate else body
        if (refusal := self._refusal(sampling)) is not None:
            return web.json_response({"error": {"message": refusal, "code": 400}}, status=400)
        if _prompt(body) != [0]:
            await anyio.sleep(self.header_s)
            if self.status != 200:
                return web.json_response(self.error_body, status=self.status)
        self.num_running += 1
        try:
            if not body["stream"]:
                return web.json_response(self._whole(sampling, is_generate=is_generate))
            return await self._stream(request, is_probe=_prompt(body) == [0])
        except (ConnectionError, anyio.get_cancelled_exc_class()):
            self.num_disconnected += 1
            raise
        finally:
            self.num_running -= 1

    def _refusal(self, sampling: dict[str, Any]) -> str | None:
        if not self.tells_limits:
            return None
        if (sampling.get("logprobs") or 0) > MAX_LOGPROBS:
            return f"Requested too many, which is greater than max allowed: {MAX_LOGPROBS}"
        if any(int(token_id) >= VOCAB_SIZE for token_id in sampling.get("logit_bias") or {}):
            return f"contain out-of-vocab token ids. Vocabulary size: {VOCAB_SIZE}"
        return None

    def _whole(self, sampling: dict[str, Any], *, is_generate: bool) -> dict[str, Any]:
        choice = self._choice(self.tokens, is_last=True)
        whole: dict[str, Any] = {"choices": [choice], "usage": {}}
        if sampling.get("prompt_logprobs") is not None:
            figures = [None, {"2": {"logprob": -1.0, "rank": 1}}]
            (whole if is_generate else choice)["prompt_logprobs"] = figures
        return whole

    async def _stream(self, request: web.Request, *, is_probe: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        tokens = self.tokens[:1] if is_probe else self.tokens
        for number, token_id in enumerate(tokens):
            if not is_probe and await self._is_faulty(request, response, number):
                return response
            is_last = number == len(tokens) - 1
            choice = self._choice([token_id], is_last=is_last)
            if is_probe:
                choice["finish_reason"] = "length"
            await _send(response, {"choices": [choice]})
            await anyio.sleep(0 if is_probe else self.token_s)
        details = {"prompt_tokens_details": {"cached_tokens": 1}}
        await _send(response, {"choices": [], "usage": details})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _is_faulty(
        self, request: web.Request, response: web.StreamResponse, number: int
    ) -> bool:
        """Do what goes wrong at this chunk. Returns whether the stream ends here."""
        if number == self.stall_at:
            await anyio.sleep(60)
        if number == self.cut_at:
            assert request.transport is not None
            request.transport.abort()
            return True
        if number == self.malformed_at:
            await response.write(b"data: {not json\n\n")
        if number == self.error_at:
            await _send(response, {"error": self.error_body})
            await response.write(b"data: [DONE]\n\n")
            return True
        return number == self.no_finish_at

    def _choice(self, token_ids: list[int], *, is_last: bool) -> dict[str, Any]:
        return {
            "index": 0,
            "text": "",
            "token_ids": token_ids if self.sends_token_ids else None,
            "finish_reason": self.finish_reason if is_last else None,
            "stop_reason": self.stop_reason if is_last else None,
        }


async def _send(response: web.StreamResponse, chunk: dict[str, Any]) -> None:
    await response.write(b"data: " + orjson.dumps(chunk) + b"\n\n")


def _prompt(body: dict[str, Any]) -> list[int]:
    return list(body.get("prompt") or body["token_ids"])


@contextlib.asynccontextmanager
async def serving(fake: FakeUpstream, port: int = 0) -> AsyncIterator[FakeUpstream]:
    """The fake on a loopback port; leaving cuts every connection."""
    runner = web.AppRunner(fake.app(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        await runner.cleanup()

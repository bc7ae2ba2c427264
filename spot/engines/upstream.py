"""A running vLLM server, or another Shuntyard, as an engine.

Generations go there over HTTP, token ids in and out; `upstream_protocol` says how, and what is
exact. The server is not ours: it is neither started nor stopped, only watched.

- An abort closes the generation's connection, which makes the server forget it.
- A generation that has output already is continued by sending the output as prompt. That is exact
  only for those that `spot.resume.continues_exactly(sampling, "prompt")` names; others are taken
  only if they allow it.
- `EngineUnavailable` in `on_error` means that the server took no work (busy, not reachable, this
  gateway's key is refused) and generated nothing: another engine may serve the same generation.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import anyio
import msgspec
from anyio.abc import TaskGroup

from spot.engines.base import DeltaSink, EngineCard, EngineState, EngineStats, EngineStatus
from spot.engines.upstream_answers import AnswerReader
from spot.engines.upstream_config import UpstreamConfig
from spot.engines.upstream_http import NoAnswer, exchange, get, open_session
from spot.engines.upstream_metrics import parse_load
from spot.engines.upstream_probe import Unsuitable, Upstream, probe
from spot.engines.upstream_protocol import build_request, choose_endpoint
from spot.engines.vllm_compat.constraint_cost import check_cost
from spot.engines.vllm_compat.refusal import Unservable
from spot.errors import (
    EngineFailed,
    EngineMisconfigured,
    EngineUnavailable,
    InvalidRequest,
    ShuntyardError,
)
from spot.generation import Generation, TokenDelta
from spot.resume import as_prompt, can_resume

__all__ = ["UpstreamConfig", "UpstreamEngine"]

logger = logging.getLogger(__name__)

_MAX_METRICS_BYTES = 8 * 1024 * 1024
# After a failed check the next one comes sooner, by this factor.
_HASTE = 4


@dataclass(slots=True)
class _Live:
    """A generation that the upstream works on."""

    generation: Generation
    sink: DeltaSink
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class UpstreamEngine:
    """One upstream server as a `spot.engines.base.PipelineEngine`.

    `stats.running` counts this gateway's generations, wherever they wait; the rest of the stats is
    the upstream's own, of all its clients, if it tells.
    """

    def __init__(self, config: UpstreamConfig) -> None:
        self._config = config
        self._state: EngineState = "stopped"
        self._detail = ""
        self._is_draining = False
        self._is_misconfigured = False
        self._upstream: Upstream | None = None
        self._load = EngineStats()
        self._live: dict[str, _Live] = {}
        self._num_failed_checks = 0
        self._last_heard_s = 0.0
        self._decided = anyio.Event()
        self._check_soon = anyio.Event()
        self._idle = anyio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._group: TaskGroup | None = None

    @property
    def status(self) -> EngineStatus:
        if self._is_draining and self._state == "ready":
            return EngineStatus("draining", self._detail)
        return EngineStatus(self._state, self._detail, is_misconfigured=self._is_misconfigured)

    @property
    def card(self) -> EngineCard | None:
        return None if self._upstream is None else self._upstream.card

    @property
    def stats(self) -> EngineStats:
        return msgspec.structs.replace(self._load, running=len(self._live))

    def submit(self, generation: Generation, sink: DeltaSink) -> None:
        """Send one generation.

        Raises EngineUnavailable, also for a generation with output that cannot be continued here
        as the engine that began it would have.
        """
        status = self.status
        if status.state != "ready" or self._group is None:
            raise EngineUnavailable(f"the engine is {status.state}: {status.detail}")
        if not can_resume(generation, "prompt"):
            raise EngineUnavailable("this engine cannot go on exactly with what another one began")
        if generation.sampling.structured is not None:
            # The upstream's other clients would wait for a constraint that is costly to compile.
            try:
                check_cost(generation.sampling.structured)
            except Unservable as refusal:
                sink.on_error(InvalidRequest(str(refusal), param=refusal.param))
                return
        live = _Live(generation, sink)
        self._live[generation.id] = live
        self._group.start_soon(self._run, live)

    def abort(self, generation_id: str) -> None:
        live = self._live.get(generation_id)
        if live is not None:
            self._forget(live)

    def kill(self, reason: str) -> None:
        """Fail what runs and take no work until the upstream has generated a token again."""
        self._die(reason)
        self._check_soon.set()

    async def wait_ready(self) -> EngineCard:
        """Wait for the first readiness, as long as it takes.

        Raises EngineMisconfigured if the upstream answers but cannot serve as an engine.
        """
        await self._decided.wait()
        card = self.card
        if card is None:
            raise EngineMisconfigured(self._detail)
        return card

    async def drain(self) -> None:
        self._is_draining = True
        while self._live:
            self._idle = anyio.Event()
            await self._idle.wait()

    async def __aenter__(self) -> Self:
        self._state, self._detail = "starting", "waiting for the upstream"
        self._session = open_session(self._config)
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(self._watch, self._session)
        self._group.start_soon(self._watch_load, self._session)
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._state, self._detail = "stopped", ""
        self._fail_all("the server is shutting down")
        assert self._group is not None
        assert self._session is not None
        self._group.cancel_scope.cancel()
        try:
            await self._group.__aexit__(None, None, None)
        finally:
            self._group = None
            with anyio.CancelScope(shield=True):
                await self._session.close()

    # Generations

    async def _run(self, live: _Live) -> None:
        """One generation's life on the upstream, unless it was aborted before it began."""
        if not self._is_live(live):
            return
        with live.scope:
            try:
                await self._exchange(live)
            except ShuntyardError as error:
                self._end_badly(live, error)
            except Exception:  # a bug here must not end the engine for all others
                logger.exception("an exchange with the upstream failed")
                self._end_badly(live, EngineFailed("the exchange with the upstream failed"))

    async def _exchange(self, live: _Live) -> None:
        assert self._upstream is not None
        assert self._session is not None
        generation = as_prompt(live.generation)
        endpoint = choose_endpoint(
            generation,
            has_generate=self._upstream.has_generate,
            max_logprobs=self._upstream.card.max_logprobs,
        )
        await exchange(
            self._session,
            self._config,
            build_request(generation, endpoint, model=self._upstream.model),
            AnswerReader(generation, endpoint),
            lambda delta: self._on_delta(live, delta),
            via=generation.via,
            is_constrained=generation.sampling.structured is not None,
        )

    def _on_delta(self, live: _Live, delta: TokenDelta) -> None:
        """Hand on a delta. A broken sink ends its own generation only."""
        self._last_heard_s = anyio.current_time()
        if not self._is_live(live):
            return
        if delta.finish_reason is not None:
            self._forget(live, cancel=False)
        try:
            live.sink.on_delta(delta)
        except Exception:  # one broken sink must not end the engine for all others
            logger.exception("a sink failed; its generation is aborted")
            self.abort(live.generation.id)

    def _end_badly(self, live: _Live, error: ShuntyardError) -> None:
        if isinstance(error, EngineFailed | EngineUnavailable):
            self._check_soon.set()
        if not self._is_live(live):
            return
        self._forget(live)
        try:
            live.sink.on_error(error)
        except Exception:  # one broken sink must not end the engine for all others
            logger.exception("a sink failed on an error")

    def _is_live(self, live: _Live) -> bool:
        return self._live.get(live.generation.id) is live

    def _forget(self, live: _Live, *, cancel: bool = True) -> None:
        if self._is_live(live):
            del self._live[live.generation.id]
        if cancel:
            live.scope.cancel()
        if not self._live:
            self._idle.set()

    def _fail_all(self, message: str) -> None:
        """End every live generation. Sinks may submit and abort elsewhere while they hear of it."""
        for live in list(self._live.values()):
            self._end_badly(live, EngineFailed(message))

    # Health

    async def _watch(self, session: aiohttp.ClientSession) -> None:
        """Ask for signs of life, for ever."""
        while True:
            await self._check(session)
            pause_s = self._config.health_interval_s
            if self._num_failed_checks:
                pause_s /= _HASTE
            with anyio.move_on_after(pause_s):
                await self._check_soon.wait()
            self._check_soon = anyio.Event()

    async def _check(self, session: aiohttp.ClientSession) -> None:
        begun_s = anyio.current_time()
        try:
            await get(session, self._config, "/health", timeout_s=self._config.health_timeout_s)
            if self._state != "ready":
                self._become_ready(await probe(session, self._config))
            self._num_failed_checks = 0
        except Unsuitable as error:
            self._note_unsuitable(str(error))
        except NoAnswer as error:
            # A server that is too busy for a health check, but sends tokens, lives.
            if not (error.is_late and self._last_heard_s > begun_s):
                self._note_failed_check(error.message)

    def _become_ready(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._state, self._detail = "ready", upstream.guarantees
        self._is_misconfigured = False
        self._decided.set()
        logger.info("upstream %s is ready: %s", self._config.base_url, upstream.guarantees)

    def _note_unsuitable(self, problem: str) -> None:
        if (self._state, self._detail) != ("dead", problem):
            logger.error("upstream %s cannot be used: %s", self._config.base_url, problem)
        self._state, self._detail = "dead", problem
        self._is_misconfigured = True
        self._num_failed_checks = 0
        self._decided.set()

    def _note_failed_check(self, problem: str) -> None:
        self._num_failed_checks += 1
        if self._state != "ready":
            self._detail = f"waiting for the upstream: {problem}"
        elif self._num_failed_checks >= self._config.max_health_failures:
            self._die(problem)

    def _die(self, reason: str) -> None:
        if self._state == "ready":
            logger.error("upstream %s is dead: %s", self._config.base_url, reason)
            self._state, self._detail = "dead", reason
            self._load = EngineStats()
            self._fail_all(f"the upstream died: {reason}")

    async def _watch_load(self, session: aiohttp.ClientSession) -> None:
        """Read the upstream's metrics from time to time, if it has any."""
        while True:
            await anyio.sleep(self._config.stats_interval_s)
            if self._state != "ready":
                continue
            try:
                text = await get(
                    session,
                    self._config,
                    "/metrics",
                    timeout_s=self._config.health_timeout_s,
                    max_bytes=_MAX_METRICS_BYTES,
                )
            except NoAnswer:
                self._load = EngineStats()
            else:
                self._load = parse_load(text)

"""What `shuntyard serve` runs, with a scripted engine, in processes that can be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Self

import anyio
import httpx

from server import serve
from server.gateway import Admission, Gateway, ServedModel
from server.metrics import Metrics
from server.model_cache import silent
from server.parts import Parts, build_resources
from server.pooling_metrics import PoolingMetrics
from server.pooling_models import ServedPoolingModels
from server.pools import Pools
from server.settings import Settings
from server.sse import StreamKeeper
from server.workflow_operators import operators_of
from server.workflow_scheduling import build_service, build_slots
from spot.engines.base import EngineCard
from spot.engines.scripted import ScriptedEngine
from spot.fleet import Fleet, PipelineSpec
from tests.harness import demo_tokenizer, say, until
from workflows.run_events import RunEvents
from workflows.stores import runs


@dataclass(frozen=True)
class Crash:
    """When the server kills itself with SIGKILL: at the event of that number that any run adds, or
    when so many transactions of the journal are stored. 0 for never."""

    at_event: int = 0
    after_write: int = 0


NEVER = Crash()
START_S = 0.3  # of an engine


async def no_more(wanted: object) -> PipelineSpec:
    raise NotImplementedError


class LateEngine(ScriptedEngine):
    """One that takes a moment to start, as engines do."""

    @property
    def card(self) -> EngineCard:
        return self._card if self._state == "ready" else None  # type: ignore[return-value]

    async def wait_ready(self) -> EngineCard:
        await self._has_started.wait()
        return self._card

    async def __aenter__(self) -> Self:
        self._has_started = anyio.Event()
        await super().__aenter__()
        self._state = "starting"
        assert self._group is not None
        self._group.start_soon(self._start)
        return self

    async def _start(self) -> None:
        await anyio.sleep(START_S)
        self._state = "ready"
        self._has_started.set()


def run(settings: dict[str, Any], crash: Crash, port: Connection) -> None:
    """Serves until it is ended; tells its port."""
    _arm(crash)
    told = Settings(port=0, shutdown_timeout=0.2, **settings)
    tokenizer = demo_tokenizer()
    assert tokenizer.eos_token_id is not None
    engine = LateEngine(
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        script=say(tokenizer, "Rain is wet."),
    )
    fleet = Fleet([PipelineSpec("local-1", engine)])
    gateway = Gateway(
        model=ServedModel(["demo"], tokenizer, fleet),
        metrics=Metrics("demo"),
        admission=Admission(max_requests=100, max_queue=100),
        keeper=StreamKeeper(keep_alive_s=0, stalled_reader_s=60),
        version="0.0-test",
    )
    pools, pooling_metrics = Pools(), PoolingMetrics(gateway.metrics.registry)
    models = ServedPoolingModels(pools, ["demo"], pooling_metrics)
    resources = build_resources(told, models, silent)
    operators = {one.name: one for one in operators_of(gateway, resources)}
    slots = build_slots(told)
    gateway.workflows = build_service(told, slots, resources.database, operators)
    listener = serve._bind(told)
    port.send(listener.getsockname()[1])
    parts = Parts(
        gateway, fleet, no_more, [], pools, pooling_metrics, resources, operators, deque()
    )
    anyio.run(partial(serve._run, told, parts, listener), backend_options={"use_uvloop": True})


def _arm(crash: Crash) -> None:
    """Let this process die where it is told to."""
    num_events, num_writes = 0, 0
    add, write = RunEvents.add, runs.write

    def counted_add(*args: Any, **kwargs: Any) -> None:
        nonlocal num_events
        num_events += 1
        add(*args, **kwargs)
        if num_events == crash.at_event:
            os.kill(os.getpid(), signal.SIGKILL)

    async def counted_write(*args: Any) -> None:
        nonlocal num_writes
        await write(*args)
        num_writes += 1
        if num_writes == crash.after_write:
            os.kill(os.getpid(), signal.SIGKILL)

    RunEvents.add = counted_add  # type: ignore[method-assign]
    runs.write = counted_write


@dataclass
class DurableServer:
    """One server, in a process of its own."""

    process: BaseProcess
    http: httpx.Client

    def end(self, number: int = signal.SIGTERM) -> int | None:
        """Its exit code. number: the signal that ends it."""
        self.http.close()
        if self.process.pid is not None and self.process.is_alive():
            with suppress(ProcessLookupError):  # it may have killed itself just now
                os.kill(self.process.pid, number)
        self.process.join(30)
        return self.process.exitcode


def start(settings: dict[str, Any], crash: Crash = NEVER) -> DurableServer:
    """A server that is ready. All that a process imports is imported once, for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.durable_preload"])
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(settings, crash, theirs))
    process.start()
    assert ours.poll(60), "the server did not start"
    http = httpx.Client(base_url=f"http://127.0.0.1:{ours.recv()}", trust_env=False, timeout=60)
    server = DurableServer(process, http)
    until(lambda: _is_ready(server), within_s=30)
    return server


def _is_ready(server: DurableServer) -> bool:
    try:
        return server.http.get("/health").status_code == 200
    except httpx.TransportError:
        return False

"""What `shuntyard serve` runs, with a scripted engine, to be killed: one server in this process."""

from __future__ import annotations

import os
import signal
from collections import deque
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import anyio

from server import serve
from server.gateway import Admission, Gateway, ServedModel
from server.metrics import Metrics
from server.model_cache import silent
from server.parts import Parts, build_resources, journaled_workflows
from server.pooling_metrics import PoolingMetrics
from server.pooling_models import ServedPoolingModels
from server.pools import Pools
from server.settings import Settings
from server.sse import StreamKeeper
from spot.engines.scripted import ScriptedEngine
from spot.fleet import Fleet, PipelineSpec
from tests.harness import demo_tokenizer, say
from workflows.run_events import RunEvents
from workflows.stores import runs


@dataclass(frozen=True)
class Crash:
    """When the server kills itself with SIGKILL: at the event of that number that any run adds, or
    when so many transactions of the journal are stored. 0 for never."""

    at_event: int = 0
    after_write: int = 0


async def no_more(wanted: object) -> PipelineSpec:
    raise NotImplementedError


def run(settings: dict[str, Any], crash: Crash, port: Connection) -> None:
    """Serves until it is ended; tells its port."""
    _arm(crash)
    told = Settings(port=0, shutdown_timeout=0.2, **settings)
    tokenizer = demo_tokenizer()
    assert tokenizer.eos_token_id is not None
    engine = ScriptedEngine(
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
    if told.workflow_journal:
        gateway.workflows = journaled_workflows(told, gateway, resources)
    listener = serve._bind(told)
    port.send(listener.getsockname()[1])
    parts = Parts(gateway, fleet, no_more, [], pools, pooling_metrics, resources, deque())
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

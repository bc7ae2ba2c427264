"""The gateway alone: the real application under uvicorn, with a scripted engine instead of a model.

Run as `python -m benchmarks.gateway` with a `GatewaySpec` as JSON on standard input. Prints
`ready PORT` once it serves and stops at the end of standard input.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import anyio
import anyio.to_thread
import msgspec
import uvicorn

from benchmarks.scripted_host import ScriptedArgs
from server.app import build_app
from server.gateway import Admission, Gateway, ServedModel
from server.heap import freeze_heap
from server.logs import RequestLog, configure_logging
from server.metrics import Metrics
from server.sse import StreamKeeper
from server.text.tokenizer import ChatTokenizer
from spot.engines.base import PipelineEngine
from spot.engines.hosted import HostConfig, HostedEngine
from spot.fleet import Fleet, PipelineSpec

_TEXT = (
    "Wagons are sorted in a yard: one after another they roll down the hump, and each takes "
    "the track that its train waits on. Nothing is lost, nothing is left standing. "
)


class GatewaySpec(msgspec.Struct):
    """How to run the gateway. engine: in its own process (hosted) or on the gateway's loop."""

    model: str
    engine: Literal["hosted", "in_loop"] = "hosted"
    core: int | None = None
    engine_core: int | None = None
    step_time_s: float = 0.0
    tokens_per_step: int = 1
    stall_at_token: int | None = None
    times_path: str | None = None
    log_requests: bool = True


def script_of(tokenizer: ChatTokenizer, num_tokens: int) -> list[int]:
    """Token ids of plain English text, at least so many."""
    ids = tokenizer.encode(_TEXT, add_special_tokens=False)
    return ids * (num_tokens // len(ids) + 1)


def _scripted_args(spec: GatewaySpec, tokenizer: ChatTokenizer) -> ScriptedArgs:
    return ScriptedArgs(
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id or 0,
        script=script_of(tokenizer, 2048),
        step_time_s=spec.step_time_s,
        tokens_per_step=spec.tokens_per_step,
        stall_at_token=spec.stall_at_token,
        core=spec.engine_core,
        times_path=spec.times_path,
    )


def _new_engine(spec: GatewaySpec, args: ScriptedArgs) -> PipelineEngine:
    if spec.engine == "in_loop":
        return args.new_engine()
    config = HostConfig(
        engine_args=msgspec.to_builtins(args),
        command=(sys.executable, "-m", "benchmarks.scripted_host"),
    )
    return HostedEngine(config, on_line=lambda line: print(line, file=sys.stderr))


@asynccontextmanager
async def _serving(gateway: Gateway, log: RequestLog) -> AsyncIterator[int]:
    """Serve on a free loopback port, as `shuntyard serve` does."""
    app = build_app(gateway, log=log)
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        backlog=4096,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listener])
            while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                await anyio.sleep(0.01)
            yield listener.getsockname()[1]
            server.should_exit = server.force_exit = True


async def _run(spec: GatewaySpec) -> None:
    tokenizer = ChatTokenizer.load(Path(spec.model))
    engine = Fleet([PipelineSpec("only", _new_engine(spec, _scripted_args(spec, tokenizer)))])
    gateway = Gateway(
        model=ServedModel(names=["scripted"], tokenizer=tokenizer, engine=engine),
        metrics=Metrics("scripted"),
        admission=Admission(max_requests=100_000, max_queue=100_000),
        keeper=StreamKeeper(keep_alive_s=15.0, stalled_reader_s=300.0),
        version="benchmark",
    )
    async with engine, gateway.keeper:
        await engine.wait_ready()
        freeze_heap()
        async with _serving(
            gateway, RequestLog(enabled=spec.log_requests, json_stream=sys.stderr.buffer)
        ) as port:
            print(f"ready {port}", flush=True)
            await anyio.to_thread.run_sync(sys.stdin.read)


def main() -> None:
    """Serve until standard input ends."""
    spec = msgspec.json.decode(sys.stdin.readline(), type=GatewaySpec)
    if spec.core is not None:
        os.sched_setaffinity(0, {spec.core})
    configure_logging(form="json", level="info")
    anyio.run(_run, spec, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()

"""An engine host around the scripted engine: the gateway's real codec path, without a model.

Run by `spot.engines.host_process` as `python -m benchmarks.scripted_host --socket PATH`, with
`ScriptedArgs` as JSON on standard input. When told a `times_path`, it writes there, at its end, by
the generation's seed: when each came in, and when its first and its last token went out.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from pathlib import Path

import anyio
import msgspec
from anyio.abc import UNIXSocketStream

from spot.engines.codec import (
    Abort,
    FrameReader,
    HandleDelta,
    Ping,
    Pong,
    Ready,
    Step,
    Stop,
    Submit,
    ToHost,
    to_host_decoder,
)
from spot.engines.outbox import Outbox
from spot.engines.scripted import Faults, ScriptedEngine
from spot.errors import ShuntyardError
from spot.generation import TokenDelta


class ScriptedArgs(msgspec.Struct):
    """How the scripted engine behaves. script: the token ids that every generation emits."""

    vocab_size: int
    eos_token_id: int
    script: list[int]
    max_model_len: int = 4096
    max_num_seqs: int = 4096
    step_time_s: float = 0.0
    tokens_per_step: int = 1
    stall_at_token: int | None = None
    core: int | None = None
    times_path: str | None = None

    def new_engine(self) -> ScriptedEngine:
        return ScriptedEngine(
            vocab_size=self.vocab_size,
            eos_token_id=self.eos_token_id,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            script=lambda generation: self.script,
            step_time_s=self.step_time_s,
            tokens_per_step=self.tokens_per_step,
            faults=Faults(stall_at_token=self.stall_at_token),
        )


class _Stopped(Exception):
    pass


class _Sink:
    __slots__ = ("_handle", "_host", "times")

    def __init__(self, host: ScriptedHost, handle: int, seed: int) -> None:
        self._host = host
        self._handle = handle
        self.times = [float(seed), time.perf_counter(), 0.0, 0.0]

    def on_delta(self, delta: TokenDelta) -> None:
        self._host.add(HandleDelta(self._handle, delta), self)

    def on_error(self, error: ShuntyardError) -> None:
        raise AssertionError(f"the scripted engine fails by order only: {error}")


class ScriptedHost:
    """Carries messages between the gateway and the engine; one `Step` per engine step."""

    def __init__(self, engine: ScriptedEngine, stream: UNIXSocketStream) -> None:
        self._engine = engine
        self._stream = stream
        self._outbox = Outbox()
        self._deltas: list[HandleDelta] = []
        self._sinks: list[_Sink] = []
        self._ids: dict[int, str] = {}
        self.times: list[list[float]] = []

    async def run(self) -> None:
        """Serve until Stop or the end of the connection."""
        self._outbox.put(Ready(self._engine.card, [os.getpid()]))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._outbox.write_to, self._stream)
                tasks.start_soon(self._read)
        except* (_Stopped, anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass

    async def _read(self) -> None:
        frames = FrameReader()
        while True:
            try:
                chunk = await self._stream.receive(256 * 1024)
            except anyio.EndOfStream:
                raise _Stopped from None
            for payload in frames.feed(chunk):
                self._handle(to_host_decoder.decode(payload))

    def _handle(self, message: ToHost) -> None:
        match message:
            case Submit(handle, generation):
                self._ids[handle] = generation.id
                sink = _Sink(self, handle, generation.sampling.seed or 0)
                self._engine.submit(generation, sink)
            case Abort(handles):
                for handle in handles:
                    if (generation_id := self._ids.pop(handle, None)) is not None:
                        self._engine.abort(generation_id)
            case Ping(number):
                self._outbox.put(Pong(number))
            case Stop():
                raise _Stopped

    def add(self, entry: HandleDelta, sink: _Sink) -> None:
        """Put one delta into the step that is being made; it leaves when the engine yields."""
        if not self._deltas:
            asyncio.get_running_loop().call_soon(self._flush)
        self._deltas.append(entry)
        self._sinks.append(sink)

    def _flush(self) -> None:
        self._outbox.put(Step(self._deltas))
        now_s = time.perf_counter()
        for entry, sink in zip(self._deltas, self._sinks, strict=True):
            sink.times[2] = sink.times[2] or now_s
            if entry.delta.finish_reason is not None:
                sink.times[3] = now_s
                self.times.append(sink.times)
                self._ids.pop(entry.handle, None)
        self._deltas, self._sinks = [], []
        self._engine.submitted.clear()
        self._engine.aborted.clear()


async def _serve(connection: socket.socket, args: ScriptedArgs) -> list[list[float]]:
    """Serve to the end; the times of each generation."""
    connection.setblocking(False)
    async with (
        await UNIXSocketStream.from_socket(connection) as stream,
        args.new_engine() as engine,
    ):
        host = ScriptedHost(engine, stream)
        await host.run()
    return host.times


def main() -> None:
    """Run one host to its end."""
    parser = argparse.ArgumentParser(prog="benchmarks.scripted_host")
    parser.add_argument("--socket", required=True)
    path = parser.parse_args().socket
    args = msgspec.json.decode(sys.stdin.read(), type=ScriptedArgs)
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    times = anyio.run(_serve, connection, args, backend_options={"use_uvloop": True})
    if args.times_path is not None:
        Path(args.times_path).write_bytes(msgspec.json.encode(times))


if __name__ == "__main__":
    main()

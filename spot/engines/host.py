"""The engine host: one vLLM engine in a process group of its own, behind a local socket.

Run as `python -m spot.engines.host --socket PATH` with the engine arguments as a JSON object on
standard input. It connects to PATH, speaks `spot.engines.codec`, and ends when the socket closes:
a host without a gateway is no use, and it must not outlive one.

While the engine starts, the event loop is blocked (vLLM starts that way); `Progress` is written to
the socket directly then, and a watching thread takes care that the host ends with its gateway.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import anyio
import anyio.to_thread
from anyio.abc import UNIXSocketStream

from spot.engines.codec import (
    Abort,
    Dead,
    Failed,
    FrameReader,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Step,
    Stop,
    Submit,
    ToHost,
    encode_frame,
    to_host_decoder,
)
from spot.engines.outbox import Outbox
from spot.engines.vllm_compat.environment import apply_default_environment

if TYPE_CHECKING:
    from spot.engines.vllm_compat.engine_core import EngineCore

_READ_BYTES = 256 * 1024
_SHUTDOWN_TIMEOUT_S = 1.0
_GRACE_AFTER_HANGUP_S = 5.0
_MAX_REASON_CHARS = 2000


class _StopRequested(Exception):
    """The gateway asked for an orderly end."""


class _GatewayGone(Exception):
    """The gateway went away, or this process was told to end."""


class EngineHost:
    """Carries messages between one gateway connection and one running engine."""

    def __init__(self, core: EngineCore, stream: UNIXSocketStream) -> None:
        from spot.engines.vllm_compat.outputs import StepMapper

        self._core = core
        self._stream = stream
        self._outbox = Outbox()
        self._mapper = StepMapper()
        self._slow_lane = anyio.CapacityLimiter(1)

    async def run(self) -> bool:
        """Serve until the gateway says Stop (True) or goes away (False). Raises EngineDeadError."""
        is_clean = True
        await self._core.connect()
        self._outbox.put(Ready(self._core.card, [os.getpid(), *self._core.pids]))
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._outbox.write_to, self._stream)
                self._tasks.start_soon(self._forward_steps)
                self._tasks.start_soon(self._obey_signals)
                self._tasks.start_soon(self._read)
        except* _StopRequested:
            pass
        except* (_GatewayGone, anyio.BrokenResourceError, anyio.ClosedResourceError):
            is_clean = False
        return is_clean

    async def say_dead(self, message: str) -> None:
        """The last message, written at once."""
        with anyio.move_on_after(1):
            await self._stream.send(encode_frame(Dead(message)))

    async def _obey_signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                raise _GatewayGone

    async def _read(self) -> None:
        frames = FrameReader()
        while True:
            try:
                chunk = await self._stream.receive(_READ_BYTES)
            except anyio.EndOfStream:
                raise _GatewayGone from None
            for payload in frames.feed(chunk):
                await self._handle(to_host_decoder.decode(payload))

    async def _handle(self, message: ToHost) -> None:
        match message:
            case Submit():
                await self._submit(message)
            case Abort():
                await self._abort(message.handles)
            case Ping():
                self._outbox.put(Pong(message.number))
            case Stop():
                raise _StopRequested

    async def _submit(self, submit: Submit) -> None:
        sampling = submit.generation.sampling
        self._mapper.begin(submit.handle, sampling)
        if sampling.structured is not None or sampling.bad_words:
            # Compiling a grammar takes long, and the tokenizer must not be used by two at once.
            self._tasks.start_soon(self._submit_slowly, submit)
        else:
            await self._prepare_and_add(submit, self._prepare)

    async def _submit_slowly(self, submit: Submit) -> None:
        async def prepare(submit: Submit) -> Any:
            return await anyio.to_thread.run_sync(
                self._core.prepare,
                str(submit.handle),
                submit.generation,
                limiter=self._slow_lane,
            )

        await self._prepare_and_add(submit, prepare)

    async def _prepare(self, submit: Submit) -> Any:
        return self._core.prepare(str(submit.handle), submit.generation)

    async def _prepare_and_add(self, submit: Submit, prepare: Callable[[Submit], Any]) -> None:
        """Validate and add a generation, unless it was aborted meanwhile."""
        from spot.engines.vllm_compat.engine_core import EngineDeadError
        from spot.engines.vllm_compat.sampling import REFUSALS, explain

        handle = submit.handle
        try:
            request = await prepare(submit)
            if self._mapper.is_live(handle):
                await self._core.add(request)
        except EngineDeadError:
            raise
        except REFUSALS as error:
            if self._mapper.forget(handle):
                self._outbox.put(Refused(handle, *explain(error)))
        except Exception as error:  # noqa: BLE001 - the request boundary
            traceback.print_exc()
            if self._mapper.forget(handle):
                self._outbox.put(Failed(handle, explain(error)[0]))

    async def _abort(self, handles: list[int]) -> None:
        known = [handle for handle in handles if self._mapper.forget(handle)]
        if known:
            await self._core.abort([str(handle) for handle in known])
            if not self._mapper.num_live:
                self._outbox.put(Step([], self._mapper.idle_stats()))

    async def _forward_steps(self) -> None:
        while True:
            mapped = self._mapper.map(await self._core.next_step())
            if mapped.step.deltas or mapped.step.stats is not None:
                self._outbox.put(mapped.step)
            for ended in mapped.ended:
                self._outbox.put(ended)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one host to its end; the exit code is 0 after an orderly stop.

    Any other end takes the whole process group along.
    """
    parser = argparse.ArgumentParser(prog="spot.engines.host")
    parser.add_argument("--socket", required=True)
    path = parser.parse_args(argv).socket
    engine_args = json.loads(sys.stdin.read())
    apply_default_environment()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    serving = threading.Event()
    _end_with(connection, serving)
    signal.signal(signal.SIGTERM, lambda *_: _kill_own_group())
    is_clean = anyio.run(
        _serve, connection, engine_args, serving, backend_options={"use_uvloop": True}
    )
    if not is_clean:
        _kill_own_group()
    sys.stderr.flush()
    os._exit(0)  # unloading torch takes seconds, and nothing is left to do


async def _serve(
    connection: socket.socket, engine_args: dict[str, Any], serving: threading.Event
) -> bool:
    """Start the engine and serve. Returns whether the end was in order."""
    core = _start_engine(connection, engine_args)
    if core is None:
        return False
    serving.set()
    from spot.engines.vllm_compat.engine_core import EngineDeadError

    connection.setblocking(False)
    async with await UNIXSocketStream.from_socket(connection) as stream:
        host = EngineHost(core, stream)
        is_clean = False
        try:
            is_clean = await host.run()
        except* EngineDeadError:
            await host.say_dead("the engine core died")
        finally:
            core.shutdown(_SHUTDOWN_TIMEOUT_S if is_clean else 0)
    return is_clean


def _start_engine(connection: socket.socket, engine_args: dict[str, Any]) -> EngineCore | None:
    """Build and start the engine, telling the gateway what goes on. None if it cannot start."""

    def say(message: Progress | Dead) -> None:
        connection.sendall(encode_frame(message))

    try:
        say(Progress("importing vLLM"))
        from spot.engines.vllm_compat.engine_args import build_config
        from spot.engines.vllm_compat.engine_core import EngineCore
        from spot.engines.vllm_compat.self_check import check

        check()
        say(Progress("reading the model's configuration"))
        config = build_config(engine_args)
        say(Progress("starting the engine core"))
        return EngineCore(config)
    except Exception as error:  # noqa: BLE001 - whatever it is, the gateway must hear it
        traceback.print_exc()
        say(Dead(_reason(error), fatal=True))
        return None


def _reason(error: Exception) -> str:
    """An error of the start for the operator; pydantic's without its decoration."""
    import pydantic

    if isinstance(error, pydantic.ValidationError):
        text = "; ".join(entry["msg"].removeprefix("Value error, ") for entry in error.errors())
    else:
        text = f"{type(error).__name__}: {error}"
    return text[:_MAX_REASON_CHARS]


def _end_with(connection: socket.socket, serving: threading.Event) -> None:
    """Kill the process group after the gateway's end of `connection` is gone.

    Once `serving`, the event loop notices as well and ends in order; it is given some time.
    """

    def watch() -> None:
        hangup = select.poll()
        hangup.register(connection.fileno(), select.POLLRDHUP)
        while not hangup.poll():
            pass
        if serving.is_set():
            time.sleep(_GRACE_AFTER_HANGUP_S)
        _kill_own_group()

    threading.Thread(target=watch, name="gateway-watch", daemon=True).start()


def _kill_own_group() -> None:
    """End this process and everything that it started, if it leads its process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()

"""A host process and its gateway: the connection between them, which the host does not outlive."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn, TypeVar

import anyio
from anyio.abc import UNIXSocketStream

from spot.engines.codec import (
    Dead,
    FrameReader,
    Ping,
    Pong,
    Progress,
    Stop,
    ToHost,
    encode_frame,
    to_host_decoder,
)
from spot.engines.outbox import Outbox
from spot.engines.vllm_compat.environment import apply_default_environment
from spot.errors import EngineMisconfigured

_READ_BYTES = 256 * 1024
_GRACE_AFTER_HANGUP_S = 5.0
_MAX_REASON_CHARS = 2000

T = TypeVar("T")


class _StopRequested(Exception):
    """The gateway asked for an orderly end."""


class _GatewayGone(Exception):
    """The gateway went away, or this process was told to end."""


class GatewayLink:
    """A host's end of the connection to the gateway that started it.

    While the engine starts, the event loop is blocked or does not run yet: `say` writes at once
    then. From `opened` on, messages go through `outbox`.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.outbox = Outbox()
        self._connection = connection
        self._is_open = threading.Event()

    def say(self, message: Progress | Dead) -> None:
        self._connection.sendall(encode_frame(message))

    def told(self, start: Callable[[], T]) -> T | None:
        """What `start` returns. None if it failed, and then the gateway has heard why."""
        try:
            return start()
        except EngineMisconfigured as error:
            self.say(Dead(error.message, fatal=True, is_misconfigured=True))
            return None
        except Exception as error:  # noqa: BLE001 - whatever it is, the gateway must hear it
            traceback.print_exc()
            self.say(Dead(_reason(error), fatal=True))
            return None

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """From now on the event loop runs, and notices when the gateway goes away."""
        self._connection.setblocking(False)
        async with await UNIXSocketStream.from_socket(self._connection) as self._stream:
            self._is_open.set()
            yield

    async def serve(self, on_message: Callable[[ToHost], Awaitable[None]]) -> bool:
        """Pass on what the gateway says, and write what is in the outbox.

        Returns True when the gateway asked for an orderly end, False when it went away or this
        process was told to end.
        """
        is_clean = True
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.outbox.write_to, self._stream)
                tasks.start_soon(self._obey_signals)
                tasks.start_soon(self._read, on_message)
        except* _StopRequested:
            pass
        except* (_GatewayGone, anyio.BrokenResourceError, anyio.ClosedResourceError):
            is_clean = False
        return is_clean

    async def say_last(self, message: Dead) -> None:
        """The last message, written at once when `serve` has ended."""
        with anyio.move_on_after(1):
            await self._stream.send(encode_frame(message))

    def watch(self) -> None:
        """Kill the process group when the gateway is gone.

        An open link's event loop notices as well and ends in order; it is given some time.
        """
        hangup = select.poll()
        hangup.register(self._connection.fileno(), select.POLLRDHUP)
        while not hangup.poll():
            pass
        if self._is_open.is_set():
            time.sleep(_GRACE_AFTER_HANGUP_S)
        _kill_own_group()

    async def _obey_signals(self) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                raise _GatewayGone

    async def _read(self, on_message: Callable[[ToHost], Awaitable[None]]) -> None:
        frames = FrameReader()
        while True:
            try:
                chunk = await self._stream.receive(_READ_BYTES)
            except anyio.EndOfStream:
                raise _GatewayGone from None
            for payload in frames.feed(chunk):
                match to_host_decoder.decode(payload):
                    case Ping(number):
                        self.outbox.put(Pong(number))
                    case Stop():
                        raise _StopRequested
                    case message:
                        await on_message(message)


def connect(prog: str, argv: Sequence[str] | None = None) -> tuple[GatewayLink, dict[str, Any]]:
    """Meet the gateway that started this process: the link to it, and the options that it gave."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--socket", required=True)
    path = parser.parse_args(argv).socket
    options = json.loads(sys.stdin.read())
    apply_default_environment()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)
    link = GatewayLink(connection)
    threading.Thread(target=link.watch, name="gateway-watch", daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: _kill_own_group())
    return link, options


def leave(*, is_clean: bool) -> NoReturn:
    """End this process now: unloading torch takes seconds, and nothing is left to do.

    Unless the end was in order, everything that this process started goes along.
    """
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody may be reading any more
            output.flush()
    if not is_clean:
        _kill_own_group()
    os._exit(0)


def _kill_own_group() -> NoReturn:
    """End this process and everything that it started, if it leads its process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _reason(error: Exception) -> str:
    """An error of the start for the operator."""
    return f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARS]

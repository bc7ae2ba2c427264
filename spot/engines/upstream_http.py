"""HTTP with an upstream: one session per engine, and one exchange per generation.

An exchange that is cancelled closes its connection, which is how an upstream hears of an abort.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import anyio

from spot.engines.event_stream import EventStream, EventTooLarge
from spot.engines.upstream_answers import AnswerReader
from spot.engines.upstream_config import UpstreamConfig
from spot.engines.upstream_errors import error_from_response
from spot.engines.upstream_protocol import UpstreamRequest
from spot.engines.upstream_via import via_headers
from spot.errors import EngineFailed, EngineUnavailable
from spot.generation import TokenDelta

# uvicorn closes connections that were idle for 5 s. Ours go first, so that no request meets one
# that is just being closed.
_IDLE_CONNECTION_S = 2.0
_FAREWELL_S = 1.0
_MAX_ERROR_BYTES = 64 * 1024
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 20, 5, 4


class NoAnswer(Exception):
    """The upstream could not be reached, was too slow, or answered something else than 200.

    status: of its answer, or None if there was none. is_late: it did not answer in time.
    """

    def __init__(self, message: str, *, status: int | None = None, is_late: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.is_late = is_late


def open_session(config: UpstreamConfig) -> aiohttp.ClientSession:
    """A session without a limit of connections. Called on the event loop; the caller closes it."""
    headers = {"Accept-Encoding": "identity", **config.headers}
    if config.api_key is not None:
        headers["Authorization"] = f"Bearer {config.api_key}"
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=_IDLE_CONNECTION_S, socket_factory=_keepalive_socket
    )
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
    )


def _keepalive_socket(address: Any) -> socket.socket:
    """A socket that notices within a minute that the other machine is gone."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
    ):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made


async def exchange(
    session: aiohttp.ClientSession,
    config: UpstreamConfig,
    request: UpstreamRequest,
    reader: AnswerReader,
    on_delta: Callable[[TokenDelta], None],
    *,
    via: Sequence[str] = (),
    is_constrained: bool = False,
) -> None:
    """Send one generation and hand on its deltas, to the last. via: where it has been before.

    Raises InvalidRequest, EngineUnavailable (nothing was generated) or EngineFailed.
    """
    try:
        response = await _post(session, config, request, via)
        async with response:
            if response.status != 200:
                body = await _read(response, _MAX_ERROR_BYTES)
                raise error_from_response(response.status, body, is_constrained=is_constrained)
            if request.is_streamed:
                await _follow(response, config, reader, on_delta)
            else:
                with anyio.fail_after(config.response_timeout_s):
                    body = await _read(response, config.max_answer_bytes)
                delta = reader.read(body)
                on_delta(reader.end() if delta is None else delta)
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise EngineUnavailable("the upstream cannot be reached") from error
    except TimeoutError as error:
        raise EngineFailed("the upstream did not answer in time") from error
    except EventTooLarge as error:
        raise EngineFailed(f"the upstream's answer is too large: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineFailed("the connection to the upstream was lost") from error


async def _post(
    session: aiohttp.ClientSession,
    config: UpstreamConfig,
    request: UpstreamRequest,
    via: Sequence[str],
) -> aiohttp.ClientResponse:
    with anyio.fail_after(config.response_timeout_s):
        return await session.post(
            config.base_url + request.path,
            data=request.body,
            headers={"Content-Type": "application/json", **via_headers(via, config.own_instance)},
            allow_redirects=False,
        )


async def _follow(
    response: aiohttp.ClientResponse,
    config: UpstreamConfig,
    reader: AnswerReader,
    on_delta: Callable[[TokenDelta], None],
) -> None:
    stream = EventStream(config.max_answer_bytes)
    async for received in response.content.iter_any():
        for event in stream.feed(received):
            delta = None if reader.is_complete else reader.read(event)
            if delta is not None:
                on_delta(delta)
        if reader.is_complete:
            await _read_to_end(response)
            return
    on_delta(reader.end())


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    """Pass over the end marker, so that the connection can be used again."""
    with anyio.move_on_after(_FAREWELL_S):
        async for _ in response.content.iter_any():
            pass


async def get(
    session: aiohttp.ClientSession,
    config: UpstreamConfig,
    path: str,
    *,
    timeout_s: float,
    max_bytes: int = 1024 * 1024,
) -> bytes:
    """The body of a 200. Raises NoAnswer."""
    try:
        with anyio.fail_after(timeout_s):
            async with session.get(config.base_url + path, allow_redirects=False) as response:
                if response.status != 200:
                    raise NoAnswer(f"{path} answered {response.status}", status=response.status)
                return await _read(response, max_bytes)
    except TimeoutError as error:
        raise NoAnswer(f"no answer within {timeout_s:g} s", is_late=True) from error
    except EventTooLarge as error:
        raise NoAnswer(str(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        raise NoAnswer(str(error) or type(error).__name__) from error


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The whole body. Raises EventTooLarge."""
    body = bytearray()
    async for received in response.content.iter_any():
        body += received
        if len(body) > max_bytes:
            raise EventTooLarge(f"a body is longer than {max_bytes} bytes")
    return bytes(body)

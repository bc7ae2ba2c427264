"""HTTP to where workflows may go.

A name is resolved here, each of its addresses is judged, and the connection goes to one that was
found good: there is no second resolution that could say something else. Redirects are followed
here too, each as a new target; what the caller's headers and body hold goes to no other origin.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import anyio
from aiohttp.abc import AbstractResolver, ResolveResult
from multidict import CIMultiDict
from yarl import URL

from workflows.outbound.addresses import AddressPolicy, parse_address
from workflows.outbound.errors import (
    Broken,
    OutboundError,
    Refused,
    TooLarge,
    TooManyRedirects,
    TooSlow,
    Unreachable,
)

Resolve = Callable[[str], Awaitable[list[str]]]

MAX_URL_CHARS: Final = 8192
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_READ_BYTES: Final = 64 * 1024
_IDLE_CONNECTION_S: Final = 4.0
# Of the caller's headers, those that another origin may see.
_HARMLESS: Final = frozenset({"accept", "accept-language", "user-agent"})
# They are the connection's business.
_OURS: Final = frozenset(
    {
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundRequest:
    """timeout_s: for everything, redirects included. max_bytes: of the answer's body, unpacked."""

    url: str
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    timeout_s: float = 30.0
    max_bytes: int = 5 * 1024 * 1024
    max_redirects: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboundAnswer:
    """url: that answered in the end. headers: by lower-case name, several joined with commas."""

    url: str
    status: int
    headers: dict[str, str]
    body: bytes
    charset: str


class OutboundClient:
    """An async context manager. Connections are kept a few seconds for the next request.

    resolve: all addresses of a name; by default the system's way.
    """

    def __init__(
        self, policy: AddressPolicy, *, resolve: Resolve | None = None, max_connections: int = 200
    ) -> None:
        self._policy = policy
        self._resolve = resolve or _system_resolve
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        session, self._session = self._session, None
        if session is not None:
            with anyio.CancelScope(shield=True):
                await session.close()

    async def send(self, request: OutboundRequest) -> OutboundAnswer:
        """The answer, whatever its status. Raises OutboundError."""
        try:
            with anyio.fail_after(request.timeout_s):
                return await self._follow(request)
        except TimeoutError:
            raise TooSlow(f"there was no whole answer within {request.timeout_s:g} s") from None

    async def _follow(self, request: OutboundRequest) -> OutboundAnswer:
        url, method, body = _checked_url(request.url), request.method.upper(), request.body
        headers = _checked_headers(request.headers)
        for _ in range(request.max_redirects + 1):
            answer = await self._exchange(url, method, headers, body, request.max_bytes)
            location = answer.headers.get("location")
            if answer.status not in _REDIRECTS or location is None:
                return answer
            target = _next_url(url, location)
            if answer.status == 303 or (answer.status in (301, 302) and method == "POST"):
                method, body = ("HEAD" if method == "HEAD" else "GET"), None
                headers = _without_body(headers)
            if target.origin() != url.origin():
                if body is not None:
                    raise Refused(
                        f"{_shown(url)} leads to another host, {_shown(target)}, which must not "
                        "get the body; send it there yourself if it should"
                    )
                headers = {
                    name: value for name, value in headers.items() if name.lower() in _HARMLESS
                }
            url = target
        raise TooManyRedirects(
            f"more than {request.max_redirects} redirects, the last to {_shown(url)}"
        )

    async def _exchange(
        self, url: URL, method: str, headers: dict[str, str], body: bytes | None, max_bytes: int
    ) -> OutboundAnswer:
        self._check_literal(url)
        try:
            async with self._opened().request(
                method, url, headers=headers, data=body, allow_redirects=False
            ) as response:
                return OutboundAnswer(
                    url=str(response.url),
                    status=response.status,
                    headers=_joined(response.headers),
                    body=await _read(response, max_bytes),
                    charset=response.charset or "utf-8",
                )
        except _RefusedAddress as error:
            raise Refused(str(error)) from None
        except aiohttp.ClientConnectorError as error:
            raise _connection_error(url, error) from None
        except (aiohttp.InvalidURL, ValueError) as error:
            raise Refused(f"this is no request that can be sent: {error}") from None
        except (aiohttp.ClientError, OSError) as error:
            words = str(error) or type(error).__name__
            raise Broken(f"the exchange with {_shown(url)} broke off: {words}") from None

    def _check_literal(self, url: URL) -> None:
        """Judge a host that is an address; names are judged by the resolver."""
        host = url.host or ""
        address = parse_address(host)
        if address is not None and not self._policy.allows(host, address):
            raise Refused(_refusal(host))

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=_JudgingResolver(self._policy, self._resolve),
                use_dns_cache=False,
                limit=self._max_connections,
                limit_per_host=max(1, self._max_connections // 4),  # a slow one leaves room
                keepalive_timeout=_IDLE_CONNECTION_S,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                headers={"User-Agent": "shuntyard"},
                trust_env=False,
                raise_for_status=False,
            )
        return self._session


class _RefusedAddress(OSError):
    """All addresses of a name are refused."""


class _JudgingResolver(AbstractResolver):
    """Gives the connector the good addresses of a name, and it connects to one of these."""

    def __init__(self, policy: AddressPolicy, resolve: Resolve) -> None:
        self._policy = policy
        self._resolve = resolve

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        good: list[ResolveResult] = []
        found = await self._resolve(host)
        for text in found:
            address = parse_address(text)
            if address is None or not self._policy.allows(host, address):
                continue
            good.append(
                ResolveResult(
                    hostname=host,
                    host=text,
                    port=port,
                    family=socket.AF_INET6 if address.version == 6 else socket.AF_INET,
                    proto=socket.IPPROTO_TCP,
                    flags=socket.AI_NUMERICHOST,
                )
            )
        if found and not good:
            raise _RefusedAddress(_refusal(host))
        if not good:
            raise OSError(f"the name {host} has no address")
        return good

    async def close(self) -> None:
        """There is nothing to close."""


async def _system_resolve(host: str) -> list[str]:
    found = await anyio.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _checked_url(text: str) -> URL:
    """Raises Refused."""
    if len(text) > MAX_URL_CHARS:
        raise Refused(f"the URL is longer than {MAX_URL_CHARS} characters")
    if "\\" in text or any(one < " " or one == "\x7f" for one in text):
        raise Refused("the URL holds a backslash or a control character")
    try:
        url = URL(text)
    except (ValueError, TypeError) as error:
        raise Refused(f"this is no URL: {error}") from None
    if url.scheme not in ("http", "https"):
        raise Refused(f"only http and https are allowed, not {url.scheme[:20] or 'no scheme'!r}")
    if not url.host:
        raise Refused("the URL names no host")
    if url.user is not None or url.password is not None:
        raise Refused("put credentials into a header, not into the URL")
    return url.with_fragment(None)


def _next_url(url: URL, location: str) -> URL:
    try:
        return _checked_url(str(url.join(URL(location))))
    except ValueError:
        raise Broken(f"{_shown(url)} leads to what is no URL") from None


def _checked_headers(headers: Mapping[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if name.lower() in _OURS:
            raise Refused(f"the header {name!r} is set here")
        is_token = (
            bool(name) and name.isascii() and all(one.isalnum() or one in _TOKEN for one in name)
        )
        if not is_token or any(one in value for one in "\r\n\0"):
            raise Refused(f"the header {name[:64]!r} cannot be sent")
    return dict(headers)


_TOKEN: Final = "!#$%&'*+-.^_`|~"


def _without_body(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() != "content-type"}


def _joined(headers: Mapping[str, str]) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, value in CIMultiDict(headers).items():
        key = name.lower()
        joined[key] = f"{joined[key]}, {value}" if key in joined else value
    return joined


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_chunked(_READ_BYTES):
        size += len(chunk)
        if size > max_bytes:
            response.close()
            raise TooLarge(f"the answer of {_shown(response.url)} is over {max_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _connection_error(url: URL, error: aiohttp.ClientConnectorError) -> OutboundError:
    cause = error.os_error
    if isinstance(cause, _RefusedAddress):
        return Refused(str(cause))
    words = cause.strerror or str(cause) or type(cause).__name__
    return Unreachable(f"there is no connection to {_shown(url)}: {words}")


def _refusal(host: str) -> str:
    return (
        f"{host[:200]} is not on the public internet; the server's operator can allow it with "
        "--workflow-http-allow"
    )


def _shown(url: URL | Any) -> str:
    """Without what may be secret."""
    return str(URL(url).with_query(None))[:200]

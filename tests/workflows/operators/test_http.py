"""The http operator against a real server, and where it must not go."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
from aiohttp import web

from tests.workflows.local_http import LocalHttp, local_http
from tests.workflows.pooling_fakes import context
from workflows.errors import NodeFailed
from workflows.operators.http import HttpOperator, HttpParams
from workflows.outbound.addresses import AddressPolicy
from workflows.outbound.client import OutboundClient

pytestmark = pytest.mark.anyio

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


async def _serve(request: web.BaseRequest) -> web.StreamResponse:
    kind, _, rest = request.path.removeprefix("/").partition("/")
    match kind:
        case "status":
            return web.Response(status=int(rest), text="why not")
        case "json":
            return web.json_response({"path": request.path_qs})
        case "to":
            code, _, _ = rest.partition("/")
            target = request.rel_url.query["target"]
            return web.Response(status=int(code), headers={"Location": target})
        case "loop":
            return web.Response(status=302, headers={"Location": f"/loop/{len(rest)}x"})
        case "large":
            return web.Response(body=b"x" * 100_000)
        case "bomb":
            packed = gzip.compress(b"\0" * 30_000_000)
            return web.Response(body=packed, headers={"Content-Encoding": "gzip"})
        case "endless":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"x" * 1000)
                await anyio.sleep(0.01)
        case "slow":
            await anyio.sleep(30)
        case "cut":
            assert request.transport is not None
            request.transport.abort()
    return web.Response(text="hello")


@pytest.fixture
async def server() -> AsyncIterator[LocalHttp]:
    async with local_http(_serve) as server:
        yield server


class Client:
    """Sends by the operator, with the names and the policy of a test."""

    def __init__(self, *allowed: str, names: dict[str, list[str]] | None = None) -> None:
        self.asked: list[str] = []
        self._names = names or {}
        self._policy = AddressPolicy.parse(allowed)

    async def _resolve(self, host: str) -> list[str]:
        self.asked.append(host)
        return self._names.get(host, [])

    async def send(self, **params: Any) -> dict[str, Any]:
        async with OutboundClient(self._policy, resolve=self._resolve) as client:
            operator = HttpOperator(client)
            result = await operator.run(HttpParams.model_validate(params), context())
            return result.output

    async def fails(self, **params: Any) -> NodeFailed:
        with pytest.raises(NodeFailed) as caught:
            await self.send(**params)
        return caught.value


@pytest.fixture
def local() -> Client:
    """May go to the loopback address."""
    return Client("127.0.0.1")


async def test_an_answer_with_all_its_parts(local: Client, server: LocalHttp) -> None:
    output = await local.send(url=server.url("/json?a=1"), query={"b": "x y", "c": True})
    assert output["status"] == 200
    assert output["json"] == {"path": "/json?a=1&b=x+y&c=true"}
    assert output["headers"]["content-type"].startswith("application/json")
    assert (await local.send(url=server.url()))["body"] == "hello"


async def test_bodies_and_headers_are_sent(local: Client, server: LocalHttp) -> None:
    await local.send(
        url=server.url(), method="POST", json={"a": [1]}, headers={"Authorization": "Bearer x"}
    )
    await local.send(url=server.url(), method="PUT", body="text", headers={"content-type": "a/b"})
    (_, _, first, body), (_, _, second, text) = server.requests
    assert (first["content-type"], body) == ("application/json", b'{"a":[1]}')
    assert first["authorization"] == "Bearer x"
    assert (second["content-type"], text) == ("a/b", b"text")


async def test_writes_carry_the_nodes_key(local: Client, server: LocalHttp) -> None:
    await local.send(url=server.url(), method="POST")
    await local.send(url=server.url(), method="POST", headers={"idempotency-key": "mine"})
    await local.send(url=server.url())
    keys = [headers.get("idempotency-key") for _, _, headers, _ in server.requests]
    assert keys == ["run_1:n", "mine", None]


@pytest.mark.parametrize(
    ("path", "params", "code", "is_retryable"),
    [
        ("/status/404", {}, "http_status", False),
        ("/status/400", {"method": "PUT"}, "http_status", False),
        ("/status/503", {}, "http_status", True),
        ("/status/429", {}, "http_status", True),
        ("/status/503", {"method": "POST"}, "http_status", False),
        ("/status/503", {"method": "POST", "idempotent": True}, "http_status", True),
        (
            "/status/503",
            {"method": "POST", "headers": {"Idempotency-Key": "k"}},
            "http_status",
            True,
        ),
        ("/", {"expect": {"status": [204]}}, "http_status", False),
        ("/", {"expect": {"json": True}}, "not_json", False),
        ("/slow", {"timeout_s": 0.1}, "timeout", True),
        ("/slow", {"timeout_s": 0.1, "method": "POST"}, "timeout", False),
        ("/endless", {"timeout_s": 0.1}, "timeout", True),
        ("/cut", {}, "connection_lost", True),
        ("/cut", {"method": "PATCH"}, "connection_lost", False),
        ("/large", {"max_bytes": 99_999}, "too_large", False),
        ("/bomb", {}, "too_large", False),
        ("/loop/", {}, "too_many_redirects", False),
    ],
)
async def test_failures(
    local: Client,
    server: LocalHttp,
    path: str,
    params: dict[str, Any],
    code: str,
    is_retryable: bool,
) -> None:
    failure = await local.fails(url=server.url(path), **params)
    assert (failure.code, failure.is_retryable) == (code, is_retryable), failure.message


async def test_an_expected_status_is_success(local: Client, server: LocalHttp) -> None:
    output = await local.send(url=server.url("/status/404"), expect={"status": [200, 404]})
    assert (output["status"], output["body"], output["json"]) == (404, "why not", None)


async def test_where_nothing_listens_anything_may_be_tried_again(local: Client) -> None:
    failure = await local.fails(url="http://127.0.0.1:9/", method="POST")
    assert (failure.code, failure.is_retryable) == ("unreachable", True)
    failure = await local.fails(url="http://nowhere.test/")
    assert (failure.code, failure.is_retryable) == ("unreachable", True)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/",
        "http://127.1:{port}/",
        "http://0.0.0.0:{port}/",
        "http://0:{port}/",
        "http://2130706433:{port}/",
        "http://0x7f000001:{port}/",
        "http://0x7f.0.0.1:{port}/",
        "http://0177.0.0.1:{port}/",
        "http://017700000001:{port}/",
        "http://127.0.0.1.:{port}/",
        "http://[::1]:{port}/",
        "http://[::ffff:127.0.0.1]:{port}/",
        "http://[::ffff:7f00:1]:{port}/",
        "http://[0:0:0:0:0:ffff:127.0.0.1]:{port}/",
        "http://[::127.0.0.1]:{port}/",
        "http://[64:ff9b::7f00:1]:{port}/",
        "http://[fe80::1%25lo]:{port}/",
        "http://①②⑦.⓪.⓪.①:{port}/",
        "http://127。0。0。1:{port}/",
        "http://localhost:{port}/",
        "http://LOCALHOST.:{port}/",
        "http://localhost.localdomain:{port}/",
        "http://ok@127.0.0.1:{port}/",
        "http://8.8.8.8@127.0.0.1:{port}/",
        "http://127.0.0.1:{port}\\@8.8.8.8/",
        "http:///127.0.0.1:{port}/",
        "http://%31%32%37.0.0.1:{port}/",
        "http://127.0.0.1%00.example.org:{port}/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[fd00:ec2::254]/latest/meta-data/",
        "file:///etc/passwd",
        "ftp://127.0.0.1/",
        "gopher://127.0.0.1:{port}/_x",
        "unix:///var/run/docker.sock",
        "//127.0.0.1:{port}/",
        "127.0.0.1:{port}",
        "http://",
        "http://127.0.0.1:99999/",
        "http://[::1/",
    ],
)
async def test_no_spelling_leads_inside(server: LocalHttp, url: str) -> None:
    """With names resolved as the system does it, numbers in odd bases included."""
    client = OutboundClient(AddressPolicy())
    params = HttpParams(url=url.replace("{port}", str(server.port)), timeout_s=5)
    async with client:
        with pytest.raises(NodeFailed) as caught:
            await HttpOperator(client).run(params, context())
    assert caught.value.code in ("refused", "unreachable"), caught.value.message
    assert server.requests == []


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1"],
        ["::1"],
        ["::ffff:127.0.0.1"],
        ["10.0.0.1", "127.0.0.1"],
        ["169.254.169.254"],
        ["fe80::1%lo"],
    ],
)
async def test_a_name_that_leads_inside_is_refused(server: LocalHttp, addresses: list[str]) -> None:
    client = Client(names={"evil.test": addresses})
    failure = await client.fails(url=server.url(host="evil.test"))
    assert (failure.code, failure.is_retryable) == ("refused", False)
    assert "--workflow-http-allow" in failure.message
    assert server.requests == []


async def test_the_address_that_was_judged_is_the_one_that_is_connected_to(
    server: LocalHttp,
) -> None:
    """A name that leads elsewhere when it is asked for again is not asked for again."""
    client = Client("127.0.0.1", names={"rebinds.test": ["10.0.0.1", "127.0.0.1"]})
    output = await client.send(url=server.url("/json", host="rebinds.test"))
    assert output["status"] == 200
    assert client.asked == ["rebinds.test"]
    assert server.requests[0][2]["host"] == f"rebinds.test:{server.port}"


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_a_redirect_inside_is_refused(server: LocalHttp, code: int) -> None:
    client = Client("good.test", names={"good.test": ["127.0.0.1"], "evil.test": ["127.0.0.1"]})
    for target in (
        server.url("/inside"),
        f"http://[::1]:{server.port}/inside",
        server.url("/inside", host="evil.test"),
        "file:///etc/passwd",
    ):
        failure = await client.fails(
            url=server.url(f"/to/{code}", host="good.test"), query={"target": target}
        )
        assert failure.code == "refused", target
    assert all(path.startswith("/to/") for path in server.paths)


async def test_redirects_on_one_host_keep_everything(local: Client, server: LocalHttp) -> None:
    await local.send(
        url=server.url("/to/307"),
        query={"target": "/json"},
        method="POST",
        body="x",
        headers={"Authorization": "secret"},
    )
    method, _, headers, body = server.requests[-1]
    assert (method, body, headers["authorization"]) == ("POST", b"x", "secret")
    await local.send(url=server.url("/to/303"), query={"target": "/json"}, method="POST", body="x")
    method, _, headers, body = server.requests[-1]
    assert (method, body) == ("GET", b"")


async def test_another_host_gets_no_credentials_and_no_body(server: LocalHttp) -> None:
    client = Client("*.test", names={"one.test": ["127.0.0.1"], "two.test": ["127.0.0.1"]})
    headers = {
        "Authorization": "secret",
        "Cookie": "secret",
        "X-Api-Key": "secret",
        "Accept": "text/plain",
    }
    there = server.url("/json", host="two.test")
    await client.send(
        url=server.url("/to/302", host="one.test"), query={"target": there}, headers=headers
    )
    _, path, seen, _ = server.requests[-1]
    assert path == "/json"
    assert seen["accept"] == "text/plain"
    assert "secret" not in seen.values()
    failure = await client.fails(
        url=server.url("/to/307", host="one.test"),
        query={"target": there},
        method="POST",
        body="secret",
    )
    assert (failure.code, server.requests[-1][1].split("?")[0]) == ("refused", "/to/307")


async def test_requests_that_would_not_be_one_are_refused(local: Client, server: LocalHttp) -> None:
    for headers in (
        {"Host": "other"},
        {"Content-Length": "5"},
        {"Transfer-Encoding": "chunked"},
        {"X": "a\r\nY: b"},
        {"X\r\nY": "a"},
        {"": "a"},
        {"a b": "c"},
    ):
        failure = await local.fails(url=server.url(), headers=headers)
        assert failure.code == "refused", headers
    failure = await local.fails(url=server.url("/ HTTP/1.1\r\nX: y"))
    assert failure.code == "refused"
    assert server.requests == []


async def test_no_proxy_of_the_environment_is_used(
    local: Client, server: LocalHttp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert (await local.send(url=server.url()))["status"] == 200


async def test_cookies_are_not_kept(local: Client, server: LocalHttp) -> None:
    async with OutboundClient(AddressPolicy.parse(["127.0.0.1"])) as client:
        for _ in range(2):
            await HttpOperator(client).run(HttpParams(url=server.url()), context())
    assert all("cookie" not in headers for _, _, headers, _ in server.requests)


def test_parameters_that_exclude_each_other() -> None:
    for wrong in (
        {"body": "a", "json": 1},
        {"json": None, "body": ""},
        {"method": "GET", "body": "a"},
        {"method": "TRACE"},
        {"method": "CONNECT"},
        {"timeout_s": 0},
        {"json_body": 1},
    ):
        with pytest.raises(ValueError, match="validation error"):
            HttpParams.model_validate({"url": "http://a", "method": "POST", **wrong})


@pytest.mark.parametrize(
    ("method", "is_shared"),
    [("GET", True), ("HEAD", True), ("OPTIONS", True), ("POST", False), ("DELETE", False)],
)
def test_only_reading_is_shared(method: str, is_shared: bool) -> None:
    operator = HttpOperator(OutboundClient(AddressPolicy()))
    identity = operator.identity(HttpParams.model_validate({"url": "http://a", "method": method}))
    assert (identity is not None) == is_shared

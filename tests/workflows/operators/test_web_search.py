"""The web_search operator and its connector, against a server that answers like SearXNG."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from tests.workflows.local_http import LocalHttp, local_http
from tests.workflows.pooling_fakes import context
from workflows.errors import NodeFailed
from workflows.operators.web_search import WebSearchOperator, WebSearchParams
from workflows.outbound.addresses import AddressPolicy
from workflows.outbound.client import OutboundClient
from workflows.web_search import SearxngSearch

pytestmark = pytest.mark.anyio


async def search(answer: Any, **params: Any) -> tuple[dict[str, Any], LocalHttp]:
    """answer: what the engine says for page N, a response or a list of results."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        found = answer(int(request.rel_url.query["pageno"]))
        return found if isinstance(found, web.Response) else web.json_response({"results": found})

    async with (
        local_http(handler) as server,
        OutboundClient(AddressPolicy.parse(["127.0.0.1"])) as client,
    ):
        operator = WebSearchOperator(SearxngSearch(server.url("/sub/"), client))
        checked = WebSearchParams.model_validate({"query": "cats & dogs", **params})
        return (await operator.run(checked, context())).output, server


def page(number: int) -> list[dict[str, Any]]:
    return [
        {"title": f"T{number}.{place}", "url": f"http://x/{number}/{place}", "content": "text"}
        for place in range(4)
    ]


async def test_results_come_in_the_engines_order() -> None:
    output, server = await search(page, count=3, language="de", time_range="week")
    assert output["results"] == [
        {"title": f"T1.{place}", "url": f"http://x/1/{place}", "snippet": "text"}
        for place in range(3)
    ]
    assert output["texts"][0] == "T1.0\ntext"
    assert server.paths == [
        "/sub/search?q=cats+%26+dogs&format=json&pageno=1&language=de&time_range=week"
    ]


async def test_pages_are_turned_until_there_are_enough() -> None:
    output, server = await search(page, count=7)
    assert [one["url"] for one in output["results"]][3:5] == ["http://x/1/3", "http://x/2/0"]
    assert (len(output["results"]), len(server.paths)) == (7, 2)


async def test_an_engine_that_has_no_more_is_not_asked_on() -> None:
    output, server = await search(lambda _: page(1), count=50)
    assert (len(output["results"]), len(server.paths)) == (4, 2)
    output, _ = await search(lambda _: [{"title": None, "url": "u"}, {"url": ""}])
    assert output["results"] == [{"title": "", "url": "u", "snippet": ""}]


@pytest.mark.parametrize(
    ("answer", "is_retryable", "words"),
    [
        (lambda: web.Response(status=403), False, "search.formats"),
        (lambda: web.Response(status=429), True, "429"),
        (lambda: web.Response(status=502), True, "502"),
        (lambda: web.Response(status=404), False, "404"),
        (lambda: web.Response(text="<html>"), False, "JSON API"),
        (lambda: web.json_response([1]), False, "JSON API"),
        (lambda: web.json_response({"results": [1]}), False, "JSON API"),
    ],
)
async def test_failures(answer: Any, is_retryable: bool, words: str) -> None:
    with pytest.raises(NodeFailed) as caught:
        await search(lambda _: answer())
    assert caught.value.code == "search_failed"
    assert caught.value.is_retryable == is_retryable
    assert words in caught.value.message


async def test_without_an_engine_it_says_how_to_get_one() -> None:
    with pytest.raises(NodeFailed, match="--searxng-url") as caught:
        await WebSearchOperator(None).run(WebSearchParams(query="x"), context())
    assert (caught.value.code, caught.value.is_retryable) == ("not_configured", False)

"""Embeddings, rerank and scores over HTTP, with a pooling engine that computes nothing."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
import numpy as np
import pytest

from server.endpoints.pooling import pooling_routes
from server.pools import PooledModel, Pools
from server.protocol.responses import EmbeddingList, RerankResponse, ScoreResponse
from spot.engines.base import EngineStatus
from spot.engines.pooling import (
    EmbedResult,
    InputTooLong,
    PoolingCard,
    ScoreResult,
    check_dimensions,
)
from spot.errors import EngineFailed, EngineUnavailable
from tests.harness import Server, serving, until

CARD = PoolingCard("embed", dimension=5, max_model_len=40, vocab_size=1000)
MATRYOSHKA = PoolingCard("embed", dimension=5, max_model_len=40, vocab_size=1000, matryoshka=True)


class FakePooler:
    """Vectors made from lengths; the score of a pair is the share of the query's letters in it.

    A text that says `fail`, `starting` or `hang` is obeyed.
    """

    def __init__(self, card: PoolingCard = CARD) -> None:
        self.card = card
        self.status = EngineStatus("ready")
        self.calls: list[Any] = []
        self.num_running = 0
        self.num_cancelled = 0

    async def embed(
        self,
        inputs: Sequence[str] | Sequence[list[int]],
        *,
        dimensions: int | None = None,
        truncate_to: int | None = None,
    ) -> EmbedResult:
        self.calls.append((list(inputs), truncate_to))
        check_dimensions(self.card, dimensions)
        await self.obey(inputs)
        for index, item in enumerate(inputs):
            if len(item) > self.card.max_model_len and truncate_to is None:
                raise InputTooLong(index=index, num_tokens=len(item), max_model_len=40)
        width = dimensions or self.card.dimension
        rows = [[len(item) / (3 + column) for column in range(width)] for item in inputs]
        return EmbedResult(np.asarray(rows, "<f4"), [len(item) for item in inputs])

    async def score(
        self, pairs: Sequence[tuple[str, str]], *, truncate_to: int | None = None
    ) -> ScoreResult:
        self.calls.append((list(pairs), truncate_to))
        await self.obey([right for _, right in pairs])
        for index, (left, right) in enumerate(pairs):
            if len(left) + len(right) > self.card.max_model_len:
                raise InputTooLong(index=index, num_tokens=99, max_model_len=40)
        scores = [len(set(left) & set(right)) / len(set(left)) for left, right in pairs]
        return ScoreResult(scores, sum(len(left) + len(right) for left, right in pairs))

    async def obey(self, inputs: Sequence[Any]) -> None:
        if "fail" in inputs:
            raise EngineFailed("the model's process ended")
        if "starting" in inputs:
            raise EngineUnavailable("the model is starting: loading the model")
        if "hang" in inputs:
            self.num_running += 1
            try:
                await anyio.sleep_forever()
            finally:
                self.num_running -= 1
                self.num_cancelled += 1


@pytest.fixture(scope="module")
def engine() -> FakePooler:
    return FakePooler()


@pytest.fixture(scope="module")
def server(engine: FakePooler) -> Iterator[Server]:
    """An embedding model only, under two names."""
    pools = Pools(embedding=PooledModel(["embedder", "mini"], engine, created=7))
    with serving(
        further_routes=lambda gateway: pooling_routes(gateway, pools), further_models=pools.cards
    ) as running:
        yield running


@pytest.fixture(scope="module")
def full_server() -> Iterator[Server]:
    """An embedding model that can be cut short, and a cross-encoder."""
    pools = Pools(
        embedding=PooledModel(["embedder"], FakePooler(MATRYOSHKA)),
        rerank=PooledModel(["ranker"], FakePooler()),
    )
    with serving(further_routes=lambda gateway: pooling_routes(gateway, pools)) as running:
        yield running


@pytest.fixture(scope="module")
def bare_server() -> Iterator[Server]:
    """No pooling model."""
    with serving(further_routes=lambda gateway: pooling_routes(gateway, Pools())) as running:
        yield running


def embed(server: Server, value: Any, **fields: Any) -> Any:
    response = server.post("/v1/embeddings", {"input": value, "model": "embedder", **fields})
    assert response.status_code == 200, response.text
    EmbeddingList.model_validate(response.json(), strict=True)
    return response.json()


def refused(server: Server, path: str, body: Any) -> tuple[int, Any]:
    response = server.post(path, body)
    return response.status_code, response.json()["error"]


def test_embeddings_have_openais_shape(server: Server) -> None:
    answer = embed(server, ["a", "bcd"])
    assert list(answer) == ["object", "data", "model", "usage"]
    assert [(item["index"], len(item["embedding"])) for item in answer["data"]] == [(0, 5), (1, 5)]
    assert answer["model"] == "embedder"
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


def test_base64_is_exactly_the_float_form(server: Server) -> None:
    texts = ["x" * length for length in range(1, 30)]
    floats = embed(server, texts)["data"]
    encoded = embed(server, texts, encoding_format="base64")["data"]
    for number, text in zip(floats, encoded, strict=True):
        decoded = np.frombuffer(base64.b64decode(text["embedding"]), "<f4")
        assert decoded.tolist() == number["embedding"]


def test_the_official_client_decodes_its_default(server: Server) -> None:
    answer = server.openai().embeddings.create(model="mini", input=["ab", "c"])
    assert answer.model == "mini"
    assert answer.data[0].embedding == embed(server, "ab")["data"][0]["embedding"]


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
    ids=str,
)
def test_every_form_of_input_is_taken(
    server: Server, engine: FakePooler, value: Any, inputs: Any
) -> None:
    answer = embed(server, value)
    assert engine.calls[-1] == (inputs, None)
    assert len(answer["data"]) == len(inputs)


def test_many_inputs_keep_their_order(server: Server) -> None:
    texts = ["x" * (1 + position % 37) for position in range(2048)]
    answer = embed(server, texts)
    firsts = [item["embedding"][0] for item in answer["data"]]
    assert firsts == [float(np.float32(len(text) / 3)) for text in texts]
    assert [item["index"] for item in answer["data"]] == list(range(2048))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/v1/embeddings/"])
def test_model_may_be_left_out(server: Server, path: str) -> None:
    response = server.post(path, {"input": "a", "encoding_format": None, "user": "me", "odd": 1})
    assert response.json()["model"] == "embedder"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input.0"),
        ({"input": [[]]}, "input.0"),
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": ["a", 1]}, "input.1"),
        ({"input": [1, "a"]}, "input.1"),
        ({"input": [[1], "a"]}, "input.1"),
        ({"input": [True]}, "input.0"),
        ({"input": [-1]}, "input.0"),
        ({"input": "a", "encoding_format": "md5"}, "encoding_format"),
        ({"input": "a", "encoding_format": 1}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "3"}, "dimensions"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "model": 3}, "model"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "a", "endianness": "big"}, "endianness"),
        ({"input": "a", "use_activation": False}, "use_activation"),
        ({"input": "a", "padding": "max_length"}, "padding"),
        ({"input": "x" * 41}, "input"),
        ({"input": ["a", "x" * 41]}, "input.1"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_embedding_request_names_the_field(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    status, error = refused(server, "/v1/embeddings", fields)
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 4000
    assert error["param"] == param


def test_vllms_options_that_change_nothing_are_taken(server: Server) -> None:
    options = {"embed_dtype": "float32", "endianness": "little", "use_activation": True}
    body = {"input": "a", "padding": "do_not_pad", **options}
    assert server.post("/v1/embeddings", body).status_code == 200


def test_an_input_beyond_the_context_says_how_long_it_may_be(server: Server) -> None:
    _, error = refused(server, "/v1/embeddings", {"input": "x" * 41})
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 40 tokens" in error["message"]
    assert embed(server, "x" * 41, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 41


def test_dimensions_need_a_model_made_for_it(server: Server, full_server: Server) -> None:
    status, error = refused(server, "/v1/embeddings", {"input": "a", "dimensions": 3})
    assert (status, error["code"]) == (400, "unsupported_value")
    assert "matryoshka" in error["message"]
    assert len(embed(server, "a", dimensions=5)["data"][0]["embedding"]) == 5
    assert len(embed(full_server, "a", dimensions=3)["data"][0]["embedding"]) == 3
    assert refused(full_server, "/v1/embeddings", {"input": "a", "dimensions": 6})[0] == 400


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [("fail", 500, "engine_failed"), ("starting", 503, "engine_unavailable")],
)
def test_engine_errors_have_their_status(server: Server, text: str, status: int, code: str) -> None:
    found, error = refused(server, "/v1/embeddings", {"input": text})
    assert (found, error["code"]) == (status, code)


def test_a_client_that_leaves_cancels_its_work(server: Server, engine: FakePooler) -> None:
    before = engine.num_cancelled
    with server.connect() as connection:
        body = b'{"input": "hang"}'
        head = "POST /v1/embeddings HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: engine.num_running == 1)
    until(lambda: engine.num_cancelled == before + 1)
    until(lambda: server.gateway.admission.num_requests == 0)


def test_tokens_and_inputs_are_counted(server: Server) -> None:
    tokens = server.metric("shuntyard_pooling_tokens_total", model_name="embedder")
    inputs = server.metric("shuntyard_pooling_inputs_total", model_name="embedder")
    embed(server, ["abc", "de"])
    assert server.metric("shuntyard_pooling_tokens_total", model_name="embedder") == tokens + 5
    assert server.metric("shuntyard_pooling_inputs_total", model_name="embedder") == inputs + 2


def test_the_list_of_models_has_the_pooling_model(server: Server) -> None:
    cards = {card["id"]: card for card in server.http.get("/v1/models").json()["data"]}
    assert list(cards) == ["demo", "embedder", "mini"]
    assert cards["mini"]["created"] == 7


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_rerank_sorts_by_relevance(server: Server, path: str) -> None:
    body = {"query": "abcd", "documents": ["xyz", {"text": "abcd", "id": 1}, "abx", "bay"]}
    response = server.post(path, body)
    answer = response.json()
    RerankResponse.model_validate(answer, strict=True)
    assert [item["index"] for item in answer["results"]] == [1, 2, 3, 0]
    assert answer["results"][0]["document"] == {"text": "abcd"}
    assert answer["results"][0]["relevance_score"] == 1.0
    assert answer["usage"]["total_tokens"] == 29
    assert answer["model"] == "embedder"


@pytest.mark.parametrize(
    ("fields", "num_results"),
    [({"top_n": 2}, 2), ({"top_n": 0}, 3), ({"top_n": None}, 3), ({"top_n": 9}, 3), ({}, 3)],
    ids=str,
)
def test_top_n_limits_the_results(server: Server, fields: dict[str, Any], num_results: int) -> None:
    body = {"query": "a", "documents": ["a", "b", "c"], **fields}
    assert len(server.post("/v1/rerank", body).json()["results"]) == num_results


def test_documents_can_be_left_out_of_the_answer(server: Server) -> None:
    body = {"query": "a", "documents": ["a"], "return_documents": False}
    assert list(server.post("/v1/rerank", body).json()["results"][0]) == [
        "index",
        "relevance_score",
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "a"}, "documents"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": [1]}, "documents.0"),
        ({"query": "a", "documents": [{"body": "x"}]}, "documents.0.text"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": ["a"], "documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["a", "x" * 40]}, "documents.1"),
        ({"query": "a", "documents": "x" * 40}, "documents"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_wrong_rerank_request_names_the_field(
    server: Server, body: dict[str, Any], param: str
) -> None:
    status, error = refused(server, "/v1/rerank", body)
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "pairs"),
    [
        ({"text_1": "a", "text_2": "b"}, [("a", "b")]),
        ({"text_1": "a", "text_2": ["b", "c"]}, [("a", "b"), ("a", "c")]),
        ({"text_1": ["a"], "text_2": ["b", "c"]}, [("a", "b"), ("a", "c")]),
        ({"text_1": ["a", "d"], "text_2": ["b", "c"]}, [("a", "b"), ("d", "c")]),
        ({"queries": "a", "documents": ["b"]}, [("a", "b")]),
        ({"data_1": "a", "data_2": "b"}, [("a", "b")]),
    ],
    ids=str,
)
def test_scores_are_one_to_many_or_pairwise(
    server: Server, engine: FakePooler, body: dict[str, Any], pairs: list[tuple[str, str]]
) -> None:
    answer = server.post("/v1/score", body).json()
    ScoreResponse.model_validate(answer, strict=True)
    assert engine.calls[-1] == (pairs, None)
    assert [item["index"] for item in answer["data"]] == list(range(len(pairs)))
    assert server.post("/score", body).json()["data"] == answer["data"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"text_1": [], "text_2": "a"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": "a"}, "text_2"),
        ({"text_1": 1, "text_2": "a"}, "text_1"),
        ({"queries": ["a"], "text_2": "a"}, "queries"),
        ({"queries": "a", "documents": ["b", "x" * 40]}, "documents.1"),
    ],
    ids=str,
)
def test_a_wrong_score_request_names_the_field(
    server: Server, body: dict[str, Any], param: str
) -> None:
    status, error = refused(server, "/v1/score", body)
    assert (status, error["param"]) == (400, param)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_model_is_404_and_names_what_there_is(server: Server, path: str) -> None:
    status, error = refused(server, path, {**BODIES[path], "model": "text-embedding-3-small"})
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'embedder'" in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_the_generative_model_is_refused_as_such(server: Server, path: str) -> None:
    status, error = refused(server, path, {**BODIES[path], "model": "demo"})
    assert (status, error["code"], error["param"]) == (400, "not_supported", "model")
    assert "only generates text" in error["message"]
    assert "'embedder'" in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_without_a_pooling_model_the_option_is_named(bare_server: Server, path: str) -> None:
    option = "--embedding-model" if path == "/v1/embeddings" else "--rerank-model"
    for model in (None, "demo"):
        status, error = refused(bare_server, path, {**BODIES[path], "model": model})
        assert (status, error["code"]) == (400, "not_supported")
        assert option in error["message"]
    assert refused(bare_server, path, {**BODIES[path], "model": "other"})[0] == 404


def test_the_cross_encoder_scores_unless_the_embedder_is_named(full_server: Server) -> None:
    body = BODIES["/v1/rerank"]
    assert full_server.post("/v1/rerank", body).json()["model"] == "ranker"
    named = full_server.post("/v1/rerank", {**body, "model": "embedder"})
    assert named.json()["model"] == "embedder"
    status, error = refused(full_server, "/v1/embeddings", {"input": "a", "model": "ranker"})
    assert (status, error["code"]) == (400, "not_supported")
    assert "'embedder'" in error["message"]


def test_a_get_is_answered_with_405(server: Server) -> None:
    response = server.http.get("/v1/embeddings")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")

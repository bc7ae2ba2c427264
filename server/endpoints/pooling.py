"""`POST /v1/embeddings`, `/v1/rerank` and `/v1/score`."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
import orjson
from anyio.lowlevel import checkpoint
from starlette.routing import BaseRoute
from starlette.types import Send

from server.app import post
from server.asgi import JSON_HEADER, send_bytes, send_json
from server.endpoints.base import JsonEndpoint
from server.gateway import Gateway, unix_s
from server.pooling_metrics import PoolingMetrics
from server.pools import PooledModel, Pools
from server.protocol.pooling import EmbeddingRequest, PoolingBody, RerankRequest, ScoreRequest
from server.record import RequestRecord
from spot.engines.pooling import InputTooLong, Vectors
from spot.errors import ContextLengthExceeded, InvalidRequest

_ROWS_AT_ONCE = 64
_SIDES = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))

B = TypeVar("B", bound=PoolingBody)


class _PoolingEndpoint(JsonEndpoint[B], Generic[B]):
    def __init__(self, gateway: Gateway, pools: Pools, metrics: PoolingMetrics) -> None:
        super().__init__(gateway)
        self._pools = pools
        self._metrics = metrics

    def _note(
        self, record: RequestRecord, model: PooledModel, num_inputs: int, num_tokens: int
    ) -> dict[str, int]:
        """Put the work into record and metrics; the usage to answer with."""
        record.num_prompt_tokens = num_tokens
        self._metrics.count(model, num_inputs=num_inputs, num_tokens=num_tokens)
        return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


class Embeddings(_PoolingEndpoint[EmbeddingRequest]):
    """Texts or token ids to vectors, as OpenAI has it."""

    body_type = EmbeddingRequest

    async def answer(
        self, body: EmbeddingRequest, raw: dict[str, Any], record: RequestRecord, send: Send
    ) -> None:
        model, name = self._pools.for_embedding(body.model, self.gateway.model.names)
        record.model = name
        inputs = body.inputs
        with _faults_of("input", is_list=len(inputs) > 1):
            result = await model.engine.embed(
                inputs, dimensions=body.dimensions, truncate_to=body.truncate_prompt_tokens
            )
        usage = self._note(record, model, len(inputs), sum(result.num_tokens))
        data = await _embedding_list(result.vectors, as_base64=body.encoding_format == "base64")
        answer = {
            "object": "list",
            "data": orjson.Fragment(data),
            "model": name,
            "usage": usage,
        }
        await send_bytes(send, 200, orjson.dumps(answer), headers=[JSON_HEADER])


async def _embedding_list(vectors: Vectors, *, as_base64: bool) -> bytes:
    """The JSON array of `data`. Lets others run between parts: it may be many megabytes.

    Numbers are written so that they are exactly the float32 values of the base64 form.
    """
    items: list[bytes] = []
    for index, row in enumerate(vectors):
        if index % _ROWS_AT_ONCE == _ROWS_AT_ONCE - 1:
            await checkpoint()
        embedding: Any
        if as_base64:
            embedding = base64.b64encode(row.astype("<f4").tobytes()).decode("ascii")
        else:
            embedding = row.astype(np.float64)
        item = {"object": "embedding", "index": index, "embedding": embedding}
        items.append(orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY))
    return b"[" + b",".join(items) + b"]"


class Rerank(_PoolingEndpoint[RerankRequest]):
    """Documents in the order of their relevance to a query."""

    body_type = RerankRequest

    async def answer(
        self, body: RerankRequest, raw: dict[str, Any], record: RequestRecord, send: Send
    ) -> None:
        model, name = self._pools.for_scores(body.model, self.gateway.model.names)
        record.model = name
        texts = body.texts
        with _faults_of("documents", is_list=not isinstance(body.documents, str)):
            result = await model.engine.score(
                [(body.query, text) for text in texts], truncate_to=body.truncate_prompt_tokens
            )
        order = sorted(range(len(texts)), key=lambda index: -result.scores[index])
        results: list[dict[str, Any]] = []
        for index in order[: body.top_n or None]:
            entry: dict[str, Any] = {"index": index}
            if body.return_documents is not False:
                entry["document"] = {"text": texts[index]}
            results.append(entry | {"relevance_score": result.scores[index]})
        await send_json(
            send,
            {
                "id": f"rerank-{secrets.token_hex(12)}",
                "model": name,
                "usage": self._note(record, model, len(texts), result.num_tokens),
                "results": results,
            },
        )


class Score(_PoolingEndpoint[ScoreRequest]):
    """How well texts go together, pair by pair, as vLLM has it."""

    body_type = ScoreRequest

    async def answer(
        self, body: ScoreRequest, raw: dict[str, Any], record: RequestRecord, send: Send
    ) -> None:
        model, name = self._pools.for_scores(body.model, self.gateway.model.names)
        record.model = name
        pairs, right_name = _pairs(body)
        with _faults_of(right_name, is_list=len(pairs) > 1):
            result = await model.engine.score(pairs, truncate_to=body.truncate_prompt_tokens)
        await send_json(
            send,
            {
                "id": f"score-{secrets.token_hex(12)}",
                "object": "list",
                "created": unix_s(),
                "model": name,
                "data": [
                    {"index": index, "object": "score", "score": score}
                    for index, score in enumerate(result.scores)
                ],
                "usage": self._note(record, model, len(pairs), result.num_tokens),
            },
        )


def _pairs(body: ScoreRequest) -> tuple[list[tuple[str, str]], str]:
    """The pairs to score, and the name of the right side. Raises InvalidRequest."""
    given = [pair for pair in _SIDES if any(getattr(body, side) is not None for side in pair)]
    if len(given) > 1:
        raise InvalidRequest(
            f"Give {given[0][0]} and {given[0][1]}, or {given[1][0]} and {given[1][1]}; not both.",
            param=given[1][0],
        )
    left_name, right_name = given[0] if given else _SIDES[0]
    left, right = (_side(body, name) for name in (left_name, right_name))
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        raise InvalidRequest(
            f"{left_name} has {len(left)} texts and {right_name} has {len(right)}: give one text "
            f"in {left_name}, or as many in both.",
            param=right_name,
        )
    return list(zip(left, right, strict=True)), right_name


def _side(body: ScoreRequest, name: str) -> list[str]:
    value = getattr(body, name)
    if value is None:
        raise InvalidRequest(
            f"Invalid request: '{name}': Field required.",
            param=name,
            code="missing_required_parameter",
        )
    return [value] if isinstance(value, str) else list(value)


@contextmanager
def _faults_of(field: str, *, is_list: bool) -> Iterator[None]:
    """Name the request's field in what the engine says of its inputs."""
    try:
        yield
    except InputTooLong as error:
        param = f"{field}.{error.index}" if is_list else field
        raise ContextLengthExceeded(error.message, param=param) from None
    except InvalidRequest as error:
        error.param = error.param or field
        raise


def pooling_routes(
    gateway: Gateway, pools: Pools, metrics: PoolingMetrics | None = None
) -> list[BaseRoute]:
    """All routes of this module. Without a pooling model they say what is missing."""
    metrics = metrics or PoolingMetrics(gateway.metrics.registry)
    embeddings = Embeddings(gateway, pools, metrics)
    rerank = Rerank(gateway, pools, metrics)
    score = Score(gateway, pools, metrics)
    return [
        *(post(path, embeddings) for path in ("/v1/embeddings", "/embeddings")),
        *(post(path, rerank) for path in ("/v1/rerank", "/rerank", "/v2/rerank")),
        *(post(path, score) for path in ("/v1/score", "/score")),
    ]

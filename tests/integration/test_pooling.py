"""Real pooling models: MiniLM for embeddings, and a tiny random cross-encoder.

One start of each serves the whole file; the last test kills the embedding model's process.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
import uvicorn
from openai import AsyncOpenAI

from server.app import build_app
from server.demo_model import ensure_demo_embedding_model
from server.endpoints.pooling import pooling_routes
from server.gateway import Admission, Gateway, ServedModel
from server.logs import RequestLog
from server.metrics import Metrics
from server.pools import PooledModel, Pools, resolve_pooling_model
from server.sse import StreamKeeper
from server.text.tokenizer import ChatTokenizer
from spot.engines.pooling import InputTooLong, PoolingConfig, PoolingEngine
from spot.engines.scripted import ScriptedEngine
from spot.errors import InvalidRequest

pytestmark = [pytest.mark.anyio, pytest.mark.engine, pytest.mark.timeout(300)]

TEXTS = [
    "The cat sits on the mat.",
    "A kitten is sitting on a rug.",
    "Shares of the bank fell sharply on Monday.",
    "hi",
    "Rain is expected in the mountains, and snow above two thousand metres. " * 8,
    "def add(a, b): return a + b",
]


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@asynccontextmanager
async def started(config: PoolingConfig) -> AsyncIterator[PoolingEngine]:
    async with PoolingEngine(config, on_line=print) as engine:
        with anyio.fail_after(250):
            await engine.wait_ready()
        yield engine


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[PoolingEngine]:
    resolved = resolve_pooling_model("demo")
    assert resolved.name == "all-MiniLM-L6-v2"
    async with started(PoolingConfig(str(resolved.path), min_backoff_s=0.05)) as started_engine:
        yield started_engine


@pytest.fixture(scope="module")
def cross_encoder_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder of two layers with random weights, and MiniLM's tokenizer."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("cross-encoder")
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=30522,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.5,
        num_labels=1,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(ensure_demo_embedding_model())).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
async def ranker(cross_encoder_path: Path) -> AsyncIterator[PoolingEngine]:
    async with started(PoolingConfig(str(cross_encoder_path), task="score")) as engine:
        yield engine


class Served:
    """Clients for an application on a loopback port."""

    def __init__(self, port: int) -> None:
        url = f"http://127.0.0.1:{port}"
        self.http = httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=60)
        transport: Any = httpx.AsyncClient(trust_env=False, verify=False, timeout=60)
        self.openai = AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport
        )

    async def post(self, path: str, body: Any) -> Any:
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()


@pytest.fixture(scope="module")
async def served(engine: PoolingEngine, tokenizer: ChatTokenizer) -> AsyncIterator[Served]:
    """The embedding model behind uvicorn; no cross-encoder."""
    gateway = Gateway(
        model=ServedModel(["demo"], tokenizer, ScriptedEngine(vocab_size=64, eos_token_id=0)),
        metrics=Metrics("demo"),
        admission=Admission(max_requests=100, max_queue=100),
        keeper=StreamKeeper(keep_alive_s=0, stalled_reader_s=60),
        version="0.0-test",
    )
    pools = Pools(embedding=PooledModel(["mini"], engine))
    app = build_app(
        gateway,
        log=RequestLog(enabled=False),
        further_routes=pooling_routes(gateway, pools),
        further_models=pools.cards,
    )
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(config)
    with listener:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.serve, [listener])
            clients = Served(listener.getsockname()[1])
            async with clients.http, clients.openai:
                yield clients
            server.should_exit = True


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    with anyio.fail_after(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.02)


async def test_the_card_is_the_models(engine: PoolingEngine) -> None:
    card = engine.card
    assert card is not None
    assert (card.task, card.dimension, card.max_model_len) == ("embed", 384, 256)
    assert not card.matryoshka


async def test_similar_sentences_are_near(engine: PoolingEngine) -> None:
    vectors = (await engine.embed(TEXTS)).vectors
    cosines = vectors @ vectors.T
    assert np.diag(cosines) == pytest.approx(1.0, abs=1e-5)
    assert cosines[0, 1] > 0.5 > cosines[0, 2] + 0.2


async def test_a_batch_equals_single_calls(engine: PoolingEngine) -> None:
    batch = await engine.embed(TEXTS * 4)
    singles = [await engine.embed([text]) for text in TEXTS]
    together = np.concatenate([single.vectors for single in singles] * 4)
    np.testing.assert_allclose(batch.vectors, together, atol=1e-5)
    assert batch.num_tokens == [single.num_tokens[0] for single in singles] * 4


async def test_token_ids_give_what_their_text_gives(engine: PoolingEngine) -> None:
    hello_world = [101, 7592, 2088, 102]
    by_ids = await engine.embed([hello_world])
    by_text = await engine.embed(["hello world"])
    np.testing.assert_allclose(by_ids.vectors, by_text.vectors, atol=1e-5)
    assert by_ids.num_tokens == by_text.num_tokens == [4]


async def test_long_inputs_are_refused_or_cut(engine: PoolingEngine) -> None:
    with pytest.raises(InputTooLong, match="maximum context length is 256 tokens"):
        await engine.embed(["word " * 255])
    assert (await engine.embed(["word " * 255], truncate_to=-1)).num_tokens == [256]
    assert (await engine.embed(["word " * 254])).num_tokens == [256]
    with pytest.raises(InvalidRequest, match="no room"):
        await engine.embed(["word word"], truncate_to=1)


async def test_the_official_clients_default_equals_the_float_form(served: Served) -> None:
    floats = await served.openai.embeddings.create(
        model="mini", input=TEXTS, encoding_format="float"
    )
    default = await served.openai.embeddings.create(model="mini", input=TEXTS)
    assert [item.embedding for item in default.data] == [item.embedding for item in floats.data]
    assert len(default.data[0].embedding) == 384
    assert default.usage.prompt_tokens == default.usage.total_tokens > 6


async def test_the_official_client_sees_errors(served: Served) -> None:
    from openai import BadRequestError, NotFoundError

    with pytest.raises(BadRequestError, match="maximum context length"):
        await served.openai.embeddings.create(model="mini", input="word " * 300)
    with pytest.raises(BadRequestError, match="matryoshka"):
        await served.openai.embeddings.create(model="mini", input="a", dimensions=64)
    with pytest.raises(NotFoundError):
        await served.openai.embeddings.create(model="text-embedding-3-small", input="a")


async def test_rerank_without_a_cross_encoder_is_by_cosine(served: Served) -> None:
    documents = ["The stock market fell.", "Paris is the capital of France.", "Cats purr."]
    body = {"query": "What is the capital of France?", "documents": documents, "top_n": 2}
    answer = await served.post("/v1/rerank", body)
    assert answer["results"][0]["index"] == 1
    assert len(answer["results"]) == 2
    scored = await served.post("/score", {"text_1": body["query"], "text_2": documents})
    best = max(item["score"] for item in scored["data"])
    assert answer["results"][0]["relevance_score"] == pytest.approx(best, abs=1e-5)


async def test_concurrent_requests_get_their_own_answers(engine: PoolingEngine) -> None:
    texts = [f"number {number} of many" for number in range(40)]
    expected = (await engine.embed(texts)).vectors
    found: dict[int, Any] = {}

    async def one(number: int) -> None:
        found[number] = (await engine.embed([texts[number]])).vectors[0]

    async with anyio.create_task_group() as tasks:
        for number in range(len(texts)):
            tasks.start_soon(one, number)
    rows = np.stack([found[number] for number in range(len(texts))])
    np.testing.assert_allclose(rows, expected, atol=1e-5)


async def test_a_cross_encoder_scores_as_sentence_transformers_does(
    ranker: PoolingEngine, cross_encoder_path: Path
) -> None:
    from sentence_transformers import CrossEncoder

    assert ranker.card is not None
    assert (ranker.card.task, ranker.card.max_model_len) == ("score", 128)
    pairs = [("a cat", "the kitten"), ("a cat", "a bank " * 20), ("rain", "snow in May")]
    result = await ranker.score(pairs)
    reference = CrossEncoder(str(cross_encoder_path), device="cpu", local_files_only=True)
    assert result.scores == pytest.approx(reference.predict(pairs).tolist(), abs=1e-5)
    assert len(set(result.scores)) == 3
    assert all(0 < score < 1 for score in result.scores)
    assert result.num_tokens == sum(
        len(reference.tokenizer(left, right)["input_ids"]) for left, right in pairs
    )
    with pytest.raises(InputTooLong) as caught:
        await ranker.score([("a", "b"), ("a", "word " * 200)])
    assert caught.value.index == 1
    assert (await ranker.score([("a", "word " * 200)], truncate_to=-1)).num_tokens == 128


async def test_a_model_that_is_not_there_says_so() -> None:
    from spot.errors import EngineFailed

    async with PoolingEngine(PoolingConfig("/nonexistent/model"), on_line=print) as engine:
        with anyio.fail_after(120), pytest.raises(EngineFailed, match="nonexistent"):
            await engine.wait_ready()


async def test_a_killed_model_comes_back_and_finishes_what_it_had(engine: PoolingEngine) -> None:
    before = await engine.embed(TEXTS)
    answers: list[Any] = []

    async def one() -> None:
        answers.append(await engine.embed(TEXTS * 20))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await until(lambda: engine.stats.running > 0, 30)
        (pid,) = engine.status.pids
        os.kill(pid, signal.SIGKILL)
        await until(lambda: engine.status.num_restarts == 1, 30)
        await until(lambda: engine.status.state == "ready", 200)
    assert engine.status.pids != [pid]
    np.testing.assert_allclose(answers[0].vectors[: len(TEXTS)], before.vectors, atol=1e-5)

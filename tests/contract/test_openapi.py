"""The running server against its own OpenAPI document, with generated requests.

Schema-valid requests ("positive") are answered as documented, or refused with a field that is to
blame: the schema cannot say that fields exclude each other or what the model's context holds.
Schema-invalid ones ("negative") are always refused. No status, header, content type or field is
undocumented, streams included.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import numpy as np
import pytest
import requests
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.config import GenerationConfig
from schemathesis.specs.openapi import checks

from server.app import HttpOptions
from server.endpoints.admin import AdminGate, admin_routes
from server.endpoints.pooling import pooling_routes
from server.gateway import Gateway
from server.openapi import ADMIN_TABLE, TABLE, Operation
from server.pools import PooledModel, Pools
from server.protocol.admin import NewPipeline
from spot.engines.base import EngineStatus
from spot.engines.pooling import EmbedResult, ScoreResult
from spot.engines.scripted import ScriptedEngine
from spot.fleet import Fleet, PipelineSpec
from tests.harness import Server, demo_tokenizer, serving, until

pytestmark = pytest.mark.contract

KEY = "sk-test"
NUM_EXAMPLES = 25
COVERAGE_STEP = 5
# The stream of events has no end that a check could wait for.
OPERATIONS = [*TABLE, *(item for item in ADMIN_TABLE if item.path != "/admin/events")]
WITH_BODY = [operation for operation in OPERATIONS if operation.request is not None]

settings = hypothesis.settings(
    max_examples=NUM_EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


class ZeroPooler:
    """A pooling engine whose every figure is zero."""

    status = EngineStatus("ready")

    async def embed(
        self,
        inputs: Sequence[str] | Sequence[list[int]],
        *,
        dimensions: int | None = None,
        truncate_to: int | None = None,
    ) -> EmbedResult:
        return EmbedResult(np.zeros((len(inputs), 3), "<f4"), [1] * len(inputs))

    async def score(
        self, pairs: Sequence[tuple[str, str]], *, truncate_to: int | None = None
    ) -> ScoreResult:
        return ScoreResult([0.0] * len(pairs), len(pairs))


@dataclass(slots=True)
class Subject:
    """The server, its document, and one connection to it."""

    server: Server
    schema: Any
    session: requests.Session = field(default_factory=requests.Session)

    def operation(self, operation: Operation) -> Any:
        return self.schema[operation.path][operation.method]


def without_large_limits(item: Any) -> Any:
    """The document without list limits that generated bodies could only reach by being huge."""
    if isinstance(item, dict):
        return {
            key: without_large_limits(value)
            for key, value in item.items()
            if not (key == "maxItems" and isinstance(value, int) and value > 128)
        }
    return [without_large_limits(value) for value in item] if isinstance(item, list) else item


def fleet_of(gateway: Gateway) -> Fleet:
    assert isinstance(gateway.model.engine, Fleet)
    return gateway.model.engine


async def one_more(wanted: NewPipeline) -> PipelineSpec:
    """A pipeline that says nothing."""
    tokenizer = demo_tokenizer()
    assert tokenizer.eos_token_id is not None
    engine = ScriptedEngine(
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        max_model_len=512,
        script=lambda generation: [],
    )
    return PipelineSpec(wanted.id or secrets.token_hex(8), engine, wanted.weight)


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    pools = Pools(PooledModel(["embedder"], ZeroPooler()), PooledModel(["ranker"], ZeroPooler()))
    with serving(
        "Hello there.",
        max_model_len=512,
        tokens_per_step=64,
        further_routes=lambda gateway: [
            *pooling_routes(gateway, pools),
            *admin_routes(fleet_of(gateway), AdminGate(None), one_more),
        ],
        spare=True,
        further_models=pools.cards,
    ) as server:
        document = without_large_limits(server.http.get("/openapi.json").json())
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=server.url)
        subject = Subject(server, schema)
        yield subject
        subject.session.close()


def try_case(subject: Subject, operation: Operation, case: Any) -> None:
    """One request; all of schemathesis' checks, then ours."""
    response = case.call(session=subject.session)
    case.validate_response(response, excluded_checks=[checks.positive_data_acceptance])
    if response.status_code < 300:
        check_fields(operation, response)
        return
    assert len(response.content) < 10_000
    error = response.json()["error"]
    positive = case.meta is None or case.meta.generation.mode is GenerationMode.POSITIVE
    if response.status_code == 400 and positive:
        assert error["param"], error


def check_fields(operation: Operation, response: Any) -> None:
    """No answer has a field that is not in its model."""
    content_type = response.headers.get("content-type", [""])[0]
    if content_type.startswith("text/event-stream"):
        assert operation.event is not None
        events = response.content.decode().removesuffix("\n\n").split("\n\n")
        if not operation.typed_events:
            assert events.pop() == "data: [DONE]"
        for event in events:
            name, _, data = event.rpartition("data: ")
            chunk = json.loads(data)
            assert name == (f"event: {chunk['type']}\n" if operation.typed_events else "")
            operation.event.model_validate(chunk, extra="forbid")
    elif isinstance(operation.answer, type):
        answer = response.json()
        for item in answer if operation.many else [answer]:
            operation.answer.model_validate(item, extra="forbid")


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda item: item.path)
def test_generated_requests(subject: Subject, operation: Operation, mode: GenerationMode) -> None:
    strategy = subject.operation(operation).as_strategy(generation_mode=mode)

    @hypothesis.given(case=strategy)
    @settings
    def run(case: Any) -> None:
        try_case(subject, operation, case)

    run()
    until(lambda: subject.server.load == 0)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda item: item.path)
def test_boundaries_of_every_field(subject: Subject, operation: Operation) -> None:
    """A sample of the deterministic cases: limits, types, missing fields, methods, media types."""
    cases = subject.schema.iter_coverage_cases(
        subject.operation(operation),
        generation_modes=list(GenerationMode),
        generation_config=GenerationConfig(),
    )
    step = COVERAGE_STEP if operation.request is not None else 1
    num_cases = 0
    for case in itertools.islice(cases, 0, None, step):
        num_cases += 1
        try_case(subject, operation, case)
    assert num_cases > 1


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda item: item.path)
def test_the_documents_example_is_answered(subject: Subject, operation: Operation) -> None:
    path = operation.path.replace("{pipeline_id}", "spare")
    answer = subject.server.http.request(operation.method, path, json=operation.example)
    assert answer.status_code == operation.success
    assert isinstance(operation.answer, type)
    operation.answer.model_validate(answer.json(), extra="forbid")


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True, "top_logprobs": 2, "n": 2, "service_tier": "auto"},
        {"return_token_ids": True, "stop": ["there"], "request_id": "mine"},
        {"prompt_logprobs": 1, "reasoning_effort": "low"},
        {"stream": True, "stream_options": {"include_usage": True}, "n": 2},
        {"stream": True, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "service_tier": "default",
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_answers_with_extras_have_documented_fields_only(
    subject: Subject, path: str, fields: dict[str, Any]
) -> None:
    operation = next(item for item in OPERATIONS if item.path == path)
    fields = dict(fields)
    if path == "/v1/completions" and fields.pop("logprobs", None):
        fields.update(logprobs=fields.pop("top_logprobs"), echo=True)
    body = {**(operation.example or {}), **fields}
    case = subject.operation(operation).Case(body=body, media_type="application/json")
    response = case.call(session=subject.session)
    assert response.status_code == 200
    case.validate_response(response)
    check_fields(operation, response)


def existing(server: Server, path: str, headers: dict[str, str]) -> dict[str, str]:
    """Path parameters of something that is there."""
    if "{response_id}" in path:
        answer = server.post("/v1/responses", {"input": "Hi"}, headers=headers)
        return {"response_id": answer.json()["id"]}
    if "{run_id}" in path:
        nodes = [{"id": "a", "op": "template", "params": {"value": 1}}]
        answer = server.post("/v1/workflows", {"nodes": nodes}, headers=headers)
        return {"run_id": answer.json()["id"]}
    if "/workflow-templates/{name}" in path:
        return {"name": "rag"}
    return {"model_id": "demo"} if "{model_id}" in path else {}


def test_every_guarded_operation_refuses_strangers() -> None:
    load_all_checks()
    with serving("Hello.", http=HttpOptions(api_keys={KEY: "test"}, open_metrics=False)) as server:
        headers = {"Authorization": f"Bearer {KEY}"}
        document = server.http.get("/openapi.json", headers=headers).json()
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=server.url)
        num_guarded = 0
        for result in schema.get_all_operations():
            operation: Any = result.ok()  # type: ignore[union-attr]
            definition = document["paths"][operation.path][operation.method]
            request = definition.get("requestBody", {}).get("content", {})
            body = request.get("application/json", {}).get("example")
            case = operation.Case(
                path_parameters=existing(server, operation.path, headers),
                **({"body": body, "media_type": "application/json"} if body else {}),
            )
            stranger = case.call()
            case.validate_response(stranger, excluded_checks=[checks.ignored_auth])
            guarded = "security" in definition
            num_guarded += guarded
            assert stranger.status_code == (401 if guarded else 200), operation.label
            known = case.call(headers=headers)
            expected = 400 if operation.path.endswith("{response_id}/cancel") else 200
            assert known.status_code == expected, operation.label
            case.validate_response(known, headers=headers)
        assert num_guarded >= 8

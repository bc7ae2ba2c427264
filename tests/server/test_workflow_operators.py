from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from server.gateway import Admission, Gateway, ServedModel
from server.metrics import Metrics
from server.protocol.workflows import LlmParams
from server.sse import StreamKeeper
from server.text.tokenizer import ChatTokenizer
from server.workflow_operators import LlmOperator
from tests.fakes import HandEngine
from workflows.functions import Function
from workflows.operators.embed import EmbedOperator
from workflows.operators.http import HttpOperator
from workflows.operators.ingest import IngestOperator
from workflows.operators.nested import LoopOperator, MapOperator, WorkflowOperator
from workflows.operators.python import PythonOperator
from workflows.operators.rerank import RerankOperator
from workflows.operators.search import SearchOperator
from workflows.operators.text import MergeOperator, SelectOperator, TemplateOperator
from workflows.operators.web_search import WebSearchOperator

PARAMS: list[type[BaseModel]] = [
    LlmParams,
    *(
        one.params
        for one in (
            *(EmbedOperator, HttpOperator, IngestOperator, RerankOperator, SearchOperator),
            *(WebSearchOperator, MergeOperator, SelectOperator, TemplateOperator),
            *(LoopOperator, MapOperator, WorkflowOperator),
        )
    ),
]


def list_schemas(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for value in schema.values():
            yield from list_schemas(value)
    elif isinstance(schema, (list, tuple)):
        for value in schema:
            yield from list_schemas(value)


def takes_anything(schema: dict[str, Any]) -> bool:
    items = schema.get("items_schema", {"type": "any"})
    return items["type"] == "any" or "JsonValue" in str(items.get("schema_ref"))


@pytest.mark.parametrize("model", PARAMS, ids=lambda model: model.__name__)
def test_every_list_stops_at_its_first_wrong_item(model: type[BaseModel]) -> None:
    """Otherwise each item of a long list costs an error of its own: a minute for one request."""
    for schema in list_schemas(model.__pydantic_core_schema__):
        assert schema.get("fail_fast") or takes_anything(schema), schema


def functions() -> dict[str, Function]:
    return {
        name: Function(name=name, call=len, is_async=False, takes_key=False, is_pure=is_pure)
        for name, is_pure in (("pure", True), ("other", False))
    }


NOTHING: Any = None
STORE: Any = SimpleNamespace(num_writes=lambda name: 1)


@pytest.mark.parametrize(
    ("operator", "params", "is_pure"),
    [
        (EmbedOperator(NOTHING), {"input": "x"}, True),
        (RerankOperator(NOTHING), {"query": "q", "documents": []}, True),
        (SearchOperator(NOTHING, STORE), {"collection": "c", "query": "q"}, True),
        (HttpOperator(NOTHING), {"url": "http://a"}, False),
        (WebSearchOperator(NOTHING), {"query": "q"}, False),
        (PythonOperator(functions()), {"function": "pure"}, True),
        (PythonOperator(functions()), {"function": "other"}, False),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_may_find_something_else_later_is_not_pure(
    operator: Any, params: dict[str, Any], is_pure: bool
) -> None:
    assert operator.identity(operator.params.model_validate(params)).is_pure == is_pure


@pytest.mark.parametrize(
    ("fields", "is_pure"),
    [({"temperature": 0}, True), ({"seed": 1}, True), ({}, False), ({"temperature": 0.1}, False)],
)
def test_an_answer_is_pure_if_it_is_deterministic(
    tokenizer: ChatTokenizer, fields: dict[str, Any], is_pure: bool
) -> None:
    params = LlmParams.model_validate({"prompt": "Hi", **fields})
    assert llm_operator(tokenizer).identity(params).is_pure == is_pure


def llm_operator(tokenizer: ChatTokenizer) -> LlmOperator:
    gateway = Gateway(
        model=ServedModel(["demo", "alias"], tokenizer, HandEngine()),
        metrics=Metrics("demo"),
        admission=Admission(max_requests=9, max_queue=9),
        keeper=StreamKeeper(keep_alive_s=0, stalled_reader_s=60),
    )
    return LlmOperator(gateway)


@pytest.mark.parametrize(
    ("fields", "is_equal"),
    [
        ({"model": "alias", "user": "u", "priority": 3}, True),
        ({"stream": True, "stream_options": {"include_usage": True}}, True),
        # These are refused, or may be: their failure is their own.
        ({"model": "nope"}, False),
        ({"stream_options": {"include_usage": True}}, False),
        ({"request_id": "x"}, False),
        ({"max_tokens": 3}, False),
    ],
)
def test_equal_are_requests_that_get_the_same_answer_or_none(
    tokenizer: ChatTokenizer, fields: dict[str, Any], is_equal: bool
) -> None:
    operator = llm_operator(tokenizer)
    contents = [
        operator.identity(LlmParams.model_validate({"prompt": "Hi", "seed": 1, **more})).content
        for more in ({}, fields)
    ]
    assert (contents[0] == contents[1]) == is_equal

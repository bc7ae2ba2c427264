from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from server.protocol.workflows import LlmParams
from workflows.operators.embed import EmbedOperator
from workflows.operators.http import HttpOperator
from workflows.operators.ingest import IngestOperator
from workflows.operators.nested import LoopOperator, MapOperator, WorkflowOperator
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

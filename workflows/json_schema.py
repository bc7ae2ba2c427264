"""The JSON Schema of a workflow's document, for editors and for those who write documents by
program. It holds what a schema can say; `workflows.checked` knows more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from workflows.operators.base import Nesting, Operator
from workflows.spec import Node, Workflow

_DEFS = "#/$defs/{model}"
_TEMPLATE = {"type": "string", "pattern": r"\{\{|\{%"}
_ABOUT = ("description", "default")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def document_schema(
    operators: Mapping[str, Operator], beside: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Draft 2020-12. Where a parameter is no text, a template may stand in its place.

    beside: schemas of what may stand beside the outermost document, in a request.
    """
    schema = Workflow.model_json_schema(ref_template=_DEFS)
    node = Node.model_json_schema(ref_template=_DEFS)
    defs = {**schema.pop("$defs", {}), **node.pop("$defs", {}), "template": _TEMPLATE}
    kinds = []
    for name, operator in sorted(operators.items()):
        defs[f"params.{name}"] = _params(name, operator, defs)
        properties = {
            **node["properties"],
            "op": {"const": name},
            "params": {"$ref": f"#/$defs/params.{name}"},
        }
        kinds.append({**node, "title": name, "properties": properties})
    defs["node"] = {"oneOf": kinds}
    schema["properties"]["nodes"]["items"] = {"$ref": "#/$defs/node"}
    defs["document"] = schema
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "properties": {**schema["properties"], **(beside or {})},
        "title": "Workflow",
        "$defs": defs,
    }


def _params(name: str, operator: Operator, defs: dict[str, Any]) -> dict[str, Any]:
    """The schema of an operator's parameters; what it refers to goes into `defs`."""
    model: type[BaseModel] = operator.params
    params = model.model_json_schema(ref_template=f"#/$defs/{name}.{{model}}")
    nested = operator.nested_param if isinstance(operator, Nesting) else None
    for inner, one in params.pop("$defs", {}).items():
        defs[f"{name}.{inner}"] = _templated(one)
    params = _templated(params)
    if nested is not None:
        params["properties"][nested] = {"$ref": "#/$defs/document"}
    return params


def _templated(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with a template allowed in place of each value inside."""
    result = dict(schema)
    if "properties" in schema:
        result["properties"] = {
            name: _or_template(_templated(one)) for name, one in schema["properties"].items()
        }
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = _or_template(_templated(schema[key]))
    for key in _LISTS:
        if key in schema:
            result[key] = [_templated(one) for one in schema[key]]
    return result


def _or_template(schema: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        key: schema[key] for key in ("description", "default") if key in schema
    }
    rest = {key: value for key, value in schema.items() if key not in described}
    if not rest:
        return schema
    return {**described, "anyOf": [rest, {"$ref": "#/$defs/template"}]}

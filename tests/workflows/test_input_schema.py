import time
from typing import Any

import pytest

from tests.workflows.fakes import checked, echo
from workflows.errors import InvalidWorkflow
from workflows.input_schema import MAX_PROBLEMS, complete_inputs, schema_size


def refused(schema: dict[str, Any]) -> str:
    """What is wrong with a schema."""
    with pytest.raises(InvalidWorkflow) as caught:
        checked(echo("a"), input_schema=schema)
    (problem,) = caught.value.problems
    assert (problem.path, problem.code) == ("input_schema", "invalid_schema")
    return problem.message


def test_inputs_are_held_to_their_schema() -> None:
    schema = {
        "type": "object",
        "properties": {"q": {"type": "string", "pattern": "^(a+)+$"}},
        "required": ["q"],
    }
    workflow = checked(echo("a"), input_schema=schema).spec
    complete_inputs(workflow, {"q": "aaa"})
    with pytest.raises(InvalidWorkflow) as caught:
        complete_inputs(workflow, {"q": "a" * 5000 + "!"})
    assert [one.path for one in caught.value.problems] == ["inputs.q"]
    with pytest.raises(InvalidWorkflow, match="required"):
        complete_inputs(workflow, {})


def test_missing_inputs_get_the_defaults_of_their_schema() -> None:
    schema = {
        "properties": {"q": {"type": "string"}, "n": {"type": "integer", "default": 3}},
        "required": ["q", "n"],
    }
    workflow = checked(echo("a"), input_schema=schema).spec
    assert complete_inputs(workflow, {"q": "a"}) == {"q": "a", "n": 3}
    assert complete_inputs(workflow, {"q": "a", "n": 4}) == {"q": "a", "n": 4}
    wrong = checked(echo("a"), input_schema={"properties": {"n": {"minimum": 2, "default": 1}}})
    with pytest.raises(InvalidWorkflow, match="less than"):
        complete_inputs(wrong.spec, {})


def test_references_are_followed_and_counted() -> None:
    word = {"type": "string"}
    schema = {
        "properties": {"a": {"$ref": "#/$defs/a~1b"}, "b": {"$ref": "#/$defs/list/prefixItems/0"}},
        "$defs": {"a/b": word, "list": {"prefixItems": [word]}},
    }
    assert schema_size({"$ref": "#/$defs/x", "$defs": {"x": word}}) == 1 + 1 + 2 + 1 + 2
    workflow = checked(echo("a"), input_schema=schema).spec
    with pytest.raises(InvalidWorkflow) as caught:
        complete_inputs(workflow, {"a": 1, "b": 2})
    assert {one.path for one in caught.value.problems} == {"inputs.a", "inputs.b"}


def test_a_schema_that_grows_with_its_references_is_refused() -> None:
    doubling = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**doubling, "d40": {"type": "object"}}}
    assert "with its references followed" in refused(schema)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("#", "leads back to itself"),
        ("#/$defs/a", "leads back to itself"),
        ("#/$defs/b", "there is nothing"),
        ("#a", "is not followed"),
        ("#/%24defs/c", "is not followed"),
        ("#/$defs/c/anyOf/1", "there is nothing"),
        ("#/$defs/c/anyOf/00", "there is nothing"),
        ("http://127.0.0.1/x", "is not followed"),
    ],
)
def test_references_lead_to_another_place_of_the_schema(reference: str, message: str) -> None:
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": reference}]}}}
    schema["$defs"]["c"] = {"anyOf": [{}]}
    assert message in refused(schema)


def test_a_schema_is_one_resource() -> None:
    inner = {"$id": "http://a/b", "$ref": "#/$defs/x", "$defs": {"x": {}}}
    assert "$id" in refused({"properties": {"a": inner}, "$defs": {"x": {}}})
    checked(echo("a"), input_schema={"$id": "http://a/b", "$ref": "#/$defs/x", "$defs": {"x": {}}})


def test_many_mistakes_in_large_inputs_do_not_take_long() -> None:
    schema = {"allOf": [{"required": [f"x{i}"]} for i in range(400)]}
    workflow = checked(echo("a"), input_schema=schema).spec
    with pytest.raises(InvalidWorkflow) as caught:
        complete_inputs(workflow, {})
    assert len(caught.value.problems) == MAX_PROBLEMS
    begun_s = time.process_time()
    with pytest.raises(InvalidWorkflow) as caught:
        complete_inputs(workflow, {"text": "a" * 1_000_000})
    assert len(caught.value.problems) == 1
    # Generous: all of them took seconds.
    assert time.process_time() - begun_s < 1
    large = {"items": {"anyOf": [{"minimum": i} for i in range(1000)]}}
    workflow = checked(echo("a"), input_schema={"properties": {"many": large}}).spec
    with pytest.raises(InvalidWorkflow, match="too large"):
        complete_inputs(workflow, {"many": [0] * 50_000})

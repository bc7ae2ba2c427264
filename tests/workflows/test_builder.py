import pytest

from tests.workflows.fakes import operators
from workflows.builder import WorkflowBuilder
from workflows.checked import check_workflow
from workflows.errors import InvalidWorkflow
from workflows.run_state import RunState


def test_a_document_comes_out() -> None:
    flow = WorkflowBuilder("two", deadline_s=5.0)
    word = flow.input("word")
    numbers = flow.input("numbers", {"type": "array"}, required=False)
    first = flow.node("echo", text=f"say {word}", items=numbers)
    second = flow.node(
        "echo",
        id="second",
        text=first["text"],
        when=first.status,
        after=(first,),
        settings={"cache": {"ttl_s": 1.0}},
    )
    flow.output(text=second["text"], first=first["items"][0])
    assert flow.document() == {
        "name": "two",
        "deadline_s": 5.0,
        "input_schema": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "numbers": {"type": "array"}},
            "required": ["word"],
            "additionalProperties": False,
        },
        "nodes": [
            {
                "id": "echo_1",
                "op": "echo",
                "params": {"text": "say {{ inputs.word }}", "items": "{{ inputs.numbers }}"},
            },
            {
                "id": "second",
                "op": "echo",
                "params": {"text": "{{ nodes.echo_1.output['text'] }}"},
                "depends_on": ["echo_1"],
                "when": "{{ nodes.echo_1.status }}",
                "cache": {"ttl_s": 1.0},
            },
        ],
        "outputs": {
            "text": "{{ nodes.second.output['text'] }}",
            "first": "{{ nodes.echo_1.output['items'][0] }}",
        },
    }
    workflow = flow.check(operators())
    assert list(workflow.nodes) == ["echo_1", "second"]
    RunState(workflow, {"word": "x"}, now_s=0.0).start(now_s=0.0)


def test_a_builder_inside_a_parameter_is_its_document() -> None:
    inner = WorkflowBuilder()
    inner.node("echo", text=inner.input("item"))
    flow = WorkflowBuilder()
    flow.node("map", workflow=inner, over=["a"])
    document = flow.document()
    assert document["nodes"][0]["params"]["workflow"] == inner.document()
    check_workflow(document, operators())


def test_the_same_rules_hold() -> None:
    flow = WorkflowBuilder()
    flow.node("echo", txt="x")
    with pytest.raises(InvalidWorkflow, match="did you mean 'text'"):
        flow.check(operators())


def test_what_is_not_known_yet_cannot_be_used_as_if_it_were() -> None:
    ref = WorkflowBuilder().input("list")
    with pytest.raises(TypeError, match="operator map"):
        list(ref)
    with pytest.raises(TypeError, match="when"):
        bool(ref)
    with pytest.raises(TypeError, match="no format"):
        f"{ref:>10}"

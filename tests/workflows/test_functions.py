from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.workflows.fakes import operators
from tests.workflows.pooling_fakes import context
from workflows.checked import check_workflow
from workflows.errors import InvalidWorkflow, NodeFailed
from workflows.functions import FunctionsUnusable, load_functions
from workflows.operators.python import PythonOperator

pytestmark = pytest.mark.anyio

SOURCE = """
import threading
from workflows.errors import NodeFailed
from workflows.functions import function

def hidden():
    return 1

@function(pure=True)
def area(width: float, height: float = 1.0) -> float:
    return width * height

@function
async def key(idempotency_key: str) -> str:
    return idempotency_key

@function
def thread() -> str:
    return threading.current_thread().name

@function
def odd():
    return {1, 2}

@function
def fails(text: str):
    raise ValueError(text)

@function
def refuses():
    raise NodeFailed("later", code="mine", is_retryable=True)
"""


@pytest.fixture
def python(tmp_path: Path) -> PythonOperator:
    path = tmp_path / "functions.py"
    path.write_text(SOURCE)
    return PythonOperator(load_functions(path))


async def call(python: PythonOperator, function: str, **args: Any) -> Any:
    params = python.params.model_validate({"function": function, "args": args})
    return (await python.run(params, context())).output["value"]


async def test_functions_are_called_by_name_with_their_arguments(python: PythonOperator) -> None:
    assert await call(python, "area", width=2, height=3) == 6
    assert await call(python, "area", width=2) == 2
    assert await call(python, "key") == context().idempotency_key
    with anyio.fail_after(5):
        assert await call(python, "thread") != threading.current_thread().name


@pytest.mark.parametrize(
    ("function", "args", "code", "part"),
    [
        ("area", {"width": "wide"}, "invalid_params", "params.args.width"),
        ("area", {}, "invalid_params", "params.args.width"),
        ("area", {"width": 1, "depth": 2}, "invalid_params", "params.args.depth"),
        ("key", {"idempotency_key": "mine"}, "invalid_params", "idempotency_key"),
        ("odd", {}, "not_json", "odd"),
        ("fails", {"text": "why"}, "function_failed", "fails failed with ValueError: why"),
        ("refuses", {}, "mine", "later"),
    ],
)
async def test_what_goes_wrong_is_told(
    python: PythonOperator, function: str, args: dict[str, Any], code: str, part: str
) -> None:
    with pytest.raises(NodeFailed, match=part) as caught:
        await call(python, function, **args)
    assert caught.value.code == code


def test_only_marked_functions_are_there_and_the_check_knows_them(python: PythonOperator) -> None:
    for name in ("hidden", "arae"):
        node = {"id": "a", "op": "python", "params": {"function": name}}
        with pytest.raises(InvalidWorkflow, match=r"nodes\.0\.params\.function"):
            check_workflow({"nodes": [node]}, {**operators(), "python": python})


def test_a_function_may_change_something_unless_it_is_pure(python: PythonOperator) -> None:
    for name, is_pure in (("area", True), ("fails", False)):
        params = python.params.model_validate({"function": name})
        assert python.writes(params) != is_pure
        assert (python.identity(params).sampled == "") == is_pure


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("x = 1", "no function"),
        ("1 / 0", "ZeroDivisionError"),
        ("def broken(", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("from workflows.functions import function\n@function\ndef f(a, /): pass", "without names"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path: Path, source: str | None, part: str) -> None:
    path = tmp_path / "functions.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(FunctionsUnusable, match=part):
        load_functions(path)

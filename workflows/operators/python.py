"""`python`: a function that the server's operator has registered, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import anyio.to_thread
import orjson
from pydantic import Field, ValidationError, create_model

from workflows.errors import NodeFailed
from workflows.functions import KEY, Function
from workflows.operators.base import JsonType, NodeContext, NodeResult
from workflows.operators.failures import invalid_params
from workflows.signature import Identity
from workflows.spec import Document


class PythonParams(Document):
    """function: its name. args: its arguments, by name."""

    function: str
    args: dict[str, Any] = Field(default_factory=dict)


class PythonOperator:
    """Calls functions; those that are no coroutines in a thread."""

    name = "python"
    outputs: Mapping[str, JsonType] = {"value": "any"}

    def __init__(self, functions: Mapping[str, Function]) -> None:
        """functions: by name, at least one."""
        self._functions = functions
        # Names that do not exist are found when the document is checked.
        names: Any = Literal[tuple(functions)]
        self.params = create_model("PythonParams", __base__=PythonParams, function=(names, ...))

    def writes(self, params: PythonParams) -> bool:
        """Unless a function says that it changes nothing, it may."""
        return not self._functions[params.function].is_pure

    def identity(self, params: PythonParams) -> Identity:
        """Of a pure function and its arguments."""
        is_pure = self._functions[params.function].is_pure
        return Identity(
            content=params.model_dump(mode="json"),
            sampled="" if is_pure else "the function is not marked as pure",
            is_pure=is_pure,
        )

    async def run(self, params: PythonParams, context: NodeContext) -> NodeResult:
        """Raises NodeFailed."""
        function = self._functions[params.function]
        args = dict(params.args)
        if KEY in args:
            raise invalid_params(f"params.args.{KEY}: is the node's, and not given")
        if function.takes_key:
            args[KEY] = context.idempotency_key
        value = await _called(function, args)
        try:
            value = orjson.loads(orjson.dumps(value))
        except (TypeError, orjson.JSONDecodeError) as error:
            message = f"{function.name} returned what is no JSON: {error}"
            raise NodeFailed(message, code="not_json", is_retryable=False) from None
        return NodeResult(output={"value": value})


async def _called(function: Function, args: dict[str, Any]) -> Any:
    try:
        if function.is_async:
            return await function.call(**args)
        return await anyio.to_thread.run_sync(
            partial(function.call, **args), abandon_on_cancel=True
        )
    except NodeFailed:
        raise
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, ("params.args", *first["loc"])))
        raise invalid_params(f"{place}: {first['msg']}") from None
    except Exception as error:
        message = f"{function.name} failed with {type(error).__name__}: {error}"
        # Whether it had an effect is not known.
        raise NodeFailed(message, code="function_failed", is_retryable=function.is_pure) from error

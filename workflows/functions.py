"""Functions of the server's operator, that `python` nodes may call and no others.

from workflows.functions import function

@function(pure=True)
def area(width: float, height: float) -> float:
    return width * height

@function
async def notify(text: str, idempotency_key: str) -> dict:
    ...
"""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import ConfigDict, validate_call
from pydantic.errors import PydanticUserError

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__workflow_function__"
KEY = "idempotency_key"


class FunctionsUnusable(Exception):
    """The file of functions cannot be used. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """call: checks its arguments' types, raises pydantic's ValidationError. takes_key: whether it
    wants the node's idempotency key. is_pure: equal arguments give equal results, and nothing
    changes outside."""

    name: str
    call: Callable[..., Any]
    is_async: bool
    takes_key: bool
    is_pure: bool


@overload
def function(marked: F) -> F: ...


@overload
def function(*, pure: bool = False) -> Callable[[F], F]: ...


def function(marked: Any = None, *, pure: bool = False) -> Any:
    """Lets `python` nodes call a function by its name.

    Its arguments are held to its annotations. What it returns must be JSON. pure: equal arguments
    give equal results, and nothing changes outside: equal calls may be one.
    """

    def mark(one: F) -> F:
        setattr(one, _MARK, pure)
        return one

    return mark if marked is None else mark(marked)


def load_functions(path: Path) -> dict[str, Function]:
    """The marked functions of a Python file, by name. Raises FunctionsUnusable."""
    try:
        found = runpy.run_path(str(path))
    except OSError as error:
        raise FunctionsUnusable(f"cannot be read: {error.strerror}") from None
    except BaseException as error:
        raise FunctionsUnusable(f"failed with {type(error).__name__}: {error}") from error
    functions = {
        name: _function(name, one)
        for name, one in found.items()
        if inspect.isfunction(one) and hasattr(one, _MARK)
    }
    if not functions:
        raise FunctionsUnusable("has no function that is marked with workflows.functions.function")
    return functions


def _function(name: str, marked: Callable[..., Any]) -> Function:
    parameters = inspect.signature(marked).parameters.values()
    if any(one.kind is one.POSITIONAL_ONLY for one in parameters):
        raise FunctionsUnusable(f"{name} takes arguments without names")
    try:
        call = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(marked)
    except PydanticUserError as error:
        raise FunctionsUnusable(f"{name}: {error.message}") from None
    return Function(
        name=name,
        call=call,
        is_async=inspect.iscoroutinefunction(marked),
        takes_key=any(one.name == KEY for one in parameters),
        is_pure=getattr(marked, _MARK),
    )

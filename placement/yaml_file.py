"""YAML files of the user into checked models; what is wrong is named by path and line."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

from placement.errors import InvalidInput, UnreadableFile, shortened, why_unreadable
from placement.regular_file import read_regular_file

Place = tuple[str | int, ...]
M = TypeVar("M", bound=pydantic.BaseModel)

# Of a file: its characters, its values with each alias counted as what it stands for, its depth.
_MAX_CHARACTERS, _MAX_VALUES, _MAX_DEPTH = 4_000_000, 200_000, 50

_KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")

_WORDS = {
    "missing": "is missing",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
}


@dataclass(frozen=True, slots=True)
class YamlFile:
    """What a YAML file holds. lines: where each value begins, from 1, by its path. other_keys: the
    paths that end in a key that is no text."""

    name: str
    value: Any
    lines: dict[Place, int] = field(default_factory=dict)
    other_keys: list[Place] = field(default_factory=list)

    def error(self, place: Place, message: str) -> InvalidInput:
        """The error for the value at `place`: `cluster.yaml, line 3: offers.0.count: …`."""
        near = place
        while near and near not in self.lines:
            near = near[:-1]
        line = f", line {self.lines[near]}" if near in self.lines else ""
        path = ".".join(map(str, place))
        return InvalidInput(f"{self.name}{line}: {path}" if path else f"{self.name}{line}", message)

    def checked(self, model: type[M]) -> M:
        """The file as a `model`. Raises InvalidInput for the first thing that is wrong, and says
        where the others are."""
        for place in self.other_keys:
            raise self.error(place, "a key must be text; write it in quotes")
        try:
            return model.model_validate(self.value if self.value is not None else {})
        except pydantic.ValidationError as failure:
            # A misspelt key explains the one that is missing.
            first, *others = sorted(
                failure.errors(include_url=False),
                key=lambda one: one["type"] != "extra_forbidden",
            )
            message = _explain(first, model)
            if others:
                places = ", ".join(dict.fromkeys(_path(one["loc"]) for one in others))
                message += f" (also wrong: {places})"
            raise self.error(tuple(first["loc"]), message) from None


def read_yaml(path: Path) -> YamlFile:
    """The file at `path`. Raises InvalidInput: there is none, it is no YAML, a key comes twice."""
    name = path.name
    try:
        text = read_regular_file(path).decode("utf-8")
    except (OSError, ValueError) as error:
        raise UnreadableFile(str(path), why_unreadable(error)) from None
    return parse_yaml(text, name)


def parse_yaml(text: str, name: str) -> YamlFile:
    """As `read_yaml`, of a text."""
    if len(text) > _MAX_CHARACTERS:
        raise InvalidInput(name, f"is longer than {_MAX_CHARACTERS} characters")
    file = YamlFile(name, None)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return file
        _check_size(node, file)
        _note_lines(node, (), file)
        value = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise InvalidInput(f"{name}{line}", f"is not YAML: {error.problem}") from None
    except RecursionError:
        raise InvalidInput(name, "is nested too deeply") from None
    except yaml.YAMLError as error:
        raise InvalidInput(name, f"is not YAML: {' '.join(str(error).split())}") from None
    return replace(file, value=value)


class _Loader(yaml.SafeLoader):
    """Says of a scalar that is not what its tag says where it stands; yaml's own constructors raise
    AttributeError, KeyError and more."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:  # noqa: BLE001  whatever a constructor trips over
            kind = node.tag.rpartition(":")[2]
            problem = (
                "a number of thousands of digits"
                if "digits" in str(error)
                else f"{shortened(node.value)} is no {kind}"
            )
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def _check_size(root: yaml.Node, file: YamlFile) -> None:
    """Refuses what is too large once each alias is replaced by what it stands for."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if not isinstance(node, yaml.CollectionNode):
            return 1
        line = node.start_mark.line + 1
        if id(node) in open_nodes:
            raise InvalidInput(f"{file.name}, line {line}", "an alias (*) stands inside itself")
        if id(node) not in sizes:
            if len(open_nodes) >= _MAX_DEPTH:
                raise InvalidInput(f"{file.name}, line {line}", "is nested too deeply")
            open_nodes.add(id(node))
            items = (
                node.value
                if isinstance(node, yaml.SequenceNode)
                else itertools.chain.from_iterable(node.value)
            )
            sizes[id(node)] = 1 + sum(map(size, items))
            open_nodes.discard(id(node))
        if sizes[id(node)] > _MAX_VALUES:
            raise InvalidInput(
                f"{file.name}, line {line}",
                f"holds more than {_MAX_VALUES} values, its aliases (*) replaced",
            )
        return sizes[id(node)]

    size(root)


def _note_lines(node: yaml.Node, place: Place, file: YamlFile) -> None:
    file.lines.setdefault(place, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note_lines(item, (*place, index), file)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, item in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            inner = (*place, key.value)
            file.lines[inner] = key.start_mark.line + 1
            if key.tag not in _KEY_TAGS:
                file.other_keys.append(inner)
            if key.value in seen:
                raise file.error(inner, "comes twice")
            seen.add(key.value)
            _note_lines(item, inner, file)


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean …?`, or what there is."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def _path(place: Sequence[str | int]) -> str:
    return ".".join(map(str, place))


def _explain(error: Any, model: type[pydantic.BaseModel]) -> str:
    kind = error["type"]
    if kind == "extra_forbidden":
        keys = _keys_at(model, error["loc"][:-1])
        return f"there is no such key; {nearest(str(error['loc'][-1]), keys)}"
    shown = (
        f", not {shortened(error['input'])}"
        if isinstance(error["input"], str | int | float)
        else ""
    )
    if kind in _WORDS:
        return _WORDS[kind] + (shown if kind != "missing" else "")
    message = str(error["msg"]).removeprefix("Value error, ")
    context = error.get("ctx") or {}
    if kind == "too_short":
        return "must not be empty: nothing is listed"
    if kind == "greater_than_equal":
        return f"must be at least {_figure(context['ge'])}{shown}"
    if kind == "greater_than":
        return f"must be above {_figure(context['gt'])}{shown}"
    if kind == "less_than_equal":
        return f"must be at most {_figure(context['le'])}{shown}"
    if kind == "literal_error" and isinstance(error["input"], str):
        expected = [
            word.strip(" '") for word in context["expected"].replace(" or ", ",").split(",")
        ]
        return f"{error['input']!r} is not known; {nearest(error['input'], expected)}"
    return message


def _figure(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def _keys_at(model: type[pydantic.BaseModel], place: Sequence[str | int]) -> list[str]:
    """The keys of the mapping at `place` in a file of this model."""
    current: Any = model
    for step in place:
        if isinstance(current, type) and issubclass(current, pydantic.BaseModel):
            info = current.model_fields.get(str(step))
            current = None if info is None else info.annotation
        else:
            current = _model_in(current)
    found = current if isinstance(current, type) else _model_in(current)
    if isinstance(found, type) and issubclass(found, pydantic.BaseModel):
        return list(found.model_fields)
    return []


def _model_in(annotation: Any) -> Any:
    """The model inside `list[M]`, `dict[str, M]`, `M | None`."""
    for argument in getattr(annotation, "__args__", ()):
        if isinstance(argument, type) and issubclass(argument, pydantic.BaseModel):
            return argument
    return None

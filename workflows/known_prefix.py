"""What is known of a prompt before all is there that it is made of.

`Answer from these rules: … {{ nodes.find.output.texts }}` begins with text that does not depend on
`find`: an engine can read that much of it while `find` still runs. Where it goes on with the text
of a node, as in `Check this: {{ nodes.draft.output.text }}`, it can read on while `draft` writes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from workflows.complaints import Path
from workflows.errors import TemplateError
from workflows.templates import RenderBudget, Template, compile_template
from workflows.values import TemplatedValue

MIN_CHARS = 400

_PARTS = ("messages", "prompt")
_TEXT = ("output", "text")
_TAG = re.compile(r"\{\{.*?\}\}|\{%|\{#", re.DOTALL)
# Behind a template's beginning: keeps it from being one expression, whose value is not its text.
_MARK = "|"


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is there while a node waits.

    scope: as for `Template.render`. ended: nodes whose output is known. said: how `output.text` of
    others begins, by node. budget: is charged for rendering.
    """

    scope: Mapping[str, Any]
    ended: Container[str]
    said: Mapping[str, str] = field(default_factory=dict)
    budget: RenderBudget | None = None

    def has(self, template: Template) -> bool:
        """Whether all that a template reads is there."""
        return all(
            one.root != "nodes" or (bool(one.path) and one.path[0] in self.ended)
            for one in template.references
        )

    def render(self, value: Template | TemplatedValue) -> Any:
        """Raises TemplateError."""
        return value.render(self.scope, self.budget)

    def beginning(self, template: Template) -> str:
        """How its value begins, where it is nothing but the text that a node writes; else empty."""
        if template.is_reference:
            (one,) = template.references
            if one.root == "nodes" and one.path[1:] == _TEXT:
                return self.said.get(one.path[0], "")
        return ""


def known_prompt(params: TemplatedValue, known: Known) -> dict[str, Any] | None:
    """The parameters with what is known of `messages` or `prompt`, of which the last text may be
    cut; None where that is little, or where another parameter is not known. Raises TemplateError.
    """
    rest = {path: one for path, one in params.templates.items() if path[0] not in _PARTS}
    if not isinstance(params.raw, dict) or not all(map(known.has, rest.values())):
        return None
    others = {name: value for name, value in params.raw.items() if name not in _PARTS}
    prompt, messages = params.raw.get("prompt"), params.raw.get("messages")
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": _known_text(params, ("prompt",), known)}]
    elif isinstance(messages, list):
        messages = _known_messages(params, messages, known)
    else:
        return None
    found = {**known.render(TemplatedValue(others, rest)), "messages": messages}
    return found if prompt_chars(found) >= MIN_CHARS else None


def prompt_chars(params: Mapping[str, Any]) -> int:
    """How much text is in the messages of what `known_prompt` returned."""
    return sum(len(one["content"]) for one in params["messages"])


def _known_messages(
    params: TemplatedValue, messages: list[Any], known: Known
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        inside = {
            path[2:]: one
            for path, one in params.templates.items()
            if path[:2] == ("messages", index)
        }
        unknown = {path for path, one in inside.items() if not known.has(one)}
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            break
        if not unknown:
            whole = known.render(TemplatedValue(message, inside))
            if not isinstance(whole["content"], str):
                break
            found.append(whole)
            continue
        if unknown == {("content",)}:
            others = {path: one for path, one in inside.items() if path not in unknown}
            cut = known.render(TemplatedValue(message, others))
            text = _known_text(params, ("messages", index, "content"), known)
            if text:
                found.append({**cut, "content": text})
        break
    return found


def _known_text(params: TemplatedValue, path: Path, known: Known) -> str:
    """The beginning of the text at `path` that depends on nothing that is not there."""
    value: Any = params.raw
    for part in path:
        value = value[part]
    source = str(value)
    template = params.templates.get(path)
    if template is None:
        return source
    tag = _first_unknown(source, known)
    if tag is None:
        return str(known.render(template))
    expression = _expression(tag[0])
    said = "" if expression is None else known.beginning(expression)
    if template.is_expression:
        return said  # white space around it is not in its value
    beginning = source[: tag.start()]
    if source[tag.start() : tag.start() + 3] in ("{{-", "{%-", "{#-"):
        beginning = beginning.rstrip()
    rendered = str(known.render(compile_template(beginning + _MARK)))
    return rendered.removesuffix(_MARK) + said


def _first_unknown(source: str, known: Known) -> re.Match[str] | None:
    """The first statement, or the first expression that is not known yet."""
    for tag in _TAG.finditer(source):
        expression = _expression(tag[0])
        if expression is None or not known.has(expression):
            return tag
    return None


def _expression(tag: str) -> Template | None:
    """What a tag says, if it is an expression; no such thing are braces inside of a string, say."""
    if not tag.startswith("{{"):
        return None
    try:
        return compile_template(tag)
    except TemplateError:
        return None

"""What is known of a prompt before all is there that it is made of.

`Answer from these rules: … {{ nodes.find.output.texts }}` begins with text that does not depend on
`find`: an engine can read that much of it while `find` still runs.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from workflows.complaints import Path
from workflows.errors import TemplateError
from workflows.templates import RenderBudget, Template, compile_template
from workflows.values import TemplatedValue

MIN_CHARS = 400

_PARTS = ("messages", "prompt")
_TAG = re.compile(r"\{\{.*?\}\}|\{%|\{#", re.DOTALL)
# Behind a template's beginning: keeps it from being one expression, whose value is not its text.
_MARK = "|"


def known_prompt(
    params: TemplatedValue,
    scope: Mapping[str, Any],
    ended: Container[str],
    budget: RenderBudget | None = None,
) -> dict[str, Any] | None:
    """The parameters with what is known of `messages` or `prompt`, of which the last text may be
    cut; None where that is little, or where another parameter is not known.

    scope: as for `Template.render`. ended: nodes whose output is known. Raises TemplateError.
    """
    rest = {path: one for path, one in params.templates.items() if path[0] not in _PARTS}
    if not isinstance(params.raw, dict) or not all(is_known(one, ended) for one in rest.values()):
        return None
    others = {name: value for name, value in params.raw.items() if name not in _PARTS}
    known: dict[str, Any] = TemplatedValue(others, rest).render(scope, budget)
    prompt, messages = params.raw.get("prompt"), params.raw.get("messages")
    if isinstance(prompt, str):
        text = _known_text(params, ("prompt",), scope, ended, budget)
        messages = [{"role": "user", "content": text}]
    elif isinstance(messages, list):
        messages = _known_messages(params, messages, scope, ended, budget)
    else:
        return None
    found = {**known, "messages": messages}
    return found if prompt_chars(found) >= MIN_CHARS else None


def prompt_chars(params: Mapping[str, Any]) -> int:
    """How much text is in the messages of what `known_prompt` returned."""
    return sum(len(one["content"]) for one in params["messages"])


def _known_messages(
    params: TemplatedValue,
    messages: list[Any],
    scope: Mapping[str, Any],
    ended: Container[str],
    budget: RenderBudget | None,
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        inside = {
            path[2:]: one
            for path, one in params.templates.items()
            if path[:2] == ("messages", index)
        }
        unknown = {path for path, one in inside.items() if not is_known(one, ended)}
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            break
        if not unknown:
            found.append(TemplatedValue(message, inside).render(scope, budget))
            continue
        if unknown == {("content",)}:
            others = {path: one for path, one in inside.items() if path not in unknown}
            cut = TemplatedValue(message, others).render(scope, budget)
            text = _known_text(params, ("messages", index, "content"), scope, ended, budget)
            if text:
                found.append({**cut, "content": text})
        break
    return found


def _known_text(
    params: TemplatedValue,
    path: Path,
    scope: Mapping[str, Any],
    ended: Container[str],
    budget: RenderBudget | None,
) -> str:
    """The beginning of the text at `path` that depends on nothing that has not ended."""
    value: Any = params.raw
    for part in path:
        value = value[part]
    source = str(value)
    if path not in params.templates:
        return source
    end = _known_end(source, ended)
    if end == len(source):
        return str(params.templates[path].render(scope, budget))
    beginning = source[:end]
    if source[end : end + 3] in ("{{-", "{%-", "{#-"):
        beginning = beginning.rstrip()
    return str(compile_template(beginning + _MARK).render(scope, budget)).removesuffix(_MARK)


def _known_end(source: str, ended: Container[str]) -> int:
    """Where the first statement stands, or the first expression that is not known yet."""
    for tag in _TAG.finditer(source):
        try:
            is_there = tag[0].startswith("{{") and is_known(compile_template(tag[0]), ended)
        except TemplateError:
            is_there = False  # braces inside of a string, say
        if not is_there:
            return tag.start()
    return len(source)


def is_known(template: Template, ended: Container[str]) -> bool:
    """Whether all that a template reads is there."""
    return all(
        one.root != "nodes" or (bool(one.path) and one.path[0] in ended)
        for one in template.references
    )

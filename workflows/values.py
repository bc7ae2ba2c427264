"""JSON values with templates in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workflows.complaints import Path
from workflows.errors import TemplateError
from workflows.templates import RenderBudget, Template, compile_template


@dataclass(frozen=True, slots=True)
class TemplatedValue:
    """A JSON value whose strings are templates. templates: those that refer to something, by path.

    Make it by `compile_value`.
    """

    raw: Any
    templates: Mapping[Path, Template]

    def render(self, scope: Mapping[str, Any], budget: RenderBudget | None = None) -> Any:
        """The value over `scope`. Raises TemplateError. budget: see `Template.render`."""
        return self.replaced(lambda _, template: template.render(scope, budget))

    def replaced(self, value_of: Callable[[Path, Template], Any]) -> Any:
        """The value with another in each template's place. Shares what has none with `raw`."""
        return self._replaced(self.raw, (), value_of) if self.templates else self.raw

    def _replaced(self, value: Any, path: Path, value_of: Callable[[Path, Template], Any]) -> Any:
        template = self.templates.get(path)
        if template is not None:
            return value_of(path, template)
        if isinstance(value, dict):
            return {
                key: self._replaced(item, (*path, key), value_of) for key, item in value.items()
            }
        if isinstance(value, list):
            return [
                self._replaced(item, (*path, index), value_of) for index, item in enumerate(value)
            ]
        return value


def compile_value(
    value: Any,
    on_error: Callable[[Path, str], None] | None = None,
    *,
    literal: str | None = None,
) -> TemplatedValue:
    """Compiles every string that has a `{{` or `{%` in it.

    on_error: takes what is wrong with a template, which is then left as it is; without it, raises
    TemplateError. literal: a key of `value` whose strings are no templates.
    """
    templates = {}
    for path, text in _strings(value, ()):
        if path[:1] == (literal,) or ("{{" not in text and "{%" not in text and "{#" not in text):
            continue
        try:
            templates[path] = compile_template(text)
        except TemplateError as error:
            if on_error is None:
                raise
            on_error(path, error.message)
    return TemplatedValue(value, templates)


def _strings(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _strings(item, (*path, index))

"""The template language of node parameters: Jinja's expressions, sandboxed and bounded in cost.

`{{ nodes.search.output.passages }}` refers to the output of a node, `{{ inputs.question }}` to an
input of the run. A string that is one expression and nothing else keeps the value's type; any other
renders to text.

A template comes from whoever may post a workflow, so it must not cost more than it says:
- Statements are `if` and `for`. There is no `set`, no macro, no include: nothing that a loop could
  grow, and nothing that could recurse.
- There are no calls: no methods (`"a".ljust(10**9)`), no functions. Filters do what they did; those
  that could multiply their input's size are left out, or bounded here.
- Loops count their rounds and watch the clock; text that grows watches its size.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jinja2
import orjson
from jinja2 import filters, nodes
from jinja2.compiler import CodeGenerator
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workflows.errors import TemplateError
from workflows.json_values import MAX_DEPTH as MAX_JSON_DEPTH

MAX_SOURCE_CHARS = 65_536
# Of what stands between braces: dense code takes 15 ms per 1,000 characters to compile.
MAX_CODE_CHARS = 8_192
MAX_TEXT_CHARS = 4_000_000
MAX_ROUNDS = 100_000
MAX_RENDER_S = 0.25
MAX_DEPTH = 40
_MAX_INT_BITS = 4096
_MAX_PRECISION = 20
_MAX_INT_CHARS = 100
# What JSON's readers and writers here have.
_LEAST_INT, _MOST_INT = -(2**63), 2**64 - 1

_FILTERS = (
    *("abs", "capitalize", "count", "default", "d", "dictsort", "e", "escape", "first", "float"),
    *("int", "items", "last", "length", "list", "lower", "max", "min", "reverse", "sort"),
    *("string", "striptags", "title", "trim", "truncate", "unique", "upper", "wordcount"),
)
_TESTS = (
    *("boolean", "defined", "divisibleby", "eq", "equalto", "even", "false", "float", "ge", "gt"),
    *("in", "integer", "iterable", "le", "lower", "lt", "mapping", "ne", "none", "number", "odd"),
    *("sequence", "string", "true", "undefined", "upper"),
)
_STATEMENTS = (nodes.Output, nodes.TemplateData, nodes.If, nodes.For)
_FORBIDDEN = {
    nodes.Call: "calls are not available; use a filter",
    nodes.Assign: "'set' is not available; put the expression where it is used",
    nodes.AssignBlock: "'set' is not available; put the expression where it is used",
}
# These apply a test or a filter, which may itself look through a list, to each item.
_FILTERS_PER_ITEM: dict[str, Callable[..., Any]] = {
    "map": filters.sync_do_map,
    "reject": filters.sync_do_reject,
    "rejectattr": filters.sync_do_rejectattr,
    "select": filters.sync_do_select,
    "selectattr": filters.sync_do_selectattr,
}
_CODE = re.compile(r"\{[{%].*?(?:[}%]\}|$)", re.DOTALL)
_NO_DEFAULT = object()
# What filters raise over data that they were not made for.
_FAILURES = (
    *(jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError),
    *(NameError, RuntimeError, TypeError, ValueError),
)
_ROOTS = ("nodes", "inputs", "item", "index", "loop")


@dataclass(slots=True)
class RenderBudget:
    """Seconds that templates may take together: `burst_s` at once, and `share` of the time that
    passes. start_s: of the clock that `refill` is told."""

    start_s: float
    burst_s: float = 1.0
    share: float = 0.1
    spent_s: float = 0.0
    left_s: float = 1.0
    _ahead: RenderBudget | None = None

    @property
    def ahead(self) -> RenderBudget:
        """Another one, as large, for what is rendered before it is needed."""
        if self._ahead is None:
            self._ahead = RenderBudget(self.start_s, self.burst_s, self.share)
        return self._ahead

    def refill(self, now_s: float) -> RenderBudget:
        """Counts the time that has passed."""
        self.left_s = self.burst_s + self.share * (now_s - self.start_s) - self.spent_s
        return self

    def spend(self, seconds: float) -> None:
        self.spent_s += seconds
        self.left_s -= seconds


@dataclass(slots=True)
class _Limit:
    """What one rendering may still cost."""

    deadline_s: float
    num_rounds: int = 0

    def tick(self) -> None:
        self.num_rounds += 1
        if self.num_rounds > MAX_ROUNDS:
            raise TemplateError(f"a template may loop {MAX_ROUNDS:,} times at most")
        if time.monotonic() > self.deadline_s:
            raise TemplateError(f"rendering a template took longer than {MAX_RENDER_S:g} s")


_limit: ContextVar[_Limit] = ContextVar("workflows.templates.limit")


@contextmanager
def _bounded(budget: RenderBudget | None) -> Iterator[None]:
    if budget is not None and budget.left_s <= 0:
        raise TemplateError("the templates of this run took too long altogether")
    begun_s = time.monotonic()
    token = _limit.set(_Limit(begun_s + MAX_RENDER_S))
    try:
        yield
    finally:
        _limit.reset(token)
        if budget is not None:
            budget.spend(time.monotonic() - begun_s)


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_TEXT_CHARS:
        raise TemplateError(f"a template may make {MAX_TEXT_CHARS:,} characters at most")


def _tick() -> str:
    _limit.get().tick()
    return ""


def _concat(*parts: object) -> str:
    texts = []
    num_chars = 0
    for part in parts:
        texts.append(str(part))
        num_chars += len(texts[-1])
        _check_size(num_chars)
    return "".join(texts)


def _join(values: Any, separator: str = "", attribute: str | None = None) -> str:
    parts: list[object] = []
    for value in values:
        if parts and separator:
            parts.append(separator)
        parts.append(value[attribute] if attribute is not None else value)
    return _concat(*parts)


def _sum(values: Iterable[Any], attribute: str | None = None) -> float:
    total: float = 0
    for value in values:
        number = value[attribute] if attribute is not None else value
        if not isinstance(number, (int, float)):
            raise TemplateError("sum adds numbers")
        total += number
    return total


def _watched(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _tick()
        yield value


def _per_item(apply: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that takes the context, with its items counted."""

    @jinja2.pass_context
    def watched(context: jinja2.runtime.Context, values: Any, *args: Any, **options: Any) -> Any:
        return apply(context, _watched(values or ()), *args, **options)

    return watched


def _replace(text: str, old: str, new: str) -> str:
    text = str(text)
    _check_size(len(text) + text.count(old) * max(0, len(new) - len(old)))
    return text.replace(old, new)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    """Jinja's, which computes 10 to the power of the precision."""
    if not -_MAX_PRECISION <= precision <= _MAX_PRECISION:
        raise TemplateError(f"round keeps {_MAX_PRECISION} digits at most")
    return filters.do_round(value, precision, method)


def _int(value: Any, default: Any = 0, base: int = 10) -> Any:
    """Jinja's, which reads texts of any length: numbers have 64 bits."""
    if isinstance(value, str) and len(value) > _MAX_INT_CHARS:
        return default
    return filters.do_int(value, default, base)


def _tojson(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:
        raise TemplateError(f"tojson: {error}") from None


def _fromjson(text: Any, default: Any = _NO_DEFAULT) -> Any:
    """The value of a text that is JSON; `default`, if there is one, where it is not."""
    try:
        if not isinstance(text, str):
            raise TemplateError(f"fromjson takes a text, not {type(text).__name__}")
        return orjson.loads(text)
    except (orjson.JSONDecodeError, TemplateError) as error:
        if default is not _NO_DEFAULT:
            return default
        raise TemplateError(f"fromjson: {error}") from None


class _CodeGenerator(CodeGenerator):
    """Computes nothing while it compiles: what an expression costs is bounded in rendering it."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Any, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja with less in it, and with a price on what is left."""

    intercepted_binops = frozenset(["*", "**", "%", "+"])
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        super().__init__(undefined=jinja2.StrictUndefined, autoescape=False, optimized=False)
        self.globals.clear()
        self.globals["__tick__"] = _tick
        self.globals["__concat__"] = _concat
        self.filters = {name: self.filters[name] for name in _FILTERS}
        self.filters.update({name: _per_item(apply) for name, apply in _FILTERS_PER_ITEM.items()})
        self.filters.update(
            join=_join,
            replace=_replace,
            round=_round,
            int=_int,
            sum=_sum,
            tojson=_tojson,
            fromjson=_fromjson,
        )
        self.tests = {name: self.tests[name] for name in _TESTS}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A mapping's keys come before its methods: an output may well be called `items`."""
        if isinstance(obj, Mapping):
            return self.getitem(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Keys of a mapping, and of nothing else than data."""
        if isinstance(obj, Mapping):
            try:
                return obj[argument]
            except (KeyError, TypeError):
                return self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**" and not _is_small_power(left, right):
            raise TemplateError("the result of ** is too large")
        if operator == "%" and isinstance(left, str):
            raise TemplateError("% does not format text here; write the values in place")
        if operator == "*":
            _check_product(left, right)
        if operator == "+" and isinstance(left, (str, list)):
            _check_size(len(left) + (len(right) if isinstance(right, (str, list)) else 0))
        return super().call_binop(context, operator, left, right)


def _is_small_power(base: Any, exponent: Any) -> bool:
    if isinstance(base, int) and isinstance(exponent, int):
        return base.bit_length() * max(exponent, 1) <= _MAX_INT_BITS
    return True


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(times, int):
            _check_size(len(value) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() + right.bit_length()
        if num_bits > _MAX_INT_BITS:
            raise TemplateError("the result of * is too large")


_environment = _Environment()


@dataclass(frozen=True, slots=True)
class Reference:
    """A value that a template reads: `root` is `nodes` or `inputs`, path what follows it.

    (`nodes.a.output.text` has the path `("a", "output", "text")`; a part that is only known when
    the template is rendered ends the path.)
    """

    root: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Template:
    """A compiled template. Make it by `compile_template`.

    is_expression: it is one expression and nothing else, and keeps its value's type.
    is_reference: that expression is one of `references`, untouched.
    """

    source: str
    references: frozenset[Reference]
    is_expression: bool
    is_reference: bool
    _evaluate: Callable[..., Any] = field(repr=False, compare=False)

    def render(self, scope: Mapping[str, Any], budget: RenderBudget | None = None) -> Any:
        """The value over `scope` (its keys: nodes, inputs, …). Raises TemplateError.

        budget: is charged with the time that it takes.
        """
        try:
            with _bounded(budget):
                return self._evaluate(scope)
        except jinja2.UndefinedError as error:
            # "'dict object' has no attribute 'z'" is Python's view of the author's data.
            message = re.sub(
                r"'[\w ]+ object' has no (attribute|element)", "there is no", str(error)
            )
            raise TemplateError(f"{message} in {_shown(self.source)}") from None
        except TemplateError as error:
            raise TemplateError(f"{error.message} in {_shown(self.source)}") from None
        except RecursionError:
            raise TemplateError(f"{_shown(self.source)} is nested too deeply") from None
        except _FAILURES as error:
            message = str(error) or type(error).__name__
            raise TemplateError(f"{message} in {_shown(self.source)}") from None


def code_chars(source: str) -> int:
    """How much of a template is code: what stands between braces."""
    return sum(len(match[0]) for match in _CODE.finditer(source))


@lru_cache(maxsize=4096)
def compile_template(source: str) -> Template:
    """Raises TemplateError for a template that is too long, malformed, or uses what is left out."""
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateError(f"a template may have {MAX_SOURCE_CHARS:,} characters at most")
    if code_chars(source) > MAX_CODE_CHARS:
        raise TemplateError(f"a template may have {MAX_CODE_CHARS:,} characters in braces at most")
    try:
        tree = _environment.parse(source)
        _check(tree, depth=0)
        references = frozenset(_references(tree))
        expression = _only_expression(tree)
        if expression is not None:
            is_reference = _is_reference(expression)
            evaluate = _compile_expression(expression)
            return Template(source, references, True, is_reference, evaluate)
        return Template(source, references, False, False, _compile_text(tree))
    except (jinja2.TemplateError, ValueError, SyntaxError) as error:
        raise TemplateError(f"{error} in {_shown(source)}") from None
    except RecursionError:
        raise TemplateError(f"{_shown(source)} is nested too deeply") from None


def compile_condition(source: str) -> Template:
    """A template that is one expression, with or without its braces."""
    text = source.strip()
    template = compile_template(text if text.startswith("{{") else "{{ " + text + " }}")
    if not template.is_expression:
        raise TemplateError(f"a condition is one expression, not {_shown(source)}")
    return template


def _shown(source: str) -> str:
    return repr(source if len(source) <= 80 else source[:77] + "...")


def _check(node: nodes.Node, *, depth: int) -> None:
    """Raises TemplateError for what the language does not have."""
    if depth > MAX_DEPTH:
        raise TemplateError("the template is nested too deeply")
    kind = type(node)
    if kind in _FORBIDDEN:
        raise TemplateError(_FORBIDDEN[kind])
    if isinstance(node, nodes.Stmt) and not isinstance(node, _STATEMENTS):
        raise TemplateError(f"'{kind.__name__.lower()}' statements are not available")
    if isinstance(node, nodes.For) and node.recursive:
        raise TemplateError("recursive loops are not available")
    if isinstance(node, nodes.Name) and node.name.startswith("__"):
        raise TemplateError(f"there is no {node.name}")
    for child in node.iter_child_nodes():
        _check(child, depth=depth + 1)


def _references(tree: nodes.Template) -> Iterator[Reference]:
    unknown = find_undeclared_variables(tree) - set(_ROOTS)
    if unknown:
        name = min(unknown)
        raise TemplateError(
            f"there is no '{name}'; a template reads inputs.NAME and nodes.ID.output"
        )
    inner: set[int] = set()
    for node in tree.find_all((nodes.Getattr, nodes.Getitem, nodes.Name)):
        if id(node) in inner:
            continue
        path: list[str] = []
        current: nodes.Node = node
        while isinstance(current, (nodes.Getattr, nodes.Getitem)):
            inner.add(id(current.node))
            part = _part_name(current)
            # What lies beyond a part that is not known yet is not known either.
            path = [] if part is None else [part, *path]
            current = current.node
        if isinstance(current, nodes.Name) and current.name in ("nodes", "inputs"):
            yield Reference(current.name, tuple(path))


def _part_name(node: nodes.Getattr | nodes.Getitem) -> str | None:
    if isinstance(node, nodes.Getattr):
        return node.attr
    if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, (str, int)):
        return str(node.arg.value)
    return None


def _only_expression(tree: nodes.Template) -> nodes.Expr | None:
    """The expression, if the template is nothing but one (white space around it does not count)."""
    parts: list[nodes.Node] = []
    for statement in tree.body:
        if not isinstance(statement, nodes.Output):
            return None
        parts += statement.nodes
    expressions = [part for part in parts if not _is_blank(part)]
    if len(expressions) != 1 or isinstance(expressions[0], nodes.TemplateData):
        return None
    only = expressions[0]
    assert isinstance(only, nodes.Expr)
    return only


def _is_reference(expression: nodes.Expr) -> bool:
    current: nodes.Node = expression
    while isinstance(current, (nodes.Getattr, nodes.Getitem)):
        if _part_name(current) is None:
            return False
        current = current.node
    return isinstance(current, nodes.Name) and current.name in ("nodes", "inputs")


def _is_blank(node: nodes.Node) -> bool:
    return isinstance(node, nodes.TemplateData) and not node.data.strip()


def _compile_expression(expression: nodes.Expr) -> Callable[[Mapping[str, Any]], Any]:
    # As jinja2.Environment.compile_expression does, from a tree instead of from text.
    body = [nodes.Assign(nodes.Name("result", "store"), expression, lineno=1)]
    template = _from_tree(nodes.Template(body, lineno=1))

    def evaluate(scope: Mapping[str, Any]) -> Any:
        context = template.new_context(dict(scope))
        for _ in template.root_render_func(context):
            pass
        return _plain(context.vars["result"])

    return evaluate


def _plain(value: Any, depth: int = 0) -> Any:
    """What filters give as JSON has it: lists for tuples and iterators, nothing undefined."""
    if depth > MAX_JSON_DEPTH:
        raise TemplateError(f"a value is nested deeper than {MAX_JSON_DEPTH} levels")
    if isinstance(value, jinja2.Undefined):
        value._fail_with_undefined_error()
    if isinstance(value, Mapping):
        return {_plain_key(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, Iterator)):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, str):
        return _plain_text(value)
    if isinstance(value, int) and not _LEAST_INT <= value <= _MOST_INT:
        raise TemplateError("a number is beyond 64 bits")
    if isinstance(value, float) and not math.isfinite(value):
        raise TemplateError(f"a number is {value}, which JSON does not have,")
    if value is None or isinstance(value, (int, float)):
        return value
    raise TemplateError(f"the value is {type(value).__name__}, which JSON does not have,")


def _plain_key(key: Any) -> str:
    if not isinstance(key, str):
        raise TemplateError(f"a key is {type(key).__name__}, and in JSON always text,")
    return _plain_text(key)


def _plain_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TemplateError("a text has half of a surrogate pair") from None
    return text


def _compile_text(tree: nodes.Template) -> Callable[[Mapping[str, Any]], str]:
    template = _from_tree(tree)

    def render(scope: Mapping[str, Any]) -> str:
        pieces = []
        num_chars = 0
        for piece in template.root_render_func(template.new_context(dict(scope))):
            num_chars += len(piece)
            _check_size(num_chars)
            pieces.append(piece)
        return _plain_text("".join(pieces))

    return render


def _from_tree(tree: nodes.Template) -> jinja2.Template:
    """Compiles a tree whose loops and concatenations are watched."""
    for loop in tree.find_all(nodes.For):
        tick = nodes.Call(nodes.Name("__tick__", "load"), [], [], None, None)
        loop.body.insert(0, nodes.ExprStmt(tick))
    _guard_concatenations(tree)
    tree = nodes.Template(tree.body, lineno=1)
    tree.set_environment(_environment)
    for node in tree.find_all(nodes.Node):
        if node.lineno is None:
            node.lineno = 1
    return jinja2.Template.from_code(
        _environment, _environment.compile(tree), _environment.globals, None
    )


def _guard_concatenations(node: nodes.Node) -> None:
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            setattr(node, name, [_guarded(item) for item in value])
        else:
            setattr(node, name, _guarded(value))


def _guarded(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _guard_concatenations(value)
    if isinstance(value, nodes.Concat):
        return nodes.Call(nodes.Name("__concat__", "load"), value.nodes, [], None, None)
    return value

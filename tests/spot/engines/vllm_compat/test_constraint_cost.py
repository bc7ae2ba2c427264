"""What a constraint may cost, and that finding it out costs little."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spot.engines.vllm_compat.constraint_cost import check_cost
from spot.engines.vllm_compat.refusal import Unservable
from spot.generation import StructuredOutput

STRING = {"type": "string"}


def an_object(properties: dict[str, Any], *, optional: bool = False, **more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [] if optional else list(properties),
        "additionalProperties": False,
        **more,
    }


def strings(number: int) -> dict[str, Any]:
    return {f"property_{index}": STRING for index in range(number)}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = STRING
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def schema(document: Any) -> StructuredOutput:
    return StructuredOutput(json_schema=document)


def patterned(pattern: str) -> StructuredOutput:
    return schema({"type": "string", "pattern": pattern})


def regex(pattern: str) -> StructuredOutput:
    return StructuredOutput(regex=pattern)


def grammar(text: str) -> StructuredOutput:
    return StructuredOutput(grammar=text)


def tag(document: Any) -> StructuredOutput:
    return StructuredOutput(structural_tag=json.dumps(document))


NESTED = "(.{1,1000}){1,1000}"
PATTERN_TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": NESTED}},
}
SCHEMA_TAG = {
    "structures": [{"begin": "<a>", "schema": an_object(strings(5000), optional=True), "end": ""}],
    "triggers": ["<a>"],
}
HOSTILE = {
    "5000 optional properties": schema(an_object(strings(5000), optional=True)),
    "1000 optional properties": schema(an_object(strings(1000), optional=True)),
    "the same as text": schema(json.dumps(an_object(strings(5000), optional=True))),
    "counted properties": schema(an_object(strings(300), optional=True, maxProperties=200)),
    "10k enum values": schema({"enum": [f"{index:020}" for index in range(10_000)]}),
    "many different enum values": schema(
        {"enum": [f"{index * 7919:032}" for index in range(4500)]}
    ),
    "5000 unlike choices": StructuredOutput(choice=[f"{index:032}" for index in range(5000)]),
    "20k choices": StructuredOutput(choice=[str(index) for index in range(20_000)]),
    "two huge choices": StructuredOutput(choice=["a" * 10**6, "b" * 10**6]),
    "5000 alternatives": schema({"anyOf": [an_object({f"k{i}": STRING}) for i in range(5000)]}),
    "alternatives that are not told apart": schema(
        {"anyOf": [{"type": "string", "pattern": f".*{index}"} for index in range(100)]}
    ),
    "many string lengths": schema(
        an_object({f"p{i}": {"type": "string", "maxLength": 200 + i} for i in range(10)})
    ),
    "many unlike counted repetitions": schema(
        an_object({f"p{i}": {"type": "string", "pattern": f".{{1,500}}{i}"} for i in range(10)})
    ),
    "counted repetitions one after the other": regex("a".join(["[a-z]{1,130}"] * 12)),
    "nested repetition": regex(NESTED),
    "small nested repetition": regex("(.{1,30}){1,30}"),
    "thrice nested": regex("((a{0,26}){0,26}){0,26}"),
    "nested loops": regex("((((.+)+x?)+y?)+z?)+"),
    "neighbours that match the same": regex(".{1,1000}.{1,1000}"),
    "many wide characters": regex("." * 1000),
    "what Python cannot read": regex(r"\p{L}(.{1,1000}){1,1000}"),
    "too long": regex("a" * 40_000),
    "too deep": regex("(" * 201),
    "pattern": patterned(NESTED),
    "patternProperties": schema({"type": "object", "patternProperties": {NESTED: STRING}}),
    "propertyNames": schema({"type": "object", "propertyNames": {"pattern": NESTED}}),
    "pattern of a definition": schema({"$defs": {"a": {"pattern": NESTED}}, "$ref": "#/$defs/a"}),
    "whitespace": StructuredOutput(json_schema=STRING, whitespace_pattern=NESTED),
    "pattern in a tag": tag(PATTERN_TAG),
    "schema in a tag": tag(SCHEMA_TAG),
    "grammar in a tag": tag(
        {"format": {"type": "grammar", "grammar": "root ::= ([a-z]{1,100}){1,100}"}}
    ),
    "counts in a grammar": grammar("root ::= ([a-z]{1,100}){1,100}"),
    "count of a rule": grammar("root ::= x{50}\nx ::= y{50}\ny ::= [a-z]{1,50}"),
    "a chain of optional characters": regex(".?" * 16),
    "a chain in a grammar": grammar("root ::= " + "[^\\n]? " * 16),
    "a palindrome": grammar("root ::= x\nx ::= [^\\n] x [^\\n] | [^\\n]"),
    "an ambiguous sum": grammar('root ::= e\ne ::= e "+" e | [0-9]'),
    "regular expression in Lark": grammar("start: /(.{1,30}){1,30}/"),
    "many sets": grammar("root ::= " + "[^\\n]? " * 400),
    "counts in Lark": grammar('start: x~1..100\nx: "a"~1..100'),
    "a rule twice in a row": grammar('root ::= x\nx ::= x x | [a-z] | ""'),
    "rules in a row": grammar("root ::= x\nx ::= (y)* z? y | [a-z]\ny ::= x\nz ::= [a-z]"),
    "a long grammar": grammar("root ::= " + " ".join(["[^a]"] * 5000)),
    "a deep schema": schema(nested(250)),
    "a deep text": schema("[" * 201),
    "not JSON": schema("{not json"),
}
EVERYDAY = {
    "any JSON": schema({}),
    "100 properties": schema(an_object(strings(100))),
    "300 optional properties": schema(an_object(strings(300), optional=True)),
    "enum of 500": schema({"enum": [f"a value with number {index}" for index in range(500)]}),
    "1000 choices": StructuredOutput(choice=[f"choice number {index}" for index in range(1000)]),
    "a long string": schema({"type": "string", "maxLength": 10_000}),
    "lengths": schema(
        an_object(
            {
                "title": {"type": "string", "minLength": 1, "maxLength": 60},
                "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}},
                "text": {"type": "string", "maxLength": 2000},
                **{f"x{i}": {"type": "string", "maxLength": 2000} for i in range(20)},
            }
        )
    ),
    "a million items": schema({"type": "array", "minItems": 10**6, "items": STRING}),
    "50 tools": schema(
        {
            "type": "array",
            "items": {
                "anyOf": [
                    an_object(
                        {"name": {"enum": [f"tool_{i}"]}, "parameters": an_object(strings(8))}
                    )
                    for i in range(50)
                ]
            },
        }
    ),
    "optional values": schema(
        an_object({f"p{i}": {"anyOf": [STRING, {"type": "null"}]} for i in range(100)})
    ),
    "recursion": schema(
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": an_object(
                    {"v": STRING, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}
                )
            },
        }
    ),
    "a reference to itself": schema({"$ref": "#"}),
    "properties called like keywords": schema(
        an_object({"pattern": STRING, "enum": STRING, "maxLength": STRING, "properties": STRING})
    ),
    "formats": schema(
        an_object(
            {
                name: {"type": "string", "format": name}
                for name in ("email", "date-time", "uuid", "uri", "ipv4", "hostname")
            }
        )
    ),
    "ranges": schema(
        an_object({f"n{i}": {"type": "integer", "minimum": 0, "maximum": 10**9} for i in range(50)})
    ),
    "three alternatives": regex("(yes|no|maybe)"),
    "phone": regex(r"\d{3}-\d{4}"),
    "words": regex(r"(\w{1,30} ){1,100}"),
    "name": regex(r"(Mr|Mrs|Ms)\. [A-Z][a-z]{1,40}"),
    "mail": regex(r"^[\w.+-]+@[\w-]+\.[\w.-]+$"),
    "version": regex(r"v?(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}(-[0-9A-Za-z.-]+)?"),
    "date": regex(r"(?<year>\d{4})-(?<month>\d{2})-(?P<day>\d{2})"),
    "a loop in a loop": regex("(a+)+$"),
    "letters": regex("[A-Z]{1,2000}"),
    "text with an end": regex(r"([^,]*,)? .*\.[a-z]{2,10}"),
    "what Python cannot read, and is small": regex(r"\p{Lu}\p{L}+"),
    "pattern": patterned(r"^[A-Z]{2}-\d{4,8}$"),
    "expressions": grammar(
        'root ::= e\ne ::= e "+" t | t\nt ::= "(" ws e ws ")" | [0-9]{1,9}\nws ::= [ ]*'
    ),
    "lists": grammar('root ::= s\ns ::= "(" s* ")" | [a-z]+'),
    "Lark": grammar('start: word ("," word)*\nword: /[a-z]+/\n'),
    "braces in a text": grammar('root ::= "{1000}" [{900}] "\\"{800}" # {700}'),
    "a tag": tag(
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<f="],
                "tags": [
                    {
                        "begin": f"<f={i}>",
                        "content": {"type": "json_schema", "json_schema": an_object(strings(5))},
                        "end": "</f>",
                    }
                    for i in range(40)
                ],
            },
        }
    ),
}


@pytest.mark.parametrize("constraint", HOSTILE.values(), ids=HOSTILE)
def test_what_may_keep_the_engine_busy_is_unservable(constraint: StructuredOutput) -> None:
    start_s = time.process_time()
    with pytest.raises(Unservable) as caught:
        check_cost(constraint)
    assert time.process_time() - start_s < 1.0
    assert caught.value.param == "structured"
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("constraint", EVERYDAY.values(), ids=EVERYDAY)
def test_everyday_constraints_pass(constraint: StructuredOutput) -> None:
    check_cost(constraint)


KEYWORDS = st.sampled_from(
    [
        "type",
        "properties",
        "required",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "items",
        "pattern",
        "patternProperties",
        "minLength",
        "maxLength",
        "minProperties",
        "maxProperties",
        "minimum",
        "format",
        "$ref",
        "$defs",
        "propertyNames",
        "grammar",
        "regex",
        "elements",
        "content",
        "schema",
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["#", "#/$defs/a", "#/properties/a", NESTED, "root ::= root root", "string"])
)
DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYWORDS | st.sampled_from(["a", "b"]), inner, max_size=5)
    ),
    max_leaves=30,
)
PATTERNS = st.text(alphabet=r"ab.,(){}[]|*+?\^$-0129dws<>=!:P", max_size=40)


@given(DOCUMENTS)
@settings(deadline=None, max_examples=300)
def test_no_schema_breaks_it(document: Any) -> None:
    for constraint in (
        StructuredOutput(json_schema=document),
        StructuredOutput(structural_tag=json.dumps(document)),
    ):
        with contextlib.suppress(Unservable):
            check_cost(constraint)


@given(PATTERNS)
@settings(deadline=None, max_examples=500)
def test_no_pattern_breaks_it(pattern: str) -> None:
    for constraint in (regex(pattern), grammar(pattern), patterned(pattern)):
        with contextlib.suppress(Unservable):
            check_cost(constraint)


def deep(depth: int) -> Any:
    document: Any = {}
    for _ in range(depth):
        document = {"anyOf": [document]}
    return document


def cyclic(number: int) -> dict[str, Any]:
    """Definitions that all refer to all."""
    names = [f"d{index}" for index in range(number)]
    everything = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    return {"$defs": dict.fromkeys(names, everything)}


@pytest.mark.parametrize(
    "constraint",
    [
        schema(deep(150)),
        schema(deep(50_000)),
        schema(cyclic(60)),
        schema([{}] * 200_000),
        schema({"enum": list(range(200_000))}),
        schema({"$ref": "#" + "/a" * 100_000}),
        schema({f"k{index}": {"pattern": "a" * 20 + str(index)} for index in range(5000)}),
        schema("{" * 100 + "[" * 100_000),
        regex("(" * 190 + "a" + "){1,9}" * 190),
        regex("a|" * 16_000),
        regex("(a?)" * 8_000),
        regex("[" * 30_000),
        regex("(?<" * 190),
        regex("a{" * 190 + "9" * 30_000),
        grammar("x ::= x\n" * 1_800),
        grammar('"' * 16_000),
        grammar("\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(500))),
        StructuredOutput(choice=["\ud800"] * 5000),
    ],
    ids=range(18),
)
def test_hostile_input_is_judged_at_once(constraint: StructuredOutput) -> None:
    start_s = time.process_time()
    with contextlib.suppress(Unservable):
        check_cost(constraint)
    assert time.process_time() - start_s < 1.5

"""What constraints on the output cost the grammar engine, beside what is reckoned for them.

    python -m benchmarks.constraint_cost            all cases, some minutes
    python -m benchmarks.constraint_cost --quick    a few, to see that it works

`spot.engines.vllm_compat.constraint_cost` bounds from a constraint's text alone what it costs to
compile and what each token costs. Here constraints at, near and beyond these bounds are compiled
and followed, with the vocabulary of the demo model (49,152 tokens):

    units     what is reckoned, to compile and for each token; none where numbers of things are
              bounded instead (choices, EBNF)
    compile   CPU time of one compilation, in one thread
    step      CPU time to find out what may come next and to take one token, the worst of a walk.
              The walk takes seeded random tokens of one character, and others where there are none

Each case runs in a process of its own, which is ended after --limit seconds: what is refused may
take for ever. Run it with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from benchmarks.record import median, save, table
from server.demo_model import ensure_demo_model
from spot.engines.vllm_compat.constraint_cost import check_cost, document_cost
from spot.engines.vllm_compat.pattern_cost import PatternCost, pattern_cost
from spot.engines.vllm_compat.refusal import Unservable
from spot.generation import StructuredOutput

Kind = Literal["schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Case:
    """One constraint. is_cheap: part of the quick run."""

    name: str
    kind: Kind
    given: Any
    is_cheap: bool = False

    @property
    def constraint(self) -> StructuredOutput:
        match self.kind:
            case "schema":
                return StructuredOutput(json_schema=self.given)
            case "regex":
                return StructuredOutput(regex=self.given)
            case "choice":
                return StructuredOutput(choice=self.given)
        return StructuredOutput(grammar=self.given)

    @property
    def refusal(self) -> str | None:
        """Why the server refuses it, or None."""
        try:
            check_cost(self.constraint)
        except Unservable as error:
            return str(error)
        return None

    @property
    def units(self) -> PatternCost | None:
        """What is reckoned for it, where that is a number."""
        if self.kind == "regex":
            return pattern_cost(self.given)
        if self.kind != "schema":
            return None
        try:
            return document_cost(self.given, self.name)
        except Unservable:
            return None


def an_object(properties: dict[str, Any], *, num_required: int = 0, **more: Any) -> dict[str, Any]:
    required = list(properties)[:num_required]
    base = {"type": "object", "properties": properties, "required": required}
    return {**base, "additionalProperties": False, **more}


def numbers(count: int) -> dict[str, Any]:
    return {f"k{index}": {"type": "integer"} for index in range(count)}


def texts(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def rules(count: int) -> str:
    """A grammar of so many rules, one of which is a choice of all others."""
    names = [f"r{index}" for index in range(count - 1)]
    lines = [f'{name} ::= "{name}" "!"' for name in names]
    return "\n".join([f"root ::= {' | '.join(names)}", *lines])


LONG_WORDS = "([^ ]{1,1000} ){1,1000}"

CASES = [
    # Everyday ones.
    Case("person", "schema", an_object({"name": texts(), "age": {"type": "integer"}}), True),
    Case("date", "regex", r"\d{4}-\d{2}-\d{2}", True),
    # One thing that costs, as much of it as is allowed, then more.
    Case("letters, 130 times", "regex", "[a-z]{130}", True),
    Case("letters, 1 to 130", "regex", "[a-z]{1,130}"),
    Case("any, 130 times", "regex", ".{130}"),
    Case("any, 1 to 130", "regex", ".{1,130}"),
    Case("any, 1 to 1000", "regex", ".{1,1000}"),
    Case("any, 1 to 1000, twice", "regex", ".{1,1000}.{1,1000}"),
    Case("any, 1 to 1000, of three letters", "regex", ".{1,1000}a.{1,1000}b.{1,1000}c"),
    Case("words in a text", "regex", r"(\w{1,30} ){1,100}"),
    Case("long words in a text", "regex", LONG_WORDS),
    Case(
        "5 texts of long words at once",
        "schema",
        {"anyOf": [texts(pattern=f"{LONG_WORDS}{index}") for index in range(5)]},
    ),
    Case("nested 5 by 5", "regex", "(.{1,5}){1,5}"),
    Case("nested 30 by 30", "regex", "(.{1,30}){1,30}"),
    Case("digits, 1 to 130", "regex", "[0-9]{1,130}"),
    Case("a literal of 4000", "regex", "abcdefghij" * 400),
    Case("5 parts that may be missing", "regex", "".join(f".*{c}?" for c in "abcde")),
    Case("20 parts that may be missing", "regex", "".join(f".*{c}?" for c in "abcdefghij" * 2)),
    Case("30 alternatives of any", "regex", "|".join(f".*{index}" for index in range(30))),
    Case("60 alternatives of any", "regex", "|".join(f".*{index}" for index in range(60))),
    Case("900 optional properties", "schema", an_object(numbers(900))),
    Case("1200 optional properties", "schema", an_object(numbers(1200))),
    Case("110 counted properties", "schema", an_object(numbers(110), maxProperties=110)),
    Case("150 counted properties", "schema", an_object(numbers(150), maxProperties=150)),
    Case("4000 short enum values", "schema", {"enum": [f"{i:06}" for i in range(4000)]}),
    Case("2000 long enum values", "schema", {"enum": [f"{i * 7919:032}" for i in range(2000)]}),
    Case("minLength 130", "schema", texts(minLength=130)),
    Case("maxLength 130", "schema", texts(maxLength=130)),
    Case("maxLength 1000", "schema", texts(maxLength=1000)),
    Case(
        "two maxLengths",
        "schema",
        an_object({"a": texts(maxLength=900), "b": texts(maxLength=901)}, num_required=2),
    ),
    Case(
        "three maxLengths",
        "schema",
        an_object({f"p{i}": texts(maxLength=900 + i) for i in range(3)}, num_required=3),
    ),
    Case(
        "900 objects",
        "schema",
        an_object({f"o{i}": an_object({}) for i in range(900)}, num_required=900),
    ),
    Case("range of integers", "schema", {"type": "integer", "minimum": -987654, "maximum": 10**8}),
    Case("format email", "schema", texts(format="email")),
    Case("format uri", "schema", texts(format="uri")),
    Case("format uri-template", "schema", texts(format="uri-template")),
    Case("format date-time", "schema", texts(format="date-time")),
    Case(
        "34 texts that begin alike",
        "schema",
        {"anyOf": [texts(pattern=f".*{index}") for index in range(34)]},
    ),
    Case(
        "60 texts that begin alike",
        "schema",
        {"anyOf": [texts(pattern=f".*{index}") for index in range(60)]},
    ),
    Case("5000 choices", "choice", [f"{index:05}" for index in range(5000)]),
    Case("2000 unlike choices", "choice", [f"{index * 7919:032}" for index in range(2000)]),
    Case("200 rules", "grammar", rules(200)),
    Case("sums", "grammar", 'e ::= e "+" t | t\nt ::= [0-9]+\nroot ::= e'),
    Case("64 sets", "grammar", "root ::= " + " ".join(["[a-z]"] * 64)),
    Case("10 optional sets", "grammar", "root ::= " + " ".join(["[^\\n]?"] * 10) + ' "."'),
    Case("twice itself", "grammar", 'root ::= x\nx ::= x x | "a"'),
]


@cache
def tokenizer_info() -> tuple[Any, list[int]]:
    """xgrammar's view of the demo model's vocabulary, and its tokens of one character."""
    import xgrammar
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure_demo_model())
    vocab_size = len(tokenizer)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
    short = [i for i, raw in enumerate(info.decoded_vocab) if len(raw) == 1 and raw.isascii()]
    return info, short


def compiler_of(case: Case) -> Callable[[Any], Any]:
    """What compiles it, as vLLM does."""
    match case.kind:
        case "schema":
            text = json.dumps(case.given)
            return lambda compiler: compiler.compile_json_schema(text)
        case "regex":
            return lambda compiler: compiler.compile_regex(case.given)
        case "choice":
            from vllm.v1.structured_output.utils import choice_as_grammar

            text = choice_as_grammar(case.given)
            return lambda compiler: compiler.compile_grammar(text)
    return lambda compiler: compiler.compile_grammar(case.given)


def measure(case: Case, *, num_steps: int, random_seed: int, report: Callable[..., None]) -> None:
    """Compile and walk. Reports what it has after each part: the next may never end."""
    import numpy as np
    import xgrammar

    info, short = tokenizer_info()
    compile_it = compiler_of(case)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    begun_s = time.process_time()
    compiled = compile_it(compiler)
    report(compile_ms=1000 * (time.process_time() - begun_s))
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    rng = random.Random(random_seed)
    steps_ms: list[float] = []
    while len(steps_ms) < num_steps and not matcher.is_terminated():
        begun_s = time.process_time()
        matcher.fill_next_token_bitmask(mask)
        filled_s = time.process_time() - begun_s
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: info.vocab_size]
        bits[info.stop_token_ids] = 0
        allowed = [i for i in short if bits[i]] or np.flatnonzero(bits).tolist()
        if not allowed:
            break
        token_id = rng.choice(allowed)
        begun_s = time.process_time()
        matcher.accept_token(token_id)
        steps_ms.append(1000 * (filled_s + time.process_time() - begun_s))
        report(steps_ms=steps_ms)


def in_child(case: Case, *, limit_s: float, num_steps: int, random_seed: int) -> dict[str, Any]:
    """The measurement in a process that can be ended. is_complete: it was not."""

    receiving, sending = multiprocessing.Pipe(duplex=False)

    def send(**part: Any) -> None:
        sending.send(part)

    def work() -> None:
        measure(case, num_steps=num_steps, random_seed=random_seed, report=send)
        sending.send(None)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    found: dict[str, Any] = {"is_complete": False}
    deadline_s = time.monotonic() + limit_s
    try:
        while receiving.poll(max(0.0, deadline_s - time.monotonic())):
            part = receiving.recv()
            if part is None:
                found["is_complete"] = True
                break
            found |= part
    finally:
        process.kill()
        process.join()
    return found


def row_of(case: Case, measured: dict[str, Any]) -> dict[str, Any]:
    units, refusal = case.units, case.refusal
    return {
        "name": case.name,
        "kind": case.kind,
        "refusal": refusal,
        "compile_units": None if units is None else units.compile_ms,
        "step_units": None if units is None else units.live_ms,
        **measured,
    }


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A row for each case, and the most that one took which is allowed."""
    shown = []
    for row in rows:
        steps_ms = row.get("steps_ms", [])
        over = "" if row["is_complete"] else "+"
        shown.append(
            [
                row["name"],
                "no" if row["refusal"] else "yes",
                _figure(row["compile_units"]),
                _figure(row.get("compile_ms")),
                _figure(row["step_units"]),
                f"{_figure(max(steps_ms, default=None))}{over}",
                _figure(median(steps_ms) if steps_ms else None),
            ]
        )
    head = ["constraint", "allowed", "compile units", "compile ms"]
    head += ["step units", "worst step ms", "median step ms"]
    allowed = [row for row in rows if not row["refusal"] and row["is_complete"]]
    unfinished = [row["name"] for row in rows if not row["refusal"] and not row["is_complete"]]
    worst_compile = max(allowed, key=lambda row: row.get("compile_ms", 0.0))
    worst_step = max(allowed, key=lambda row: max(row.get("steps_ms", []), default=0.0))
    return "\n\n".join(
        [
            table(head, shown),
            f"Most of what is allowed: to compile {worst_compile['compile_ms']:.0f} ms "
            f"({worst_compile['name']}), for a token {max(worst_step['steps_ms']):.0f} ms "
            f"({worst_step['name']}). Not finished: {', '.join(unfinished) or 'none'}.",
        ]
    )


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.constraint_cost")
    parser.add_argument(
        "--limit", type=float, default=30.0, help="seconds of wall time for each case"
    )
    parser.add_argument("--steps", type=int, default=60, help="tokens of each walk")
    parser.add_argument("--seed", type=int, default=7, help="of the walks")
    parser.add_argument("--quick", action="store_true", help="see that it works; measures nothing")
    parser.add_argument("--show", metavar="FILE", help="print the table of a result file")
    args = parser.parse_args()
    if args.show:
        print(report(json.loads(Path(args.show).read_text())["results"]))
        return 0
    tokenizer_info()
    rows = []
    for case in CASES:
        if args.quick and not case.is_cheap:
            continue
        print(case.name, file=sys.stderr)
        steps = 5 if args.quick else args.steps
        measured = in_child(case, limit_s=args.limit, num_steps=steps, random_seed=args.seed)
        rows.append(row_of(case, measured))
    print(report(rows))
    if not args.quick:
        parameters = {"limit_s": args.limit, "num_steps": args.steps, "random_seed": args.seed}
        print(f"\nraw results: {save('constraint_cost', parameters=parameters, results=rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What may happen to a server of workflows, as hypothesis makes it up; for `test_safety`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hypothesis import strategies as st

from tests.workflows.safety_world import BAD, TENANTS
from workflows.scheduling.parameters import PolicyName

Document = dict[str, Any]

_WORK = ("think", "think", "think", "think", "read", "write", "write", "look")
_TIMES_S = (1.0, 1.0, 0.3, 4.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request for a run. document: which. key: of idempotency. leave_s: after how long its client
    leaves, whereupon the run is cancelled."""

    document: int
    tenant: str
    at_s: float
    topic: str
    key: str | None
    leave_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """num_llm: slots. outages: when `llm` has how many from then on. changes: of what is read."""

    documents: Sequence[Document]
    arrivals: Sequence[Arrival]
    policy: PolicyName
    num_llm: int
    outages: Sequence[tuple[float, int]]
    changes: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """Of one server. ends: how, after lasts_s. down_s: until the next one. losses: when its
    connection to the database breaks."""

    lasts_s: float
    ends: Literal["kill", "stop"]
    down_s: float
    losses: Sequence[float]


def plans() -> st.SearchStrategy[Plan]:
    return _alike().flatmap(
        lambda some: st.builds(
            Plan,
            documents=st.just(some),
            arrivals=st.lists(_arrivals(len(some)), min_size=1, max_size=6),
            policy=st.sampled_from(["hera", "fcfs", "srtf", "plas", "topology"]),
            num_llm=st.sampled_from([1, 2, 3]),
            outages=st.lists(
                st.tuples(st.sampled_from(_TIMES_S), st.sampled_from([3, 1, 0])), max_size=2
            ),
            changes=st.lists(st.sampled_from([0.1, 0.5, 1.0, 1.15, 3.0]), max_size=2),
        )
    )


def lives() -> st.SearchStrategy[list[Life]]:
    """Of servers that end. Another one follows."""
    life = st.builds(
        Life,
        lasts_s=st.sampled_from([0.002, 0.0, 0.011, 0.152, 0.302, 1.0, 1.002, 2.03, 4.002])
        | st.floats(0.0, 5.0, allow_subnormal=False),
        ends=st.sampled_from(["kill", "kill", "stop"]),
        down_s=st.sampled_from([0.0, 1.0, 40.0]),
        losses=st.just([]) | st.lists(st.sampled_from([0.005, 0.3, 1.01]), max_size=2),
    )
    return st.lists(life, min_size=1, max_size=2)


def _arrivals(num_documents: int) -> st.SearchStrategy[Arrival]:
    return st.builds(
        Arrival,
        document=st.integers(0, num_documents - 1),
        tenant=st.sampled_from([*TENANTS, TENANTS[0]]),
        at_s=st.sampled_from([0.0, 0.0, 0.15, 0.5, 1.0, 2.5]),
        topic=st.sampled_from("ab"),
        key=st.sampled_from([None, None, None, "k"]),
        leave_s=st.sampled_from([*[None] * 8, 0.0, 0.01, 0.15, 1.0, 1.3, 2.0]),
    )


@st.composite
def _alike(draw: st.DrawFn) -> list[Document]:
    """Documents that do the same work, but share it, limit it and depend on it otherwise; and
    others."""
    some = [draw(documents())]
    for _ in range(draw(st.integers(0, 2))):
        if draw(st.integers(0, 2)) == 2:
            some.append(draw(documents()))
        else:
            some.append({"nodes": [draw(_varied(node)) for node in some[0]["nodes"]]})
    return some


@st.composite
def _varied(draw: st.DrawFn, node: dict[str, Any]) -> dict[str, Any]:
    """A node with the same work at other times."""
    params = node["params"]
    if "takes_s" in params:
        params = {**params, "takes_s": draw(st.sampled_from(_TIMES_S))}
    what = {"id": node["id"], "op": node["op"], "params": params}
    return {**what, **draw(_fields(node["depends_on"]))}


@st.composite
def documents(draw: st.DrawFn, *, depth: int = 0) -> Document:
    """Up to five nodes, of which some hold a document of their own."""
    nodes: list[dict[str, Any]] = []
    for index in range(draw(st.integers(1, 3 if depth else 5))):
        parents = draw(st.sets(st.integers(0, index - 1), max_size=2)) if index else set()
        before = [f"n{parent}" for parent in sorted(parents)]
        if depth == 0 and draw(st.integers(0, 5)) == 5:
            node = draw(_nesting())
        else:
            texts = [name for name in before if "workflow" not in nodes[int(name[1:])]["params"]]
            node = draw(_working(before, texts, is_inside=depth > 0))
        nodes.append({"id": f"n{index}", **node, **draw(_fields(before))})
    document: Document = {"nodes": nodes}
    if draw(st.integers(0, 5)) == 5:
        document["deadline_s"] = draw(st.sampled_from([1.0, 3.0, 20.0]))
    return document


@st.composite
def _working(
    draw: st.DrawFn, before: Sequence[str], texts: Sequence[str], *, is_inside: bool
) -> dict[str, Any]:
    """texts: of the nodes before, those whose output has a text."""
    op = draw(st.sampled_from(_WORK))
    prompts = ["a", "a", "a", "{{ inputs.topic }}", "b"]
    prompts += [f"{{{{ nodes.{name}.output | tojson }}}}" for name in before]
    prompts += [f"{{{{ nodes.{name}.output.text }}}}" for name in texts]
    if is_inside:
        prompts += ["{{ inputs.item }}", "{{ inputs.previous | tojson }}"]
    params: dict[str, Any] = {
        "prompt": draw(st.sampled_from(prompts)),
        "takes_s": draw(st.sampled_from(_TIMES_S)),
        "num_failures": draw(st.sampled_from([*[0] * 7, 1, 2])),
        "is_refused": draw(st.integers(0, 11)) == 11,
    }
    if op == "think":
        params["temperature"] = draw(st.sampled_from([0.0, 0.0, 1.0]))
        params["seed"] = draw(st.sampled_from([None, None, None, 1]))
        params["stream"] = draw(st.booleans())
        params["is_cut"] = draw(st.integers(0, 7)) == 7
    if op == "look":
        items = st.sampled_from(["a", "b", "c", "{{ inputs.topic }}", BAD])
        params["items"] = draw(st.lists(items, min_size=1, max_size=5))
    return {"op": op, "params": params}


@st.composite
def _nesting(draw: st.DrawFn) -> dict[str, Any]:
    op = draw(st.sampled_from(["map", "map", "loop", "workflow"]))
    inner = draw(documents(depth=1))
    params: dict[str, Any] = {"workflow": inner, "inputs": {"topic": "{{ inputs.topic }}"}}
    if op == "map":
        params["over"] = draw(st.lists(st.sampled_from("ab"), min_size=1, max_size=3))
        params["max_parallel"] = draw(st.sampled_from([2, 1]))
    if op == "loop":
        params["max_rounds"] = draw(st.sampled_from([2, 3]))
        inner["outputs"] = {
            "done": "{{ inputs.round >= 1 }}",
            "last": "{{ nodes.n0.output | tojson }}",
        }
    return {"op": op, "params": params}


@st.composite
def _fields(draw: st.DrawFn, before: Sequence[str]) -> dict[str, Any]:
    """All that is alike for nodes of any operator."""
    conditions = [None, None, None, None, "inputs.topic == 'a'"]
    conditions += [f"nodes.{name}.status == 'completed'" for name in before]
    fields: dict[str, Any] = {
        "depends_on": list(before),
        "when": draw(st.sampled_from(conditions)),
        "timeout_s": draw(st.sampled_from([*[None] * 5, 0.5, 2.0])),
        "priority": draw(st.sampled_from([0, 0, -1, 5])),
        "on_error": draw(st.sampled_from(["fail", "skip", "fail", "default"])),
        "on_interrupt": draw(st.sampled_from(["repeat", "repeat", "fail"])),
        "effects": draw(st.sampled_from([*[None] * 9, "write"])),
        "share": {
            "scope": draw(st.sampled_from([*["tenant"] * 5, "workflow", "run", "none"])),
            "salt": draw(st.sampled_from(["", "", "", "s"])),
            "sampled": draw(st.booleans()),
        },
        "retry": {
            "max_attempts": draw(st.sampled_from([1, 3, 2])),
            "backoff_s": draw(st.sampled_from([0.1, 0.0])),
            # By chance, so that nothing could be repeated.
            "jitter": 0.0,
        },
    }
    if fields["on_error"] == "default":
        fields["default"] = {"text": "default"}
    ttl_s = draw(st.sampled_from([None, None, None, 0.4, 30.0]))
    if ttl_s is not None:
        fields["cache"] = {"ttl_s": ttl_s}
    return fields

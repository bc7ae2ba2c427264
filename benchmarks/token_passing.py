"""What it gives to read a prompt while another node still writes it, on a real engine.

    python -m benchmarks.token_passing                 8 pairs of each size, a quarter of an hour
    python -m benchmarks.token_passing --pairs 1       to see that it works

A run of two `llm` nodes: a draft, and a question about it. `passed`: the question's template is the
draft's text, which the engine reads as it is written. `whole`: a filter that changes nothing stands
in between, so that the question is read when the draft has ended. The two of a pair take turns in
being first, have the same draft, and nothing else in common that a prefix cache could find. One run
is under way at a time; times are those of the run's events, by the server's clock.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import tempfile
from typing import Any

from benchmarks.frontend_cost import serving
from benchmarks.processes import BenchmarkError
from benchmarks.record import median, save, table
from server.demo_model import ensure_demo_model

_TEXTS = {
    "passed": "{{ nodes.draft.output.text }}",
    "whole": "{{ nodes.draft.output.text | string }}",
}
_ANSWER_TOKENS = 8
_MILLISECONDS = {"wait_s": "wait", "draft_s": "draft", "run_s": "run"}


def main() -> None:
    """Measure, print, keep the raw times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+", default=[200, 400, 800], help="of drafts")
    args = parser.parse_args()
    model = str(ensure_demo_model())
    with tempfile.TemporaryDirectory() as data:
        os.environ["SHUNTYARD_WORKFLOW_DATA"] = data
        with serving("shuntyard", model) as server:
            rows = measure(server.port, args.pairs, args.tokens)
    path = save(
        "token_passing", parameters={"model": os.path.basename(model), **vars(args)}, results=rows
    )
    print(report(rows, args.tokens))
    print(f"raw times: {path}")


def measure(port: int, num_pairs: int, sizes: list[int]) -> list[dict[str, Any]]:
    """One row per run, behind a pair that is not counted."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    rows: list[dict[str, Any]] = []
    for kind in _TEXTS:
        _ask(connection, kind, 0, min(sizes))
    for pair in range(1, num_pairs + 1):
        for num_tokens in sizes:
            for kind in sorted(_TEXTS, reverse=bool(pair % 2)):
                rows.append({"pair": pair, **_ask(connection, kind, pair, num_tokens)})  # noqa: PERF401
    connection.close()
    return rows


def report(rows: list[dict[str, Any]], sizes: list[int]) -> str:
    """Medians by size and kind."""
    lines = []
    for num_tokens in sizes:
        for kind in _TEXTS:
            those = [one for one in rows if (one["tokens"], one["kind"]) == (num_tokens, kind)]
            shares = [one["cached_tokens"] / one["prompt_tokens"] for one in those]
            times = [f"{1000 * median([one[name] for one in those]):.0f}" for name in _MILLISECONDS]
            lines.append([str(num_tokens), kind, f"{median(shares):.0%}", *times])
    head = [f"{name}, ms" for name in _MILLISECONDS.values()]
    return table(["tokens of the draft", "its text is", "found in the cache", *head], lines)


def _ask(
    connection: http.client.HTTPConnection, kind: str, number: int, num_tokens: int
) -> dict[str, Any]:
    """One run. Raises BenchmarkError if it did not do what it should.

    wait_s: from the draft's end to the first token of what follows. draft_s: from the draft's start
    to its end. run_s: of the whole run.
    """
    # The kind comes first: the other one's question is no beginning of this one.
    question = f"{kind} {number:04d}-{num_tokens}: what is wrong with this? {_TEXTS[kind]}"
    story = f"{number:04d}-{num_tokens}: tell the story of a long train."
    nodes = [_llm("draft", story, num_tokens), _llm("check", question, _ANSWER_TOKENS, stream=True)]
    body = json.dumps({"nodes": nodes, "stream": True})
    connection.request("POST", "/v1/workflows", body, {"Content-Type": "application/json"})
    content = connection.getresponse().read().decode()
    lines = [line[6:] for line in content.splitlines() if line.startswith("data: {")]
    events = [json.loads(line) for line in lines]
    # Of the first event of each kind.
    at_s = {(one["type"], one.get("node_id")): one["created_at"] for one in reversed(events)}
    done = {one["node_id"]: one for one in events if one["type"] == "node.completed"}
    if set(done) != {"draft", "check"} or done["draft"]["usage"]["completion_tokens"] != num_tokens:
        raise BenchmarkError(f"{kind}: {content[-500:]!r}")
    drafted_s = at_s["node.completed", "draft"]
    return {
        "kind": kind,
        "tokens": num_tokens,
        "wait_s": at_s["node.delta", "check"] - drafted_s,
        "draft_s": drafted_s - at_s["node.started", "draft"],
        "run_s": at_s["run.completed", None] - at_s["run.created", None],
        **{name: done["check"]["usage"][name] for name in ("prompt_tokens", "cached_tokens")},
    }


def _llm(node_id: str, prompt: str, max_tokens: int, **params: Any) -> dict[str, Any]:
    params |= {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {"id": node_id, "op": "llm", "params": params}


if __name__ == "__main__":
    main()

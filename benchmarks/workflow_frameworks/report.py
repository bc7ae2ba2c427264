"""The tables of a result: each cell's systems side by side, then the ratios."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.record import percentile, table
from benchmarks.workflow_frameworks.bound import Work, best, bound
from benchmarks.workflow_frameworks.cells import Cell

OURS = "shuntyard"
Row = dict[str, Any]
_SUMS = ("elapsed_s", "client_cpu_s", "server_cpu_s")


def throughput(row: Row) -> float:
    """Completed runs per second."""
    return len(latencies_s(row)) / float(row["elapsed_s"])


def pooled(rows: Sequence[Row]) -> list[Row]:
    """One row for each system of each cell: what was measured repeatedly, together.

    `rates`: the throughput of each time.
    """
    together: dict[tuple[str, str], Row] = {}
    for row in rows:
        whole = together.setdefault(
            (row["cell"], row["system"]),
            {**row, **dict.fromkeys(_SUMS, 0.0), "counters": {}, "runs": [], "rates": []},
        )
        for name in _SUMS:
            whole[name] += row[name]
        for name, count in row["counters"].items():
            whole["counters"][name] = whole["counters"].get(name, 0) + count
        for number, *rest in row["runs"]:
            whole["runs"].append([(row["repeat"], number), *rest])
        whole["rates"].append(throughput(row))
    return list(together.values())


def latencies_s(row: Row) -> list[float]:
    """Of the runs that were answered."""
    return [end_s - start_s for _, start_s, end_s, digest in row["runs"] if digest]


def best_framework(rows: Sequence[Row]) -> float:
    """The highest throughput of any framework in any of these rows; 0 without one."""
    return max((throughput(row) for row in rows if row["system"] != OURS), default=0.0)


def equal_answers(row: Row, ours: Row) -> float:
    """The share of the runs that both answered whose answers are the same."""
    theirs = {number: digest for number, _, _, digest in row["runs"] if digest}
    both = [
        theirs[number] == digest
        for number, _, _, digest in ours["runs"]
        if digest and number in theirs
    ]
    return sum(both) / len(both) if both else float("nan")


def report(results: dict[str, Any]) -> str:
    """results: `capacities` by workload, each as often as measured, and `rows`."""
    capacities = {
        workload: [Work(**one) for one in measured]
        for workload, measured in results["capacities"].items()
    }
    by_cell: dict[str, list[Row]] = {}
    for row in pooled(results["rows"]):
        by_cell.setdefault(row["cell"], []).append(row)
    parts = [_capacities(capacities)]
    for name, rows in by_cell.items():
        parts.append(f"### {name}\n\n{_cell(rows)}")
    parts.append(
        "### Ratios\n\n"
        + _ratios(by_cell, {name: best(measured) for name, measured in capacities.items()})
    )
    return "\n\n".join(parts)


def _capacities(capacities: dict[str, list[Work]]) -> str:
    return table(
        ["workload", "chats/s", "query embeddings/s", "pairs ranked/s"],
        [
            [workload, f"{one.chats:.2f}", f"{one.embeddings:.2f}", f"{one.pairs:.2f}"]
            for workload, measured in capacities.items()
            for one in measured
        ],
    )


def _cell(rows: Sequence[Row]) -> str:
    head = [
        *("system", "runs", "errors", "runs/s", "each time", "mean s", "p50 s", "p99 s", "chats"),
        *("prompt tokens", "output tokens", "texts and pairs", "server CPU s", "client CPU s"),
        "answers like ours",
    ]
    ours = next((row for row in rows if row["system"] == OURS), None)
    return table(head, [_line(row, ours) for row in rows])


def _line(row: Row, ours: Row | None) -> list[str]:
    taken = latencies_s(row)
    mean_s = sum(taken) / len(taken) if taken else float("nan")
    counters = row["counters"]
    counted = ("chats", "prompt_tokens", "completion_tokens", "pooling_inputs")
    return [
        row["system"],
        str(len(taken)),
        str(len(row["runs"]) - len(taken)),
        f"{throughput(row):.2f}",
        ", ".join(f"{rate:.2f}" for rate in row["rates"]),
        f"{mean_s:.2f}",
        f"{percentile(taken, 0.5):.2f}",
        f"{percentile(taken, 0.99):.2f}",
        *(f"{counters[name]:.0f}" for name in counted),
        f"{row['server_cpu_s']:.1f}",
        f"{row['client_cpu_s']:.1f}",
        "-" if ours is None else f"{equal_answers(row, ours):.0%}",
    ]


def _ratios(by_cell: dict[str, list[Row]], capacities: dict[str, Work]) -> str:
    head = [
        *(
            "cell",
            "ours runs/s",
            "best framework",
            "ratio",
            "ours p99 s",
            "best framework",
            "ratio",
        ),
        *("bound runs/s", "ours of it", "bound, one machine", "ours of it"),
    ]
    return table(head, list(_ratio_lines(by_cell, capacities)))


def _ratio_lines(by_cell: dict[str, list[Row]], capacities: dict[str, Work]) -> Iterator[list[str]]:
    for name, rows in by_cell.items():
        ours = next((row for row in rows if row["system"] == OURS), None)
        others = [row for row in rows if row["system"] != OURS]
        if ours is None or not others:
            continue
        rate, reached = throughput(ours), best_framework(others)
        p99_s = percentile(latencies_s(ours), 0.99)
        best_p99_s = min(percentile(latencies_s(row), 0.99) for row in others)
        bounds = ["-", "-", "-", "-"]
        if ours["loop"] == "closed":
            most = bound(Work(**ours["work"]), ours["num_runs"], capacities[ours["workload"]])
            bounds = [
                f"{most.slowest:.2f} ({most.resource})",
                f"{rate / most.slowest:.2f}",
                f"{most.machine:.2f}",
                f"{rate / most.machine:.2f}",
            ]
        yield [
            name,
            *(f"{rate:.2f}", f"{reached:.2f}", f"{rate / reached:.2f}"),
            *(f"{p99_s:.2f}", f"{best_p99_s:.2f}", f"{best_p99_s / p99_s:.2f}"),
            *bounds,
        ]


def saturation(rows: Sequence[Row], cell: Cell) -> float:
    """What the best framework's closed loops reached with the cell's workload and duplicates."""
    alike = [
        row
        for row in rows
        if row["loop"] == "closed"
        and row["workload"] == cell.workload
        and row["duplicate_share"] == cell.duplicate_share
    ]
    return best_framework(pooled(alike))

"""One measurement of one system, in a process of its own, in the frameworks' environment.

Reads a `LoadSpec` as a line of JSON on standard input, opens the system, does the warm-up runs and
prints `ready`; with the next line it begins, and prints a `LoadOutcome` when all runs have ended.
Only the standard library, anyio, httpx and what the system itself needs are imported here.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import anyio

from benchmarks.workflow_frameworks.systems.base import Addresses, System, Workflows
from benchmarks.workflow_frameworks.workload import Run

SystemName = Literal["shuntyard", "langgraph", "llamaindex", "haystack"]
_MODULES: dict[SystemName, str] = {
    "shuntyard": "shuntyard",
    "langgraph": "langgraph_graphs",
    "llamaindex": "llamaindex_flows",
    "haystack": "haystack_pipelines",
}
SYSTEMS: tuple[SystemName, ...] = tuple(_MODULES)
_DIGEST_LENGTH = 8


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to run.

    concurrency: of the closed loop, each of whose clients begins a run when its last one has ended,
    until there are none left or `limit_s` is over. arrivals_s: of the open loop, when each run
    begins; one that is due after `limit_s` is left out.
    """

    system: SystemName
    addresses: Addresses
    warm_up: list[Run]
    runs: list[Run]
    limit_s: float
    concurrency: int | None = None
    arrivals_s: list[float] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LoadSpec:
        fields: dict[str, Any] = json.loads(text)
        fields["addresses"] = Addresses(**fields["addresses"])
        for name in ("warm_up", "runs"):
            fields[name] = [Run(**run) for run in fields[name]]
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Ended:
    """One run. number: its place in the list. start_s: when it began, or was due. Times are from
    the beginning. digest: of its answer; empty for one that failed."""

    number: int
    start_s: float
    end_s: float
    digest: str


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """elapsed_s: until the last run ended. cpu_s: of this process. errors: the first few."""

    runs: list[Ended]
    elapsed_s: float
    cpu_s: float
    errors: list[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LoadOutcome:
        fields = json.loads(text)
        return cls(**fields | {"runs": [Ended(**run) for run in fields["runs"]]})


class Load:
    """Sends runs to a system and notes when they end."""

    def __init__(self, spec: LoadSpec, workflows: Workflows) -> None:
        self._spec = spec
        self._workflows = workflows
        self._ended: list[Ended] = []
        self._errors: list[str] = []
        self._begin_s = 0.0

    async def run(self) -> LoadOutcome:
        cpu_s = time.process_time()
        self._begin_s = time.perf_counter()
        if self._spec.arrivals_s is None:
            await self._closed_loop()
        else:
            await self._open_loop(self._spec.arrivals_s)
        return LoadOutcome(
            runs=sorted(self._ended, key=lambda one: one.number),
            elapsed_s=self._now_s(),
            cpu_s=time.process_time() - cpu_s,
            errors=self._errors[:5],
        )

    def _now_s(self) -> float:
        return time.perf_counter() - self._begin_s

    async def _closed_loop(self) -> None:
        waiting = iter(range(len(self._spec.runs)))

        async def client() -> None:
            for number in waiting:
                if self._now_s() > self._spec.limit_s:
                    return
                await self._run(number, self._now_s())

        async with anyio.create_task_group() as group:
            for _ in range(self._spec.concurrency or 1):
                group.start_soon(client)

    async def _open_loop(self, arrivals_s: list[float]) -> None:
        async with anyio.create_task_group() as group:
            for number, due_s in enumerate(arrivals_s):
                if due_s > self._spec.limit_s:
                    return
                await anyio.sleep(max(0.0, due_s - self._now_s()))
                group.start_soon(self._run, number, due_s)

    async def _run(self, number: int, start_s: float) -> None:
        digest = ""
        try:
            answer = await self._workflows.answer(self._spec.runs[number])
            digest = hashlib.sha256(answer.encode()).hexdigest()[:_DIGEST_LENGTH]
        except Exception as error:  # noqa: BLE001 - whatever a framework raises is a failed run
            self._errors.append(f"{type(error).__name__}: {error}"[:500])
        self._ended.append(Ended(number, start_s, self._now_s(), digest))


async def _measure(spec: LoadSpec) -> LoadOutcome:
    module = importlib.import_module(
        f"benchmarks.workflow_frameworks.systems.{_MODULES[spec.system]}"
    )
    async with cast(System, module.opened)(spec.addresses) as workflows:
        for run in spec.warm_up:
            await workflows.answer(run)
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        return await Load(spec, workflows).run()


def main() -> None:
    spec = LoadSpec.from_json(sys.stdin.readline())
    print(anyio.run(_measure, spec).to_json(), flush=True)


if __name__ == "__main__":
    main()

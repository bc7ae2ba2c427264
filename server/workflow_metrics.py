"""Prometheus metrics of runs and of the slots that their nodes wait for, read when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from workflows.service import WorkflowService
from workflows.slots import Waits


class WorkflowMetrics(Collector):
    """`shuntyard_workflow_*`: by resource, and of all runs."""

    def __init__(self, service: WorkflowService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "shuntyard_workflow_active_runs",
            "Runs that have not ended, without those inside others.",
            value=self._service.num_active,
        )
        shared = CounterMetricFamily(
            "shuntyard_workflow_nodes_shared",
            "Nodes that took the result of equal work, running or kept.",
            labels=["how"],
        )
        for how, count in self._service.shared_work.num_shared.items():
            shared.add_metric([how], count)
        yield shared
        yield from self._by_resource()

    def _by_resource(self) -> Iterator[Metric]:
        slots = self._service.slots
        num_slots = _gauge("slots", "Slots of the resource.")
        running = _gauge("slots_used", "Of these, held by a node or a batch.")
        queued = _gauge("queue_length", "Nodes that wait for a slot, in whole or in part.")
        items = _gauge("queued_items", "Texts and pairs that wait; a node that has none is one.")
        for name, one in slots.statistics().items():
            num_slots.add_metric([name], one.num_slots)
            running.add_metric([name], one.num_running)
            queued.add_metric([name], one.num_queued)
            items.add_metric([name], one.num_queued_items)
        dispatches = CounterMetricFamily(
            "shuntyard_workflow_dispatches", "Slots given out.", labels=["resource"]
        )
        waits = SummaryMetricFamily(
            "shuntyard_workflow_wait_seconds",
            "From the wish for a slot to the first one, s.",
            labels=["resource"],
        )
        for name in slots.statistics():
            wait = slots.waits.get(name, Waits())
            dispatches.add_metric([name], wait.num_dispatches)
            waits.add_metric([name], count_value=wait.num_waits, sum_value=wait.waited_s)
        yield from (num_slots, running, queued, items, dispatches, waits)


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"shuntyard_workflow_{name}", text, labels=["resource"])

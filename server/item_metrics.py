"""Prometheus metrics of the texts and pairs that nodes batch, read whenever they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from workflows.pooled_items import PooledItems

_TEXTS = {
    "items": "Texts and pairs that nodes asked for.",
    "items_shared": "Of these, answered by an equal one that was in flight.",
    "items_computed": "Given to a model.",
    "batches": "Calls of a model.",
}


class ItemMetrics(Collector):
    """`shuntyard_workflow_items*` and `shuntyard_workflow_batches`, by task and model."""

    def __init__(self, items: PooledItems) -> None:
        self._items = items

    def collect(self) -> Iterator[Metric]:
        families = {
            name: CounterMetricFamily(
                f"shuntyard_workflow_{name}", text, labels=["task", "model_name"]
            )
            for name, text in _TEXTS.items()
        }
        for key, statistics in self._items.statistics.items():
            labels = key.split(":", 1)
            families["items"].add_metric(labels, statistics.num_items)
            families["items_shared"].add_metric(labels, statistics.num_shared)
            families["items_computed"].add_metric(labels, statistics.num_computed)
            families["batches"].add_metric(labels, statistics.num_batches)
        yield from families.values()

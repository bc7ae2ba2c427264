"""The journal's Prometheus metrics, read from it whenever they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.journal import Journal


class JournalMetrics(Collector):
    """`shuntyard_journal_*`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def collect(self) -> Iterator[Metric]:
        journal = self._journal
        for name, text, value in (
            ("bytes", "Size of the journal on disk.", journal.num_bytes),
            ("entries", "Requests that the journal knows.", journal.num_entries),
            ("full", "1 while new requests are not journaled for want of room.", journal.is_full),
        ):
            yield GaugeMetricFamily(f"shuntyard_journal_{name}", text, value=value)
        for name, text, value in (
            ("resumed", "Answers that a client came back for.", journal.num_resumed),
            ("write_failures", "Writes that failed.", journal.num_write_failures),
        ):
            yield CounterMetricFamily(f"shuntyard_journal_{name}", text, value=value)

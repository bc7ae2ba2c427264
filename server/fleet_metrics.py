"""The fleet's Prometheus metrics, read from its state whenever they are scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from spot.fleet import Fleet


class FleetMetrics(Collector):
    """`shuntyard_pipeline_*` by pipeline, and what generations went through."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        fleet = self._fleet
        pipelines = list(fleet.state.pipelines.values())
        serving = _by_pipeline("serving", "1 while the pipeline takes work.")
        running = _by_pipeline("running", "Generations that the pipeline works on.")
        seats = _by_pipeline("seats", "Generations that the pipeline runs at once.")
        weight = _by_pipeline("weight", "Expected throughput, corrected by what is observed.")
        rate = _by_pipeline("tokens_per_second", "Output tokens per second, smoothed.")
        tokens = CounterMetricFamily(
            "shuntyard_pipeline_tokens", "Output tokens of the pipeline.", labels=["pipeline"]
        )
        for pipeline in pipelines:
            labels = [pipeline.id]
            serving.add_metric(labels, float(pipeline.state == "serving"))
            running.add_metric(labels, len(pipeline.legs))
            seats.add_metric(labels, pipeline.num_seats)
            weight.add_metric(labels, pipeline.weight * pipeline.correction)
            rate.add_metric(labels, pipeline.tokens_per_s)
            tokens.add_metric(labels, pipeline.num_tokens)
        yield from (serving, running, seats, weight, rate, tokens)
        yield GaugeMetricFamily(
            "shuntyard_fleet_waiting",
            "Generations that no pipeline has room for.",
            value=fleet.state.num_waiting,
        )
        for name, text, value in (
            ("migrations", "Generations that went on on another pipeline.", fleet.num_migrations),
            ("preemptions", "Seats given to a more urgent generation.", fleet.num_preemptions),
            ("lost_generations", "Generations that no pipeline went on with.", fleet.num_lost),
        ):
            yield CounterMetricFamily(f"shuntyard_{name}", text, value=value)


def _by_pipeline(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"shuntyard_pipeline_{name}", text, labels=["pipeline"])

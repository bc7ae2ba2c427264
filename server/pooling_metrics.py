"""What the pooling models have worked on, for endpoints and workflows alike."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from server.pools import PooledModel


class PoolingMetrics:
    """What the pooling models have worked on."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["model_name"]
        self._inputs = Counter(
            "shuntyard_pooling_inputs",
            "Texts embedded and pairs of texts scored.",
            labels,
            registry=registry,
        )
        self._tokens = Counter(
            "shuntyard_pooling_tokens",
            "Tokens that pooling models have read.",
            labels,
            registry=registry,
        )

    def count(self, model: PooledModel, *, num_inputs: int, num_tokens: int) -> None:
        self._inputs.labels(model.names[0]).inc(num_inputs)
        self._tokens.labels(model.names[0]).inc(num_tokens)

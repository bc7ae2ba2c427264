"""What is missing where a model does not fit all machines together."""

from __future__ import annotations

from collections.abc import Sequence

from placement.errors import Infeasible
from placement.estimator import Estimator, StageKind
from placement.hardware import Offer, Shape
from placement.optimizer.cluster import Cluster

_GIB = 2**30


def does_not_fit(cluster: Cluster) -> Infeasible:
    """The error: by how many bytes, and the fewest more machines of one offer that would do."""
    estimator = cluster.estimator
    need = _needed_bytes(estimator)
    have = sum(one.count * _usable_bytes(estimator, one.shape) for one in cluster.classes)
    missing = max(need - have, 0.0)
    text = (
        f"{estimator.model.name} needs {_gib(need)} for its weights and one request, "
        f"and all offers together leave {_gib(have)} beside activations"
    )
    text += (
        f": {_gib(missing)} ({missing:.0f} bytes) are missing"
        if missing
        else (", but layers do not divide so that every stage holds its own")
    )
    return Infeasible(f"{text}; {_advice(cluster)}")


def fits(cluster: Cluster) -> bool:
    """Whether any pipeline of these machines holds the model and a request."""
    return holds(cluster, [(one.shape, one.count) for one in cluster.classes])


def holds(cluster: Cluster, machines: Sequence[tuple[Shape, int]]) -> bool:
    """Whether a pipeline over so many machines of each shape holds the model and a request."""
    estimator = cluster.estimator
    num_layers = estimator.model.num_layers
    ends = [(False, False), (True, False), (False, True), (True, True)]
    gain: dict[Shape, list[int]] = {
        shape: [_most_layers(estimator, shape, *end) for end in ends] for shape, _ in machines
    }
    if any(count and gain[shape][3] >= num_layers for shape, count in machines):
        return True
    if num_layers == 1:
        return False
    best = -1
    total = sum(count * gain[shape][0] for shape, count in machines)
    for index, (first, count) in enumerate(machines):
        for other_index, (last, other) in enumerate(machines):
            is_pair = count > 0 and other > 0 and (index != other_index or count > 1)
            if is_pair and gain[first][1] > 0 and gain[last][2] > 0:
                loss = gain[first][0] - gain[first][1] + gain[last][0] - gain[last][2]
                best = max(best, total - loss)
    return best >= num_layers


def _most_layers(estimator: Estimator, shape: Shape, is_first: bool, is_last: bool) -> int:
    """Layers that a machine holds in its best split, by memory alone."""
    tps = [tp for tp in range(1, shape.num_gpus + 1) if estimator.model.allows_tp(tp)]

    def stage(tp: int, first: bool, last: bool) -> int:
        kind = StageKind(shape=shape, tp=tp)
        memory = estimator.stage_memory(kind)
        ends = estimator.weight_bytes(kind, 0, is_first=first, is_last=last)
        each = memory.layer_weights + memory.layer_kv_per_request
        return max(0, min(estimator.model.num_layers, int((memory.available - ends) // each)))

    inner = [0] * (shape.num_gpus + 1)
    for gpus in range(1, shape.num_gpus + 1):
        options = [stage(tp, False, False) + inner[gpus - tp] for tp in tps if tp <= gpus]
        inner[gpus] = max([inner[gpus - 1], *options])
    best = 0
    for tp in tps:
        rest = shape.num_gpus - tp
        if not is_first:
            closing = stage(tp, False, is_last)
            best = max(best, closing + inner[rest] if closing else 0)
            continue
        best = max(best, stage(tp, True, is_last))
        for other in tps:
            opening, closing = stage(tp, True, False), stage(other, False, is_last)
            if other <= rest and opening and closing:
                best = max(best, opening + closing + inner[rest - other])
    return best


def _needed_bytes(estimator: Estimator) -> float:
    model, workload = estimator.model, estimator.workload
    tokens = model.cached_tokens(workload.input_tokens + workload.output_tokens)
    return model.weight_bytes_total() + model.num_layers * tokens * model.kv_bytes_per_token()


def _usable_bytes(estimator: Estimator, shape: Shape) -> float:
    """Of a machine cut into stages of one GPU, or as few as the model allows."""
    tps = [tp for tp in range(1, shape.num_gpus + 1) if estimator.model.allows_tp(tp)]
    return max(
        (
            shape.num_gpus
            // tp
            * tp
            * max(estimator.stage_memory(StageKind(shape=shape, tp=tp)).available, 0.0)
            for tp in tps
        ),
        default=0.0,
    )


def _advice(cluster: Cluster) -> str:
    """The cheapest addition of machines of one class that makes the model fit."""
    ways = []
    for one in cluster.classes:
        machines = [(other.shape, other.count) for other in cluster.classes]
        for more in range(1, cluster.num_layers + 2):
            if holds(cluster, [*machines, (one.shape, more)]):
                ways.append((more * one.price_usd_per_hour, more, one.offers[0]))
                break
    if not ways:
        return "no number of further machines of these shapes would do: take larger GPUs"
    _, more, offer = min(ways, key=lambda way: way[:2])
    return f"{more} more {_label(offer)} would make it fit"


def _label(offer: Offer) -> str:
    return offer.label


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:.1f} GiB"

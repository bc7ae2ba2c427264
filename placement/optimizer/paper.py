"""ShuntServe's Algorithm 1, kept as the baseline: a beam over partial placements.

DP[l][s] holds the `beam` best placements of l layers on s stages. Each is extended by a stage with
more layers, on a machine of any class that is left, or on the GPUs left of the last machine; the
largest batch (equation 6) and the throughput are computed anew, and scored by throughput per dollar
and latency (equation 7). Pipelines are extracted one after another until no more can be built.

A partial placement is scored as if its last stage handed on to nobody; the LM head and the logits
come with the last layer.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from placement.errors import Infeasible
from placement.estimator import Estimator, Stage, StageKind
from placement.hardware import Offer
from placement.optimizer.cluster import Cluster, make_cluster
from placement.optimizer.columns import Column, make_column, plan_pipelines
from placement.optimizer.machines import check_offers
from placement.optimizer.shortage import does_not_fit, fits
from placement.plan import Goal, Plan

_NO_TIMES = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Placed:
    """A stage in a partial placement. machine: class; node: which machine of the placement."""

    machine: int
    tp: int
    num_layers: int
    node: int


@dataclass(frozen=True, slots=True)
class Partial:
    """stages in order; used: [class], machines; spare_gpus: left on the last machine."""

    stages: tuple[Placed, ...]
    used: tuple[int, ...]
    spare_gpus: int
    cost: float
    score: float


@dataclass(slots=True)
class _Kinds:
    """Times and memory of kinds of stages, each computed once. Lists are indexed by batch."""

    cluster: Cluster
    _times: dict[tuple[int, int, int], list[list[tuple[float, float]]]] = field(
        default_factory=dict
    )
    _batches: dict[tuple[int, int, int, int], int] = field(default_factory=dict)

    def max_batch(self, stage: Placed, is_first: bool, is_last: bool) -> int:
        """Equation 6 for one stage."""
        ends = is_first + 2 * is_last
        key = (stage.machine, stage.tp, stage.num_layers, ends)
        if key not in self._batches:
            estimator = self.cluster.estimator
            kind = StageKind(shape=self.cluster.classes[stage.machine].shape, tp=stage.tp)
            memory = estimator.stage_memory(kind)
            weights = estimator.weight_bytes(
                kind, stage.num_layers, is_first=is_first, is_last=is_last
            )
            fits = (memory.available - weights) / (stage.num_layers * memory.layer_kv_per_request)
            self._batches[key] = max(0, min(math.floor(fits), estimator.fidelity.max_batch))
        return self._batches[key]

    def times(self, machine: int, tp: int, depth: int) -> list[list[tuple[float, float]]]:
        """[part][batch]: (prefill, decode) seconds of a layer, a near hop, a far one, logits."""
        key = (machine, tp, depth if self.cluster.has_depths else 1)
        if key not in self._times:
            estimator = self.cluster.estimator
            kind = StageKind(shape=self.cluster.classes[machine].shape, tp=tp)
            batch = np.maximum(np.arange(estimator.fidelity.max_batch + 1, dtype=np.float64), 1.0)
            prefill = estimator.prefill_times(kind, batch)
            decode = estimator.decode_times(kind, batch, depth)
            self._times[key] = [
                list(zip((one + 0 * batch).tolist(), (two + 0 * batch).tolist(), strict=True))
                for one, two in (
                    (prefill.layer_s, decode.layer_s),
                    (prefill.near_s, decode.near_s),
                    (prefill.far_s, decode.far_s),
                    (prefill.logits_s, decode.logits_s),
                )
            ]
        return self._times[key]


class Beam:
    """Algorithm 1 for one pipeline on the machines left. counts: [class]."""

    def __init__(
        self, kinds: _Kinds, counts: Sequence[int], *, beam: int, splits: bool, deadline_s: float
    ) -> None:
        self.kinds = kinds
        self.cluster = kinds.cluster
        self.counts = counts
        self.beam = beam
        self.splits = splits
        self.deadline_s = deadline_s

    def best(self) -> Partial | None:
        """The whole placement with the highest score; None where the beam holds none."""
        num_layers = self.cluster.num_layers
        empty = Partial((), (0,) * len(self.counts), 0, 0.0, 0.0)
        table: list[dict[int, list[Partial]]] = [{0: [empty]}]
        for layers in range(1, num_layers + 1):
            cells: dict[int, list[Partial]] = {}
            for before in range(layers):
                for num_stages, partials in table[before].items():
                    for partial in partials:
                        for new in self._extensions(partial, layers - before, layers == num_layers):
                            self._keep(cells.setdefault(num_stages + 1, []), new)
                if time.perf_counter() > self.deadline_s:
                    raise TimeoutError
            table.append(cells)
        whole = [partial for partials in table[num_layers].values() for partial in partials]
        return max(whole, key=lambda partial: partial.score, default=None)

    def _keep(self, cell: list[Partial], new: Partial) -> None:
        """The `beam` best of a cell, best first, no two alike."""
        if len(cell) == self.beam and new.score <= cell[-1].score:
            return
        if any(new.stages == old.stages for old in cell):
            return
        cell.append(new)
        cell.sort(key=lambda partial: -partial.score)
        del cell[self.beam :]

    def _extensions(self, partial: Partial, num_layers: int, is_whole: bool) -> Iterator[Partial]:
        for machine, tp, is_new in self._options(partial):
            node = partial.stages[-1].node + is_new if partial.stages else 0
            stages = (*partial.stages, Placed(machine, tp, num_layers, node))
            one = self.cluster.classes[machine]
            cost = partial.cost + (one.cost if is_new else 0.0)
            score = self._score(stages, cost, is_whole)
            if score > 0:
                used = partial.used
                if is_new:
                    used = (*used[:machine], used[machine] + 1, *used[machine + 1 :])
                spare = (one.shape.num_gpus if is_new else partial.spare_gpus) - tp
                yield Partial(stages, used, spare, cost, score)

    def _options(self, partial: Partial) -> Iterator[tuple[int, int, bool]]:
        """(class, tp, whether on a new machine) of stages that can follow."""
        allows = self.cluster.estimator.model.allows_tp
        if self.splits and partial.stages:
            machine = partial.stages[-1].machine
            for tp in filter(allows, range(1, partial.spare_gpus + 1)):
                yield machine, tp, False
        for machine, one in enumerate(self.cluster.classes):
            if partial.used[machine] < self.counts[machine]:
                num_gpus = one.shape.num_gpus
                for tp in range(1, num_gpus + 1) if self.splits else (num_gpus,):
                    if allows(tp):
                        yield machine, tp, True

    def _score(self, stages: tuple[Placed, ...], cost: float, is_whole: bool) -> float:
        """Equation 7, 0 where not even one request fits."""
        last = len(stages) - 1
        batch = min(
            self.kinds.max_batch(stage, index == 0, is_whole and index == last)
            for index, stage in enumerate(stages)
        )
        if batch < 1:
            return 0.0
        prefill, decode = [], []
        for index, stage in enumerate(stages):
            parts = self.kinds.times(stage.machine, stage.tp, len(stages))
            layer, end = parts[0][batch], _NO_TIMES
            if index < last:
                end = parts[1 if stages[index + 1].node == stage.node else 2][batch]
            elif is_whole:
                end = parts[3][batch]
            prefill.append(stage.num_layers * layer[0] + end[0])
            decode.append(stage.num_layers * layer[1] + end[1])
        if not self.cluster.has_depths:
            batch_s = max(prefill) + max(decode)
        else:
            batch_s = max(map(sum, zip(prefill, decode, strict=True)))
        return batch / batch_s / cost * (self._factor(stages, batch) if is_whole else 1.0)

    def _factor(self, stages: tuple[Placed, ...], batch: int) -> float:
        goal = self.cluster.goal
        if self.cluster.latency is None:
            return 1.0
        estimate = self.cluster.estimator.evaluate(_stages(self.cluster, stages), batch)
        return goal.latency_factor(estimate)


def solve_paper(
    offers: Sequence[Offer],
    estimator: Estimator,
    goal: Goal,
    *,
    beam: int = 3,
    splits: bool = True,
    time_limit_s: float = math.inf,
) -> Plan:
    """The fleet that Algorithm 1 finds. It knows no bound, so the plan's gap is infinite.

    splits: whether a machine may be cut into several stages; else it is one stage of all its GPUs.
    The goal's limits on price and shares are not known to it; for a load, extraction ends when it
    is served. Raises Infeasible if no pipeline is found, TimeoutError after `time_limit_s`.
    """
    started = time.perf_counter()
    check_offers(offers, goal)
    cluster = make_cluster(offers, estimator, goal)
    if not fits(cluster):
        raise does_not_fit(cluster)
    columns: list[Column] = []
    kinds, counts = _Kinds(cluster), [int(count) for count in cluster.counts]
    while goal.objective != "cost-for-load" or _rps(columns) < (goal.load_rps or 0.0):
        search = Beam(kinds, counts, beam=beam, splits=splits, deadline_s=started + time_limit_s)
        best = search.best()
        if best is None:
            break
        columns.append(_column(cluster, best))
        counts = [left - used for left, used in zip(counts, best.used, strict=True)]
    if not columns:
        raise Infeasible(f"a beam of {beam} finds no pipeline that meets the goal")
    price = sum(column.price_usd_per_hour for column in columns)
    return Plan(
        pipelines=plan_pipelines(cluster, [(column, 1) for column in columns]),
        goal=goal,
        value=goal.value(_rps(columns), price),
        bound=0.0 if goal.objective == "cost-for-load" else math.inf,
        solve_s=time.perf_counter() - started,
        solver="paper",
    )


def _rps(columns: Sequence[Column]) -> float:
    return sum(column.rps for column in columns)


def _stages(cluster: Cluster, stages: Sequence[Placed]) -> tuple[Stage, ...]:
    return tuple(
        Stage(
            shape=cluster.classes[stage.machine].shape,
            tp=stage.tp,
            num_layers=stage.num_layers,
            node=stage.node,
        )
        for stage in stages
    )


def _column(cluster: Cluster, partial: Partial) -> Column:
    stages = _stages(cluster, partial.stages)
    nodes = [next(group).machine for _, group in itertools.groupby(partial.stages, _node)]
    return make_column(cluster, stages, nodes, cluster.estimator.max_batch(stages))


def _node(stage: Placed) -> int:
    return stage.node

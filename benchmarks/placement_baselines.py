"""Planners to compare with, after the systems that ShuntServe's section 7.1.2 compares with.

None of them is the system itself: each keeps the rule that the paper says decides its placement.
All see the same machines, choose among the same TP degrees inside a machine (where the original
chooses), give a machine to one pipeline only, and count memory by the same estimator.

- vLLM-like: all machines of a GPU type are one pipeline, a machine a stage (TP over its GPUs),
  layers split evenly (`get_pp_indices`).
- AlpaServe-like: machines of a GPU type in equal groups, as many as hold the model (it replicates
  for its SLO), layers so that the slowest stage is fastest, TP for the lowest latency of a request.
- HexGen-like: pipelines of any machines, each machine cut into stages of one TP degree, layers
  proportional to a stage's memory, searched by mutation from heterogeneous groups: the highest
  throughput of all that were seen, by the estimator that our planner uses. (By the paper's reading
  it would cut machines into stages of one GPU, as the paper reports of HexGen, and do worse.)
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.estimator import Estimator, PipelineEstimate, Stage, StageKind
from placement.hardware import Offer, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """pipelines: the stages of each. skipped: machines that no pipeline could use, and why."""

    pipelines: tuple[tuple[Stage, ...], ...]
    skipped: tuple[str, ...] = ()


def vllm_like(offers: Sequence[Offer], estimator: Estimator) -> Placement:
    pipelines, skipped = [], []
    for offer in offers:
        tp = largest_tp(estimator, offer.shape)
        kinds = [StageKind(shape=offer.shape, tp=tp)] * offer.count
        stages = place(kinds, even_layers(estimator.model.num_layers, offer.count))
        if estimator.max_batch(stages) < 1:
            skipped.append(f"{offer.count} × {offer.shape.name}: does not fit")
        else:
            pipelines.append(stages)
    return Placement(pipelines=tuple(pipelines), skipped=tuple(skipped))


def alpaserve_like(offers: Sequence[Offer], estimator: Estimator) -> Placement:
    pipelines, skipped = [], []
    for offer in offers:
        for size in range(1, offer.count + 1):
            if offer.count % size == 0 and (found := _group(offer.shape, size, estimator)):
                pipelines += [found] * (offer.count // size)
                break
        else:
            skipped.append(f"{offer.count} × {offer.shape.name}: does not fit")
    return Placement(pipelines=tuple(pipelines), skipped=tuple(skipped))


def _group(shape: Shape, num_machines: int, estimator: Estimator) -> tuple[Stage, ...] | None:
    """The pipeline of the lowest latency on so many machines; None if the model does not fit."""
    best: tuple[float, tuple[Stage, ...]] | None = None
    for tp in tp_choices(estimator, shape):
        num_stages = num_machines * shape.num_gpus // tp
        kinds = [StageKind(shape=shape, tp=tp)] * num_stages
        if num_stages > estimator.model.num_layers:
            continue
        nodes = [index * tp // shape.num_gpus for index in range(num_stages)]
        stages = balanced(estimator, kinds, nodes)
        if estimator.max_batch(stages) < 1:
            continue
        latency_s = sum(map(sum, estimator.phase_s(stages, 1)))
        if best is None or latency_s < best[0]:
            best = (latency_s, stages)
    return None if best is None else best[1]


def balanced(
    estimator: Estimator, kinds: Sequence[StageKind], nodes: Sequence[int]
) -> tuple[Stage, ...]:
    """The layers that make the slowest stage fastest, for one request at a time.

    Layer by layer to the stage that would be fastest with it; exact, as each stage's time grows by
    the same amount per layer.
    """
    counts = [1] * len(kinds)
    one = np.ones(1)
    layer_s, rest_s = [], []
    for index, kind in enumerate(kinds):
        times = (estimator.prefill_times(kind, one), estimator.decode_times(kind, one, len(kinds)))
        end = "logits_s" if index == len(kinds) - 1 else "far_s"
        layer_s.append(sum(float(part.layer_s[0]) for part in times))
        rest_s.append(sum(float(getattr(part, end)[0]) for part in times))
    for _ in range(estimator.model.num_layers - len(kinds)):
        fastest = min(
            range(len(kinds)),
            key=lambda index: (counts[index] + 1) * layer_s[index] + rest_s[index],
        )
        counts[fastest] += 1
    return place(kinds, counts, nodes)


def hexgen_like(
    offers: Sequence[Offer], estimator: Estimator, *, num_steps: int = 4000, seed: int = 1
) -> Placement:
    rng = random.Random(seed)
    machines = [offer.shape for offer in offers for _ in range(offer.count)]
    search = _HexGen(machines, estimator, rng)
    best = search.start()
    best_rps = search.throughput_rps(best)
    current, current_rps = best, best_rps
    for step in range(num_steps):
        changed = search.mutated(current)
        rps = search.throughput_rps(changed)
        # As in a small population: what is nearly as good may go on, ever less.
        if rps >= current_rps * (1 - 0.05 * (1 - step / num_steps)):
            current, current_rps = changed, rps
        if rps > best_rps:
            best, best_rps = changed, rps
    return Placement(pipelines=tuple(search.pipelines(best)))


# Of each machine: its pipeline, and the TP degree that it is cut into.
_Genes = tuple[tuple[int, int], ...]


class _HexGen:
    def __init__(self, machines: Sequence[Shape], estimator: Estimator, rng: random.Random) -> None:
        self._machines = machines
        self._estimator = estimator
        self._rng = rng
        self._known: dict[tuple[tuple[Shape, int], ...], tuple[tuple[Stage, ...], float] | None]
        self._known = {}

    def start(self) -> _Genes:
        """As many heterogeneous groups as hold the model, each machine one stage."""
        for num_groups in range(len(self._machines), 0, -1):
            genes = tuple(
                (index % num_groups, largest_tp(self._estimator, shape))
                for index, shape in enumerate(self._machines)
            )
            if len(self.pipelines(genes)) == num_groups:
                return genes
        return tuple((0, largest_tp(self._estimator, shape)) for shape in self._machines)

    def mutated(self, genes: _Genes) -> _Genes:
        """One machine goes elsewhere, two change places, or one is cut otherwise."""
        rng, changed = self._rng, list(genes)
        index = rng.randrange(len(genes))
        group, tp = changed[index]
        kind = rng.randrange(3)
        if kind == 0:
            changed[index] = (rng.randrange(max(one for one, _ in genes) + 2), tp)
        elif kind == 1:
            other = rng.randrange(len(genes))
            changed[index], changed[other] = (changed[other][0], tp), (group, changed[other][1])
        else:
            choices = tp_choices(self._estimator, self._machines[index])
            changed[index] = (group, rng.choice(choices))
        return tuple(changed)

    def throughput_rps(self, genes: _Genes) -> float:
        return sum(rps for _, rps in self._groups(genes))

    def pipelines(self, genes: _Genes) -> list[tuple[Stage, ...]]:
        return [stages for stages, _ in self._groups(genes)]

    def _groups(self, genes: _Genes) -> Iterator[tuple[tuple[Stage, ...], float]]:
        """The groups that hold the model, and their throughput."""
        for group in sorted({one for one, _ in genes}):
            members = tuple(
                (shape, tp)
                for shape, (one, tp) in zip(self._machines, genes, strict=True)
                if one == group
            )
            if members not in self._known:
                stages = self._stages(members)
                self._known[members] = (
                    None
                    if stages is None
                    else (stages, self._estimator.evaluate(stages).throughput_rps)
                )
            if (found := self._known[members]) is not None:
                yield found

    def _stages(self, members: tuple[tuple[Shape, int], ...]) -> tuple[Stage, ...] | None:
        kinds: list[StageKind] = []
        nodes: list[int] = []
        for node, (shape, tp) in enumerate(members):
            kinds += [StageKind(shape=shape, tp=tp)] * (shape.num_gpus // tp)
            nodes += [node] * (shape.num_gpus // tp)
        memory = [kind.tp * self._estimator.stage_memory(kind).available for kind in kinds]
        counts = proportional(self._estimator.model.num_layers, memory)
        if min(counts) < 1:
            return None
        stages = place(kinds, counts, nodes)
        return stages if self._estimator.max_batch(stages) >= 1 else None


def place(
    kinds: Sequence[StageKind], counts: Sequence[int], nodes: Sequence[int] | None = None
) -> tuple[Stage, ...]:
    """Stages in order. nodes: the machine of each, by default one for each."""
    return tuple(
        Stage(shape=kind.shape, tp=kind.tp, num_layers=count, node=node)
        for kind, count, node in zip(kinds, counts, nodes or range(len(kinds)), strict=True)
    )


def even_layers(num_layers: int, num_stages: int) -> list[int]:
    """vLLM's `get_pp_indices`: what is left over goes to the stages before the last, from there
    backwards, one each."""
    counts = [num_layers // num_stages] * num_stages
    for index in range(2, num_layers % num_stages + 2):
        counts[-index] += 1
    return counts


def proportional(num_layers: int, shares: Sequence[float]) -> list[int]:
    """Whole layers in proportion to shares, that add up."""
    total = sum(shares)
    ends = [round(num_layers * part / total) for part in itertools.accumulate(shares)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def largest_tp(estimator: Estimator, shape: Shape) -> int:
    return tp_choices(estimator, shape)[-1]


def tp_choices(estimator: Estimator, shape: Shape) -> list[int]:
    """TP degrees that divide a machine and that the model allows, from 1 on."""
    return [
        tp
        for tp in range(1, shape.num_gpus + 1)
        if shape.num_gpus % tp == 0 and estimator.model.allows_tp(tp)
    ]


def estimates(placement: Placement, estimator: Estimator) -> list[PipelineEstimate]:
    """Of each pipeline. Raises Infeasible if one does not fit by this estimator."""
    return [estimator.evaluate(stages) for stages in placement.pipelines]


def paper_estimator(estimator: Estimator) -> Estimator:
    """The same hardware, model and workload in the paper's reading."""
    return replace(estimator, fidelity=replace(estimator.fidelity, reading="batch"), _memory={})

"""The fleet that runs, for `plan --running`: its plan file, on the machines of today."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from placement.errors import Infeasible, InvalidInput, user_path
from placement.estimator import Estimator, PipelineEstimate, Stage
from placement.hardware import Offer, machine_label
from placement.plan import PlannedPipeline
from server.plan_file import FORMATS, FileMachine, FilePipeline, PlanFile, read_plan

if TYPE_CHECKING:
    from placement.optimizer import Replan

Reason = Literal["lost", "not_offered", "fewer_machines", "moved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A pipeline that does not go on, by its index in the running plan.

    reason: it was said to be lost; `machine` is offered no more; fewer machines are offered than
    run; or its machines do better otherwise, or are not worth their price.
    """

    pipeline: int
    reason: Reason
    machine: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """name: of the file. pipelines: as `replan` takes them. lost: why those are None that are."""

    name: str
    pipelines: tuple[PlannedPipeline | None, ...]
    lost: tuple[Stop, ...]

    def stops(self, found: Replan, offers: Sequence[Offer]) -> list[Stop]:
        """Every pipeline that does not go on, in their order."""
        rented = {
            index: [offer.kind for offer in pipeline.offers]
            for index, pipeline in enumerate(self.pipelines)
            if pipeline is not None
        }
        needed = Counter(kind for kinds in rented.values() for kind in kinds)
        short = needed - Counter(offer.kind for offer in offers for _ in range(offer.count))
        stops = [
            Stop(
                pipeline=index,
                reason="fewer_machines" if short.keys() & set(kinds) else "moved",
            )
            for index, kinds in rented.items()
            if index not in found.kept
        ]
        return sorted([*self.lost, *stops], key=lambda one: one.pipeline)


def read_running(
    flags: Mapping[str, Any], estimator: Estimator, offers: Sequence[Offer]
) -> Running | None:
    """The plan of --running; None without it. Raises InvalidInput that names flag and field."""
    if flags["running"] is None:
        for name in ("lost", "start_up", "horizon"):
            if flags[name] is not None:
                raise InvalidInput(f"--{name.replace('_', '-')}", "is for --running")
        return None
    path = user_path(flags["running"])
    try:
        plan = read_plan(path)
    except InvalidInput as error:
        raise InvalidInput("--running", error.message) from None
    reader = _Reader(path.name, estimator, offers)
    reader.check_model(plan, flags)
    told = _numbers(flags["lost"], len(plan.pipelines), path.name)
    pipelines: list[PlannedPipeline | None] = []
    lost = []
    for index, planned in enumerate(plan.pipelines):
        found = reader.pipeline(index, planned)
        if index in told:
            found = Stop(pipeline=index, reason="lost")
        if isinstance(found, Stop):
            lost.append(found)
        pipelines.append(None if isinstance(found, Stop) else found)
    return Running(name=path.name, pipelines=tuple(pipelines), lost=tuple(lost))


def _numbers(text: str | None, most: int, name: str) -> set[int]:
    """Indices out of numbers from 1, separated by commas."""
    found = set()
    for word in text.split(",") if text is not None else ():
        number = word.strip()
        if not (number.isascii() and number.isdigit()) or len(number) > 9:
            raise InvalidInput("--lost", f"{number[:20]!r} is no number of a pipeline")
        if not 1 <= int(number) <= most:
            raise InvalidInput("--lost", f"{name} has pipelines 1 to {most}, not {int(number)}")
        found.add(int(number) - 1)
    return found


@dataclass(frozen=True, slots=True)
class _Reader:
    """name: of the file. estimates: of pipelines read so far, by stages and batch: a fleet has many
    that are equal."""

    name: str
    estimator: Estimator
    offers: Sequence[Offer]
    estimates: dict[tuple[tuple[Stage, ...], int], PipelineEstimate] = field(default_factory=dict)

    def check_model(self, plan: PlanFile, flags: Mapping[str, Any]) -> None:
        """Raises InvalidInput for a plan of another model, or in other formats."""
        for name in ("format", "model"):
            if getattr(plan, name) is None:
                raise self._error(name, "is missing; write the plan with `shuntyard plan --output`")
        assert plan.model is not None, "checked before"
        difference = plan.model.difference(self.estimator.model)
        if difference is not None:
            raise self._error("model", difference)
        for name in FORMATS:
            planned, given = getattr(plan.model, name), flags.get(name)
            if planned != given:
                flag = f"--{name.replace('_', '-')}"
                without = f"it was planned without {flag}; leave it out"
                raise self._error(
                    f"model.{name}",
                    without if planned is None else f"it was planned with {planned}; give {flag}",
                )

    def pipeline(self, index: int, planned: FilePipeline) -> PlannedPipeline | Stop:
        """A pipeline as it runs; where one of its machines is not offered any more, which one."""
        place = f"pipelines.{index}"
        if planned.machines is None or any(stage.node is None for stage in planned.stages):
            raise self._error(
                f"{place}.machines", "is missing; write the plan with `shuntyard plan --output`"
            )
        rented = []
        for number, machine in enumerate(planned.machines):
            offer = self._offer(machine)
            if offer is None:
                return Stop(
                    pipeline=index, reason="not_offered", machine=machine_label(*machine.kind)
                )
            used = sum(stage.tp for stage in planned.stages if stage.node == number)
            if not 1 <= used <= offer.shape.num_gpus:
                raise self._error(
                    f"{place}.machines.{number}",
                    f"{used} of the {offer.shape.num_gpus} GPUs of {offer.shape.name} are used",
                )
            rented.append(offer)
        stages = self._stages(place, planned, rented)
        try:
            estimate = self._estimate(stages, planned.batch)
        except Infeasible as error:
            raise self._error(place, error.message) from None
        return PlannedPipeline(stages=stages, offers=tuple(rented), estimate=estimate)

    def _estimate(self, stages: tuple[Stage, ...], batch: int) -> PipelineEstimate:
        """Of so many requests in flight, or as many as fit. Raises Infeasible."""
        if (stages, batch) not in self.estimates:
            size = min(batch, self.estimator.max_batch(stages))
            self.estimates[stages, batch] = self.estimator.evaluate(stages, size)
        return self.estimates[stages, batch]

    def _offer(self, machine: FileMachine) -> Offer | None:
        """As it was rented, in the shape that is offered today."""
        today = next((offer for offer in self.offers if offer.kind == machine.kind), None)
        if today is None:
            return None
        return replace(
            today,
            count=1,
            price_usd_per_hour=machine.price_usd_per_hour or 0.0,
            interruptions_per_hour=machine.interruptions_per_hour,
        )

    def _stages(
        self, place: str, planned: FilePipeline, rented: Sequence[Offer]
    ) -> tuple[Stage, ...]:
        stages = []
        for number, stage in enumerate(planned.stages):
            at = f"{place}.stages.{number}"
            assert stage.node is not None, "checked before"
            if stage.node >= len(rented):
                raise self._error(f"{at}.node", f"there are {len(rented)} machines")
            shape = rented[stage.node].shape
            if shape.name != stage.shape:
                raise self._error(
                    f"{at}.shape", f"machine {stage.node} is {shape.name}, not {stage.shape}"
                )
            if shape.gpu.name != stage.gpu:
                raise self._error(
                    f"{at}.gpu", f"{shape.name} has {shape.gpu.name} today, not {stage.gpu}"
                )
            stages.append(Stage(shape=shape, tp=stage.tp, num_layers=stage.layers, node=stage.node))
        return tuple(stages)

    def _error(self, place: str, message: str) -> InvalidInput:
        return InvalidInput("--running", f"{self.name}: {place}: {message}")

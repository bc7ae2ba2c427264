"""What to know of a plan before it is served."""

from __future__ import annotations

from collections.abc import Iterator

from placement.catalogue import Catalogue
from placement.plan import Plan, PlannedPipeline
from server.plan_file import FilePipeline, PlannedStage
from server.planned_engines import why_not_runnable

_CPU = "cpu"
_FP16_WORDS = ("half", "float16", "float", "float32")


def plan_notes(plan: Plan, catalogue: Catalogue, dtype: str | None) -> list[str]:
    """Sentences. dtype: as --dtype said, None if it said nothing."""
    return [*_refusals(plan), *_without_bf16(plan, catalogue, dtype), *_shared_memory(plan)]


def _refusals(plan: Plan) -> Iterator[str]:
    """Pipelines of one machine that `serve --plan` would not start."""
    for number, pipeline in enumerate(plan.pipelines, start=1):
        if len(pipeline.offers) == 1:
            reason = why_not_runnable(number, _as_in_file(pipeline))
            if reason is not None:
                yield f"serve --plan refuses this plan: {reason}"
                return


def _as_in_file(pipeline: PlannedPipeline) -> FilePipeline:
    return FilePipeline(
        stages=[
            PlannedStage(
                shape=one.shape.name,
                gpu=one.shape.gpu.name,
                tp=one.tp,
                layers=one.num_layers,
                node=one.node,
            )
            for one in pipeline.stages
        ],
        batch=pipeline.estimate.batch,
        throughput_rps=pipeline.estimate.throughput_rps,
    )


def _without_bf16(plan: Plan, catalogue: Catalogue, dtype: str | None) -> Iterator[str]:
    if dtype in _FP16_WORDS:
        return
    used = dict.fromkeys(
        stage.shape.gpu.name for pipeline in plan.pipelines for stage in pipeline.stages
    )
    without = [name for name in used if catalogue.gpus[name].arithmetic == "fp16"]
    if without:
        yield (
            f"{' and '.join(without)} without BF16: vLLM runs a BF16 model in another format "
            "there; --dtype half plans for FP16, and the plan is served with it"
        )


def _shared_memory(plan: Plan) -> Iterator[str]:
    stages = [
        one
        for pipeline in plan.pipelines
        for one in pipeline.estimate.stages
        if one.stage.shape.gpu.name == _CPU
    ]
    if len(stages) > 1:
        wanted = sum(one.weights_bytes + one.kv_bytes for one in stages)
        yield (
            "each cpu node is planned with all of a machine's memory; on a single machine all of "
            f"them together need {wanted / 1e9:.1f} GB, and share its cores"
        )

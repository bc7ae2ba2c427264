"""A plan's pipelines as engines of this machine, or the reason why they cannot be.

Nothing else than what was planned is ever run: a plan that spans machines, that needs other GPUs
than there are, or whose stages differ in TP is refused (machines are joined in a later release).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from placement.catalogue import shipped_catalogue
from placement.errors import PlacementError
from placement.model_catalogue import local_config
from placement.model_config import model_spec
from server.gpus import query_gpus, visible_gpus
from server.plan_file import FORMATS, FilePipeline, PlanFile, read_plan
from server.settings import SettingsError
from spot.engines.vllm_compat.environment import is_cpu_build

_CPU = "cpu"
_GIB = 2.0**30
_LATER = "machines are joined in a later release"
_PLANNED_ARGS = ("tensor_parallel_size", "pipeline_parallel_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEngine:
    """One pipeline of a plan. engine_args: over the server's own. env: for its processes. weight:
    its expected throughput, in requests per second."""

    engine_args: Mapping[str, Any]
    env: Mapping[str, str]
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What engines can run on here. gpus: the driver's name of each GPU by its id."""

    gpus: Mapping[str, str] = field(default_factory=dict)
    memory_bytes: float = 0.0
    has_cpu_engine: bool = False


def this_machine(environ: Mapping[str, str] = os.environ) -> Machine:
    """The machine that this runs on."""
    names: dict[str, str] = {}
    for line in query_gpus("index,uuid,name"):
        index, uuid, name = (part.strip() for part in line.split(",", 2))
        names[index] = names[uuid] = name
    return Machine(
        gpus={gpu: names.get(gpu, "an unknown GPU") for gpu in visible_gpus(environ)},
        memory_bytes=float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        has_cpu_engine=is_cpu_build(),
    )


def read_planned_engines(
    path: Path, folder: Path, engine_args: Mapping[str, Any], machine: Machine
) -> list[PlannedEngine]:
    """The engines of the plan at `path`, for the model in `folder`.

    engine_args: what the server was told. Raises SettingsError that says what is missing.
    """
    try:
        plan = read_plan(path)
        _check_model(plan, folder)
    except PlacementError as error:
        raise _refused(" ".join(error.message.split())) from None
    return planned_engines(plan, engine_args, machine)


def planned_engines(
    plan: PlanFile, engine_args: Mapping[str, Any], machine: Machine
) -> list[PlannedEngine]:
    """As `read_planned_engines`, of a plan for a model that is known to be right."""
    for number, pipeline in enumerate(plan.pipelines, start=1):
        reason = why_not_runnable(number, pipeline)
        if reason is not None:
            raise _refused(reason)
    formats = _formats(plan, engine_args)
    _check_settings(engine_args)
    environments = _environments(plan, machine)
    return [
        PlannedEngine(
            engine_args={
                **formats,
                **_parallel_args(pipeline),
                "max_num_seqs": _max_num_seqs(pipeline, engine_args),
            },
            env={**environment, **_partition(pipeline)},
            weight=pipeline.throughput_rps,
        )
        for pipeline, environment in zip(plan.pipelines, environments, strict=True)
    ]


def _refused(message: str) -> SettingsError:
    return SettingsError(f"--plan (SHUNTYARD_PLAN): {message}")


def _check_model(plan: PlanFile, folder: Path) -> None:
    """The served model has the planned one's dimensions, whatever it is called."""
    spec = model_spec(local_config(folder), name=str(folder))
    num_planned = {sum(stage.layers for stage in one.stages) for one in plan.pipelines}
    if num_planned != {spec.num_layers}:
        layers = " and ".join(map(str, sorted(num_planned)))
        raise _refused(f"it places {layers} layers; the model has {spec.num_layers}")
    if plan.model is None:
        return
    difference = plan.model.difference(spec)
    if difference is not None:
        raise _refused(difference)


def why_not_runnable(number: int, pipeline: FilePipeline) -> str | None:
    """Why no single machine and engine of ours can be this pipeline; None if one can."""
    stages = pipeline.stages
    nodes = {stage.node for stage in stages}
    if len(stages) > 1 and None in nodes:
        return (
            f"pipeline {number} does not say which stages share a machine; write the plan with "
            "`shuntyard plan --output`"
        )
    if len(nodes) > 1:
        shapes = ", ".join(dict.fromkeys(stage.shape for stage in stages))
        return (
            f"pipeline {number} spans {len(nodes)} machines ({shapes}), and {_LATER}; plan with "
            "machines that hold the model alone"
        )
    sizes = dict.fromkeys(stage.tp for stage in stages)
    if len(sizes) > 1:
        return (
            f"pipeline {number} has stages of TP {' and '.join(map(str, sizes))}; engines of this "
            "release have one TP for all stages"
        )
    if any(stage.gpu == _CPU for stage in stages) and (len(stages) > 1 or stages[0].tp > 1):
        return (
            f"pipeline {number} splits the model over CPUs, which engines of this release cannot; "
            "plan with gpus_per_node 1"
        )
    return None


def _formats(plan: PlanFile, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """The formats that the plan counted with; the server must not be told others."""
    found = {}
    for name in FORMATS:
        planned = getattr(plan.model, name) if plan.model is not None else None
        if planned is None:
            continue
        given = engine_args.get(name)
        if given not in (None, planned):
            raise _refused(f"it counts with --{name.replace('_', '-')} {planned}, not {given}")
        found[name] = planned
    return found


def _check_settings(engine_args: Mapping[str, Any]) -> None:
    for name in _PLANNED_ARGS:
        if engine_args.get(name) is not None:
            raise _refused(f"it says --{name.replace('_', '-')}; leave that flag out")


def _parallel_args(pipeline: FilePipeline) -> dict[str, int]:
    return {
        "tensor_parallel_size": pipeline.stages[0].tp,
        "pipeline_parallel_size": len(pipeline.stages),
    }


def _max_num_seqs(pipeline: FilePipeline, engine_args: Mapping[str, Any]) -> int:
    """The planned batch; the user may ask for less."""
    given = engine_args.get("max_num_seqs")
    return pipeline.batch if given is None else min(int(given), pipeline.batch)


def _partition(pipeline: FilePipeline) -> dict[str, str]:
    """vLLM's variable for the layers of each stage."""
    if len(pipeline.stages) == 1:
        return {}
    return {"VLLM_PP_LAYER_PARTITION": ",".join(str(stage.layers) for stage in pipeline.stages)}


def _environments(plan: PlanFile, machine: Machine) -> list[dict[str, str]]:
    """Variables that put each pipeline onto its own part of the machine."""
    kinds = {stage.gpu for pipeline in plan.pipelines for stage in pipeline.stages}
    if kinds == {_CPU}:
        return _cpu_environments(plan, machine)
    if _CPU in kinds:
        raise _refused("it has pipelines on CPU and on GPUs; engines of one server are all alike")
    if machine.has_cpu_engine:
        raise _refused(
            f"it is for {_listed(sorted(kinds))}, but vLLM is installed as its CPU build"
        )
    return _gpu_environments(plan, machine)


def _cpu_environments(plan: PlanFile, machine: Machine) -> list[dict[str, str]]:
    if not machine.has_cpu_engine:
        raise _refused("it is for cpu, but vLLM is installed as its GPU build")
    stages = [pipeline.stages[0] for pipeline in plan.pipelines]
    wanted = sum(stage.weights_bytes + stage.kv_bytes for stage in stages)
    if wanted > machine.memory_bytes:
        raise _refused(
            f"it needs {wanted / 1e9:.1f} GB of memory; this machine has "
            f"{machine.memory_bytes / 1e9:.1f} GB"
        )
    # vLLM wants whole GiB.
    return [
        {"VLLM_CPU_KVCACHE_SPACE": str(max(1, -int(-stage.kv_bytes // _GIB)))} for stage in stages
    ]


def _gpu_environments(plan: PlanFile, machine: Machine) -> list[dict[str, str]]:
    free = dict(machine.gpus)
    environments = []
    for number, pipeline in enumerate(plan.pipelines, start=1):
        gpu = pipeline.stages[0].gpu
        wanted = sum(stage.tp for stage in pipeline.stages)
        fitting = [one for one, name in free.items() if _is_called(name, gpu)]
        if len(fitting) < wanted:
            total = sum(stage.tp for one in plan.pipelines for stage in one.stages)
            raise _refused(
                f"it needs {total} GPU{'' if total == 1 else 's'}; for pipeline {number}, "
                f"{wanted} × {gpu}, {len(fitting)} {'is' if len(fitting) == 1 else 'are'} left of "
                f"this machine's ({_listed(list(machine.gpus.values())) or 'none'}), and {_LATER}"
            )
        chosen = fitting[:wanted]
        for one in chosen:
            del free[one]
        environments.append({"CUDA_VISIBLE_DEVICES": ",".join(chosen)})
    return environments


def _is_called(driver_name: str, gpu: str) -> bool:
    """Whether the driver's name is that of a GPU of the catalogue, or holds the user's own name."""
    entry = shipped_catalogue().gpus.get(gpu)
    if entry is not None and entry.driver_names:
        return driver_name in entry.driver_names
    return gpu.casefold() in driver_name.casefold().split()


def _listed(names: Sequence[str]) -> str:
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())

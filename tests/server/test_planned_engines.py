"""A plan on this machine: exactly what was planned, or a reason why not."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from server.pipelines import PipelineMaker
from server.plan_file import PlanFile
from server.planned_engines import (
    Machine,
    PlannedEngine,
    planned_engines,
    read_planned_engines,
    this_machine,
)
from server.protocol.admin import NewPipeline
from server.settings import Settings, SettingsError
from spot.errors import InvalidRequest

CPU = Machine(memory_bytes=16e9, has_cpu_engine=True)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def gpus(*names: str) -> Machine:
    return Machine(gpus={str(index): name for index, name in enumerate(names)})


def stage(gpu: str = "L4", tp: int = 1, layers: int = 6, **fields: Any) -> dict[str, Any]:
    return {"shape": f"box-{gpu}", "gpu": gpu, "tp": tp, "layers": layers, "node": 0, **fields}


def pipeline(*stages: dict[str, Any], batch: int = 8, rps: float = 1.5) -> dict[str, Any]:
    return {"stages": list(stages), "batch": batch, "throughput_rps": rps}


def plan(*pipelines: dict[str, Any], **model: Any) -> PlanFile:
    dimensions = {"name": "m", "num_layers": 6, "hidden_size": 64, "vocab_size": 100}
    return PlanFile.model_validate(
        {"format": 1, "model": {**dimensions, **model}, "pipelines": list(pipelines)}
    )


def test_cpu_pipelines_get_batch_weight_and_room_for_their_kv() -> None:
    found = planned_engines(
        plan(
            pipeline(stage("cpu", kv_bytes=2.5 * 2**30, weights_bytes=1e9), rps=0.5),
            pipeline(stage("cpu"), batch=3),
        ),
        {},
        CPU,
    )
    assert [one.weight for one in found] == [0.5, 1.5]
    assert [one.engine_args["max_num_seqs"] for one in found] == [8, 3]
    assert [one.env for one in found] == [
        {"VLLM_CPU_KVCACHE_SPACE": "3"},
        {"VLLM_CPU_KVCACHE_SPACE": "1"},
    ]


def test_pipelines_share_out_the_gpus_of_this_machine_by_kind() -> None:
    machine = gpus("NVIDIA L4", "NVIDIA A10G", "NVIDIA L4", "NVIDIA L4", "NVIDIA A10G")
    found = planned_engines(
        plan(
            pipeline(stage("A10G", tp=2)),
            pipeline(stage("L4", layers=4), stage("L4", layers=2)),
            pipeline(stage("L4")),
        ),
        {},
        machine,
    )
    assert [one.env for one in found] == [
        {"CUDA_VISIBLE_DEVICES": "1,4"},
        {"CUDA_VISIBLE_DEVICES": "0,2", "VLLM_PP_LAYER_PARTITION": "4,2"},
        {"CUDA_VISIBLE_DEVICES": "3"},
    ]
    assert [
        (one.engine_args["tensor_parallel_size"], one.engine_args["pipeline_parallel_size"])
        for one in found
    ] == [(2, 1), (1, 2), (1, 1)]


def test_gpus_of_the_users_own_are_known_by_their_name() -> None:
    machine = gpus("NVIDIA RTX 6000 Ada")
    with pytest.raises(SettingsError, match="0 are left"):
        planned_engines(plan(pipeline(stage("RTX5000"))), {}, machine)
    assert planned_engines(plan(pipeline(stage("Ada"))), {}, machine)


def test_formats_of_the_plan_are_the_engines() -> None:
    [found] = planned_engines(
        plan(pipeline(stage("cpu")), dtype="float32"), {"dtype": "float32"}, CPU
    )
    assert found.engine_args["dtype"] == "float32"


def test_a_lower_limit_of_sequences_may_be_asked_for() -> None:
    [found] = planned_engines(plan(pipeline(stage("cpu"))), {"max_num_seqs": 2}, CPU)
    assert found.engine_args["max_num_seqs"] == 2


@pytest.mark.parametrize(
    ("pipelines", "machine", "message"),
    [
        (
            [pipeline(stage("L4", layers=3), stage("L40S", layers=3, node=1))],
            gpus("NVIDIA L4", "NVIDIA L40S"),
            r"pipeline 1 spans 2 machines \(box-L4, box-L40S\), and machines are joined in a later",
        ),
        (
            [pipeline(stage(tp=2, layers=3), stage(layers=3))],
            gpus(*["NVIDIA L4"] * 3),
            "pipeline 1 has stages of TP 2 and 1",
        ),
        (
            [pipeline(stage(layers=3, node=None), stage(layers=3, node=None))],
            gpus(*["NVIDIA L4"] * 2),
            "does not say which stages share a machine; .* --output",
        ),
        (
            [pipeline(stage(tp=4)), pipeline(stage(tp=4))],
            gpus(*["NVIDIA L4"] * 6),
            r"it needs 8 GPUs; for pipeline 2, 4 × L4, 2 are left of this machine's "
            r"\(6 × NVIDIA L4\)",
        ),
        ([pipeline(stage("L4"))], gpus("NVIDIA L40S"), "0 are left of this machine's"),
        ([pipeline(stage("L4"))], gpus(), r"it needs 1 GPU; .* \(none\)"),
        ([pipeline(stage("L4"))], CPU, "it is for L4, but vLLM is installed as its CPU build"),
        ([pipeline(stage("cpu"))], gpus("NVIDIA L4"), "it is for cpu, but vLLM is .* GPU build"),
        (
            [pipeline(stage("cpu")), pipeline(stage("L4"))],
            gpus("NVIDIA L4"),
            "pipelines on CPU and on GPUs",
        ),
        (
            [pipeline(stage("cpu", layers=3), stage("cpu", layers=3))],
            CPU,
            "pipeline 1 splits the model over CPUs",
        ),
        (
            [pipeline(stage("cpu", kv_bytes=9e9)), pipeline(stage("cpu", weights_bytes=9e9))],
            CPU,
            r"it needs 18\.0 GB of memory; this machine has 16\.0 GB",
        ),
    ],
)
def test_what_this_release_cannot_run_is_refused(
    pipelines: list[dict[str, Any]], machine: Machine, message: str
) -> None:
    with pytest.raises(SettingsError, match=rf"--plan \(SHUNTYARD_PLAN\): .*{message}"):
        planned_engines(plan(*pipelines), {}, machine)


@pytest.mark.parametrize(
    ("engine_args", "message"),
    [
        ({"tensor_parallel_size": 2}, "it says --tensor-parallel-size; leave that flag out"),
        ({"pipeline_parallel_size": 1}, "it says --pipeline-parallel-size"),
        ({"dtype": "bfloat16"}, "it counts with --dtype float32, not bfloat16"),
    ],
)
def test_flags_that_contradict_the_plan_are_refused(
    engine_args: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        planned_engines(plan(pipeline(stage("cpu")), dtype="float32"), engine_args, CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"num_hidden_layers": 7}, "it places 6 layers; the model has 7"),
        ({"hidden_size": 128}, "it is for m with hidden_size 64; the model has 128"),
        ({"model_type": "lama"}, "model_type: 'lama' is not known"),
    ],
)
def test_the_served_model_must_be_the_planned_one(
    tmp_path: Path, changes: dict[str, Any], message: str | None
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan(pipeline(stage("cpu"))).model_dump_json())
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    if message is None:
        assert len(read_planned_engines(path, tmp_path, {}, CPU)) == 1
        return
    with pytest.raises(SettingsError, match=message):
        read_planned_engines(path, tmp_path, {}, CPU)


def test_a_plan_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--plan .*gone\.json: cannot be read"):
        read_planned_engines(tmp_path / "gone.json", tmp_path, {}, CPU)


def test_the_machine_knows_its_gpus_by_index_and_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["0, GPU-aa, NVIDIA L4", "1, GPU-bb, NVIDIA L40S"]
    monkeypatch.setattr("server.planned_engines.query_gpus", lambda fields: lines)
    found = this_machine({"CUDA_VISIBLE_DEVICES": "GPU-bb,0,MIG-1"})
    assert found.gpus == {"GPU-bb": "NVIDIA L40S", "0": "NVIDIA L4", "MIG-1": "an unknown GPU"}
    assert found.memory_bytes > 1e8


def maker(planned: list[PlannedEngine], **settings: Any) -> PipelineMaker:
    return PipelineMaker(
        Settings(**settings),
        {"model": "m", "dtype": "float32"},
        deque(),
        vocab_size=10,
        on_step=lambda tokens: None,
        planned=planned,
    )


def planned(weight: float) -> PlannedEngine:
    return PlannedEngine(engine_args={"max_num_seqs": 4}, env={"X": "1"}, weight=weight)


def test_planned_pipelines_are_routed_to_by_their_throughput() -> None:
    specs = maker([planned(0.5), planned(2.0)], upstream=["http://a=3"]).at_start()
    assert [(spec.id, spec.weight) for spec in specs] == [
        ("local-2", 0.5),
        ("local-3", 2.0),
        ("upstream-1", 3.0),
    ]


def test_the_number_of_pipelines_is_the_plans() -> None:
    with pytest.raises(SettingsError, match="--pipelines: --plan says"):
        maker([planned(1.0)], pipelines=2).at_start()


@pytest.mark.anyio
async def test_a_planned_machine_takes_no_further_engine() -> None:
    pipelines = maker([planned(1.0)])
    pipelines.at_start()
    with pytest.raises(InvalidRequest, match="runs a plan"):
        await pipelines.make(NewPipeline())
    assert (await pipelines.make(NewPipeline(upstream="http://far:8000"))).weight == 1.0

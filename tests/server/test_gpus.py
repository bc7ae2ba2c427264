"""GPUs for pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from server.gpus import GpuAllotment, visible_gpus


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("0,1", ["0", "1"]), (" GPU-a , GPU-b", ["GPU-a", "GPU-b"]), ("", [])],
)
def test_the_variable_says_what_may_be_used(variable: str, expected: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": variable}) == expected


@pytest.mark.parametrize(
    ("gpus", "num_each", "num_pipelines", "expected"),
    [
        ("", 1, 2, [None, None]),
        ("0", 1, 1, [None]),
        ("0 1", 1, 2, ["0", "1"]),
        ("0 1 2 3", 2, 2, ["0,1", "2,3"]),
        ("0 1", 1, 3, ["0", "1", "0"]),
        ("0 1", 1, 1, [None, "1"]),
        ("0", 2, 2, [None, None]),
    ],
)
def test_pipelines_get_gpus_of_their_own(
    gpus: str, num_each: int, num_pipelines: int, expected: list[str | None]
) -> None:
    allotment = GpuAllotment(gpus.split(), num_each, num_pipelines)
    given = [allotment.next_environment().get("CUDA_VISIBLE_DEVICES") for _ in expected]
    assert given == expected


@pytest.mark.parametrize(
    ("gpus", "num_pipelines", "engine_args", "expected"),
    [
        ("0 1", 2, {}, {}),
        ("0", 2, {}, {"gpu_memory_utilization": 0.45}),
        ("0 1", 3, {}, {"gpu_memory_utilization": 0.45}),
        ("0", 2, {"gpu_memory_utilization": 0.3}, {}),
        ("", 2, {}, {}),
    ],
)
def test_memory_is_shared_where_gpus_are(
    gpus: str, num_pipelines: int, engine_args: dict[str, Any], expected: dict[str, Any]
) -> None:
    allotment = GpuAllotment(gpus.split(), 1, num_pipelines)
    assert allotment.memory_args(engine_args) == expected

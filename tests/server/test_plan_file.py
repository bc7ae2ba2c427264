"""Plan files: what is written can be read, and what cannot be is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from placement.errors import InvalidInput
from server.plan_file import read_plan, write_plan
from server.plan_json import plan_answer
from tests import plans


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def test_what_is_written_is_read(path: Path) -> None:
    plan = plans.papers_plan()
    model = plans.estimator().model
    formats = {"dtype": "bfloat16", "quantization": None, "kv_cache_dtype": None}
    write_plan(path, plan, model, plans.AZURE, formats)
    found = read_plan(path)
    assert found.model is not None
    assert (found.model.num_layers, found.model.dtype, found.model.quantization) == (
        64,
        "bfloat16",
        None,
    )
    for read, planned in zip(found.pipelines, plan.pipelines, strict=True):
        assert read.batch == planned.estimate.batch
        assert read.throughput_rps == planned.estimate.throughput_rps
        assert [(one.tp, one.layers, one.node, one.gpu) for one in read.stages] == [
            (one.tp, one.num_layers, one.node, one.shape.gpu.name) for one in planned.stages
        ]


def test_the_answer_for_scripts_is_a_plan_too(path: Path) -> None:
    path.write_text(json.dumps(plan_answer(plans.papers_plan())))
    found = read_plan(path)
    assert found.model is None
    assert [one.node for one in found.pipelines[1].stages] == [None, None]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"plan\.json: Invalid JSON"),
        ({"pipelines": []}, r"plan\.json: pipelines"),
        ({"format": 2, "pipelines": []}, r"plan\.json: format"),
        (
            {
                "pipelines": [
                    {
                        "batch": 1,
                        "throughput_rps": 1,
                        "stages": [
                            {"shape": "a", "gpu": "L4", "tp": 1, "layers": 4, "kv_bytes": 1e300}
                        ],
                    }
                ]
            },
            r"stages\.0\.kv_bytes: Input should be less than or equal to 1000000000000000",
        ),
        (
            {"pipelines": [{"batch": 1, "throughput_rps": 1, "stages": [{"shape": "a"}]}]},
            r"plan\.json: pipelines\.0\.stages\.0\.gpu",
        ),
        (
            {
                "pipelines": [
                    {
                        "batch": 0,
                        "throughput_rps": 1,
                        "stages": [{"shape": "a", "gpu": "L4", "tp": 1, "layers": 4}],
                    }
                ]
            },
            r"pipelines\.0\.batch",
        ),
    ],
)
def test_what_is_wrong_is_named(path: Path, content: Any, message: str) -> None:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InvalidInput, match=message):
        read_plan(path)


def test_a_missing_file_is_named(path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"plan\.json: cannot be read: No such file"):
        read_plan(path)

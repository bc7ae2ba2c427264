"""What is said of a plan before it is served."""

from __future__ import annotations

import pytest

from placement.catalogue import shipped_catalogue
from placement.hardware import Offer
from server.plan_notes import plan_notes
from tests import plans

CATALOGUE = shipped_catalogue()
SMALL = plans.estimator("HuggingFaceTB/SmolLM2-135M-Instruct")


def bare(gpu: str, num_gpus: int = 1) -> Offer:
    shape = CATALOGUE.bare_shape(gpu, num_gpus, "calibrated")
    return Offer(shape=shape, count=2, price_usd_per_hour=1.0)


def test_of_a_plan_that_runs_as_it_is_nothing_is_said() -> None:
    l4 = plans.offer("g6.12xlarge")
    one = plans.plan(plans.pipeline(plans.estimator(), (l4, 4, 64, 0)))
    assert plan_notes(one, CATALOGUE, None) == []
    # Machines that are joined by links are no slip.
    assert plan_notes(plans.papers_plan(), CATALOGUE, None) == []


def test_a_machine_that_serve_refuses_is_told() -> None:
    l4 = plans.offer("g6.12xlarge")
    estimator = plans.estimator("meta-llama/Llama-3.2-1B-Instruct")
    unequal = plans.plan(plans.pipeline(estimator, (l4, 2, 10, 0), (l4, 1, 6, 0)))
    [note] = plan_notes(unequal, CATALOGUE, None)
    assert note.startswith("serve --plan refuses this plan: pipeline 1 has stages of TP 2 and 1")


@pytest.mark.parametrize("gpu", ["T4", "V100"])
def test_gpus_without_bf16_want_a_dtype(gpu: str) -> None:
    found = plans.plan(plans.pipeline(SMALL, (bare(gpu), 1, 30, 0)))
    for dtype in (None, "bfloat16"):
        [note] = plan_notes(found, CATALOGUE, dtype)
        assert note.startswith(f"{gpu} without BF16")
        assert "--dtype half" in note
    assert plan_notes(found, CATALOGUE, "half") == []


def test_cpu_nodes_may_be_the_same_machine() -> None:
    one = plans.pipeline(SMALL, (bare("cpu"), 1, 30, 0))
    assert plan_notes(plans.plan(one), CATALOGUE, None) == []
    [note] = plan_notes(plans.plan(one, one), CATALOGUE, None)
    stage = one.estimate.stages[0]
    wanted = 2 * (stage.weights_bytes + stage.kv_bytes)
    assert f"together need {wanted / 1e9:.1f} GB" in note

"""ShuntServe's evaluation, for the benchmarks of placement: its cluster, its models, its trace."""

from __future__ import annotations

import csv
import gzip
import random
from dataclasses import replace
from functools import cache

from benchmarks.record import ROOT
from placement.catalogue import shipped_catalogue
from placement.corrections import CALIBRATED
from placement.estimator import Estimator, Fidelity
from placement.hardware import Offer
from placement.model import ModelSpec
from placement.model_catalogue import find_model
from placement.simulator.run import SimulatedRequest
from placement.workload import WORKLOADS, Workload

MODELS = {
    "70B": "meta-llama/Llama-3.1-70B-Instruct",
    "32B": "Qwen/Qwen3-32B",
}
# Section 7: machines, their number.
CLUSTER = {"g6.12xlarge": 3, "g5.12xlarge": 2, "g6e.xlarge": 4}
AZURE = WORKLOADS["azure-conv"]
# The same means, all requests equal.
EQUAL = Workload(name="equal", input_tokens=763, output_tokens=232)
TRACE = ROOT / "benchmarks" / "data" / "azure_llm_2023_conv.csv.gz"

# Tokens per step: the default of vLLM's server on such GPUs.
ENGINE = replace(CALIBRATED, max_tokens_per_pass=2048)


@cache
def model(name: str) -> ModelSpec:
    found = find_model(MODELS[name])
    assert found is not None
    return found


def estimator(name: str, *, fidelity: Fidelity = ENGINE, workload: Workload = AZURE) -> Estimator:
    return Estimator(model=model(name), workload=workload, fidelity=fidelity)


def offers() -> list[Offer]:
    """The cluster on demand, with calibrated figures (L4: 55 TFLOPS, as in the paper)."""
    return [catalogue_offer(name, count) for name, count in CLUSTER.items()]


def catalogue_offer(name: str, count: int) -> Offer:
    """Machines of the catalogue at their price on demand."""
    shape = shipped_catalogue().shape(name, "calibrated")
    assert shape.price_usd_per_hour is not None
    return Offer(shape=shape, count=count, price_usd_per_hour=shape.price_usd_per_hour)


@cache
def trace() -> tuple[SimulatedRequest, ...]:
    """Azure's conversation trace, prompts of at most 2,048 tokens, from 0 s on."""
    with gzip.open(TRACE, "rt", newline="") as file:
        return tuple(
            SimulatedRequest(
                int(row["arrival_ms"]) / 1000, int(row["input_tokens"]), int(row["output_tokens"])
            )
            for row in csv.DictReader(file)
        )


def first_minutes(minutes: float) -> list[SimulatedRequest]:
    return [request for request in trace() if request.arrival_s < 60 * minutes]


def at_once(requests: list[SimulatedRequest]) -> list[SimulatedRequest]:
    """The same requests, all of them there at 0 s."""
    return [SimulatedRequest(0.0, one.input_tokens, one.output_tokens) for one in requests]


def drawn(num: int, rng: random.Random) -> list[SimulatedRequest]:
    """Requests drawn from the trace, all of them there at 0 s."""
    return at_once([rng.choice(trace()) for _ in range(num)])

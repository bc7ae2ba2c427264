"""Random small clusters, models and goals, in which memory, time and links all matter."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import numpy as np

from placement.estimator import PAPER, Fidelity, PipelineEstimate
from placement.hardware import Gpu, Link, Offer, Shape
from placement.model import ModelSpec
from placement.plan import Goal
from placement.roofline import EngineTraits, Operation, Pass, Quantity, roofline_s
from placement.workload import Workload
from tests.placement.optimizer.brute_force import CachedEstimator


@dataclass(frozen=True)
class Instance:
    offers: list[Offer]
    estimator: CachedEstimator


def in_waves_s(operation: Operation, work: Pass, gpu: Gpu) -> Quantity:
    """Times with steps: throughput does not always rise with the batch."""
    waves = np.ceil(np.asarray(work.num_tokens) / 3) * 3 / np.asarray(work.num_tokens)
    return roofline_s(operation, work, gpu) * waves + 1e-6


def random_instance(seed: int) -> Instance:
    """Even seeds: reading `batch`; odd ones: `continuous`."""
    dice = random.Random(seed)
    model = random_model(dice)
    estimator = CachedEstimator(
        model=model,
        workload=Workload(
            input_tokens=dice.choice([3, 20, 60]), output_tokens=dice.choice([1, 4, 30])
        ),
        fidelity=random_fidelity(dice, seed),
    )
    gpus = [random_gpu(dice, estimator, index) for index in range(dice.choice([1, 2, 2, 3]))]
    max_machines = 4 if model.num_layers <= 3 else 3 if model.num_layers <= 4 else 2
    return Instance(random_offers(dice, gpus[:max_machines], max_machines), estimator)


def random_model(dice: random.Random) -> ModelSpec:
    num_heads = dice.choice([2, 4])
    return ModelSpec(
        name="tiny",
        num_layers=dice.choice([1, 2, 3, 3, 4, 4, 5, 6]),
        hidden_size=dice.choice([32, 64]),
        num_heads=num_heads,
        num_kv_heads=dice.choice([1, 2]),
        head_dim=16,
        ffn_size=dice.choice([48, 96, 200]),
        vocab_size=dice.choice([64, 500, 1500]),
        tie_word_embeddings=dice.random() < 0.3,
    )


def random_fidelity(dice: random.Random, seed: int) -> Fidelity:
    is_odd = dice.random() < 0.4
    return replace(
        PAPER,
        reading="continuous" if seed % 2 else "batch",
        traits=EngineTraits(
            is_attention_causal=dice.random() < 0.5, computes_all_logits=dice.random() < 0.5
        ),
        operation_time=in_waves_s if is_odd else roofline_s,
        max_tokens_per_pass=1,
        max_batch=dice.choice([2, 3, 5]),
        is_monotone=not is_odd,
    )


def random_gpu(dice: random.Random, estimator: CachedEstimator, index: int) -> Gpu:
    """Memory for a part of the model, up to all of it, and a few requests."""
    model, workload = estimator.model, estimator.workload
    length = workload.input_tokens + workload.output_tokens
    layer = (
        model.layer_weight_bytes() + dice.choice([1, 2, 4]) * length * model.kv_bytes_per_token()
    )
    layers = dice.uniform(0.5, model.num_layers + 1)
    ends = dice.choice([0, 1, 2]) * model.vocabulary_bytes()
    return Gpu(
        name=f"gpu{index}",
        memory_bytes=layers * layer + ends + 2000,
        flops=dice.choice([1e9, 2e9, 8e9]),
        bandwidth=dice.choice([1e8, 4e8, 1e9]),
    )


def random_offers(dice: random.Random, gpus: list[Gpu], max_machines: int) -> list[Offer]:
    shapes = [random_shape(dice, gpu, max_gpus=2 if max_machines > 2 else 3) for gpu in gpus]
    offers = []
    for index in range(max(len(shapes), dice.randint(1, max_machines))):
        market = dice.choice(["spot", "on_demand"])
        offer = Offer(
            shape=shapes[index % len(shapes)],
            count=1,
            price_usd_per_hour=dice.choice([0.5, 1.0, 1.3, 2.0]),
            market=market,
            zone=dice.choice(["a", "b"]),
            interruptions_per_hour=dice.choice([0.0, 0.1, 2.0]) if market == "spot" else 0.0,
        )
        offers.append(offers[-1] if offers and dice.random() < 0.4 else offer)
    return merged(offers)


def random_shape(dice: random.Random, gpu: Gpu, *, max_gpus: int) -> Shape:
    near, far = (
        Link(latency_s=dice.choice([0, 1e-6, 1e-4]), bandwidth=dice.choice([1e7, 1e9]))
        for _ in range(2)
    )
    return Shape(
        name=f"shape-{gpu.name}",
        gpu=gpu,
        num_gpus=dice.choice([1, 1, 2, max_gpus]),
        intra=near,
        inter=far,
    )


def random_goal(dice: random.Random, offers: list[Offer], typical: PipelineEstimate) -> Goal:
    """A goal that some of the fleets meet. typical: of a pipeline that is good without it."""
    objective = dice.choice(["throughput-per-dollar", "throughput", "cost-for-load"])
    price = sum(offer.count * offer.price_usd_per_hour for offer in offers)

    def limit(value: float) -> float | None:
        return value * dice.choice([0.5, 0.8, 1.0, 1.2]) if dice.random() < 0.25 else None

    has_load = objective == "cost-for-load" or dice.random() < 0.15
    return Goal(
        objective=objective,
        load_rps=dice.choice([0.3, 0.8, 1.5]) * typical.throughput_rps if has_load else None,
        slo_ttft_s=limit(typical.ttft_s),
        slo_tpot_s=limit(typical.tpot_s),
        slo_latency_s=limit(typical.latency_s),
        latency_penalty=dice.choice([math.inf, 0.0, 0.7, 3.0]),
        max_price_usd_per_hour=price * dice.choice([0.4, 0.7]) if dice.random() < 0.2 else None,
        on_demand_share=dice.choice([0.3, 0.6, 1.0]) if dice.random() < 0.2 else 0.0,
        max_zone_share=dice.choice([0.5, 0.7]) if dice.random() < 0.15 else 1.0,
        recovery_s=dice.choice([0.0, 0.0, 300.0]),
    )


def merged(offers: list[Offer]) -> list[Offer]:
    """Alike offers as one with a count."""
    counts: dict[Offer, int] = {}
    for offer in offers:
        counts[offer] = counts.get(offer, 0) + 1
    return [replace(offer, count=count) for offer, count in counts.items()]

"""GPUs, links and machine shapes, as the estimator sees them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link in the α-β model: `latency_s` per message (α), bytes per second one way (β)."""

    latency_s: float
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator, by the figures that hold for real work (calibrated where known).

    memory_bytes: what the driver reports as total.
    flops: dense FLOP per second in the model's arithmetic (BF16 unless said otherwise).
    bandwidth: bytes per second from device memory.
    """

    name: str
    memory_bytes: float
    flops: float
    bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A machine as it is rented: GPUs of one kind and their links.

    intra: between its GPUs. inter: to another machine.
    price_usd_per_hour: on demand; None where only the caller can know it.
    """

    name: str
    gpu: Gpu
    num_gpus: int
    intra: Link
    inter: Link
    price_usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Up to `count` machines of one shape at one price.

    price_usd_per_hour: 0 where nobody knows it, for goals that count no dollars.
    market: `spot` or `on_demand`. interruptions_per_hour: expected, of one spot machine.
    """

    shape: Shape
    count: int
    price_usd_per_hour: float
    market: str = "on_demand"
    zone: str = ""
    interruptions_per_hour: float = 0.0

    @property
    def kind(self) -> tuple[str, str, str]:
        """Machines of the same name, market and zone may stand for each other, at any price."""
        return self.shape.name, self.market, self.zone

    @property
    def label(self) -> str:
        return machine_label(*self.kind)


def machine_label(shape: str, market: str, zone: str) -> str:
    """`g6.12xlarge (spot in use1-az4)`."""
    return f"{shape} ({market} in {zone})" if zone else f"{shape} ({market})"

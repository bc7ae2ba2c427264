"""Models and clusters of the benchmark of the placement's speed: machines of the shipped catalogue,
on demand, with its calibrated figures."""

from __future__ import annotations

from typing import Final

from benchmarks import paper_setup
from placement.hardware import Offer
from placement.model import ModelSpec

MODELS: Final[dict[str, ModelSpec]] = {
    name.partition("/")[2]: paper_setup.model(size) for size, name in paper_setup.MODELS.items()
}

# 76 GPUs of seven types on fifteen instances, one of each: the figures that the paper gives of its
# second cluster, whose list it does not give.
SHAPES_76: Final = (
    *("g4dn.xlarge", "g4dn.12xlarge", "g4dn.metal"),
    *("g5.xlarge", "g5.12xlarge", "g5.48xlarge"),
    *("g6.xlarge", "g6.12xlarge", "g6.48xlarge"),
    *("g6e.xlarge", "g6e.12xlarge", "g6e.48xlarge"),
    *("p3.16xlarge", "p4d.24xlarge", "p5.48xlarge"),
)
# Twenty types for the growth curve.
SHAPES_20: Final = (
    *SHAPES_76,
    *("p3.2xlarge", "p3.8xlarge", "p4de.24xlarge", "p5.4xlarge", "p5en.48xlarge"),
)


def cluster_24() -> list[Offer]:
    """The paper's cluster: 24 GPUs on nine instances of three types."""
    return paper_setup.offers()


def cluster_76() -> list[Offer]:
    return [paper_setup.catalogue_offer(name, 1) for name in SHAPES_76]


def cluster_of(num_instances: int) -> list[Offer]:
    """So many instances, as evenly as may be over twenty types."""
    share, rest = divmod(num_instances, len(SHAPES_20))
    counts = [share + (index < rest) for index in range(len(SHAPES_20))]
    return [
        paper_setup.catalogue_offer(name, count)
        for name, count in zip(SHAPES_20, counts, strict=True)
        if count
    ]

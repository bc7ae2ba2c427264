"""The best cut of a model over machines, with a proof."""

from placement.optimizer.solver import solve

__all__ = ["solve"]

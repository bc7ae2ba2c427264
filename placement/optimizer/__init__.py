"""The best cut of a model over machines, with a proof.

A pipeline is found by branch and bound over batches and stage times (`search`, `boxes`), where the
machines of a box are a knapsack cover (`knapsack`) by what they hold (`rates`, `capacity`). A fleet
is a packing of pipelines (`fleet`): of all sets of machines where they are few (`solver`), else of
columns generated (`generation`, `large`). `replanning` weighs moving a running fleet. `nearest`
says what can be met of a goal that no fleet meets, latencies by `fastest`. `paper` is ShuntServe's
own search, as a baseline.
"""

from placement.optimizer.paper import solve_paper
from placement.optimizer.replanning import Replan, replan
from placement.optimizer.solver import solve

__all__ = ["Replan", "replan", "solve", "solve_paper"]

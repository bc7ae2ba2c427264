"""What the scheduler asks about time. `workflows.profiler` answers from what it has measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workflows.scheduling.messages import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """T(n outputs, m inputs) = overhead_s + n · per_output_s + m · per_input_s, of one dispatch.

    Equation 13 with the throughput of a whole batch: its overhead is paid once for all its items.
    """

    overhead_s: float
    per_output_s: float = 0.0
    per_input_s: float = 0.0

    def of(self, size: Size) -> float:
        """Seconds, alone in its slot."""
        return self.overhead_s + self.marginal_s(size)

    def marginal_s(self, size: Size) -> float:
        """Seconds that it adds to a batch."""
        return self.per_output_s * size.outputs + self.per_input_s * size.inputs


class CostModel(Protocol):
    """Predicts, and learns from what is observed. Both are deterministic and take no time."""

    def cost(self, profile: str) -> Cost:
        """Of a profile; a guess for one that was never seen."""
        ...

    def observe(self, profile: str, size: Size, service_s: float) -> None:
        """A dispatch of this size took so long."""
        ...


class CostsOfModels:
    """The costs of profiles without what stands behind `#`.

    That keeps work out of other work's batches, and is no other kind of work.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def cost(self, profile: str) -> Cost:
        return self._costs.cost(profile.partition("#")[0])

    def observe(self, profile: str, size: Size, service_s: float) -> None:
        self._costs.observe(profile.partition("#")[0], size, service_s)


class FixedCosts:
    """Costs that are given, and stay. Unknown profiles cost `default`."""

    def __init__(self, costs: dict[str, Cost], default: Cost | None = None) -> None:
        self._costs = costs
        self._default = default or Cost(overhead_s=1.0)

    def cost(self, profile: str) -> Cost:
        return self._costs.get(profile, self._default)

    def observe(self, profile: str, size: Size, service_s: float) -> None:
        """Nothing is learnt."""

"""What `plan` asks of the optimizer, as its flags say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from placement.errors import InvalidInput, OutOfTime, Unmet
from placement.estimator import Estimator
from placement.hardware import Offer
from placement.plan import Goal, Plan
from server import plan_inputs
from server.plan_picture import amount
from server.running_plan import Running

if TYPE_CHECKING:
    from placement.optimizer import Replan

_DEFAULT_BEAM = 3

Say = Callable[[str], None]


def silent(line: str) -> None:
    del line


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """beam: of the paper's search; None for the exact one. running: what runs, and `times`, in
    seconds, by the names that `replan` has for them. say: told of progress.
    """

    estimator: Estimator
    goal: Goal
    say: Say
    beam: int | None = None
    running: Running | None = None
    times: Mapping[str, float] = field(default_factory=dict)

    def plan(self, offers: Sequence[Offer], /, *, time_limit_s: float) -> Plan:
        """The best fleet of these offers. Raises Infeasible."""
        return self.find(offers, time_limit_s)[0]

    def find(self, offers: Sequence[Offer], time_limit_s: float) -> tuple[Plan, Replan | None]:
        """With the best fleet how to get there, where one runs already."""
        from placement import optimizer

        if self.beam is not None:
            return self._by_paper(offers, self.beam, time_limit_s), None
        asked = (offers, self.estimator, self.goal)
        options: dict[str, Any] = {"time_limit_s": time_limit_s, "on_progress": self._better}
        if self.running is None:
            return optimizer.solve(*asked, **options), None
        options.update(self.times)
        found = optimizer.replan(self.running.pipelines, *asked, **options)
        return found.plan, found

    def unmet(self, error: Unmet, offers: Sequence[Offer], time_limit_s: float) -> Unmet:
        """The error of a goal that no fleet meets, with what can be met."""
        from placement.optimizer.nearest import unmet

        def solve_for(goal: Goal, left_s: float) -> Plan:
            return replace(self, goal=goal, say=silent).plan(offers, time_limit_s=left_s)

        self.say("no fleet was found that meets the goal; looking for what can be met")
        return unmet(
            self.goal,
            offers,
            self.estimator,
            solve_for,
            time_limit_s=time_limit_s,
            is_proven=error.is_proven,
        )

    def _by_paper(self, offers: Sequence[Offer], beam: int, time_limit_s: float) -> Plan:
        from placement import optimizer

        self.say("searching as the paper does")
        try:
            return optimizer.solve_paper(
                offers, self.estimator, self.goal, beam=beam, time_limit_s=time_limit_s
            )
        except TimeoutError:
            raise OutOfTime(
                f"the paper's search did not end within {time_limit_s:g} s; lower --beam, or "
                "give it a longer --time-limit"
            ) from None

    def _better(self, value: float, bound: float) -> None:
        best, limit = amount(value, self.goal.objective), amount(bound, self.goal.objective)
        self.say(f"best so far {best}; no better than {limit}")


def read_search(
    flags: Mapping[str, Any], estimator: Estimator, goal: Goal, running: Running | None, say: Say
) -> Search:
    """Raises InvalidInput for flags that are for another solver."""
    beam = plan_inputs.count(flags, "beam")
    if plan_inputs.choice(flags, "solver", plan_inputs.SOLVERS) == "paper":
        plan_inputs.check_papers_goal(flags)
        if running is not None:
            raise InvalidInput(
                "--running", "is not known to the paper's search; use --solver exact"
            )
        beam = beam or _DEFAULT_BEAM
    elif beam is not None:
        raise InvalidInput("--beam", "is for --solver paper")
    times = {
        f"{name}_s": value
        for name in ("start_up", "horizon")
        if (value := plan_inputs.duration_s(flags, name)) is not None
    }
    return Search(estimator=estimator, goal=goal, say=say, beam=beam, running=running, times=times)

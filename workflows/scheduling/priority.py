"""The order of ready tickets, by policy: a key, lower goes first.

**hera.** π = α/(Ŝ' + ε) + γ·φ' + δ·y (eq. 7 and 20) with Ŝ' and φ' free of units: Ŝ in medians of
recent runs, φ over its running p95. As printed, a node of 256 tokens would outweigh everything, and
a heavy one every short run of more than two seconds.

Ageing: every ticket gains at the same rate, so that their order does not change by waiting, and the
key is static: `arrived − A·(π − priority_step·declared)`, A being what a unit of π is worth in
seconds. It is cut to arrived ± A·π_max. A run with a deadline goes to the front, to the lower end
of that range, when it must go on: `slack·Ŝ` before.

**Bound on waiting.** With H = A·π_max, every key lies within H of the arrival of its run. So a
ticket v is never passed over for a ticket u whose run arrived more than 2·H later: then
key(u) ≥ arrived(u) − H > arrived(v) + H ≥ key(v), whatever arrives and however often keys are
computed anew. From arrived(v) + 2·H on, only tickets of runs that are there already can go first:
a finite amount of work, to which nothing is added. So v waits at most for that, which is 2·H of
arrivals more than under first come, first served by run. Since A follows the median service, H is
that of the largest A meanwhile. Two mechanisms stand beside the keys, and the bound holds for what
they leave: the reservation gives R of N slots to heavy work while there is any, so others have it
on N − R slots (`workflows.scheduling.reservation`; for heavy work itself it is never worse); and a
tenant has it within its own share (`workflows.scheduling.tenants`).

**fcfs**: by the time a ticket became ready. **srtf**: by Ŝ alone; long runs starve. **plas**: by
least attained service of the run (Autellix), blind to predictions. **topology**: runs in the order
of arrival, within a run those far from the end first (Ayo's batches).
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor

from workflows.scheduling.live_ticket import LiveTicket
from workflows.scheduling.parameters import PolicyName, SchedulerParameters
from workflows.scheduling.scale import Scale

Key = Callable[[LiveTicket, SchedulerParameters, Scale], float]


def score(live: LiveTicket, parameters: SchedulerParameters, scale: Scale) -> float:
    """π, from 0 to `parameters.max_score`.

    A shared ticket has the least Ŝ of its runs, and the sum of φ over its logical nodes (eq. 3).
    """
    remaining = least_remaining_s(live, parameters, scale) / scale.service_s
    contribution = contribution_of(live, parameters, scale) / scale.contribution
    return (
        parameters.srtf_weight / (remaining + parameters.min_remaining)
        + parameters.contribution_weight * min(contribution, parameters.max_contribution)
        + parameters.heavy_weight * live.is_heavy
    )


def least_remaining_s(live: LiveTicket, parameters: SchedulerParameters, scale: Scale) -> float:
    return min(
        member.run.remaining_service_s(parameters, scale.service_s)
        for member in live.members.values()
    )


def contribution_of(live: LiveTicket, parameters: SchedulerParameters, scale: Scale) -> float:
    """φ, with work in medians."""
    weight = parameters.successor_work
    return sum(
        member.run.contribution(member.node_id, scale.service_s, weight)
        for member in live.members.values()
    )


def horizon_s(parameters: SchedulerParameters, scale: Scale) -> float:
    """H = A·π_max: the most by which a key differs from its run's arrival."""
    return parameters.ageing * scale.service_s * parameters.max_score


def hera_key(live: LiveTicket, parameters: SchedulerParameters, scale: Scale) -> float:
    arrived_s = min(member.run.arrived_s for member in live.members.values())
    rank = score(live, parameters, scale) - parameters.priority_step * live.ticket.priority
    limit_s = horizon_s(parameters, scale)
    if live.is_urgent:
        return arrived_s - limit_s
    key = arrived_s - parameters.ageing * scale.service_s * rank
    return min(max(key, arrived_s - limit_s), arrived_s + limit_s)


def fcfs_key(live: LiveTicket, parameters: SchedulerParameters, scale: Scale) -> float:
    return live.ready_s


def srtf_key(live: LiveTicket, parameters: SchedulerParameters, scale: Scale) -> float:
    return least_remaining_s(live, parameters, scale)


def plas_key(live: LiveTicket, parameters: SchedulerParameters, scale: Scale) -> float:
    return min(member.run.attained_s for member in live.members.values())


def topology_key(live: LiveTicket, parameters: SchedulerParameters, scale: Scale) -> float:
    """The depth only breaks ties between nodes of one run: it is worth a billionth of a median."""
    depth = max(member.run.nodes[member.node_id].depth for member in live.members.values())
    arrived_s = min(member.run.arrived_s for member in live.members.values())
    return arrived_s - 1e-9 * scale.service_s * depth


KEYS: dict[PolicyName, Key] = {
    "hera": hera_key,
    "fcfs": fcfs_key,
    "srtf": srtf_key,
    "plas": plas_key,
    "topology": topology_key,
}


def engine_priority(key: float, parameters: SchedulerParameters, scale: Scale) -> int:
    """The key as engines take it: an integer, in coarse steps, lower first."""
    return floor(key / (parameters.engine_step * scale.service_s))

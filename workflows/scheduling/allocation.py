"""How many items a batch takes (b), over how many slots (a), in how many parts (k): one choice.

A slot is the unit of share, as nothing finer can be set behind an engine's API: a configuration
takes k slots with one part each, so a = k. Of the paper's ways to share, *equal* is k = 1;
*weighted* is a larger k, which pays only where little else waits, since others are put off by its
slot time; *skewed* is the least k of a heavy node that has waited long (η_long, κ_long).

The paper splits only heavy nodes, but its table 2 shows all runs with more nodes at low load. We
split whatever can be split, by load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workflows.scheduling.parameters import SchedulerParameters


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known when a slot is free. Times in seconds.

    num_items: that could go now, about a full batch for each free slot at most.
    ends: the number of items up to the end of each ticket.
    overhead_s, item_s: of a part: T(n) = overhead + n·item (eq. 13, with a fitted batch rate).
    num_waiting: tickets behind these.
    max_split: parts into which they may be cut. min_split: parts that a long-waiting heavy ticket
    gets at least if slots are free; 1 for others.
    balance: λ.
    """

    num_items: int
    ends: Sequence[int]
    num_waiting: int
    num_free: int
    num_slots: int
    max_batch: int
    max_split: int
    min_split: int
    overhead_s: float
    item_s: float
    balance: float

    @property
    def num_tickets(self) -> int:
        return len(self.ends)


@dataclass(frozen=True, slots=True)
class Choice:
    """num_items in all, in `split` parts of one slot each."""

    num_items: int
    split: int


def choose(situation: Situation, parameters: SchedulerParameters) -> Choice:
    """The configuration with the least ΔJ; a split only if it wins by `split_gain`.

    So, as far as the overhead is known, a split node is never slower than a whole one by more than
    its error in prediction, and the search costs O(log B · S).
    """
    batches = _batch_sizes(situation)
    best = min(
        (Choice(b, 1) for b in batches), key=lambda one: (cost_s(one, situation), -one.num_items)
    )
    limit = _split_limit(situation)
    if limit < 2:
        return best
    owed = min(situation.min_split, limit)
    cuts = _splits(situation, batches, range(max(2, owed), limit + 1))
    cut = min(cuts, key=lambda one: (cost_s(one, situation), one.split), default=best)
    if owed > 1 and duration_s(cut, situation) < duration_s(best, situation):
        return cut
    bar_s = (1 - parameters.split_gain) * cost_s(best, situation)
    return cut if cost_s(cut, situation) < bar_s else best


def _splits(situation: Situation, batches: Sequence[int], counts: range) -> list[Choice]:
    """Parts of the sizes that a batch may have, and of all the items, equally."""
    num_items = situation.num_items
    return [
        Choice(min(num_items, size * k), k)
        for k in counts
        for size in {*batches, -(-num_items // k)}
        if size <= situation.max_batch and k <= size * k < num_items + k
    ]


def duration_s(choice: Choice, situation: Situation) -> float:
    """T_v = max over the parts (eq. 14); parts are equal (eq. 15)."""
    return situation.overhead_s + -(-choice.num_items // choice.split) * situation.item_s


def cost_s(choice: Choice, situation: Situation) -> float:
    """The local surrogate of ΔJ = λ·mean + (1 − λ)·max, O(1).

    The items end after T; those of the same candidates that stay behind end with their own batches,
    in the slots that are still free, else after it. Those that wait behind all follow at the pace
    of these, in slot time over slots: the last after all of it, the mean after half.
    """
    own_s = duration_s(choice, situation)
    rest_end_s, rest_slot_s = _rest(choice, own_s, situation)
    num_tickets = situation.num_tickets
    num_own = max(1.0, choice.num_items / situation.num_items * num_tickets)
    # Under load, as many come behind these as these are.
    num_behind = situation.num_waiting + situation.balance * num_tickets
    delay_s = (choice.split * own_s + rest_slot_s) / situation.num_slots
    drain_s = delay_s * (1 + num_behind / num_tickets)
    total_s = num_own * own_s + (num_tickets - num_own) * rest_end_s + num_behind * drain_s / 2
    mean_s = total_s / (num_tickets + num_behind)
    last_s = max(own_s, rest_end_s, drain_s)
    return situation.balance * mean_s + (1 - situation.balance) * last_s


def _rest(choice: Choice, own_s: float, situation: Situation) -> tuple[float, float]:
    """When the candidates that stay behind end, and the slot time that they take."""
    num_rest = situation.num_items - choice.num_items
    if not num_rest:
        return 0.0, 0.0
    num_batches = -(-num_rest // situation.max_batch)
    slot_s = num_batches * situation.overhead_s + num_rest * situation.item_s
    num_free = situation.num_free - choice.split
    if not num_free:
        return own_s + slot_s, slot_s
    return slot_s / min(num_free, num_batches), slot_s


def _batch_sizes(situation: Situation) -> list[int]:
    """The first 1, 2, 4, … tickets, and a full batch. Not less than a ticket: that is a split."""
    most = min(situation.num_items, situation.max_batch)
    sizes = {most}
    count = 1
    while count < situation.num_tickets and situation.ends[count - 1] < most:
        sizes.add(situation.ends[count - 1])
        count *= 2
    return sorted(sizes)


def _split_limit(situation: Situation) -> int:
    """The most parts: by slots, by what the items allow, and fewer as the load rises."""
    limit = min(situation.num_free, situation.max_split, situation.num_items)
    calm = 1 + round((1 - situation.balance) * (limit - 1))
    return min(limit, max(calm, situation.min_split))

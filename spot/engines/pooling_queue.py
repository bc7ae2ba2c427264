"""Which inputs a pooling model takes next: a pure queue over the inputs of all waiting requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_SIMILAR_FACTOR = 2.0
_SIMILAR_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Slot:
    """One input: number `index` of the request `handle`, of `num_tokens` tokens."""

    handle: int
    index: int
    num_tokens: int


@dataclass(slots=True)
class _Request:
    waiting: list[Slot] = field(default_factory=list)


class PoolingQueue:
    """Takes inputs from all requests in turn, so that one of thousands does not stop one of one.

    max_batch: inputs at once. max_batch_tokens: tokens at once, before padding; an input that is
    longer goes alone.
    """

    def __init__(self, *, max_batch: int, max_batch_tokens: int) -> None:
        self._max_batch = max_batch
        self._max_batch_tokens = max_batch_tokens
        self._requests: OrderedDict[int, _Request] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return sum(len(request.waiting) for request in self._requests.values())

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, handle: int, lengths: Sequence[int]) -> None:
        """Queue the inputs of one request; those of similar length will be near each other."""
        slots = [Slot(handle, index, length) for index, length in enumerate(lengths)]
        slots.sort(key=lambda slot: slot.num_tokens)
        if slots:
            self._requests[handle] = _Request(slots)

    def drop(self, handle: int) -> None:
        """Forget what waits of a request. Idempotent."""
        self._requests.pop(handle, None)

    def take(self) -> list[Slot]:
        """The next inputs to work on, at least one unless the queue is empty.

        Requests give their longest input in turn; the next call begins with another one.
        """
        batch: list[Slot] = []
        num_tokens = 0
        while self._requests and len(batch) < self._max_batch:
            handle, request = next(iter(self._requests.items()))
            longest = request.waiting[-1]
            if batch and num_tokens + longest.num_tokens > self._max_batch_tokens:
                break
            batch.append(request.waiting.pop())
            num_tokens += longest.num_tokens
            if request.waiting:
                self._requests.move_to_end(handle)
            else:
                del self._requests[handle]
        return batch


def similar(batch: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Cut a batch into groups of similar length, so that little is spent on padding."""
    group: list[Slot] = []
    for slot in sorted(batch, key=lambda slot: slot.num_tokens):
        if group and slot.num_tokens > group[0].num_tokens * _SIMILAR_FACTOR + _SIMILAR_TOKENS:
            yield group
            group = []
        group.append(slot)
    if group:
        yield group

"""Equal deterministic generations that run at the same time are one.

Two are equal when an engine could not tell them apart: prompt, sampling, constraint, cache salt.
(Servers with several tenants salt every generation with its tenant, so none meets another's.) The
one that is run belongs to all who share it: it goes on while anybody wants it.

Where outputs are kept, one that ended by itself is replayed to equal ones that come later. An
output that was cut, by its limit or by those who left, is not kept.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from spot.engines.base import DeltaSink, Engine
from spot.errors import ShuntyardError
from spot.generation import Generation, TokenDelta
from spot.kept_outputs import KeptOutputs

# Whose output a generation has: that of an equal one that runs, or that has ended.
Sharing = Literal["inflight", "cache"]


@dataclass(slots=True, eq=False)
class _Group:
    """id: that the engine knows. epoch: of the kept outputs, when it began. said: all that came so
    far, for those who come later."""

    generations: SharedGenerations
    key: bytes
    id: str
    priority: int
    epoch: int
    sinks: dict[str, DeltaSink] = field(default_factory=dict)
    said: TokenDelta | None = None

    def on_delta(self, delta: TokenDelta) -> None:
        if self.said is None:
            self.said = _copy(delta)
        else:
            self.said.merge(delta)
        if delta.finish_reason is not None:
            self.generations.finished(self)
        first, *others = self.sinks.values()
        for sink in others:
            sink.on_delta(_copy(delta))
        first.on_delta(delta)

    def on_error(self, error: ShuntyardError) -> None:
        self.generations.forget(self)
        for sink in list(self.sinks.values()):
            sink.on_error(error)


def _loop_time_s() -> float:
    # Engines speak from callbacks as well, where anyio does not know of a task.
    return asyncio.get_running_loop().time()


class SharedGenerations:
    """What of an `Engine` takes generations, with equal ones run once.

    kept: outputs that have ended, for equal ones to come; without it they are not kept. It is
    cleared by whoever changes what the engine may say. clock: in seconds.
    num_shared: generations that were not run, because an equal one was running, or its output kept.
    """

    def __init__(
        self,
        engine: Engine,
        kept: KeptOutputs | None = None,
        *,
        clock: Callable[[], float] = _loop_time_s,
    ) -> None:
        self._engine = engine
        self._kept = kept
        self._clock = clock
        self._groups: dict[bytes, _Group] = {}
        self._members: dict[str, _Group] = {}
        self.num_shared = 0

    def submit(self, generation: Generation, sink: DeltaSink) -> Sharing | None:
        """As `Engine.submit`; which equal one's output this has, if it is not run itself.

        One that is more urgent than the one that runs, or has output already, runs itself.
        """
        if not _is_deterministic(generation) or generation.output_token_ids:
            self._engine.submit(generation, sink)
            return None
        key = _key(generation)
        output = self._find(key)
        if output is not None:
            self.num_shared += 1
            sink.on_delta(output)
            return "cache"
        group = self._groups.get(key)
        if group is None or generation.priority < group.priority:
            self._begin(key, generation, sink)
            return None
        self.num_shared += 1
        group.sinks[generation.id] = sink
        self._members[generation.id] = group
        if group.said is not None:
            sink.on_delta(_copy(group.said))
        return "inflight"

    def _find(self, key: bytes) -> TokenDelta | None:
        return None if self._kept is None else self._kept.find(key, now_s=self._clock())

    def _begin(self, key: bytes, generation: Generation, sink: DeltaSink) -> None:
        epoch = 0 if self._kept is None else self._kept.epoch
        sinks = {generation.id: sink}
        group = _Group(self, key, generation.id, generation.priority, epoch, sinks)
        self._groups[key] = self._members[generation.id] = group
        try:
            self._engine.submit(generation, group)
        except BaseException:
            self.forget(group)
            raise

    def abort(self, generation_id: str) -> None:
        """As `Engine.abort`; an engine's generation ends when the last who shares it has left."""
        group = self._members.pop(generation_id, None)
        if group is None:
            self._engine.abort(generation_id)
            return
        del group.sinks[generation_id]
        if not group.sinks:
            self.forget(group)
            self._engine.abort(group.id)

    def finished(self, group: _Group) -> None:
        """A group's last delta has come."""
        self.forget(group)
        said = group.said
        if self._kept is not None and said is not None and said.finish_reason == "stop":
            self._kept.keep(group.key, said, epoch=group.epoch, now_s=self._clock())

    def forget(self, group: _Group) -> None:
        """Nobody joins a group that has ended, or was left."""
        if self._groups.get(group.key) is group:
            del self._groups[group.key]
        for generation_id in group.sinks:
            self._members.pop(generation_id, None)


def _is_deterministic(generation: Generation) -> bool:
    return generation.sampling.temperature == 0 or generation.sampling.seed is not None


def _key(generation: Generation) -> bytes:
    """Of everything but what does not change the output."""
    same = msgspec.structs.replace(generation, id="", priority=0, via=[])
    return hashlib.blake2b(msgspec.msgpack.encode(same), digest_size=32).digest()


def _copy(delta: TokenDelta) -> TokenDelta:
    """Its lists are the taker's own, who may append to them."""
    logprobs = None if delta.logprobs is None else list(delta.logprobs)
    return msgspec.structs.replace(delta, token_ids=list(delta.token_ids), logprobs=logprobs)

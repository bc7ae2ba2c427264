"""The pooling host: one embedding model or cross-encoder in a process group of its own.

Run as `python -m spot.engines.pooling_host --socket PATH` with `PoolingModel`'s arguments (and
`max_batch`, `max_batch_tokens`) as a JSON object on standard input. It connects to PATH, speaks
`spot.engines.codec`, and ends when the socket closes.

Requests are tokenized as they come and then worked on together: each forward pass takes inputs of
all waiting requests. One thread does both, so the event loop can always answer.
"""

from __future__ import annotations

import os
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import anyio
import anyio.to_thread
import numpy as np
from numpy.typing import NDArray

from spot.engines.base import EngineStats
from spot.engines.codec import (
    Abort,
    Embed,
    Failed,
    Pooled,
    PoolingCard,
    PoolingReady,
    Progress,
    Refused,
    ScorePairs,
    Step,
    ToHost,
    TooLong,
)
from spot.engines.gateway_link import GatewayLink, connect, leave
from spot.engines.pooling_queue import PoolingQueue, Slot, similar

if TYPE_CHECKING:
    from spot.engines.pooling_model import PoolingModel, Sample, Text

_TOKENIZE_CHARS = 200_000
_CPU_BATCH_TOKENS = 1024
_GPU_BATCH_TOKENS = 16_384
_MAX_BATCH = 64


class Model(Protocol):
    """What the host needs of a model; `PoolingModel` is one."""

    card: PoolingCard

    def tokenize(self, texts: list[Text], *, truncate_to: int | None = None) -> list[Sample]: ...

    def sample_of_ids(self, token_ids: list[int], *, truncate_to: int | None = None) -> Sample: ...

    def pool(self, samples: list[Sample]) -> NDArray[np.float32]: ...


class _Overlong(Exception):
    """Input number `index` does not fit the model's context."""

    def __init__(self, index: int, num_tokens: int) -> None:
        super().__init__(index, num_tokens)
        self.index = index
        self.num_tokens = num_tokens


class _Unserved(Exception):
    """The request cannot be served as it stands. param: its field that says so, if one does."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


@dataclass(slots=True)
class _Job:
    """One request: its inputs until they are tokenized, its samples until they are pooled."""

    inputs: Sequence[Any]
    truncate_to: int | None
    samples: list[Any] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    rows: NDArray[np.float32] | None = None
    num_done: int = 0


class PoolingHost:
    """Carries messages between the gateway and one model."""

    def __init__(
        self, model: Model, link: GatewayLink, *, max_batch: int, max_batch_tokens: int
    ) -> None:
        self._model = model
        self._link = link
        self._outbox = link.outbox
        self._jobs: dict[int, _Job] = {}
        self._untokenized: deque[int] = deque()
        self._queue = PoolingQueue(max_batch=max_batch, max_batch_tokens=max_batch_tokens)
        self._work_came = anyio.Event()
        self._worker = anyio.CapacityLimiter(1)

    async def run(self) -> bool:
        """Serve until the gateway says Stop (True) or goes away (False)."""
        self._outbox.put(PoolingReady(self._model.card, [os.getpid()]))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._work)
            is_clean = await self._link.serve(self._handle)
            tasks.cancel_scope.cancel()
        return is_clean

    async def _handle(self, message: ToHost) -> None:
        match message:
            case Embed():
                self._accept(message.handle, _Job(message.inputs, message.truncate_to))
            case ScorePairs():
                self._accept(message.handle, _Job(message.pairs, message.truncate_to))
            case Abort(handles):
                for handle in handles:
                    self._forget(handle)

    def _accept(self, handle: int, job: _Job) -> None:
        self._jobs[handle] = job
        self._untokenized.append(handle)
        self._work_came.set()

    def _forget(self, handle: int) -> bool:
        self._queue.drop(handle)
        return self._jobs.pop(handle, None) is not None

    async def _work(self) -> None:
        """Tokenize what came, then pool a batch, and again."""
        while True:
            if not self._untokenized and not self._queue:
                self._outbox.put(Step([], EngineStats()))
                self._work_came = anyio.Event()
                await self._work_came.wait()
            for _ in range(len(self._untokenized)):
                await self._tokenize_some(self._untokenized.popleft())
            for group in similar(self._queue.take()):
                await self._pool([slot for slot in group if slot.handle in self._jobs])
            self._outbox.put(Step([], EngineStats(len(self._jobs), self._queue.num_waiting)))

    async def _tokenize_some(self, handle: int) -> None:
        """Tokenize the next inputs of a request; the rest of a long one waits for its next turn."""
        job = self._jobs.get(handle)
        if job is None:
            return
        try:
            samples = await self._in_thread(self._tokenize, job)
        except _Overlong as fault:
            if self._forget(handle):
                self._outbox.put(TooLong(handle, fault.index, fault.num_tokens))
            return
        except _Unserved as fault:
            if self._forget(handle):
                self._outbox.put(Refused(handle, fault.message, fault.param))
            return
        except Exception as error:  # noqa: BLE001 - the request boundary
            self._fail({handle}, error)
            return
        if handle not in self._jobs:
            return
        job.samples += samples
        job.num_tokens += [sample.num_tokens for sample in samples]
        if len(job.samples) < len(job.inputs):
            self._untokenized.append(handle)
        else:
            job.inputs = ()
            job.rows = np.empty((len(job.samples), self._model.card.dimension), "<f4")
            self._queue.add(handle, job.num_tokens)

    def _tokenize(self, job: _Job) -> list[Sample]:
        start = end = len(job.samples)
        num_chars = 0
        while end < len(job.inputs) and num_chars < _TOKENIZE_CHARS:
            num_chars += _size(job.inputs[end])
            end += 1
        part = job.inputs[start:end]
        if isinstance(part[0], list):
            samples = [self._model.sample_of_ids(ids, truncate_to=job.truncate_to) for ids in part]
        else:
            samples = self._model.tokenize(list(part), truncate_to=job.truncate_to)
        for index, sample in enumerate(samples, start):
            self._check(index, sample, job.truncate_to)
        return samples

    def _check(self, index: int, sample: Sample, truncate_to: int | None) -> None:
        if truncate_to is not None and sample.num_tokens > truncate_to:
            raise _Unserved(
                f"truncate_prompt_tokens of {truncate_to} leaves no room for the special tokens.",
                "truncate_prompt_tokens",
            )
        if sample.num_tokens > self._model.card.max_model_len:
            raise _Overlong(index, sample.num_tokens)
        if sample.num_tokens == 0:
            raise _Unserved(f"Input {index} has no tokens.")

    async def _pool(self, slots: list[Slot]) -> None:
        if not slots:
            return
        samples = [self._jobs[slot.handle].samples[slot.index] for slot in slots]
        try:
            rows = await self._in_thread(self._model.pool, samples)
            if not np.isfinite(rows).all():
                raise ArithmeticError("the model gave values that are not finite")
        except Exception as error:
            if "CUDA error" in str(error):
                raise  # the device is lost to this process; the next one starts anew
            self._fail({slot.handle for slot in slots}, error)
            return
        for slot, row in zip(slots, rows, strict=True):
            self._keep(slot, row)

    def _keep(self, slot: Slot, row: NDArray[np.float32]) -> None:
        """Note one result; the last one of a request sends its answer."""
        job = self._jobs.get(slot.handle)
        if job is None:
            return
        assert job.rows is not None
        job.rows[slot.index] = row
        job.samples[slot.index] = None
        job.num_done += 1
        if job.num_done == len(job.rows):
            del self._jobs[slot.handle]
            self._outbox.put(Pooled(slot.handle, job.rows.tobytes(), job.num_tokens))

    def _fail(self, handles: set[int], error: Exception) -> None:
        traceback.print_exception(error)
        for handle in handles:
            if self._forget(handle):
                self._outbox.put(Failed(handle, "The model failed on this request."))

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await anyio.to_thread.run_sync(function, *args, limiter=self._worker)


def _size(value: Any) -> int:
    """Characters or tokens in one input."""
    return len(value[0]) + len(value[1]) if isinstance(value, tuple) else len(value)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one host to its end; the exit code is 0 after an orderly stop."""
    link, options = connect("spot.engines.pooling_host", argv)
    limits = {name: options.pop(name, None) for name in ("max_batch", "max_batch_tokens")}
    model = link.told(lambda: _load(link, options))
    if model is None:
        leave(is_clean=False)
    is_clean = anyio.run(_serve, link, model, limits, backend_options={"use_uvloop": True})
    leave(is_clean=is_clean)


async def _serve(link: GatewayLink, model: Model, limits: dict[str, int | None]) -> bool:
    is_on_cpu = model.card.device == "cpu"
    async with link.opened():
        host = PoolingHost(
            model,
            link,
            max_batch=limits["max_batch"] or _MAX_BATCH,
            max_batch_tokens=limits["max_batch_tokens"]
            or (_CPU_BATCH_TOKENS if is_on_cpu else _GPU_BATCH_TOKENS),
        )
        return await host.run()


def _load(link: GatewayLink, options: dict[str, Any]) -> PoolingModel:
    """Load the model, telling the gateway what goes on."""
    link.say(Progress("importing sentence-transformers"))
    from spot.engines.pooling_model import PoolingModel

    link.say(Progress("loading the model"))
    return PoolingModel(**options)


if __name__ == "__main__":
    main()

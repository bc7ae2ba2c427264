"""The engine host: one vLLM engine in a process group of its own, behind a local socket.

Run as `python -m spot.engines.host --socket PATH` with the engine arguments as a JSON object on
standard input. It connects to PATH, speaks `spot.engines.codec`, and ends when the socket closes:
a host without a gateway is no use, and it must not outlive one.

While the engine starts, the event loop is blocked (vLLM starts that way); `Progress` is written to
the socket directly then, and a watching thread takes care that the host ends with its gateway.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import anyio
import anyio.to_thread

from spot.engines.codec import (
    Abort,
    Dead,
    Failed,
    Progress,
    Ready,
    Refused,
    Step,
    Submit,
    ToHost,
)
from spot.engines.gateway_link import GatewayLink, connect, leave

if TYPE_CHECKING:
    from spot.engines.vllm_compat.engine_core import EngineCore

_SHUTDOWN_TIMEOUT_S = 1.0
_PREPARING_FAILED = "The server had an error while it prepared this request for the engine."


class EngineHost:
    """Carries messages between the gateway and one running engine."""

    def __init__(self, core: EngineCore, link: GatewayLink) -> None:
        from spot.engines.vllm_compat.outputs import StepMapper

        self._core = core
        self._link = link
        self._outbox = link.outbox
        self._mapper = StepMapper()
        self._slow_lane = anyio.CapacityLimiter(1)

    async def run(self) -> bool:
        """Serve until the gateway says Stop (True) or goes away (False). Raises EngineDeadError."""
        await self._core.connect()
        self._outbox.put(Ready(self._core.card, [os.getpid(), *self._core.pids]))
        async with anyio.create_task_group() as self._tasks:
            self._tasks.start_soon(self._forward_steps)
            is_clean = await self._link.serve(self._handle)
            self._tasks.cancel_scope.cancel()
        return is_clean

    async def _handle(self, message: ToHost) -> None:
        match message:
            case Submit():
                await self._submit(message)
            case Abort(handles):
                await self._abort(handles)

    async def _submit(self, submit: Submit) -> None:
        sampling = submit.generation.sampling
        resumed = bool(submit.generation.output_token_ids)
        self._mapper.begin(submit.handle, sampling, resumed=resumed)
        if sampling.structured is not None or sampling.bad_words:
            # Compiling a grammar takes long, and the tokenizer must not be used by two at once.
            self._tasks.start_soon(self._submit_slowly, submit)
        else:
            await self._prepare_and_add(submit, self._prepare)

    async def _submit_slowly(self, submit: Submit) -> None:
        async def prepare(submit: Submit) -> Any:
            return await anyio.to_thread.run_sync(
                self._core.prepare,
                str(submit.handle),
                submit.generation,
                limiter=self._slow_lane,
            )

        await self._prepare_and_add(submit, prepare)

    async def _prepare(self, submit: Submit) -> Any:
        return self._core.prepare(str(submit.handle), submit.generation)

    async def _prepare_and_add(self, submit: Submit, prepare: Callable[[Submit], Any]) -> None:
        """Validate and add a generation, unless it was aborted meanwhile.

        An exception that nobody foresaw is a bug that this request met, and would meet elsewhere.
        """
        from spot.engines.vllm_compat.engine_core import EngineDeadError
        from spot.engines.vllm_compat.sampling import REFUSALS, explain

        handle = submit.handle
        try:
            request = await prepare(submit)
            if self._mapper.is_live(handle):
                await self._core.add(request)
        except EngineDeadError:
            raise
        except REFUSALS as error:
            if self._mapper.forget(handle):
                self._outbox.put(Refused(handle, *explain(error)))
        except Exception:  # noqa: BLE001 - the request boundary
            traceback.print_exc()
            if self._mapper.forget(handle):
                self._outbox.put(Failed(handle, _PREPARING_FAILED, everywhere=True))

    async def _abort(self, handles: list[int]) -> None:
        known = [handle for handle in handles if self._mapper.forget(handle)]
        if known:
            await self._core.abort([str(handle) for handle in known])
            if not self._mapper.num_live:
                self._outbox.put(Step([], self._mapper.idle_stats()))

    async def _forward_steps(self) -> None:
        while True:
            mapped = self._mapper.map(await self._core.next_step())
            if mapped.step.deltas or mapped.step.stats is not None:
                self._outbox.put(mapped.step)
            for ended in mapped.ended:
                self._outbox.put(ended)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one host to its end; the exit code is 0 after an orderly stop.

    Any other end takes the whole process group along.
    """
    link, engine_args = connect("spot.engines.host", argv)
    is_clean = anyio.run(_serve, link, engine_args, backend_options={"use_uvloop": True})
    leave(is_clean=is_clean)


async def _serve(link: GatewayLink, engine_args: dict[str, Any]) -> bool:
    """Start the engine and serve. Returns whether the end was in order."""
    core = link.told(lambda: _start_engine(link, engine_args))
    if core is None:
        return False
    from spot.engines.vllm_compat.engine_core import EngineDeadError

    async with link.opened():
        is_clean = False
        try:
            is_clean = await EngineHost(core, link).run()
        except* EngineDeadError:
            await link.say_last(Dead(f"the engine core {core.describe_end()}"))
        finally:
            core.shutdown(_SHUTDOWN_TIMEOUT_S if is_clean else 0)
    return is_clean


def _start_engine(link: GatewayLink, engine_args: dict[str, Any]) -> EngineCore:
    """Build and start the engine, telling the gateway what goes on."""
    link.say(Progress("importing vLLM"))
    from spot.engines.vllm_compat.engine_args import build_config
    from spot.engines.vllm_compat.engine_core import EngineCore
    from spot.engines.vllm_compat.self_check import check

    check()
    link.say(Progress("reading the model's configuration"))
    config = build_config(engine_args)
    link.say(Progress("starting the engine core"))
    return EngineCore(config)


if __name__ == "__main__":
    main()

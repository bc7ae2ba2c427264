"""A worker of vLLM's CPU build that writes down how long each pass took.

Named by `worker_cls`; appends JSON lines to the file that SHUNTYARD_PASS_TIMES names, one per pass
and stage. On a machine that others use, the time that the thread waited for a core is noted beside
the whole (Linux counts it): with one thread, what remains is what the pass takes on a core of its
own.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from placement.calibration.clock import waiting_s


class TimedCPUWorker(CPUWorker):  # type: ignore[misc]
    """CPUWorker with a note per pass, and with the buffer that PP on a CPU lacks in vLLM 0.32."""

    _received: tuple[float, float] | None = None

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        from vllm.distributed.parallel_state import get_pp_group

        runner, group = self.model_runner, get_pp_group()
        if group.is_first_rank:
            return
        self._receive = group.irecv_tensor_dict
        group.irecv_tensor_dict = self._receive_now
        if runner.intermediate_tensors is None:
            # vLLM makes it while it warms up, which it skips on a CPU without compilation.
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=self.model_config.dtype,
                device=self.device,
            )

    def execute_model(self, scheduler_output: Any) -> Any:
        begun = (time.perf_counter(), waiting_s())
        self._received = None
        result = super().execute_model(scheduler_output)
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduled:
            # A later stage begins when it has what the one before it sends.
            self._note("execute", self._received or begun, list(scheduled.values()))
        return result

    def _receive_now(self, *args: Any, **options: Any) -> Any:
        """Receives at once, where vLLM would as late as it can, and notes when."""
        tensors, handles, afterwards = self._receive(*args, **options)
        for handle in handles:
            handle.wait()
        for finish in afterwards:
            finish()
        self._received = (time.perf_counter(), waiting_s())
        return tensors, [], []

    def sample_tokens(self, grammar_output: Any) -> Any:
        begun = (time.perf_counter(), waiting_s())
        result = super().sample_tokens(grammar_output)
        self._note("sample", begun, [])
        return result

    def _note(self, what: str, begun: tuple[float, float], tokens: list[int]) -> None:
        ended, waited = time.perf_counter(), waiting_s()
        note = {
            "what": what,
            "rank": self.rank,
            "tokens": tokens,
            "begun_s": begun[0],
            "wall_s": ended - begun[0],
            "waited_s": waited - begun[1],
        }
        with open(os.environ["SHUNTYARD_PASS_TIMES"], "a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")

"""Which sequences a continuously batching engine computes in its next step, and how many tokens.

A pure core: no clock, no tokens' meaning. One step is `plan`, then, when its time has passed,
`complete`, which says which sequences now have a next token; the caller answers each with `append`
or `finish`. Several steps may be under way (pipeline stages); they complete in order.

Source: `Scheduler.schedule` in vLLM 0.32, `v1/core/sched/scheduler.py`. There is no prefill phase
and no decode phase: each sequence has tokens and computed tokens, and a step lets the second catch
up with the first, within a budget of tokens. Running sequences come first, in the order of their
admission, so what decodes is served before a long prompt's next chunk and before new prompts. The
queue is ordered by priority, then arrival (`policy="priority"`; with equal priorities it is first
come, first served). A sequence is admitted when all of its tokens fit
(`scheduler_reserve_full_isl`). When a running one finds no block, the least urgent and youngest is
preempted: its blocks are freed, and it is computed again from the start. In such a step nobody is
admitted.

Blocks are known to the prefix cache as soon as their tokens are planned: steps complete in order,
and within a step KV is written before it is read.

Differences: a plan that only preempts is no step, the next one is made at once. No speculation, no
encoder inputs, no sliding windows, no watermark, no threshold for long prompts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import Enum

from placement.simulator.kv_blocks import BlockTable, KvBlocks
from placement.simulator.step_time import StepWork


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class BatchedSequence:
    """One sequence in the batcher, which alone changes it.

    token_ids: prompt and output so far.
    num_computed: tokens whose KV is there, or will be when the steps under way are complete.
    num_under_way: steps under way that it takes part in; at most one of them brings it a token.
    num_cached: tokens found in the prefix cache at the first admission; None until then.
    admitted_s: when it was first admitted.
    """

    id: str
    token_ids: list[int]
    priority: int
    arrival: int
    cache_root: int = 0
    phase: Phase = Phase.WAITING
    num_computed: int = 0
    num_under_way: int = 0
    num_cached: int | None = None
    admitted_s: float | None = None
    table: BlockTable = field(default_factory=BlockTable)
    block_hashes: list[int] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        """Order in the queue; the last of the running ones is preempted first."""
        return (self.priority, self.arrival)

    def hash_blocks(self, num_tokens: int, block_size: int) -> list[int]:
        """The hashes of the full blocks of its first tokens."""
        hashes = self.block_hashes
        num_full = num_tokens // block_size
        while len(hashes) < num_full:
            start = len(hashes) * block_size
            parent = hashes[-1] if hashes else self.cache_root
            hashes.append(hash((parent, *self.token_ids[start : start + block_size])))
        return hashes[:num_full]


@dataclass(slots=True, eq=False)
class Step:
    """What is computed at once.

    num_new_tokens: by sequence, of those that take part.
    sampling: the sequences that have a next token when the step is complete.
    """

    num_new_tokens: dict[BatchedSequence, int]
    sampling: list[BatchedSequence]
    work: StepWork


class ContinuousBatcher:
    """Plans steps.

    max_num_batched_tokens: tokens per step, over all sequences.
    max_num_seqs: sequences that run at once, over all steps under way.
    max_seqs_per_step: sequences in one step; None for no limit besides.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_seqs_per_step: int | None = None,
        enable_prefix_caching: bool = False,
    ) -> None:
        if max_num_seqs < 1 or max_num_batched_tokens < 1:
            raise ValueError("max_num_seqs and max_num_batched_tokens must be at least 1")
        if max_seqs_per_step is not None and max_seqs_per_step < 1:
            raise ValueError("max_seqs_per_step must be at least 1")
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_seqs_per_step = max_seqs_per_step or max_num_seqs
        self.enable_prefix_caching = enable_prefix_caching
        self.kv = KvBlocks(num_blocks, block_size)
        self.running: list[BatchedSequence] = []
        self.num_waiting = 0
        self.num_preemptions = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self._queue: list[tuple[int, int, BatchedSequence]] = []
        self._num_arrivals = 0

    def add(
        self, sequence_id: str, token_ids: list[int], *, priority: int = 0, cache_root: int = 0
    ) -> BatchedSequence:
        """Queue one sequence. The list is the batcher's from here on.

        priority: smaller is more urgent.
        cache_root: only sequences with the same one share cached blocks.
        Raises ValueError if it could never run.
        """
        if not token_ids or not self.kv.num_blocks * self.kv.block_size >= len(token_ids):
            raise ValueError(f"{len(token_ids)} tokens cannot run in this KV cache")
        self._num_arrivals += 1
        sequence = BatchedSequence(sequence_id, token_ids, priority, self._num_arrivals, cache_root)
        self._enqueue(sequence)
        return sequence

    def plan(self, *, now_s: float) -> Step | None:
        """Begin a step; None if no sequence can take part now."""
        num_new_tokens: dict[BatchedSequence, int] = {}
        has_preempted = True
        while has_preempted and not num_new_tokens:
            budget, has_preempted = self._continue_running(num_new_tokens)
            if not has_preempted:
                self._admit(num_new_tokens, budget, now_s)
        return self._commit(num_new_tokens) if num_new_tokens else None

    def complete(self, step: Step) -> list[BatchedSequence]:
        """End a step. Returns the sequences that have a next token; those that ended are not.

        A sequence that was preempted meanwhile has its token all the same.
        """
        for sequence in step.num_new_tokens:
            sequence.num_under_way -= 1
        return [sequence for sequence in step.sampling if sequence.phase is not Phase.ENDED]

    def append(self, sequence: BatchedSequence, token_id: int) -> None:
        """Give a sequence its next token; it goes on."""
        sequence.token_ids.append(token_id)

    def finish(self, sequence: BatchedSequence) -> None:
        """Forget a sequence, wherever it is, and free its seat and its blocks. Idempotent."""
        if sequence.phase is Phase.RUNNING:
            self.running.remove(sequence)
            self.kv.free(sequence.table)
        elif sequence.phase is Phase.WAITING:
            self.num_waiting -= 1
        sequence.phase = Phase.ENDED

    def check_invariants(self) -> None:
        """Seats and blocks are within their limits, and every count is of something."""
        assert len(self.running) <= self.max_num_seqs
        assert all(sequence.phase is Phase.RUNNING for sequence in self.running)
        waiting = [s for _, _, s in self._queue if s.phase is Phase.WAITING]
        assert len(waiting) == len(set(waiting)) == self.num_waiting
        assert all(not s.table.num_blocks and not s.num_computed for s in waiting)
        self.kv.check_invariants(sequence.table for sequence in self.running)
        for sequence in self.running:
            num_slots = sequence.table.num_blocks * self.kv.block_size
            assert sequence.num_computed <= min(num_slots, len(sequence.token_ids))
            assert sequence.num_under_way >= 0

    def _enqueue(self, sequence: BatchedSequence) -> None:
        heapq.heappush(self._queue, (*sequence.rank, sequence))
        sequence.phase = Phase.WAITING
        self.num_waiting += 1

    def _continue_running(self, num_new_tokens: dict[BatchedSequence, int]) -> tuple[int, bool]:
        """Give running sequences their tokens. Returns what is left of the budget, and whether
        somebody was preempted."""
        budget = self.max_num_batched_tokens
        running = self.running
        has_preempted = False
        index = 0
        while index < len(running) and budget and len(num_new_tokens) < self.max_seqs_per_step:
            sequence = running[index]
            num_new = len(sequence.token_ids) - sequence.num_computed
            if not num_new:  # Its next token is under way in another step.
                index += 1
                continue
            num_new = min(num_new, budget)
            while not self._hold(sequence, sequence.num_computed + num_new):
                has_preempted = True
                victim = max(running, key=lambda s: s.rank)
                index -= running.index(victim) < index
                budget += num_new_tokens.pop(victim, 0)
                self._preempt(victim)
                if victim is sequence:
                    return budget, has_preempted
            num_new_tokens[sequence] = num_new
            budget -= num_new
            index += 1
        return budget, has_preempted

    def _hold(self, sequence: BatchedSequence, num_tokens: int) -> bool:
        """Give a sequence the blocks for its first tokens, all of which will be computed."""
        kv = self.kv
        if not kv.grow(sequence.table, num_tokens):
            return False
        if self.enable_prefix_caching:
            num_registered = len(sequence.table.known)
            if num_tokens // kv.block_size > num_registered:
                hashes = sequence.hash_blocks(num_tokens, kv.block_size)
                kv.register(sequence.table, hashes[num_registered:])
        return True

    def _preempt(self, sequence: BatchedSequence) -> None:
        """Take everything from a running sequence, and what was planned for it."""
        self.running.remove(sequence)
        self.kv.unregister(sequence.table, sequence.num_computed // self.kv.block_size)
        self.kv.free(sequence.table)
        sequence.num_computed = 0
        self.num_preemptions += 1
        self._enqueue(sequence)

    def _admit(self, num_new_tokens: dict[BatchedSequence, int], budget: int, now_s: float) -> None:
        """Give seats to waiting sequences, until a seat, a block or the budget is missing."""
        skipped: list[BatchedSequence] = []
        while (
            self._queue
            and budget
            and len(self.running) < self.max_num_seqs
            and len(num_new_tokens) < self.max_seqs_per_step
        ):
            sequence = self._queue[0][2]
            if sequence.phase is not Phase.WAITING:
                heapq.heappop(self._queue)
            elif sequence.num_under_way:
                # Preempted with a token under way, it would compute it twice if admitted now.
                heapq.heappop(self._queue)
                skipped.append(sequence)
            elif self._seat(sequence, now_s):
                heapq.heappop(self._queue)
                num_new = min(len(sequence.token_ids) - sequence.num_computed, budget)
                has_space = self._hold(sequence, sequence.num_computed + num_new)
                assert has_space
                num_new_tokens[sequence] = num_new
                budget -= num_new
            else:
                break
        for sequence in skipped:
            heapq.heappush(self._queue, (*sequence.rank, sequence))

    def _seat(self, sequence: BatchedSequence, now_s: float) -> bool:
        """Let a sequence run, with what the cache has of it, if all of its tokens fit."""
        num_tokens = len(sequence.token_ids)
        found: list[int] = []
        if self.enable_prefix_caching:
            # The last token is always computed: its logits are what comes next.
            found = self.kv.find(sequence.hash_blocks(num_tokens - 1, self.kv.block_size))
        if not self.kv.can_hold(num_tokens, found):
            return False
        self.kv.share(sequence.table, found)
        sequence.num_computed = len(found) * self.kv.block_size
        if self.enable_prefix_caching:
            self.prefix_cache_queries += num_tokens
            self.prefix_cache_hits += sequence.num_computed
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            sequence.admitted_s = now_s
        sequence.phase = Phase.RUNNING
        self.num_waiting -= 1
        self.running.append(sequence)
        return True

    def _commit(self, num_new_tokens: dict[BatchedSequence, int]) -> Step:
        sampling: list[BatchedSequence] = []
        prefill_tokens = prefill_context = prefill_pairs = num_decode = decode_context = 0
        for sequence, num_new in num_new_tokens.items():
            num_computed = sequence.num_computed = sequence.num_computed + num_new
            sequence.num_under_way += 1
            if num_new == 1:
                num_decode += 1
                decode_context += num_computed
            else:
                prefill_tokens += num_new
                prefill_context += num_computed
                prefill_pairs += num_new * num_computed - num_new * (num_new - 1) // 2
            if num_computed == len(sequence.token_ids):
                sampling.append(sequence)
        work = StepWork(
            num_prefill_tokens=prefill_tokens,
            num_decode_seqs=num_decode,
            prefill_context_tokens=prefill_context,
            decode_context_tokens=decode_context,
            prefill_pairs=prefill_pairs,
            num_seqs=len(num_new_tokens),
        )
        return Step(num_new_tokens, sampling, work)

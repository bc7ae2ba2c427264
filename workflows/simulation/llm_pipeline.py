"""An LLM engine with continuous batching, as a fluid: rates that change when one comes or goes.

A step takes base + n · per_sequence for n sequences that decode, and reads a chunk of one prompt on
the side, as with chunked prefill; then it takes the chunk's time more. Every decoding sequence gets
a token in each step. Prompts are read one after the other, by priority.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workflows.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds. Defaults: Llama-3-8B in 16 bits on one RTX 4090 (16 GB of weights at about 0.9 TB/s,
    and some 5,500 prompt tokens a second)."""

    base_s: float = 0.018
    per_sequence_s: float = 0.0002
    per_prompt_token_s: float = 0.00018
    chunk_tokens: int = 512


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation. Tokens are counted as real numbers, since rates are."""

    prompt_left: float
    output_left: float
    order: tuple[int, int]
    on_subnode: Callable[[float], None]
    on_end: Callable[[], None]
    num_made: float = 0.0
    next_boundary: float = 0.0


class LlmPipeline:
    """One engine. subnode_tokens: `on_subnode` is called with the tokens made, so often."""

    def __init__(self, timeline: Timeline, costs: StepCosts, *, subnode_tokens: int) -> None:
        self._timeline = timeline
        self._costs = costs
        self._subnode_tokens = subnode_tokens
        self._sequences: list[Sequence] = []
        self._updated_s = 0.0
        self._generation = 0
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def add(
        self,
        num_prompt: float,
        num_output: float,
        *,
        priority: int,
        on_subnode: Callable[[float], None],
        on_end: Callable[[], None],
    ) -> None:
        """Begin at once: admission is the scheduler's."""
        self._advance()
        self._num_added += 1
        sequence = Sequence(
            prompt_left=num_prompt,
            output_left=num_output,
            order=(priority, self._num_added),
            on_subnode=on_subnode,
            on_end=on_end,
            next_boundary=self._subnode_tokens,
        )
        self._sequences.append(sequence)
        self._plan()

    def _reading(self) -> Sequence | None:
        waiting = [one for one in self._sequences if one.prompt_left > 0]
        return min(waiting, key=lambda one: one.order) if waiting else None

    def _rates(self) -> tuple[Sequence | None, float, float]:
        """Who is read, prompt tokens and output tokens of a sequence per second."""
        costs, reading = self._costs, self._reading()
        num_decoding = sum(one.prompt_left <= 0 for one in self._sequences)
        step_s = costs.base_s + num_decoding * costs.per_sequence_s if num_decoding else 0.0
        if reading is None:
            return None, 0.0, 1.0 / step_s if step_s else 0.0
        step_s += costs.chunk_tokens * costs.per_prompt_token_s
        return reading, costs.chunk_tokens / step_s, 1.0 / step_s

    def _advance(self) -> None:
        """Bring all progress up to now, at the rates since the last change."""
        elapsed_s = self._timeline.now_s - self._updated_s
        self._updated_s = self._timeline.now_s
        if elapsed_s <= 0 or not self._sequences:
            return
        reading, prompt_rate, output_rate = self._rates()
        for one in self._sequences:
            if one is reading:
                one.prompt_left = _less(one.prompt_left, prompt_rate * elapsed_s)
            elif one.prompt_left <= 0:
                one.num_made += output_rate * elapsed_s
                one.output_left = _less(one.output_left, output_rate * elapsed_s)

    def _plan(self) -> None:
        """Come back at the next moment at which a rate changes or a sub-node ends."""
        self._generation += 1
        if not self._sequences:
            return
        reading, prompt_rate, output_rate = self._rates()
        waits = [] if reading is None else [reading.prompt_left / prompt_rate]
        for one in self._sequences:
            if one.prompt_left <= 0:
                to_boundary = one.next_boundary - one.num_made
                waits.append(max(0.0, min(one.output_left, to_boundary)) / output_rate)
        generation = self._generation
        self._timeline.after(min(waits), lambda: self._arrive(generation))

    def _arrive(self, generation: int) -> None:
        if generation != self._generation:
            return
        self._advance()
        ended = [one for one in self._sequences if one.prompt_left <= 0 and one.output_left <= 0]
        passed = [
            one
            for one in self._sequences
            if one.output_left > 0 and one.num_made >= one.next_boundary - 1e-6
        ]
        self._sequences = [one for one in self._sequences if one not in ended]
        for one in passed:
            one.next_boundary += self._subnode_tokens
        self._plan()
        for one in passed:
            one.on_subnode(one.num_made)
        for one in ended:
            one.on_end()


def _less(left: float, done: float) -> float:
    rest = left - done
    return rest if rest > 1e-6 else 0.0

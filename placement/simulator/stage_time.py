"""The step time of a stage, from the roofline estimator.

A step may hold decoding sequences and chunks of prompts. Matrix products, all-reduces and the hop
see all of its tokens at once; attention runs over each kind apart. So a step of one kind takes what
`Estimator` says of it, and a mixed one less than both apart: the weights are read once.

All that depends on the number of tokens alone is a table over that number, exact. Attention of
decoding sequences is a table over their number and mean context, linear between
`_CONTEXTS` (exact for a roofline but for the cell with the ridge); that of prompts is computed.
Sliding windows count as for sequences of equal length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from placement.estimator import Estimator, Stage, StageKind
from placement.roofline import (
    Array,
    Pass,
    Quantity,
    hop_s,
    prefill_pass,
)
from placement.simulator.step_time import StepWork

# Mean tokens of a decoding sequence: 3 % apart.
_CONTEXTS = np.unique(np.round(np.geomspace(1, 2**20, 480)))
_CONTEXT_LIST: list[float] = _CONTEXTS.tolist()


class StageTime:
    """Implements `placement.simulator.step_time.StepTime` for one stage.

    Raises IndexError for steps of more than `fidelity.max_tokens_per_pass` tokens.
    """

    def __init__(
        self, layer: LayerTime, num_layers: int, hop_s: Array, logits_s: Array | None
    ) -> None:
        """hop_s, logits_s: by the number of tokens, of rows; from 0 on."""
        self._layer = layer
        self._num_layers = num_layers
        self._fixed_s: dict[bool, list[float]] = {
            is_prefill: (num_layers * layer.fixed_s(is_prefill) + hop_s).tolist()
            for is_prefill in (False, True)
        }
        self._logits_s: list[float] | None = None if logits_s is None else logits_s.tolist()

    def step_s(self, work: StepWork) -> float:
        seconds = self._fixed_s[work.num_prefill_tokens > 0][work.num_tokens]
        attention_s = 0.0
        if work.num_decode_seqs:
            attention_s = self._layer.decode_attention_s(
                work.num_decode_seqs, work.decode_context_tokens
            )
        if work.num_prefill_tokens:
            attention_s += self._layer.prefill_attention_s(work)
        if self._logits_s is not None:
            seconds += self._logits_s[work.num_seqs]
        return seconds + self._num_layers * attention_s


class LayerTime:
    """One layer on one kind of stage, for steps of up to `fidelity.max_tokens_per_pass` tokens."""

    def __init__(self, estimator: Estimator, kind: StageKind) -> None:
        self._estimator = estimator
        self._kind = kind
        self._decode_rows: dict[int, list[float]] = {}
        self._last_prefill: tuple[StepWork, float] | None = None

    def fixed_s(self, is_prefill: bool) -> Array:
        """By the number of tokens, from 0 on: all of a layer but its attention."""
        work = _tokens(self._estimator, is_prefill)
        return _from_zero(self._estimator.other_operations_s(self._kind, work), work)

    def decode_attention_s(self, num_seqs: int, context_tokens: int) -> float:
        row = self._decode_rows.get(num_seqs)
        if row is None:
            row = self._decode_rows[num_seqs] = self._decode_row(num_seqs)
        mean = self._estimator.model.cached_tokens(context_tokens / num_seqs)
        index = min(bisect_right(_CONTEXT_LIST, mean), len(row) - 1)
        low, high = _CONTEXT_LIST[index - 1], _CONTEXT_LIST[index]
        share = (mean - low) / (high - low)
        return row[index - 1] + share * (row[index] - row[index - 1])

    def prefill_attention_s(self, work: StepWork) -> float:
        if self._last_prefill is not None and self._last_prefill[0] is work:
            return self._last_prefill[1]
        seconds = self._estimator.attention_s(
            self._kind,
            Pass(
                num_tokens=float(work.num_prefill_tokens),
                attention_pairs=self._pairs(work),
                kv_tokens=float(work.prefill_context_tokens),
                logit_rows=0.0,
                is_prefill=True,
            ),
        )
        self._last_prefill = (work, float(seconds))
        return float(seconds)

    def _decode_row(self, num_seqs: int) -> list[float]:
        tokens = num_seqs * _CONTEXTS
        work = Pass(
            num_tokens=float(num_seqs) + 0.0 * tokens,
            attention_pairs=tokens,
            kv_tokens=tokens,
            logit_rows=float(num_seqs),
            is_prefill=False,
        )
        row: list[float] = np.asarray(self._estimator.attention_s(self._kind, work)).tolist()
        return row

    def _pairs(self, work: StepWork) -> float:
        """What the estimator would count for prompts of this mean length (exact for whole ones)."""
        model, traits = self._estimator.model, self._estimator.fidelity.traits
        pairs = float(work.prefill_pairs)
        if model.sliding_window is not None:
            num_prompts = work.num_seqs - work.num_decode_seqs
            length = max(1, work.prefill_context_tokens // num_prompts)
            counted = float(prefill_pass(model, 1.0, length, traits).attention_pairs)
            return pairs * counted / (length * (length + 1) / 2)
        return pairs if traits.is_attention_causal else 2 * pairs - work.num_prefill_tokens


def stage_times(estimator: Estimator, stages: Sequence[Stage]) -> list[StageTime]:
    """The step times of a pipeline's stages. A stage that hands on has the hop's time."""
    layers: dict[StageKind, LayerTime] = {}
    work = _tokens(estimator, is_prefill=False)
    times: list[StageTime] = []
    for index, stage in enumerate(stages):
        layer = layers.setdefault(stage.kind, LayerTime(estimator, stage.kind))
        hop, logits = np.zeros(1), None
        if index == len(stages) - 1:
            logits = _from_zero(estimator.logits_s(stage.kind, work), work)
        else:
            is_near = stages[index + 1].node == stage.node
            link = stage.shape.intra if is_near else stage.shape.inter
            hop = _from_zero(hop_s(estimator.model, work, link), work)
        times.append(StageTime(layer, stage.num_layers, hop, logits))
    return times


def _from_zero(seconds: Quantity, work: Pass) -> Array:
    """Times of 1, 2, … tokens as a table from 0 on, where nothing takes no time."""
    return np.concatenate(([0.0], seconds + 0.0 * np.asarray(work.num_tokens)))


def _tokens(estimator: Estimator, is_prefill: bool) -> Pass:
    """Passes of 1, 2, … tokens with a row of logits each, and no attention."""
    tokens = np.arange(1, estimator.fidelity.max_tokens_per_pass + 1, dtype=np.float64)
    return Pass(
        num_tokens=tokens,
        attention_pairs=0.0 * tokens,
        kv_tokens=0.0 * tokens,
        logit_rows=tokens,
        is_prefill=is_prefill,
    )

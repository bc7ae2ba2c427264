"""A deterministic language model without weights: the next token is a hash of the tokens before it.

The same prefix always continues alike, wherever prompt and output meet, so a generation that goes
on elsewhere continues exactly. `HashModel` has logits, so penalties, seeds, biases and logprobs
mean what they mean elsewhere. `RollingModel` has none and costs a hundredth.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence
from typing import Protocol

from spot.generation import FinishReason, Generation, SamplingParams, TokenLogprobs

_NUM_CANDIDATES = 32
_NEVER = -9999.0


class Continuation(Protocol):
    """One generation's next tokens, from where its output stands at the start."""

    def next_token(self) -> tuple[int, TokenLogprobs | None]:
        """Generate one token. Its logprobs come with it if the generation asks for them."""

    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """One entry per prompt token, the first one None. The generation asks for them."""


class TokenModel(Protocol):
    """Continues generations. Tokens are ids below `vocab_size`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_id(self) -> int: ...

    def begin(self, generation: Generation) -> Continuation: ...


class HashModel:
    """A model whose logits are hashed from the whole prefix, sampled as the generation asks.

    chance: for generations without a seed.
    """

    def __init__(
        self, vocab_size: int, eos_token_id: int, chance: random.Random | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self.chance = chance or random.Random()

    def begin(self, generation: Generation) -> HashedContinuation:
        return HashedContinuation(self, generation)


class HashedContinuation:
    """One generation under `HashModel`."""

    def __init__(self, model: HashModel, generation: Generation) -> None:
        self._model = model
        self._generation = generation
        self._output = list(generation.output_token_ids)
        self._context = hash_tokens(b"", [*generation.prompt_token_ids, *self._output])

    def next_token(self) -> tuple[int, TokenLogprobs | None]:
        sampling = self._generation.sampling
        logits = self._logits()
        token_id = _sample(logits, sampling.temperature, self._rng())
        entry = None
        if sampling.logprobs is not None:
            entry = top_logprobs(logits, token_id, sampling.logprobs)
        self._output.append(token_id)
        self._context = hash_tokens(self._context, [token_id])
        return token_id, entry

    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        prompt = self._generation.prompt_token_ids
        num_top = self._generation.sampling.prompt_logprobs or 0
        entries: list[TokenLogprobs | None] = [None]
        context = b""
        for position in range(1, len(prompt)):
            context = hash_tokens(context, [prompt[position - 1]])
            logits = hashed_logits(context, self._model.vocab_size)
            logits.setdefault(prompt[position], 0.0)
            entries.append(top_logprobs(logits, prompt[position], num_top))
        return entries

    def _rng(self) -> random.Random:
        """With a seed, chance depends on the seed and the position only."""
        seed = self._generation.sampling.seed
        if seed is None:
            return self._model.chance
        position = len(self._generation.prompt_token_ids) + len(self._output)
        return random.Random(f"{seed}@{position}")

    def _logits(self) -> dict[int, float]:
        sampling = self._generation.sampling
        logits = hashed_logits(self._context, self._model.vocab_size)
        if sampling.allowed_token_ids is not None:
            logits = {t: logits.get(t, 0.0) for t in sampling.allowed_token_ids}
        for token_id, bias in (sampling.logit_bias or {}).items():
            logits[token_id] = logits.get(token_id, 0.0) + bias
        for token_id in logits:
            count = self._output.count(token_id)
            if count:
                logits[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * count
        if len(self._output) < sampling.min_tokens:
            logits.pop(self._model.eos_token_id, None)
        return logits


class RollingModel:
    """A model that costs next to nothing, for simulations of many tokens.

    The next token is taken from a linear congruential hash of all tokens before it. It never says
    `eos_token_id`, so outputs are as long as they may be, and of the sampling parameters only the
    stops and limits count; logprobs are 0.
    """

    def __init__(self, vocab_size: int, eos_token_id: int) -> None:
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id

    def begin(self, generation: Generation) -> RollingContinuation:
        return RollingContinuation(self, generation)


class RollingContinuation:
    """One generation under `RollingModel`."""

    def __init__(self, model: RollingModel, generation: Generation) -> None:
        self._generation = generation
        self._num_choices = model.vocab_size - 1
        self._eos_token_id = model.eos_token_id
        self._has_logprobs = generation.sampling.logprobs is not None
        state = 0
        for token_id in (*generation.prompt_token_ids, *generation.output_token_ids):
            state = _roll(state, token_id)
        self._state = state

    def next_token(self) -> tuple[int, TokenLogprobs | None]:
        token_id = (self._state >> 32) % self._num_choices
        if token_id >= self._eos_token_id:
            token_id += 1
        self._state = _roll(self._state, token_id)
        return token_id, TokenLogprobs([token_id], [0.0], 1) if self._has_logprobs else None

    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        later = self._generation.prompt_token_ids[1:]
        return [None, *(TokenLogprobs([token_id], [0.0], 1) for token_id in later)]


def finish_of(
    token_id: int,
    num_output: int,
    generation: Generation,
    *,
    eos_token_id: int,
    max_model_len: int,
) -> tuple[FinishReason | None, int | None]:
    """Whether the output ends with this token, and by which stop token.

    num_output: output tokens of the generation so far, this one included.
    """
    sampling: SamplingParams = generation.sampling
    if num_output >= sampling.min_tokens:
        if token_id == eos_token_id and not sampling.ignore_eos:
            return "stop", None
        if token_id in sampling.stop_token_ids:
            return "stop", token_id
    total = len(generation.prompt_token_ids) + num_output
    if num_output >= sampling.max_tokens or total >= max_model_len:
        return "length", None
    return None, None


def hash_tokens(prefix: bytes, token_ids: Sequence[int]) -> bytes:
    """A hash of all tokens so far: of `prefix` and one more, token by token."""
    for token_id in token_ids:
        prefix = hashlib.blake2b(prefix + token_id.to_bytes(4, "little"), digest_size=16).digest()
    return prefix


def hashed_logits(context: bytes, vocab_size: int) -> dict[int, float]:
    """The logits after `context`: a few candidates, all other tokens impossible."""
    rng = random.Random(context)
    return {rng.randrange(vocab_size): rng.gauss(0.0, 2.0) for _ in range(_NUM_CANDIDATES)}


def top_logprobs(logits: dict[int, float], token_id: int, num_top: int) -> TokenLogprobs:
    """The chosen token's entry with `num_top` alternatives, -1 for all."""
    logprobs = _log_softmax(logits)
    ranked = sorted(logprobs, key=lambda t: (-logprobs[t], t))
    top = ranked if num_top < 0 else ranked[:num_top]
    return TokenLogprobs(
        [token_id, *top],
        [logprobs.get(token_id, _NEVER), *(logprobs[t] for t in top)],
        ranked.index(token_id) + 1,
    )


def _roll(state: int, token_id: int) -> int:
    """Knuth's MMIX generator over a state that takes in one token."""
    return ((state ^ token_id) * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF


def _log_softmax(logits: dict[int, float]) -> dict[int, float]:
    top = max(logits.values())
    log_total = top + math.log(sum(math.exp(value - top) for value in logits.values()))
    return {token_id: value - log_total for token_id, value in logits.items()}


def _sample(logits: dict[int, float], temperature: float, rng: random.Random) -> int:
    if temperature == 0:
        return max(logits, key=lambda token_id: (logits[token_id], -token_id))
    scaled = _log_softmax({t: value / temperature for t, value in logits.items()})
    return rng.choices(list(scaled), [math.exp(value) for value in scaled.values()])[0]

"""What is asked of a fleet: mean lengths, and how many requests come."""

from __future__ import annotations

import math
from dataclasses import dataclass

from placement.errors import InvalidInput, shortened, unknown_name

_MOST_TOKENS, _MOST_RPS = 10_000_000, 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Mean prompt and output length in tokens (S_in, S_out), and the load in requests per second.

    rate_rps: None where as much as possible is wanted.
    held_tokens: tokens that a request holds in the KV cache, as the mean over its steps. By default
        that of equal requests. Where lengths differ it is higher, as long answers stay longer.
    """

    input_tokens: int
    output_tokens: int
    rate_rps: float | None = None
    name: str = "custom"
    held_tokens: float | None = None

    def __post_init__(self) -> None:
        for field in ("input_tokens", "output_tokens"):
            if getattr(self, field) < 1:
                raise InvalidInput(field, "must be at least 1")
            if getattr(self, field) > _MOST_TOKENS:
                raise InvalidInput(field, f"must be at most {_MOST_TOKENS} tokens")
        if self.rate_rps is not None:
            if not self.rate_rps > 0:
                raise InvalidInput("rate_rps", "must be positive")
            if self.rate_rps > _MOST_RPS:
                raise InvalidInput("rate_rps", f"must be at most {_MOST_RPS:.0f} requests/s")
        if self.held_tokens is not None and not self.held_tokens >= 1:
            raise InvalidInput("held_tokens", "must be at least 1")

    @property
    def mean_held_tokens(self) -> float:
        """S_in plus half of the output, or what is known of the requests."""
        if self.held_tokens is not None:
            return self.held_tokens
        return self.input_tokens + (self.output_tokens + 1) / 2


WORKLOADS = {
    # Means of prompts of at most 2,048 tokens in Azure's conversation trace of 2023, as ShuntServe
    # gives them (section 7: 763, 232, 4.67 per second). Held: Σ out · (in + (out + 1) / 2) / Σ out.
    "azure-conv": Workload(
        name="azure-conv", input_tokens=763, output_tokens=232, rate_rps=4.67, held_tokens=1099.0
    ),
}


def find_workload(name: str) -> Workload:
    """A preset by name, or `INPUTxOUTPUT[@RATE]` (`512x128@3.5`)."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    lengths, at, rate = name.partition("@")
    prompt, times, output = lengths.partition("x")
    if times and prompt.isascii() and prompt.isdigit() and output.isascii() and output.isdigit():
        try:
            rate_rps = float(rate) if at else None
        except ValueError:
            rate_rps = math.nan
        if rate_rps is not None and not math.isfinite(rate_rps):
            raise InvalidInput("workload", f"{shortened(rate)} is no rate in requests per second")
        return Workload(
            name=name,
            input_tokens=_tokens(prompt),
            output_tokens=_tokens(output),
            rate_rps=rate_rps,
        )
    raise unknown_name("workload", name, [*WORKLOADS, "INPUTxOUTPUT[@RATE]"])


def _tokens(digits: str) -> int:
    """A number of any length; those too long to be read are too large as well."""
    return int(digits) if len(digits.lstrip("0")) <= 20 else _MOST_TOKENS + 1

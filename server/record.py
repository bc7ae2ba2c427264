"""What is remembered of one HTTP request until its line is logged and its metrics are counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from starlette.types import Scope

if TYPE_CHECKING:
    from server.journaling import Journaling

Outcome = Literal["completed", "aborted", "client_error", "rejected", "failed"]
SCOPE_KEY = "shuntyard.record"


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are of the event loop's clock, in seconds.

    queue_s: the longest that one of its generations waited for a seat in the engine.
    num_shared: its generations that have the output of equal ones. num_from_cache: of these, of
        ones that had ended; the others ran already.
    num_migrations: how often its generations lost their pipeline and went on elsewhere.
    n, max_tokens: choices per prompt, and the output limit of each.
    num_counted_tokens, is_prompt_counted: what the token counters have of this request so far.
    outcome: completed; aborted (the client left); client_error (4xx); rejected (429, 503 before any
        work); failed (our fault, before or after the first byte).
    via: other Shuntyards that it has come through.
    journaling: what writes the answer into the journal, if it is journaled.
    idempotency_key: by which the client names a run of a workflow that it wants once.
    """

    request_id: str
    method: str
    path: str
    arrived_s: float
    tenant: str = ""
    model: str = ""
    stream: bool = False
    status: int = 0
    outcome: Outcome = "completed"
    error: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_choices: int = 0
    num_shared: int = 0
    num_from_cache: int = 0
    num_migrations: int = 0
    n: int = 1
    max_tokens: int = 0
    num_counted_tokens: int = 0
    is_prompt_counted: bool = False
    finish_reasons: list[str] = field(default_factory=list)
    submitted_s: float | None = None
    queue_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    via: list[str] = field(default_factory=list)
    journaling: Journaling | None = None
    idempotency_key: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time from arrival to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token of one choice, after its first."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        num_later = self.num_output_tokens / max(1, self.num_choices) - 1
        return (self.last_token_s - self.first_token_s) / num_later if num_later > 0 else None


def record_of(scope: Scope) -> RequestRecord:
    """The record that the outermost middleware put into the scope."""
    record = scope[SCOPE_KEY]
    assert isinstance(record, RequestRecord)
    return record

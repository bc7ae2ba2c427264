"""What can be wrong with a workflow, or go wrong in a run.

WorkflowError
├── InvalidWorkflow       the document cannot be run; every problem at once, nothing was run
├── TemplateError         a template that cannot be compiled or rendered
├── NodeFailed            one node's work failed; says whether another try could help
├── RunNotFound           no run of this id, or of another tenant
├── TemplateNotFound      no workflow template of this name, or of another tenant
├── TooManyRuns           the limit of runs at once is reached
├── KeyReused             the idempotency key belongs to a run of another request
├── RunElsewhere          another server works on the run
└── JournalUnavailable    runs cannot be recorded now, so none is begun
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class WorkflowError(Exception):
    """Root of this package's errors. `message` is written for the author of the workflow."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong. path: where, as `nodes.3.params.model`. code: for programs."""

    path: str
    code: str
    message: str


class InvalidWorkflow(WorkflowError):
    """The document cannot be run. problems: all that were found, at least one."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        first = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"{first.path}: {first.message}{more}")
        self.problems = list(problems)


class TemplateError(WorkflowError):
    """A template cannot be compiled or rendered."""


class NodeFailed(WorkflowError):
    """A node's work failed.

    code: a short reason for programs. is_retryable: whether the same work may succeed later; errors
    of the input never do.
    """

    def __init__(self, message: str, *, code: str, is_retryable: bool) -> None:
        super().__init__(message)
        self.code = code
        self.is_retryable = is_retryable


class RunNotFound(WorkflowError):
    """There is no such run for this tenant."""


class TemplateNotFound(WorkflowError):
    """There is no workflow template of this name for this tenant."""


class TooManyRuns(WorkflowError):
    """As many runs are active as may be. Worth trying again later."""


class KeyReused(WorkflowError):
    """The idempotency key was used for another request."""


class RunElsewhere(WorkflowError):
    """The run is at work on another server of the same database; only that one can say more."""


class JournalUnavailable(WorkflowError):
    """Runs cannot be recorded at the moment. Worth trying again later."""

"""Every error that Shuntyard raises on purpose.

ShuntyardError
├── InvalidRequest            the caller's request cannot be served as it stands
│   ├── ContextLengthExceeded
│   └── NotSupported          well formed, but this model or engine cannot do it
├── Overloaded                too much work is queued; worth trying again later
└── EngineError
    ├── EngineUnavailable     no engine takes work now (starting, dead, draining)
    ├── EngineFailed          the engine ended while it worked on this generation
    │   └── EngineMisconfigured   the engine cannot start with the settings that it was given
    └── GenerationFailed      a fault of ours with this one generation; the engine is well

The HTTP status of each is decided in `server.errors`, nowhere else.
"""

from __future__ import annotations


class ShuntyardError(Exception):
    """Root of the project's errors. `message` is written for the person who sent the request."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(ShuntyardError):
    """The request cannot be served as it stands.

    param: dotted path of the offending field (`messages.0.content`), or None.
    code: a short machine-readable reason.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested output do not fit the model's context."""

    def __init__(self, message: str, *, param: str | None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class NotSupported(InvalidRequest):
    """A well-formed request for something that this model or engine cannot do."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="not_supported")


class Overloaded(ShuntyardError):
    """Too much work is queued. `retry_after_s` is a hint, in seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(ShuntyardError):
    """Something about an engine, not about the request."""


class EngineUnavailable(EngineError):
    """No engine takes work now: it is starting, draining or dead."""


class EngineFailed(EngineError):
    """The engine ended, or reported a fault, while it worked on this generation."""


class EngineMisconfigured(EngineFailed):
    """The engine cannot start with the settings that it was given. The message names the flag."""


class GenerationFailed(EngineError):
    """A fault of ours with this one generation, on an engine that is well.

    Another engine would fail at it too: it is not tried again.
    """

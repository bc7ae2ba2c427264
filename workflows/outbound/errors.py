"""What can go wrong with a request to the world outside.

OutboundError
├── Refused          a target or a request that is not allowed; nothing was sent there
├── Unreachable      no connection: nothing was sent
├── Broken           the connection was lost, or what came is no HTTP; it may have been done
├── TooSlow          the time is over; it may have been done
├── TooLarge         the answer is over the limit
└── TooManyRedirects
"""

from __future__ import annotations


class OutboundError(Exception):
    """Root of these errors. message: for the author of the workflow."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Refused(OutboundError):
    """The target or the request is not allowed."""


class Unreachable(OutboundError):
    """There is no connection to be had. Nothing was sent."""


class Broken(OutboundError):
    """The exchange broke off. The other side may have done what was asked."""


class TooSlow(OutboundError):
    """The time is over. The other side may have done what was asked."""


class TooLarge(OutboundError):
    """The answer is larger than allowed."""


class TooManyRedirects(OutboundError):
    """The answer leads on and on."""

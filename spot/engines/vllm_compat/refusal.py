"""What a request that cannot be served as it stands raises."""

from __future__ import annotations


class Unservable(ValueError):
    """The request cannot be served as it stands. `param` names the field, if it is known."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

"""What a plan can fail for.

PlacementError
├── InvalidInput      a field of the input is wrong: it is named, with the nearest valid value
│   └── UnreadableFile    a file of the user cannot be read as what it should be
└── Infeasible        the input is sound, but nothing that it describes can be built
    ├── Unmet             machines hold the model, and no fleet of them meets the goal
    └── OutOfTime         time was up before any fleet was found
"""

from __future__ import annotations

import difflib
import os.path
from collections.abc import Iterable, Mapping
from pathlib import Path


class PlacementError(Exception):
    """Root of this package's errors. `message` is written for the person who asked for a plan."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidInput(PlacementError):
    """A field is wrong. field: its path in the input (`offers.1.count`)."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class UnreadableFile(InvalidInput):
    """A file is missing, or is no text. field: its path."""


class Infeasible(PlacementError):
    """Nothing that the input describes can hold the model, or reach what was asked for."""


class Unmet(Infeasible):
    """No fleet meets the goal, or none was found that does.

    is_proven: whether there is none. nearest: by field of the goal, values that can be met, if
    known. told: how they are told.
    """

    def __init__(
        self, *, is_proven: bool = True, nearest: Mapping[str, float] | None = None, told: str = ""
    ) -> None:
        text = "no fleet of these offers meets the goal"
        if not is_proven:
            text = "no fleet of these offers was found that meets the goal, and none is ruled out"
        super().__init__(f"{text}; what can be met: {told}" if told else text)
        self.is_proven = is_proven
        self.nearest = dict(nearest or {})


class OutOfTime(Infeasible):
    """No fleet was found in time; there may be one."""


def user_path(text: str) -> Path:
    """A path as it was typed, `~` replaced where that user is known."""
    return Path(os.path.expanduser(text))  # Path's raises for users not known


def why_unreadable(error: OSError | ValueError) -> str:
    """In plain words why a text file could not be read."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, IsADirectoryError):
        return "is a folder, not a file"
    if isinstance(error, UnicodeDecodeError):
        return f"is not text in UTF-8 (byte {error.start})"
    reason = error.strerror if isinstance(error, OSError) else None
    return f"cannot be read: {(reason or 'its name is not valid').lower()}"


def shortened(value: object) -> str:
    """A value of the user as Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def unknown_name(field: str, name: str, known: Iterable[str]) -> InvalidInput:
    """The error for a name that is not among `known`, with the nearest ones: those that begin like
    it, then those that are spelt like it."""
    names = list(known)
    wanted = name.casefold()
    folded = {candidate.casefold(): candidate for candidate in names}
    begun = [one for one in folded if wanted and one.startswith(wanted)]
    alike = difflib.get_close_matches(wanted, folded, n=3, cutoff=0.5)
    near = list(dict.fromkeys([*begun, *alike]))[:3]
    hint = f"known: {', '.join(sorted(names))}"
    if near:
        hint = f"did you mean {' or '.join(folded[one] for one in near)}?"
    return InvalidInput(field, f"{name!r} is not known; {hint}")

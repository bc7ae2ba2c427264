"""Fields of a model's config.json, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from placement.errors import InvalidInput, shortened

# No model's field is larger; what is, is a slip, and no float would hold what follows from it.
_MOST = 1_000_000
_MOST_OF = {
    "num_hidden_layers": 1000,
    "num_attention_heads": 10_000,
    "num_local_experts": 10_000,
    "num_experts": 10_000,
    "n_routed_experts": 10_000,
    "n_shared_experts": 1000,
    "vocab_size": 10_000_000,
    "max_position_embeddings": 1_000_000_000,
    "sliding_window": 1_000_000_000,
}


class ConfigFields:
    """A config.json with the defaults of its family under it.

    name: of the file or model, for errors. A null stays null (`sliding_window` of Mistral v0.3): a
    default stands in for missing fields only, as in transformers.
    """

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any], *, name: str
    ) -> None:
        self._config = {**defaults, **config}
        self._name = name

    def get(self, field: str) -> Any:
        """The field as it is, None if it is missing."""
        return self._config.get(field)

    def is_set(self, field: str) -> bool:
        return self._config.get(field) is not None

    def count(self, field: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`, and of what a model can have.

        Raises InvalidInput that names the field.
        """
        value = self._config.get(field)
        if value is None:
            if default is None:
                raise self.error(field, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(
                field, f"must be a whole number of at least {least}, not {shortened(value)}"
            )
        most = _MOST_OF.get(field, _MOST)
        if value > most:
            raise self.error(field, f"must be at most {most}, not {shortened(value)}")
        return value

    def flag(self, field: str) -> bool:
        """A truth value. Raises InvalidInput that names the field."""
        value = self._config.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.error(field, f"must be true or false, not {shortened(value)}")
        return bool(value)

    def error(self, field: str, message: str) -> InvalidInput:
        return InvalidInput(f"{self._name}: {field}", message)

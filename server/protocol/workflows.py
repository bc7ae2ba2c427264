"""Bodies of `/v1/workflows` and of its `llm` nodes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from server.protocol.base import RequestBody
from server.protocol.chat import ChatCompletionRequest


class RunOptions(RequestBody):
    """What of a run's request is not the workflow. All other fields are the workflow's document."""

    inputs: dict[str, Any] = Field(default_factory=dict)
    """The values that templates read as `inputs.NAME`."""
    stream: bool | None = None
    """Answer with the run's events as they happen."""
    background: bool | None = None
    """Answer at once; the run goes on, and can be asked for by its id."""
    on_disconnect: Literal["cancel", "continue"] = "cancel"
    """What happens to the run when the client leaves before its end."""


class LlmParams(ChatCompletionRequest):
    """A chat request; `prompt` stands for one user message. Unknown fields are errors here."""

    model_config = ConfigDict(extra="forbid")

    prompt: str | None = None
    """One user message, in place of `messages`."""
    n: Literal[1] | None = None
    """A node has one answer."""

    @model_validator(mode="before")
    @classmethod
    def _prompt_as_message(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("prompt") is None:
            return data
        if "messages" in data:
            raise ValueError("prompt and messages exclude each other")
        return {**data, "messages": [{"role": "user", "content": data["prompt"]}]}

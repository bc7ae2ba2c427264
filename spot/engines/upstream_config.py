"""Where an upstream server is, and how it is treated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """A running vLLM server, or another Shuntyard.

    url: its base, with or without `/v1` (`http://10.0.0.7:8000`).
    model: which of its models; None if it serves one only.
    own_instance: what this server says of itself: it must not be an upstream of its own, neither
        at once nor through others.
    api_key: sent as a bearer token.
    headers: sent with each request.
    vocab_size: of the model; None asks the upstream.
    max_num_seqs: generations that it should be given at a time. Nothing is held back here.
    connect_timeout_s: until a connection stands.
    response_timeout_s: until an answer begins; where it comes in one piece, until it is complete.
    health_interval_s, health_timeout_s: how often it is asked for a sign of life, and how long it
        may take to give one.
    max_health_failures: so many in a row make it dead.
    stats_interval_s: how often its metrics are read.
    max_answer_bytes: how much of one event, or of an answer in one piece, is kept in memory.

    Raises ValueError for a value out of its range.
    """

    url: str
    model: str | None = None
    own_instance: str = ""
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    vocab_size: int | None = None
    max_num_seqs: int = 256
    connect_timeout_s: float = 5.0
    response_timeout_s: float = 600.0
    health_interval_s: float = 2.0
    health_timeout_s: float = 5.0
    max_health_failures: int = 3
    stats_interval_s: float = 5.0
    max_answer_bytes: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        if not self.url.isprintable() or " " in self.url:
            raise ValueError(f"the upstream's URL holds characters that none has: {self.url!r}")
        parts = urlsplit(self.url)
        has_port = parts.port is None or parts.port > 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not has_port:
            raise ValueError(f"the upstream's URL must be http(s)://host[:port], not {self.url!r}")
        if parts.username is not None or parts.query or parts.fragment:
            raise ValueError("the upstream's URL takes no user name, query or fragment")
        for name in (
            "vocab_size",
            "max_num_seqs",
            "connect_timeout_s",
            "response_timeout_s",
            "health_interval_s",
            "health_timeout_s",
            "max_health_failures",
            "stats_interval_s",
            "max_answer_bytes",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be greater than 0, not {value}")

    @property
    def base_url(self) -> str:
        """Without `/v1` and without a slash at the end."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

"""Counters of a server, in the text format that Prometheus reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

REASONS = ("stop", "length", "abort", "error")
"""Why requests end: a stop token or text, the limit of tokens, the client disconnects, the model fails."""


@dataclass
class Metrics:
    """What the requests of a server did since it started.

    Attributes:
        finished: number of finished requests by reason, see `REASONS`.
        prompt_tokens, new_tokens: number of tokens.
        first_tokens: number of requests that have their first token.
        first_token_seconds, request_seconds: sums over requests of the time until the first, and the last token.
    """

    finished: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    new_tokens: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0
    request_seconds: float = 0.0

    def text(self, *, waiting: int, running: int) -> str:
        """Returns all values.

        Args:
            waiting: number of requests without a token yet.
            running: number of unfinished requests with a token.
        """
        finished = {f'_total{{reason="{reason}"}}': self.finished[reason] for reason in REASONS}
        first = {"_sum": self.first_token_seconds, "_count": self.first_tokens}
        whole = {"_sum": self.request_seconds, "_count": self.finished.total()}
        return (
            _metric("requests_waiting", "gauge", "Requests that wait for their first token.", {"": waiting})
            + _metric("requests_running", "gauge", "Requests that get tokens.", {"": running})
            + _metric("requests_finished", "counter", "Requests that have ended, by reason.", finished)
            + _metric("prompt_tokens", "counter", "Tokens of prompts.", {"_total": self.prompt_tokens})
            + _metric("new_tokens", "counter", "Tokens that the model chose.", {"_total": self.new_tokens})
            + _metric("first_token_seconds", "summary", "Time from a request to its first token.", first)
            + _metric("request_seconds", "summary", "Time from a request to its end.", whole)
        )


def _metric(name: str, kind: str, description: str, values: Mapping[str, float]) -> str:
    """Returns the lines of a metric; the keys of `values` follow its name."""
    name = f"ligerzoo_{name}"
    full_name = f"{name}_total" if kind == "counter" else name
    lines = [f"# HELP {full_name} {description}", f"# TYPE {full_name} {kind}"]
    lines += [f"{name}{suffix} {value}" for suffix, value in values.items()]
    return "".join(f"{line}\n" for line in lines)

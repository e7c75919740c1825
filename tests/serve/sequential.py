"""A scheduler with the interface of `ligerzoo.generate.Scheduler` that decodes row after row with the model itself."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ligerzoo.generate import filter_logits, penalize_repetition, sample
from ligerzoo.models import CausalLM


class Update(NamedTuple):
    index: int
    tokens: list[int]
    logps: list[float]
    finish_reason: str | None


class Row:
    """One request: its tokens so far, its cache and its options."""

    def __init__(self, model: CausalLM, prompt: Tensor | Sequence[int], options: dict[str, Any]) -> None:
        self.model, self.options = model, options
        self.unread = self.all = torch.as_tensor(prompt, device=model.device)[None]
        self.length = self.all.shape[1]
        self.cache = model.new_cache()

    @torch.no_grad()
    def step(self) -> tuple[int, float, str | None]:
        output = self.model(self.unread, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1].float()
        assert logits.isfinite().all()
        logps = logits.log_softmax(-1)
        occurred = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, self.all, True)
        logits = penalize_repetition(logits, occurred, self.options.get("repetition_penalty", 1.0))
        if self.options.get("do_sample", False):
            filters = (self.options.get(name) for name in ("top_k", "top_p", "min_p"))
            logits = filter_logits(logits, self.options.get("temperature", 1.0), *filters)
            self.unread = sample(logits, self.options.get("generator"))
        else:
            self.unread = logits.argmax(-1, keepdim=True)
        self.all = torch.cat([self.all, self.unread], 1)
        token = int(self.unread)
        eos = self.model.generation_config.get("eos_token_id", self.model.config.eos_token_id)
        reason = "length" if self.all.shape[1] - self.length == self.options["max_new_tokens"] else None
        reason = "stop" if token in (eos if isinstance(eos, list) else [eos]) else reason
        return token, float(logps[0, token]), reason


class SequentialScheduler:
    """Decodes each request alone, up to `batch_size` at a time."""

    def __init__(self, model: CausalLM, *, batch_size: int) -> None:
        self.model, self.batch_size = model, batch_size
        self.rows: dict[int, Row] = {}
        self.count = 0

    @property
    def is_idle(self) -> bool:
        return not self.rows

    def add(self, prompt: Tensor | Sequence[int], **options: Any) -> int:
        self.rows[self.count] = Row(self.model, prompt, options)
        self.count += 1
        return self.count - 1

    def step(self) -> list[Update]:
        updates = []
        for index, row in list(self.rows.items())[: self.batch_size]:
            token, logp, reason = row.step()
            updates.append(Update(index, [token], [logp], reason))
            if reason is not None:
                del self.rows[index]
        return updates

    def cancel(self, index: int) -> None:
        del self.rows[index]

    def close(self) -> None:
        self.rows.clear()

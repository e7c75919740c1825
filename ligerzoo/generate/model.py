"""What `generate` needs of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor


class SupportsGenerate(Protocol):
    """A model that `generate` accepts, called like `ligerzoo.models.CausalLM`.

    `generate` also uses `check_inputs`, `device`, `inputs_per_token`, `modalities` and `new_cache` if the model has
    them. The option `inputs_embeds` needs `get_input_embeddings`, and a call without token ids. `num_return_sequences`
    needs a cache with `select_rows` and, with further model inputs, `repeat_rows`.
    """

    @property
    def config(self) -> Any: ...
    @property
    def generation_config(self) -> Mapping[str, Any]: ...
    def __call__(
        self,
        input_ids: Any,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        *,
        past_key_values: Any,
        use_cache: bool,
        logits_to_keep: int,
        **model_inputs: Any,
    ) -> Any: ...

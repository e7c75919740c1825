"""Tiny checkpoints of Muse Glimmer, text only.

transformers has no class with a head for the decoder alone. The one here has the head of the class with images.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, MuseGlimmerTextConfig, MuseGlimmerTextModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.models.tiny import EMBEDDING, HEAD, Tensors, Tiny, without
from tests.models.variants import variant


class MuseGlimmerForCausalLM(MuseGlimmerTextModel.__mro__[1], GenerationMixin):  # type: ignore[misc]
    """transformers' decoder with the head of `MuseGlimmerForConditionalGeneration`."""

    config: MuseGlimmerTextConfig
    _tied_weights_keys: ClassVar = {HEAD: EMBEDDING}
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"model\.vision_"]

    def __init__(self, config: MuseGlimmerTextConfig) -> None:
        super().__init__(config)
        self.model = MuseGlimmerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        return super().from_pretrained(*arguments, key_mapping={r"^model\.language_model\.": "model."}, **options)

    def forward(
        self, input_ids: Tensor | None = None, labels: Tensor | None = None, logits_to_keep: int = 0, **inputs: Any
    ) -> CausalLMOutputWithPast:
        outputs = self.model(input_ids=input_ids, **inputs)
        cap, scale = self.config.final_logit_softcapping, self.config.output_multiplier
        logits = self.lm_head(outputs.last_hidden_state[:, -logits_to_keep:]) * scale
        logits = torch.tanh(logits / cap) * cap
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **inputs)
        hidden = {name: outputs.get(name) for name in ("past_key_values", "hidden_states", "attentions")}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **hidden)


# `register` of some versions ignores the configs of transformers itself.
AutoModelForCausalLM._model_mapping._extra_content[MuseGlimmerTextConfig] = MuseGlimmerForCausalLM

FULL, SLIDING = "full_attention", "sliding_attention"
MUSE_GLIMMER: dict[str, Any] = {
    "architectures": ["MuseGlimmerForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "final_logit_softcapping": 20.0,
    "head_dim": 12,
    "hidden_activation": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 56,
    "layer_rope_theta": [10000.0, 10000.0, 0],
    "layer_types": [SLIDING, SLIDING, FULL],
    "max_position_embeddings": 128,
    "model_type": "muse_glimmer_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "output_multiplier": 0.19611613513818404,
    "pad_token_id": None,
    "post_norm_eps": 1e-08,
    "qk_scale_factor": 3.87,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": 7,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 700.0}


def of_a_vision_language_model(tensors: Tensors) -> Tensors:
    """Weights as the repository of the model with images names them, with the parts that the text model lacks."""
    renamed = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    others = ("vision_tower.ln_pre.bias", "vision_adapter.fc1.weight", "vision_projection.weight")
    return {**renamed, **{f"model.{name}": torch.rand(3, i + 1).bfloat16() for i, name in enumerate(others)}}


def glimmers() -> Iterator[Tiny]:
    glimmer = partial(variant, MUSE_GLIMMER)
    bf16 = {"torch_dtype": "bfloat16"}
    yield glimmer("of the model with images", bf16, tensors=of_a_vision_language_model, stored_dtype=torch.bfloat16)
    yield glimmer(
        "minimal config",
        {"num_hidden_layers": 5, "num_attention_heads": 8, "head_dim": 8},
        absent=(
            "attention_bias", "final_logit_softcapping", "hidden_activation", "layer_rope_theta", "layer_types",
            "max_position_embeddings", "num_key_value_heads", "output_multiplier", "post_norm_eps", "qk_scale_factor",
            "rms_norm_eps", "rope_parameters", "sliding_window", "tie_word_embeddings", "torch_dtype",
        ),
    )  # fmt: skip
    yield glimmer("saved by transformers", {"num_key_value_heads": 1}, shards=2, by_transformers=True)
    others = {"rms_norm_eps": 0.01, "post_norm_eps": 0.02, "qk_scale_factor": 1.3, "output_multiplier": 0.4}
    yield glimmer(
        "biases, tied, other numbers, rope_theta",
        {**others, "attention_bias": True, "final_logit_softcapping": 3.0, "tie_word_embeddings": True,
         "rope_theta": 300.0, "layer_rope_theta": None},
        absent=("rope_parameters",), tensors=without(HEAD),
    )  # fmt: skip
    thetas = {"layer_types": [FULL, FULL, SLIDING], "layer_rope_theta": [700.0, 0, 0], "rope_parameters": YARN}
    yield glimmer("full attention with positions, sliding without, YARN", thetas)


CHECKPOINTS = list(glimmers())

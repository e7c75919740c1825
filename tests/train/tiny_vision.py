"""Tiny vision-language checkpoints with processors, and conversations with images."""

import base64
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from PIL import Image
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from ligerzoo.models import (
    CausalLM,
    Gemma3,
    Gemma3Config,
    Gemma4,
    Gemma4Config,
    Gemma4Unified,
    Gemma4UnifiedConfig,
    Gemma4UnifiedVisionConfig,
    Gemma4VisionConfig,
    Glm4v,
    Glm4vConfig,
    Glm4vMoe,
    Glm4vMoeConfig,
    Glm4vVisionConfig,
    Mistral3,
    Mistral3Config,
    Mistral3VisionConfig,
    Mllama,
    MllamaConfig,
    MllamaVisionConfig,
    MuseGlimmer,
    MuseGlimmerConfig,
    MuseGlimmerVisionConfig,
    Qwen2_5VL,
    Qwen2_5VLConfig,
    Qwen2VL,
    Qwen2VLConfig,
    Qwen3_5,
    Qwen3_5Config,
    Qwen3_5Moe,
    Qwen3_5MoeConfig,
    Qwen3VisionConfig,
    Qwen3VL,
    Qwen3VLConfig,
    Qwen3VLMoe,
    Qwen3VLMoeConfig,
    Qwen3VLVisionConfig,
)
from ligerzoo.models.gemma3 import Gemma3VisionConfig
from ligerzoo.models.qwen2_5_vl import Qwen2_5VLVisionConfig
from ligerzoo.models.qwen2_vl import Qwen2VLVisionConfig

QWENS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"]
GEMMA4S = ["gemma4", "gemma4_unified"]
GLMS = ["glm4v", "glm4v_moe"]
KINDS = [*QWENS, "muse_glimmer", "mistral3", "gemma3", *GEMMA4S, "glm4v_moe", "mllama"]

_QWEN_TOKENS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
_GLM_TOKENS = ["<|endoftext|>", "<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"]
_GEMMA4_TOKENS = ["<bos>", "<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>", "<|video|>"]
TOKENS = {
    **dict.fromkeys(QWENS, _QWEN_TOKENS),
    "muse_glimmer": ["<|eot|>", "<|image_start|>", "<|image_end|>", "<|patch|>", "<|video|>"],
    "mistral3": ["<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "gemma3": ["<bos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"],
    **dict.fromkeys(GEMMA4S, _GEMMA4_TOKENS),
    **dict.fromkeys(GLMS, _GLM_TOKENS),
    "mllama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|image|>"],
}
"""Special tokens, from id 256 on."""

END = {
    **dict.fromkeys(QWENS, "<|im_end|>"),
    "muse_glimmer": "<|eot|>",
    "mistral3": "</s>",
    "gemma3": "<end_of_turn>",
    **dict.fromkeys(GEMMA4S, "<turn|>"),
    **dict.fromkeys(GLMS, "<|endoftext|>"),
    "mllama": "<|eot_id|>",
}
BOS = {**dict.fromkeys(["gemma3", *GEMMA4S], "<bos>"), "mistral3": "<s>", "mllama": "<|begin_of_text|>"}
PLACEHOLDERS = {
    **dict.fromkeys(QWENS, "<|vision_start|><|image_pad|><|vision_end|>"),
    "muse_glimmer": "<|patch|>",
    "mistral3": "[IMG]",
    "gemma3": "<start_of_image>",
    **dict.fromkeys([*GEMMA4S, "mllama"], "<|image|>"),
    **dict.fromkeys(GLMS, "<|begin_of_image|><|image|><|end_of_image|>"),
}
HEADERS = {
    **dict.fromkeys(QWENS, ("<|im_start|>", "\n")),
    "muse_glimmer": ("", ": "),
    "mistral3": ("[INST]", "[/INST]"),
    "gemma3": ("<start_of_turn>", "\n"),
    **dict.fromkeys(GEMMA4S, ("<|turn>", "\n")),
    **dict.fromkeys(GLMS, ("", "\n")),
    "mllama": ("<|start_header_id|>", "<|end_header_id|>"),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"processor_class": "Qwen2VLProcessor", "image_processor_type": "Qwen2VLImageProcessor"},
    "qwen2_5_vl": {"processor_class": "Qwen2_5_VLProcessor", "image_processor_type": "Qwen2VLImageProcessor"},
    "qwen3_vl": {"processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast"},
    "qwen3_vl_moe": {"processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast"},
    "qwen3_5": {"processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast"},
    "qwen3_5_moe": {"processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast"},
    "muse_glimmer": {"processor_class": "MuseGlimmerProcessor", "patch_size": 4, "max_image_tokens": 16},
    "mistral3": {"processor_class": "PixtralProcessor", "size": {"longest_edge": 24}},
    "gemma3": {"processor_class": "Gemma3Processor", "size": {"height": 24, "width": 24}},
    "gemma4": {"processor_class": "Gemma4Processor", "patch_size": 2, "pooling_kernel_size": 2, "max_soft_tokens": 70},
    "gemma4_unified": {
        "processor_class": "Gemma4UnifiedProcessor",
        "patch_size": 2,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
    },
    "mllama": {"processor_class": "MllamaProcessor", "size": {"height": 12, "width": 12}},
    **{
        kind: {
            "processor_class": "Glm4vProcessor",
            "patch_size": 4,
            "size": {"shortest_edge": 128, "longest_edge": 2048},
        }
        for kind in GLMS
    },
}
for _kind in QWENS:
    SETTINGS[_kind] |= {"patch_size": 4, "min_pixels": 64, "max_pixels": 1024}

_TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "initializer_range": 0.1, "num_hidden_layers": 2,
}  # fmt: skip
_HYBRID: dict[str, Any] = {
    "head_dim": 16, "partial_rotary_factor": 0.5, "full_attention_interval": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip


def ids_of(kind: str) -> dict[str, int]:
    return {token: 256 + index for index, token in enumerate(TOKENS[kind])}


def write_processor(directory: Path, kind: str) -> None:
    """Writes a tokenizer with a token for each byte, a chat template and the settings of images."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS[kind]])
    named = {"eos_token": END[kind], "pad_token": END[kind]}
    if bos := BOS.get(kind):
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, 256)])
        named["bos_token"] = bos
    backend.save(str(directory / "tokenizer.json"))
    before, after = HEADERS[kind]
    template = (
        f"{BOS.get(kind, '')}{{% for message in messages %}}{before}{{{{ message['role'] }}}}{after}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        f"{{% if 'image' in part or part['type'] == 'image' %}}{PLACEHOLDERS[kind]}{{% else %}}{{{{ part['text'] }}}}"
        f"{{% endif %}}{{% endfor %}}{{% endif %}}{END[kind]}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{before}assistant{after}{{% endif %}}"
    )
    settings: dict[str, Any] = {
        "tokenizer_config.json": named,
        "preprocessor_config.json": SETTINGS[kind],
        "chat_template.json": {"chat_template": template},
    }
    if kind == "gemma3":
        settings["processor_config.json"] = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    if kind == "mistral3":
        own = {"processor_class": "PixtralProcessor", "patch_size": 4, "spatial_merge_size": 2}
        settings["processor_config.json"] = own
    for name, value in settings.items():
        (directory / name).write_text(json.dumps(value))


def new_model(kind: str) -> CausalLM:
    """Returns a model in which every weight is random, gates of cross-attention included."""
    ids = ids_of(kind)
    model: CausalLM
    match kind:
        case _ if kind in QWENS:
            text = {
                **_TEXT, "vocab_size": 264, "mrope_section": [2, 1, 1], "image_token_id": ids["<|image_pad|>"],
                "video_token_id": ids["<|video_pad|>"], "rope_theta": 100.0, "eos_token_id": ids["<|im_end|>"],
                "tie_word_embeddings": True,
            }  # fmt: skip
            tower: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": 4}
            if kind == "qwen2_vl":
                vision = Qwen2VLVisionConfig(**tower, embed_dim=16, hidden_size=32)
                model = Qwen2VL(Qwen2VLConfig(**text, vision_config=vision))
            elif kind.startswith("qwen3"):
                tower |= {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
                tower |= {"num_position_embeddings": 9}
                deepstack = Qwen3VLVisionConfig(**tower, deepstack_visual_indexes=[0, 1])
                with_deepstack = {**text, "head_dim": 8, "vision_config": deepstack}
                hybrid = {**text, **_HYBRID, "vision_config": Qwen3VisionConfig(**tower)}
                experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
                match kind:
                    case "qwen3_vl":
                        model = Qwen3VL(Qwen3VLConfig(**with_deepstack))
                    case "qwen3_vl_moe":
                        model = Qwen3VLMoe(Qwen3VLMoeConfig(**with_deepstack, **experts))
                    case "qwen3_5":
                        model = Qwen3_5(Qwen3_5Config(**hybrid))
                    case _:
                        experts |= {"shared_expert_intermediate_size": 20}
                        model = Qwen3_5Moe(Qwen3_5MoeConfig(**hybrid, **experts))
            else:
                sizes = {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "window_size": 16}
                vision_25 = Qwen2_5VLVisionConfig(**tower, **sizes, fullatt_block_indexes=[1])
                model = Qwen2_5VL(Qwen2_5VLConfig(**text, vision_config=vision_25))
        case "muse_glimmer":
            adapter = {"position_side": 3, "hidden_size": 16, "intermediate_size": 24}
            adapted = MuseGlimmerVisionConfig(depth=2, num_heads=2, patch_size=4, **adapter)
            glimmer = MuseGlimmerConfig(
                **_TEXT, vocab_size=264, head_dim=8, sliding_window=8, image_token_id=ids["<|patch|>"],
                video_token_id=ids["<|video|>"], eos_token_id=ids["<|eot|>"], vision_config=adapted,
                out_hidden_size=64, projector_hidden_size=20,
            )  # fmt: skip
            model = MuseGlimmer(glimmer)
        case "mistral3":
            pixels = Mistral3VisionConfig(
                hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, patch_size=4
            )
            mistral = Mistral3Config(
                **_TEXT, vocab_size=264, head_dim=8, image_token_id=ids["[IMG]"], eos_token_id=ids["</s>"],
                rope_theta=100.0, vision_config=pixels,
            )  # fmt: skip
            model = Mistral3(mistral)
        case "gemma3":
            siglip = Gemma3VisionConfig(
                hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=24,
                patch_size=6,
            )  # fmt: skip
            config = Gemma3Config(
                **_TEXT, vocab_size=264, head_dim=8, sliding_window=8, sliding_window_pattern=2, mm_tokens_per_image=4,
                image_token_id=ids["<image_soft_token>"], boi_token_id=ids["<start_of_image>"],
                eoi_token_id=ids["<end_of_image>"], eos_token_id=ids["<end_of_turn>"], vision_config=siglip,
            )  # fmt: skip
            model = Gemma3(config)
        case "gemma4" | "gemma4_unified":
            gemma4: dict[str, Any] = {
                **_TEXT, "vocab_size": 264, "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 3,
                "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
                "image_token_id": ids["<|image|>"], "video_token_id": ids["<|video|>"], "audio_token_id": 263,
                "eos_token_id": ids["<turn|>"], "use_bidirectional_attention": "vision",
            }  # fmt: skip
            if kind == "gemma4":
                padded = Gemma4VisionConfig(
                    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
                    num_key_value_heads=2, patch_size=2, pooling_kernel_size=2, position_embedding_size=140,
                    use_clipped_linears=True,
                )  # fmt: skip
                gemma4 |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 264}
                model = Gemma4(Gemma4Config(**gemma4, num_kv_shared_layers=1, vision_config=padded))
            else:
                square = Gemma4UnifiedVisionConfig(
                    patch_size=2, pooling_kernel_size=2, mm_embed_dim=16, mm_posemb_size=70
                )
                model = Gemma4Unified(Gemma4UnifiedConfig(**gemma4, vision_config=square))
        case "glm4v" | "glm4v_moe":
            downsampled = Glm4vVisionConfig(
                depth=2, num_heads=2, patch_size=4, hidden_size=16, intermediate_size=24, out_hidden_size=32,
                image_size=12,
            )  # fmt: skip
            glm: dict[str, Any] = {
                **_TEXT, "vocab_size": 264, "mrope_section": [1, 1, 0], "image_token_id": ids["<|image|>"],
                "video_token_id": ids["<|video|>"], "eos_token_id": ids["<|endoftext|>"], "vision_config": downsampled,
            }  # fmt: skip
            if kind == "glm4v":
                model = Glm4v(Glm4vConfig(**glm))
            else:
                routed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
                model = Glm4vMoe(Glm4vMoeConfig(**glm, **routed))
        case _:
            tiles = MllamaVisionConfig(
                attention_heads=2, hidden_size=16, image_size=12, patch_size=4, intermediate_size=24,
                num_hidden_layers=2, num_global_layers=1, intermediate_layers_indices=[0], vision_output_dim=32,
            )  # fmt: skip
            model = Mllama(
                MllamaConfig(
                    **{**_TEXT, "num_hidden_layers": 3}, cross_attention_layers=[1], vocab_size=ids["<|image|>"],
                    image_token_index=ids["<|image|>"], vision_config=tiles, tie_word_embeddings=False,
                    eos_token_id=ids["<|eot_id|>"],
                )
            )  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and name.endswith("norm.weight"):
                if kind in GEMMA4S and "q_norm" in name:
                    parameter.fill_(0.3)  # scores have no scale
                continue
            parameter.normal_(0.0, 0.3 if parameter.ndim < 2 else 0.12)
    return model


def write_vision_checkpoint(directory: Path, kind: str) -> Path:
    write_processor(directory, kind)
    new_model(kind).save_pretrained(directory)
    return directory


def picture(height: int, width: int) -> Image.Image:
    pixels = np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def data_uri(height: int, width: int) -> str:
    buffer = io.BytesIO()
    picture(height, width).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def conversation(question: Sequence[Any], answer: str) -> list[dict[str, Any]]:
    """A question, texts and images (values of the key "path"), and its answer."""
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) and not part.endswith(".png")
        else {"type": "image", "path": part}
        for part in question
    ]  # fmt: skip
    return [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": answer}]},
    ]


def write_conversations(directory: Path, samples: int = 24) -> Path:
    """Writes conversations with no, one or two images of several sizes, which are files in `images`."""
    (directory / "images").mkdir(parents=True)
    source = random.Random(0)
    words = ["liger", "lion", "tiger", "is", "a", "large", "cat", "hybrid", "of", "and"]
    lines = []
    for index in range(samples):
        question: list[str] = [" ".join(source.choices(words, k=2))]
        for _ in range(index % 3):
            name = f"images/{source.randrange(8, 40)}x{source.randrange(8, 40)}.png"
            height, width = map(int, Path(name).stem.split("x"))
            picture(height, width).save(directory / name)
            question.insert(source.randrange(len(question) + 1), name)
        lines.append(json.dumps({"messages": conversation(question, " ".join(source.choices(words, k=3)))}))
    (directory / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return directory / "chats.jsonl"

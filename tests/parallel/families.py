"""Configs of tiny models of several families, and the meshes that fit them."""

from collections.abc import Mapping
from typing import Any

from ligerzoo.mesh_sizes import MeshSizes
from tests.models.tiny_deepseek_v3 import DEEPSEEK_V3
from tests.models.tiny_gemma2 import GEMMA2
from tests.models.tiny_gemma3 import GEMMA3
from tests.models.tiny_gpt_oss import GPT_OSS
from tests.models.tiny_granite import GRANITE
from tests.models.tiny_llama import LLAMA
from tests.models.tiny_mixtral import MIXTRAL
from tests.models.tiny_olmo2 import OLMO2
from tests.models.tiny_qwen2_vl import CHECKPOINTS as QWEN2_VL
from tests.models.tiny_qwen3 import QWEN3
from tests.models.tiny_qwen3_moe import QWEN3_MOE
from tests.models.tiny_qwen3_next import QWEN3_NEXT
from tests.models.tiny_qwen3_vl_moe import CHECKPOINTS as QWEN3_VL_MOE

TEXT: dict[str, Mapping[str, Any]] = {
    "llama": LLAMA | {"num_attention_heads": 8},
    "gemma2": GEMMA2,
    "olmo2": OLMO2 | {"num_key_value_heads": 1},
    "qwen3": QWEN3 | {"tie_word_embeddings": True},
    "granite": GRANITE,
    "gpt_oss": GPT_OSS | {"output_router_logits": True, "num_local_experts": 8},
    "mixtral": MIXTRAL | {"num_local_experts": 8, "num_hidden_layers": 2},
    "qwen3_moe": QWEN3_MOE | {"num_hidden_layers": 2},
    "deepseek_v3": DEEPSEEK_V3,
    "qwen3_next": QWEN3_NEXT | {"linear_num_key_heads": 4},
    "few": QWEN3_NEXT | {"linear_num_key_heads": 1, "num_key_value_heads": 1},
}
"""Grouped queries; windows and soft caps; norms over all heads; tied heads with norms of heads; multipliers; sinks and
router losses; experts; latent attention; the gated delta rule; fewer heads of keys than processes."""
VISION: dict[str, Mapping[str, Any]] = {
    "gemma3": GEMMA3,
    "qwen2_vl": QWEN2_VL[3].config,
    "qwen3_vl_moe": QWEN3_VL_MOE[0].config,
}
MIXTURES = ("gpt_oss", "mixtral", "qwen3_moe", "deepseek_v3", "qwen3_next", "few", "qwen3_vl_moe", "qwen3_5_moe")


def fitting(family: str, mesh: str, experts: int = 8) -> str | None:
    """Returns a mesh for a family, without experts if it has none; None if its heads or experts cannot be divided."""
    mesh = mesh if family in MIXTURES else mesh.partition(" expert")[0]
    sizes = MeshSizes.parse(mesh)
    key_heads = {"qwen3_next": 4, "few": 1, "qwen3_5_moe": 2}.get(family)  # of the delta rule
    is_exchanging = key_heads is None or max(1, key_heads // sizes.tensor) % sizes.context == 0
    return mesh if is_exchanging and not experts % (sizes.tensor * sizes.expert) else None

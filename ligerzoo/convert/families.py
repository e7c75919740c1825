"""Families of checkpoints in a table: few names of tensors and of entries in config.json differ from ours.

Checkpoints of MoE models store one tensor per expert and projection. Checkpoints that transformers 5 saves in its
in-memory layout have our stacked tensors.
"""

import math

from ligerzoo.checks import is_text
from ligerzoo.convert.architecture import GELU_TANH, ROTARY_BUFFERS, SILU, Architecture
from ligerzoo.convert.fields import first_given, first_spelling, refuse, rope_fields, switched_window, written_as
from ligerzoo.convert.layout import Fused, Layout, PerExpert, Rename, Transposed
from ligerzoo.entries import Entries, is_array, object_entry

GATE_UP = Fused("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))
"""Gate and up projections in one tensor."""

_EXPERT = "mlp.experts.{expert}"
PER_EXPERT = (
    PerExpert((f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"), "mlp.experts.gate_up_proj"),
    PerExpert((f"{_EXPERT}.down_proj.weight",), "mlp.experts.down_proj"),
)
"""Experts of most families."""

_MIXTRAL_EXPERT = "block_sparse_moe.experts.{expert}"
MIXTRAL = (
    Rename("block_sparse_moe.gate", "mlp.gate"),
    PerExpert((f"{_MIXTRAL_EXPERT}.w1.weight", f"{_MIXTRAL_EXPERT}.w3.weight"), "mlp.experts.gate_up_proj"),
    PerExpert((f"{_MIXTRAL_EXPERT}.w2.weight",), "mlp.experts.down_proj"),
)
"""Mixtral's experts: w1 (gate), w2 (down) and w3 (up)."""

GRANITE_MOE = (
    Rename("block_sparse_moe.router", "mlp.gate"),
    Rename("block_sparse_moe.experts", "mlp.experts"),
    Fused("shared_mlp.input_linear", ("shared_mlp.gate_proj", "shared_mlp.up_proj")),
    Rename("shared_mlp.output_linear", "shared_mlp.down_proj"),
)
"""Granite's experts, stacked, and its shared expert."""

GRANITE_MOE_FILES = (
    Rename("block_sparse_moe.router.layer", "mlp.gate"),
    Rename("block_sparse_moe.input_linear.weight", "mlp.experts.gate_up_proj"),
    Rename("block_sparse_moe.output_linear.weight", "mlp.experts.down_proj"),
)
"""Granite 4's experts in files."""

GRANITE_SHARED = (
    Fused("shared_mlp.input_linear", ("mlp.gate_proj", "mlp.up_proj")),
    Rename("shared_mlp.output_linear", "mlp.down_proj"),
)
"""Granite 4 without routed experts."""

FLINT = (Rename("mlp.shared_expert", "mlp.shared_experts"),)
"""Flint's shared expert, which has no gate."""

SHORT_CONV = (
    Rename("operator_norm", "input_layernorm"),
    Rename("ffn_norm", "post_attention_layernorm"),
    Rename("self_attn.out_proj", "self_attn.o_proj"),
    Rename("self_attn.q_layernorm", "self_attn.q_norm"),
    Rename("self_attn.k_layernorm", "self_attn.k_norm"),
    Rename("embedding_norm", "norm"),
)
"""LFM2's norms and attention."""

SHORT_CONV_MLP = (
    Rename("feed_forward.w1", "mlp.gate_proj"),
    Rename("feed_forward.w3", "mlp.up_proj"),
    Rename("feed_forward.w2", "mlp.down_proj"),
)
"""MLPs of LFM2."""

ROUTER_BIAS = "mlp.gate.e_score_correction_bias"
_LFM_EXPERT = "feed_forward.experts.{expert}"
_LFM_ROUTER = (Rename("feed_forward.expert_bias", ROUTER_BIAS), Rename("feed_forward.gate", "mlp.gate"))
LFM_MOE = (
    PerExpert((f"{_LFM_EXPERT}.w1.weight", f"{_LFM_EXPERT}.w3.weight"), "mlp.experts.gate_up_proj"),
    PerExpert((f"{_LFM_EXPERT}.w2.weight",), "mlp.experts.down_proj"),
    *_LFM_ROUTER,
)
LFM_MOE_MODULES = (Rename("feed_forward.experts", "mlp.experts"), *_LFM_ROUTER)
"""LFM2's experts and routers, in files and in transformers' modules."""

KOLIBRI = (
    Rename("moe.router.expert_bias", ROUTER_BIAS),
    Rename("post_attn_norm", "post_self_attn_layernorm"),
    Rename("post_ffn_norm", "post_mlp_layernorm"),
)
"""Names in Kolibri's files."""

MAMBA_LIMITS: tuple[object, ...] = [0.0, math.inf], [0.0, {"__float__": "Infinity"}]
"""No limits of step sizes, in JSON with infinity and in transformers 5's. It applies others in some forwards only."""

_MAMBA_FP32 = r".*\.mamba\.(A_log|dt_bias|D|norm\.weight)"
_MAMBA_BLOCKS = (
    Rename("feed_forward", "mlp"),
    Rename("pre_ff_layernorm", "post_attention_layernorm"),
    Rename("model.final_layernorm", "model.norm"),
)
"""Names in the files of Bamba and Falcon-H1."""

_GRANITE_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Types of layers in Granite's files, and in those of transformers 5."""

EXAONE = (
    Rename("transformer.wte", "model.embed_tokens"),
    Rename("transformer.h", "model.layers"),
    Rename("transformer.ln_f", "model.norm"),
    Rename("ln_1", "input_layernorm"),
    Rename("attn.attention.out_proj", "self_attn.o_proj"),
    Rename("attn.attention", "self_attn"),
    Rename("ln_2", "post_attention_layernorm"),
    Rename("mlp.c_fc_0", "mlp.gate_proj"),
    Rename("mlp.c_fc_1", "mlp.up_proj"),
    Rename("mlp.c_proj", "mlp.down_proj"),
)
"""Names in EXAONE 3's files, those of GPT-2."""

SARVAM = (
    Rename("model.word_embeddings", "model.embed_tokens"),
    Fused("attention.query_key_value", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    Rename("attention.query_layernorm", "self_attn.q_norm"),
    Rename("attention.key_layernorm", "self_attn.k_norm"),
    Rename("attention.dense", "self_attn.o_proj"),
    Rename("mlp.gate.expert_bias", ROUTER_BIAS),
)
"""Names in the files of Sarvam's MoE."""

LLAMA4 = (
    Rename("feed_forward.router", "mlp.gate"),
    Rename("feed_forward.shared_expert", "mlp.shared_experts"),
    Rename("feed_forward", "mlp"),
    Transposed("experts.gate_up_proj"),
    Transposed("experts.down_proj"),
)
"""Llama 4's experts, for products x @ W, and its MLPs."""

ROUTER = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}
"""Entries of DeepSeek's code, with the only values that transformers and we compute."""

SARVAM_ROUTER = {
    **ROUTER,
    "moe_router_enable_expert_bias": (True,),
    "score_function": ("sigmoid",),
    "use_bias": (False,),
}
"""The same with entries of Sarvam's code."""


def expert_layouts(config: object) -> tuple[Layout, ...]:
    """Returns the layouts of experts: stored one by one, or stacked under our names."""
    return Layout(PER_EXPERT), Layout()


def _without_null_types(config: object, entries: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in entries.items() if name != "layer_types" or value is not None}


def _read_hunyuan(raw: Entries) -> Entries:
    """Returns config.json. As in transformers, `head_dim` counts; another `attention_head_dim` is refused."""
    refuse(raw, "attention_head_dim", unless=(None, raw.get("head_dim")), remedy="Set head_dim, which is used instead.")
    return raw


def _read_qwen_moe(raw: Entries) -> Entries:
    return {**raw, **switched_window(raw)}


def _read_llama4(raw: Entries) -> Entries:
    """Returns the entries of config.json. An empty list of layers without rotary positions counts as absent."""
    experts, flags = first_given(raw, "num_local_experts", "num_experts"), raw.get("no_rope_layers")
    return {**raw, "num_experts": experts, "no_rope_layers": None if flags == [] else flags}


def _without_dense_size(config: object, entries: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in entries.items() if name != "intermediate_size"}


def _write_qwen_moe(config: object, entries: dict[str, object]) -> dict[str, object]:
    return {**entries, "use_sliding_window": entries["sliding_window"] is not None}


def _read_qwen3_moe(raw: Entries) -> Entries:
    """`num_local_experts`, written by transformers 5, takes precedence over `num_experts`."""
    return {**_read_qwen_moe(raw), "num_experts": first_given(raw, "num_local_experts", "num_experts")}


def _read_routed_experts(raw: Entries) -> Entries:
    """Returns the entries of config.json; `n_routed_experts` takes precedence over `num_local_experts`.

    Raises:
        ConfigError: An option is null. transformers takes null as false, but an absent entry as true.
    """
    for name in ("norm_topk_prob", "rope_interleave"):
        refuse({name: True, **raw}, name, unless=(True, False))
    return {**raw, "num_experts": first_given(raw, "n_routed_experts", "num_local_experts")}


_write_routed_experts = written_as(num_experts="n_routed_experts")


def _with_all_key_value_heads(config: object, entries: dict[str, object]) -> dict[str, object]:
    """Readers have other defaults of the number of key-value heads, which is that of the heads."""
    return {**entries, "num_key_value_heads": entries["num_attention_heads"]}


def _write_deepseek(config: object, entries: dict[str, object]) -> dict[str, object]:
    return _with_all_key_value_heads(config, _write_routed_experts(config, entries))


_SARVAM_EXPERTS = {
    "n_routed_experts": ("num_experts", "n_routed_experts", "num_local_experts"),
    "n_shared_experts": ("num_shared_experts", "n_shared_experts"),
}


def _read_sarvam_moe(raw: Entries) -> Entries:
    """Returns the entries of config.json. Those of Sarvam's code take precedence over those of GLM-4.5."""
    biases = ("use_qkv_bias", "attention_bias")
    return _read_routed_experts(first_spelling(**_SARVAM_EXPERTS, attention_bias=biases)(raw))


def _read_sarvam_mla(raw: Entries) -> Entries:
    """Returns the entries of config.json, without a `head_dim`, which is that of cached keys in Sarvam's code."""
    raw = {name: value for name, value in raw.items() if name != "head_dim" or type(value) is not int}
    return _read_routed_experts(first_spelling(**_SARVAM_EXPERTS)(raw))


def _read_sarvam_rope(raw: Entries, default_theta: float) -> Entries:
    """Reads `rope_theta` and `rope_scaling`. "deepseek_yarn" is another name of "yarn"."""
    scaling = object_entry(raw, "rope_scaling")
    if "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
        refuse(scaling, "rope_type", unless=(None, "yarn", "deepseek_yarn"))
        raw = {**raw, "rope_scaling": {**scaling, "rope_type": "yarn"}}
    return rope_fields(raw, default_theta)


def _read_deepseek_v2(raw: Entries) -> Entries:
    """Returns the entries of config.json. Groups count only with the method that transformers uses them with."""
    if raw.get("topk_method") != "group_limited_greedy":
        refuse(raw, "n_group", unless=(None, 1), remedy='Set topk_method to "group_limited_greedy".')
        raw = {**raw, "topk_group": None}
    return {**raw, "num_experts": first_given(raw, "n_routed_experts", "num_local_experts")}


def _write_deepseek_v2(config: object, entries: dict[str, object]) -> dict[str, object]:
    method = "greedy" if entries["n_group"] == 1 else "group_limited_greedy"
    return {**_write_deepseek(config, entries), "scoring_func": "softmax", "topk_method": method}


def _read_youtu(raw: Entries) -> Entries:
    """Returns the entries of config.json. Without `initializer_range`, it follows from the size."""
    size = raw.get("hidden_size", 2048)
    if raw.get("initializer_range") is None and type(size) is int and 0 < size < 2**32:
        return {**raw, "initializer_range": 2 / (5 * size) ** 0.5}
    return raw


def _read_mamba(raw: Entries) -> Entries:
    return {**raw, "mamba_d_head": None} if raw.get("mamba_d_head") == "auto" else raw


def _write_mamba(config: object, entries: dict[str, object]) -> dict[str, object]:
    """transformers 5 rejects a null size of heads; without an entry, it is that of ours."""
    return {name: value for name, value in entries.items() if name != "mamba_d_head" or value is not None}


def _read_granite_hybrid(raw: Entries) -> Entries:
    types = first_given(raw, "layer_types", "layers_block_type")
    if is_array(types):
        types = [_GRANITE_TYPES.get(kind, kind) if is_text(kind) else kind for kind in types]
    experts = first_given(raw, "num_local_experts", "num_experts")
    return {**_read_mamba(raw), "layer_types": types, "num_experts": experts}


def _write_granite_hybrid(config: object, entries: dict[str, object]) -> dict[str, object]:
    names, types = {kind: name for name, kind in _GRANITE_TYPES.items()}, entries["layer_types"]
    entries = _write_mamba(config, written_as(num_experts="num_local_experts")(config, entries))
    return {**entries, "layer_types": [names[kind] for kind in types] if is_array(types) else None}


_DENSE = (
    Architecture("arcee", accepted={"hidden_act": ("relu2",)}),
    Architecture(
        "bamba",
        accepted={"time_step_limit": MAMBA_LIMITS, "partial_rotary_factor": (0.5,), "z_loss_coefficient": (0.0,)},
        read_entries=_read_mamba,
        write_entries=_write_mamba,
        layouts=lambda config: (Layout(_MAMBA_BLOCKS),),
        kept_fp32=_MAMBA_FP32,
    ),
    Architecture("ernie4_5", accepted={"compression_ratio": (1.0,)}),
    Architecture(
        "exaone",
        accepted={"activation_function": SILU, "hidden_act": SILU, "partial_rotary_factor": (1.0,)},
        read_entries=first_spelling(
            num_hidden_layers=("num_layers", "num_hidden_layers"), rms_norm_eps=("layer_norm_epsilon", "rms_norm_eps")
        ),
        write_entries=written_as(
            num_hidden_layers="num_layers", rms_norm_eps="layer_norm_epsilon", hidden_act="activation_function"
        ),
        layouts=lambda config: (Layout(EXAONE), Layout()),
    ),
    Architecture(
        "falcon_h1",
        accepted={"time_step_limit": MAMBA_LIMITS, "partial_rotary_factor": (1.0,)},
        read_entries=_read_mamba,
        write_entries=_write_mamba,
        layouts=lambda config: (Layout(_MAMBA_BLOCKS),),
        kept_fp32=_MAMBA_FP32,
    ),
    # The first Gemma checkpoints have `"hidden_act": "gelu"` and a null `hidden_activation`; both mean the tanh
    # approximation. Both entries are written: transformers 5 reads `hidden_act`, transformers 4 `hidden_activation`.
    Architecture(
        "gemma",
        accepted={"hidden_act": (GELU_TANH, "gelu"), "use_bidirectional_attention": (False,)},
        write_entries=lambda config, entries: {"hidden_activation": GELU_TANH, **entries},
    ),
    # `hidden_act` is ignored.
    Architecture("gemma2", accepted={"hidden_activation": (GELU_TANH,), "use_bidirectional_attention": (False,)}),
    Architecture("glm", layouts=lambda config: (Layout((GATE_UP,)),)),
    Architecture("glm4", layouts=lambda config: (Layout((GATE_UP,)),)),
    Architecture("granite"),
    Architecture("granite_swa", accepted={"partial_rotary_factor": (1.0,)}),
    # transformers ignores entries of Hunyuan's code that would change the model, such as `use_cla`.
    Architecture(
        "hunyuan_v1_dense",
        accepted={
            "use_cla": (False,),
            "use_qk_norm": (True,),
            "use_rotary_pos_emb": (True,),
            "mlp_bias": (False,),
            "norm_type": ("rms",),
            "num_experts": (1,),
        },
        read_entries=_read_hunyuan,
        layouts=lambda config: (Layout((Rename("query_layernorm", "q_norm"), Rename("key_layernorm", "k_norm"))),),
    ),
    Architecture("hyperclovax"),
    Architecture(
        "internlm3",
        read_entries=first_spelling(attention_bias=("qkv_bias", "attention_bias"), mlp_bias=("bias", "mlp_bias")),
        write_entries=written_as(attention_bias="qkv_bias", mlp_bias="bias"),
    ),
    Architecture("iquestcoder", accepted={"clip_qkv": (None,), "use_sliding_window": (False,)}),
    # transformers ignores entries of Liquid's code that would change the model.
    Architecture(
        "lfm2",
        accepted={
            "attention_bias": (False,),
            "block_use_swiglu": (True,),
            "partial_rotary_factor": (1.0,),
            "use_pos_enc": (True,),
        },
        read_entries=first_spelling(
            intermediate_size=("block_ff_dim", "intermediate_size"),
            rms_norm_eps=("norm_eps",),
            tie_word_embeddings=("tie_embedding", "tie_word_embeddings"),
        ),
        write_entries=written_as(rms_norm_eps="norm_eps"),
        layouts=lambda config: (Layout((*SHORT_CONV, *SHORT_CONV_MLP)),),
    ),
    Architecture("llama"),
    Architecture("ministral"),
    # A missing `sliding_window` means 4096; null means full attention. `layer_types` selects the window per layer, as
    # in Ministral; so does transformers' AutoConfig.
    Architecture("mistral", write_entries=_without_null_types),
    # A text model has the decoder's part of the files of a model with images.
    Architecture(
        "muse_glimmer_text",
        "MuseGlimmerForCausalLM",
        accepted={"hidden_activation": SILU, "partial_rotary_factor": (1.0,)},
        layouts=lambda config: (Layout(prefixes=(("model.", "model.", "model.language_model.", ""),)),),
        extra_tensors=rf"{ROTARY_BUFFERS}|model\.(vision_tower|vision_adapter|vision_projection)\..+",
    ),
    Architecture("nanochat", accepted={"hidden_act": ("relu2",)}),
    Architecture("olmo2"),
    Architecture("qwen2"),
    Architecture("qwen3", quantized_formats=frozenset({"fp8"})),
    Architecture("seed_oss"),
    Architecture("smollm3"),
    Architecture(
        "youtu",
        accepted={"partial_rotary_factor": (1.0,), "mlp_bias": (False,)},
        read_entries=_read_youtu,
        write_entries=_with_all_key_value_heads,
    ),
)

_MOE = (
    Architecture(
        "deepseek_v2",
        accepted={
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
            "moe_layer_freq": (1,),
            "partial_rotary_factor": (1.0,),
            "mlp_bias": (False,),
        },
        read_entries=_read_deepseek_v2,
        write_entries=_write_deepseek_v2,
        layouts=expert_layouts,
    ),
    # Kimi-K2 has another `model_type`.
    Architecture(
        "deepseek_v3",
        accepted={**ROUTER, "partial_rotary_factor": (1.0,)},
        read_entries=_read_routed_experts,
        write_entries=_write_deepseek,
        layouts=expert_layouts,
        keeps_extra_layers=True,
        quantized_formats=frozenset({"fp8"}),
    ),
    # Tensors of multi-token prediction are kept. Routers that are stored in fp32 stay in fp32.
    Architecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        accepted={"moe_gate": ("topk",), "moe_use_aux_free": (True,), "compression_ratio": (1.0,)},
        read_entries=first_spelling(
            num_experts=("moe_num_experts", "num_experts"), num_experts_per_tok=("moe_k", "num_experts_per_tok")
        ),
        write_entries=written_as(num_experts="moe_num_experts", num_experts_per_tok="moe_k"),
        layouts=lambda config: (
            Layout((Rename("mlp.moe_statics.e_score_correction_bias", ROUTER_BIAS), *PER_EXPERT)),
            Layout((Rename("mlp.gate.moe_statics.e_score_correction_bias", ROUTER_BIAS),)),
        ),
        kept_fp32=r".*\.mlp\.gate\.weight",
        extra_tensors=rf"{ROTARY_BUFFERS}|(model\.)?mtp_.+",
    ),
    # Sinks, and routers that are stored in fp32, stay in fp32.
    Architecture(
        "flint",
        accepted={"partial_rotary_factor": (1.0,), "use_sliding_window": (True,), "qkv_bias": (False,)},
        layouts=lambda config: (
            Layout((Rename("self_attn.softmax_offset", "self_attn.sinks"), *FLINT, *PER_EXPERT)),
            Layout(FLINT),
        ),
        kept_fp32=r".*\.(mlp\.gate\.weight|self_attn\.sinks)",
    ),
    Architecture(
        "glm4_moe",
        accepted=ROUTER,
        read_entries=_read_routed_experts,
        write_entries=_write_routed_experts,
        layouts=expert_layouts,
        keeps_extra_layers=True,
    ),
    Architecture(
        "granitemoe_swa",
        accepted={"partial_rotary_factor": (1.0,)},
        read_entries=first_spelling(num_experts=("num_local_experts", "num_experts")),
        write_entries=written_as(num_experts="num_local_experts"),
        layouts=lambda config: (Layout(GRANITE_MOE),),
    ),
    Architecture(
        "granitemoehybrid",
        accepted={"time_step_limit": MAMBA_LIMITS, "partial_rotary_factor": (1.0,)},
        read_entries=_read_granite_hybrid,
        write_entries=_write_granite_hybrid,
        layouts=lambda config: (
            (Layout((*GRANITE_MOE_FILES, *GRANITE_MOE)), Layout(GRANITE_MOE))
            if config.num_experts
            else (Layout(GRANITE_SHARED),)
        ),
        kept_fp32=_MAMBA_FP32,
    ),
    Architecture(
        "kolibri1",
        accepted={
            "partial_rotary_factor": (1.0,),
            "use_sliding_window": (True,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([],),
            "attention_bias": (False,),
        },
        read_entries=first_spelling(num_experts=("num_local_experts", "num_experts")),
        write_entries=_without_dense_size,
        layouts=lambda config: (Layout((*KOLIBRI, *PER_EXPERT)), Layout()),
    ),
    Architecture(
        "lfm2_moe",
        accepted={"attention_bias": (False,), "partial_rotary_factor": (1.0,)},
        read_entries=first_spelling(
            num_experts=("num_experts", "num_local_experts"),
            rms_norm_eps=("norm_eps",),
            tie_word_embeddings=("tie_embedding", "tie_word_embeddings"),
        ),
        write_entries=written_as(rms_norm_eps="norm_eps"),
        layouts=lambda config: (
            Layout((*LFM_MOE, *SHORT_CONV, *SHORT_CONV_MLP)),
            Layout((*LFM_MOE_MODULES, *SHORT_CONV, *SHORT_CONV_MLP)),
        ),
    ),
    Architecture(
        "llama4_text",
        "Llama4ForCausalLM",
        accepted={"router_jitter_noise": (0.0,), "partial_rotary_factor": (1.0,)},
        read_entries=_read_llama4,
        write_entries=written_as(num_experts="num_local_experts"),
        layouts=lambda config: (Layout(LLAMA4),),
    ),
    Architecture(
        "mixtral",
        read_entries=first_spelling(num_experts=("num_experts", "num_local_experts")),
        write_entries=written_as(num_experts="num_local_experts"),
        layouts=lambda config: (Layout(MIXTRAL), Layout()),
    ),
    # OLMoE's code could clip queries, keys and values; no published checkpoint does.
    Architecture(
        "olmoe",
        accepted={"clip_qkv": (None,)},
        read_entries=first_spelling(num_experts=("num_local_experts", "num_experts")),
        layouts=expert_layouts,
    ),
    Architecture("qwen2_moe", read_entries=_read_qwen_moe, write_entries=_write_qwen_moe, layouts=expert_layouts),
    Architecture(
        "qwen3_moe",
        read_entries=_read_qwen3_moe,
        write_entries=_write_qwen_moe,
        layouts=expert_layouts,
        quantized_formats=frozenset({"fp8"}),
    ),
    Architecture(
        "sarvam_mla",
        accepted={**SARVAM_ROUTER, "use_qkv_bias": (False,), "partial_rotary_factor": (1.0,)},
        read_entries=_read_sarvam_mla,
        read_rope=_read_sarvam_rope,
        write_entries=_write_deepseek,
        layouts=expert_layouts,
        keeps_extra_layers=True,
    ),
    Architecture(
        "sarvam_moe",
        accepted=SARVAM_ROUTER,
        read_entries=_read_sarvam_moe,
        write_entries=_write_routed_experts,
        layouts=lambda config: (Layout((*SARVAM, *PER_EXPERT)), *expert_layouts(config)),
        keeps_extra_layers=True,
    ),
)

FAMILIES = {architecture.model_type: architecture for architecture in (*_DENSE, *_MOE)}

"""Names of liger-kernel 0.8.5, TRL 1.16, transformers and others, and ours: hints for those who type them.

docs/coming-from.md has the same names in tables, with the options translated.
"""

from __future__ import annotations

from collections.abc import Collection

from ligerzoo.checks import is_text

OURS = {
    "sigmoid_norm": "dpo_loss(variant='sigmoid', average_log_prob=True)",
    "sft": "nll_weight=... with any variant",
    "kto_pair": "kto_loss(variant='kto')",
    "dpo": "dpo_loss(variant='sigmoid')",
    "bco": "dpo_loss(variant='bco_pair')",
    "simpo": "simpo_loss",
    "cpo": "cpo_loss",
    "orpo": "orpo_loss",
    "ppo": "ppo_clip_loss",
    "cosine_similarity": "distillation_loss(divergence='cosine')",
    "loss_type": "variant",
    "alpha": "nll_weight",
    "cpo_alpha": "nll_weight",
    "rpo_alpha": "nll_weight",
    "compute_nll_loss": "nll_weight",
    "simpo_gamma": "gamma",
    "ref_chosen_logps": "ref_logps, chosen completions first,",
    "ref_rejected_logps": "ref_logps, chosen completions first,",
    "preference_labels": "desirable",
    "importance_sampling_level": "level",
    "epsilon_low": "epsilon",
    "old_per_token_logps": "old_logps",
    "ref_per_token_logps": "ref_logps",
    "vllm_is_ratio": "correction",
    "importance_sampling_ratio": "correction",
    "use_bias_correction_kl": "is_kl_corrected",
    "max_completion_length": "max_length",
    "sapo_temperature_pos": "sapo_temperatures[0]",
    "sapo_temperature_neg": "sapo_temperatures[1]",
    "vespo_k_pos": "vespo_shapes[0][0]",
    "vespo_lambda_pos": "vespo_shapes[0][1]",
    "vespo_k_neg": "vespo_shapes[1][0]",
    "vespo_lambda_neg": "vespo_shapes[1][1]",
    "num_items_in_batch": "num_items",
    "weight_soft_loss": "soft_weight",
    "weight_hard_loss": "hard_weight",
    "use_ref_model": "ref_logps",
    **dict.fromkeys(
        ("ref_input", "ref_weight", "ref_bias", "ref_hidden"),
        "ref_logps, from sequence_logps(ref_hidden, ref_weight, target) without gradients (grpo_loss: token_logps),",
    ),
    "lin_weight": "weight",
    "selected_token_ids": "target",
    "attention_mask": "target, with ignore_index at masked tokens,",
    "chunk_size": "logits_budget",
    "chunk_mem_const": "logits_budget",
    "ce_weight": "class_weight",
    "weight": "class_weight",
    "lse_square_scale": "z_loss",
    "use_token_scaling": "token_weight, from token_logps(...).detach().exp(),",
    "return_z_loss": "return_statistics (the z-loss follows from its logsumexp)",
    "return_token_accuracy": "return_statistics (its accuracy)",
    "return_predicted_tokens": "return_statistics (its argmax)",
    **dict.fromkeys(("size_average", "reduce"), "reduction"),
    "batchmean": "reduction='mean', over tokens,",
    "shift_labels": "target",
    "jsd_beta": "beta",
    "student_input": "student_hidden",
    "teacher_input": "teacher_hidden",
    "student_weight": "weight",
    "student_bias": "bias",
    "true_labels": "target",
    "compute_ce_loss": "hard_weight",
    **dict.fromkeys(("log_q", "y_pred"), "student"),
    **dict.fromkeys(("log_p", "y_true"), "teacher"),
    "tp_group": "group",
    "mrope_section": "sections",
    "offset": "weight_offset",
    "zero_centered_gamma": "weight_offset=1.0",
    "casting_mode": "round_before_scale (True for 'llama', False for 'gemma')",
    "with_scale": "elementwise_affine",
    "impl": "backend",
    "rms_norm": "norm",
    "layer_norm": "norm",
    "swiglu": "mlp",
    "geglu": "mlp",
    "cross_entropy": "loss",
    "fused_linear_cross_entropy": "loss",
    "model": "hf_model",
    "hidden_act": "activation",
    "r": "rank",
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "modules_to_save": "trained",
    "use_dora": "dora",
}
"""Their variants, then their options -> ours."""

_LAYER_OPTIONS = {
    "hidden_size": "dim d_model embed_dim embedding_dim n_embd normalized_shape in_features input_dim",
    "intermediate_size": "hidden_dim ffn_dim dim_feedforward d_ff moe_intermediate_size",
    "num_heads": "num_attention_heads n_heads n_head nhead",
    "num_kv_heads": "num_key_value_heads n_kv_heads n_query_groups num_query_groups",
    "head_dim": "head_size kdim vdim",
    "window": "sliding_window window_size sliding_window_size",
    "scale": "scaling softmax_scale sm_scale routed_scaling_factor",
    "softcap": "logits_soft_cap attn_logit_softcapping final_logit_softcapping logit_softcapping soft_cap",
    "is_causal": "causal",
    "qkv_bias": "attention_bias bias attn_bias add_bias_kv",
    "output_bias": "attention_bias bias",
    "bias": "mlp_bias use_bias",
    "rotary": "pos_embeddings rotary_emb rope position_embeddings",
    "dim": "head_dim rotary_dim",
    "theta": "base rope_theta rope_base",
    "scaling": "rope_scaling rope_parameters",
    "max_position_embeddings": "max_seq_len max_seq_length max_positions",
    "eps": "epsilon norm_eps rms_norm_eps variance_epsilon layer_norm_eps",
    "elementwise_affine": "with_scale affine",
    "num_experts": "n_experts num_local_experts n_routed_experts",
    "num_experts_per_token": "top_k topk num_experts_per_tok k n_activated_experts moe_top_k",
    "renormalize": "norm_topk_prob normalize norm_topk",
    "num_groups": "n_group n_groups",
    "num_selected_groups": "topk_group",
    "gate": "router",
    "jitter_noise": "router_jitter_noise",
    "num_key_heads": "num_heads num_attention_heads linear_num_key_heads",
    "num_value_heads": "num_heads num_attention_heads linear_num_value_heads num_v_heads",
    "key_head_dim": "head_dim head_k_dim linear_key_head_dim",
    "value_head_dim": "head_dim head_v_dim linear_value_head_dim",
    "conv_kernel_size": "conv_size linear_conv_kernel_dim",
    "vocab_size": "out_features num_embeddings",
    "target": "labels",
    "hidden": "_input input hidden_states",
    "logits": "_input input",
    "embed_tokens": "tok_embeddings embedding embeddings wte",
    "activation": "act_fn act hidden_activation",
    "temperature": "scale",
    "similarity": "similarity_fct similarity_function",
    "group": "gather_across_devices",
    "dims": "matryoshka_dims",
}

"""Our options of layers -> theirs. One of theirs may have several of ours, of which a layer accepts some."""

UNSUPPORTED = {
    "config": "layers take numbers, such as config.hidden_size, and modules",
    "layer_idx": "layers do not know their index; their caches belong to the context",
    "batch_first": "all tensors begin with the batch, (B, T, H)",
    "attention_dropout": "attention has no dropout",
    "aot": "it sorts the margins of the whole batch",
    "aot_unpaired": "it sorts the log-ratios of the whole batch",
    "alphapo": "ligerzoo does not implement it",
    "compiled": "the losses need no torch.compile",
    "accum_dtype": "gradients of the head's weight accumulate in fp32",
    "log_target": "the divergences take logits of the teacher",
    "return_soft_hard_loss": "the metrics always have soft_loss and hard_loss",
    "num_shards": "ligerzoo.memory.plan_activations recomputes MLPs as far as a budget requires",
    "init_fn": "the scale is 1 at first, with every weight_offset",
    "in_place": "no kernel overwrites its inputs or the gradient of its output",
    "row_mode": "the kernels choose their launch",
    "mode": "the kernels choose their launch",
    "unsqueeze_dim": "cosines and sines have shape (B or 1, T, R/2)",
    "rotary_dim": "the size of cosines and sines says how many features are rotated",
    "gate_multiplier": "multiply the gate's features, or the weights of gate_proj",
    "down_multiplier": "multiply the output, or the weights of down_proj",
}
"""Their variants, then their options that ligerzoo does not have -> the reason."""

_FOR_WRAPPED = "ligerzoo.integrations.transformers.wrap(model)"

_NAMES = {
    "ligerzoo.AutoModel": "AutoModelForCausalLM AutoModelForImageTextToText AutoModelForVision2Seq LLM",
    "ligerzoo.AutoModel and its generate, or the pipeline itself with " + _FOR_WRAPPED + ",": "pipeline",
    "the class of transformers, which takes a ligerzoo.Tokenizer,": (
        "DataCollatorForLanguageModeling DataCollatorWithPadding TextIteratorStreamer"
    ),
    "the options of model.generate": "GenerationConfig",
    "model.new_cache() or ligerzoo.layers.KVCache": "DynamicCache StaticCache HybridCache SlidingWindowCache",
    "ligerzoo.integrations.torchao": "BitsAndBytesConfig",
    "torch.manual_seed": "set_seed",
    "ligerzoo.Tokenizer": "AutoTokenizer PreTrainedTokenizerFast",
    "ligerzoo.Processor": "AutoProcessor",
    "ligerzoo.hub.read_config": "AutoConfig",
    "ligerzoo.adapters.add_lora": "LoraConfig get_peft_model FastLanguageModel FastVisionModel LoRALinear",
    "ligerzoo.adapters.load_adapter": "PeftModel PeftModelForCausalLM",
    "`ligerzoo train`, or the trainer itself with " + _FOR_WRAPPED + ",": (
        "Trainer SFTTrainer DPOTrainer KTOTrainer ORPOTrainer CPOTrainer GRPOTrainer GKDTrainer LigerORPOTrainer "
        "RewardTrainer Seq2SeqTrainer TrainingArguments SFTConfig DPOConfig KTOConfig ORPOConfig CPOConfig GRPOConfig "
        "GKDConfig RewardConfig"
    ),
    "ligerzoo.integrations": "transformers",
    "ligerzoo.kernels": "functional ops",
    "ligerzoo.losses": "chunked_loss",
    "ligerzoo.losses.ContrastiveLoss": (
        "MultipleNegativesRankingLoss CachedMultipleNegativesRankingLoss MultipleNegativesSymmetricRankingLoss"
    ),
    "ligerzoo.integrations.apply(model)": "_apply_liger_kernel _apply_liger_kernel_to_instance",
    "ligerzoo.integrations.AutoKernelModelForCausalLM": "AutoLigerKernelForCausalLM",
    "ligerzoo.layers.set_backend": "set_impl get_impl available_impls set_backend get_backend available_backends",
    "ligerzoo.layers.RMSNorm": "LigerRMSNorm LigerRMSNormForOlmo2 LigerRMSNormForGlm4 LigerMegatronRMSNorm",
    "ligerzoo.layers.RMSNorm(..., weight_offset=1.0, round_before_scale=False)": (
        "LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 LigerRMSNormForQwen3Next "
        "LigerRMSNormForMuseGlimmerTextCentered"
    ),
    "ligerzoo.layers.RMSNorm(..., round_before_scale=False)": "LigerRMSNormForGemma4 LigerRMSNormForMuseGlimmer",
    "ligerzoo.kernels.rms_norm": "liger_rms_norm LigerRMSNormFunction",
    "ligerzoo.kernels.add_rms_norm": (
        "LigerFusedAddRMSNorm liger_fused_add_rms_norm fused_add_rms_norm LigerFusedAddRMSNormFunction"
    ),
    "ligerzoo.layers.LayerNorm": "LigerLayerNorm",
    "ligerzoo.layers.Attention": "MultiHeadAttention CausalSelfAttention",
    "ligerzoo.layers.RotaryEmbedding": "RotaryPositionalEmbeddings",
    "ligerzoo.layers.PreNormBlock": "TransformerSelfAttentionLayer",
    "ligerzoo.layers.CrossAttentionBlock": "TransformerCrossAttentionLayer",
    "ligerzoo.layers.Decoder": "TransformerDecoder",
    "ligerzoo.layers.LMHead": "CEWithChunkedOutputLoss",
    "ligerzoo.kernels.layer_norm": "liger_layer_norm LigerLayerNormFunction",
    "ligerzoo.layers.GatedMLP": (
        "LigerSwiGLUMLP LigerMLP LigerPhi3SwiGLUMLP LigerQwen3MoeSwiGLUMLP LigerHunyuanV1SwiGLUMLP "
        "LigerSwiGLUMLPForMuseGlimmer LigerMegatronSwiGLU LigerFalconH1MLP LigerFalconH1SwiGLUMLP FeedForward LLaMAMLP"
    ),
    "ligerzoo.layers.GatedMLP(..., activation='gelu_tanh')": "LigerGEGLUMLP LigerGEGLUMLPForGemma4",
    "ligerzoo.layers.UngatedMLP(..., activation='relu2')": "LigerReLUSquared",
    "ligerzoo.kernels.activation_linear(..., activation='relu2')": "liger_relu_squared LigerReLUSquaredFunction",
    "ligerzoo.memory.plan_activations": (
        "LigerTiledSwiGLUMLP LigerTiledGEGLUMLP LigerTiledMLPFunction apply_tiled_mlp"
    ),
    "ligerzoo.kernels.swiglu": "liger_swiglu LigerSiLUMulFunction LigerFusedGateUpSiLUMulFunction",
    "ligerzoo.kernels.glu_linear": "LigerMLPFunction",
    "ligerzoo.kernels.geglu": "liger_geglu LigerGELUMulFunction",
    "ligerzoo.layers.MoE": "LigerExperts LigerBlockSparseTop2MLP",
    "ligerzoo.kernels.experts_mlp": "LigerFusedMoEFunction",
    "ligerzoo.layers.Embedding": "LigerEmbedding LigerEmbeddingFunction",
    "ligerzoo.kernels.softmax": "LigerSoftmax liger_softmax LigerSoftmaxFunction",
    "ligerzoo.kernels.rope": (
        "liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision liger_rope LigerRopeFunction"
    ),
    "ligerzoo.kernels.rope(..., interleaved=True)": (
        "liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb apply_liger_llama4_rope_full "
        "LigerLlama4RopeFunction"
    ),
    "ligerzoo.layers.SectionedRotaryEmbedding": (
        "liger_qwen2vl_mrope liger_multimodal_rotary_pos_emb LigerQwen2VLMRopeFunction"
    ),
    "ligerzoo.losses.CrossEntropyLoss": "LigerCrossEntropyLoss",
    "ligerzoo.kernels.cross_entropy": "liger_cross_entropy LigerCrossEntropyFunction",
    "ligerzoo.losses.LinearCrossEntropyLoss": "LigerFusedLinearCrossEntropyLoss",
    "ligerzoo.kernels.linear_cross_entropy": (
        "liger_fused_linear_cross_entropy fused_linear_cross_entropy LigerFusedLinearCrossEntropyFunction"
    ),
    "ligerzoo.kernels.TokenStatistics": "CrossEntropyOutput",
    "ligerzoo.kernels.token_statistics": "LigerFusedLinearScaledCrossEntropyFunction",
    "ligerzoo.parallel.vocab_parallel_linear_cross_entropy": (
        "LigerVocabParallelCrossEntropy LigerVocabParallelCEFunction LigerMegatronCrossEntropy "
        "liger_fused_linear_scaled_cross_entropy_tp LigerFusedLinearScaledCrossEntropyTPFunction"
    ),
    "ligerzoo.losses.KLDivLoss": "LigerKLDIVLoss",
    "ligerzoo.kernels.kl_div": "liger_kl_div LigerKLDivLossFunction",
    "ligerzoo.losses.JSDLoss": "LigerJSD",
    "ligerzoo.kernels.jsd": "liger_jsd LigerJSDFunction",
    "ligerzoo.losses.TVDLoss": "LigerTVDLoss",
    "ligerzoo.kernels.tvd": "liger_tvd LigerTVDLossFunction",
    "ligerzoo.losses.LinearJSDLoss": "LigerFusedLinearJSD",
    "ligerzoo.kernels.linear_jsd": "liger_fused_linear_jsd fused_linear_jsd LigerFusedLinearJSDFunction",
    "ligerzoo.losses.CrossEntropyLoss and TVDLoss, both with reduction='none',": (
        "LigerFusedCETVDLoss LigerFusedCETVDFunction"
    ),
    "ligerzoo.losses.DPO or dpo_loss": (
        "LigerFusedLinearDPOLoss LigerFusedLinearDPOFunction liger_fused_linear_dpo LigerFusedLinearPreferenceBase"
    ),
    "ligerzoo.losses.KTO or kto_loss": (
        "LigerFusedLinearKTOLoss LigerFusedLinearKTOFunction liger_fused_linear_kto "
        "LigerFusedLinearUnpairedPreferenceBase"
    ),
    "ligerzoo.losses.ORPO or orpo_loss": (
        "LigerFusedLinearORPOLoss LigerFusedLinearORPOFunction liger_fused_linear_orpo"
    ),
    "ligerzoo.losses.CPO or cpo_loss": "LigerFusedLinearCPOLoss LigerFusedLinearCPOFunction liger_fused_linear_cpo",
    "ligerzoo.losses.SimPO or simpo_loss": (
        "LigerFusedLinearSimPOLoss LigerFusedLinearSimPOFunction liger_fused_linear_simpo"
    ),
    "ligerzoo.losses.GRPO or grpo_loss": (
        "LigerFusedLinearGRPOLoss LigerFusedLinearGRPOFunction liger_fused_linear_grpo GrpoLossFunction "
        "LigerFusedLinearPPOBase"
    ),
    "ligerzoo.losses.Distillation": "LigerFusedLinearJSDLoss LigerFusedLinearDistillationBase",
    "ligerzoo.losses.Distillation(divergence='cosine')": (
        "LigerFusedLinearCosineSimilarityLoss LigerFusedLinearCosineSimilarityFunction liger_fused_linear_cosine"
    ),
}

_FLAGS = {
    "MODEL": "model_name_or_path base_model model_name pretrained_model_name_or_path model_id checkpoint_dir",
    "--tokenizer": "tokenizer_name tokenizer_name_or_path",
    "--data": "dataset datasets dataset_name train_file train_data train_dataset data_path dataset_path data_files",
    "--eval-data": "eval_dataset eval_file validation_file val_data test_data test_datasets val_set_size",
    "--output": "output_dir out out_dir save_dir",
    "--lr": "learning_rate optimizer_lr peak_lr",
    "--schedule": "lr_scheduler_type lr_scheduler scheduler lr_schedule",
    "--warmup": "warmup_ratio warmup_steps num_warmup_steps lr_warmup_steps",
    "--batch-size": "per_device_train_batch_size micro_batch_size train_batch_size global_batch_size",
    "--accumulate": "gradient_accumulation_steps grad_accum gradient_accumulation accumulate_steps",
    "--epochs": "num_train_epochs num_epochs",
    "--max-steps": "max_steps_per_epoch num_steps steps iters total_steps",
    "--seq-length": "max_seq_length max_length sequence_len max_seq_len block_size cutoff_len model_max_length",
    "--packing": "sample_packing packed",
    "--packing none": "no_packing no_sample_packing",
    "--train-on-prompt": "train_on_inputs train_on_input",
    "--lora-rank": "lora_r r rank use_peft adapter peft",
    "--lora-targets": "lora_target_modules target_modules lora_attn_modules",
    "--dora": "use_dora peft_use_dora",
    "--train-only": "unfrozen_parameters",
    "--optimizer": "optim optimizer_name",
    "--max-grad-norm": "clip_grad_norm gradient_clipping grad_clip gradient_clip_val",
    "--optimizer-in-backward": "optimizer_in_bwd",
    "--weight-decay": "wd",
    "--dtype": "torch_dtype precision",
    "--dtype bfloat16": "bf16",
    "--dtype float32": "fp32",
    "--dtype float16": "fp16 half",
    "--activation-checkpointing": "gradient_checkpointing enable_activation_checkpointing grad_checkpoint",
    "--resume": "resume_from_checkpoint auto_resume_from_checkpoints resume_from",
    "--eval-every": "eval_steps evaluation_strategy eval_strategy eval_interval val_interval",
    "--save-every": "save_steps save_strategy save_interval checkpoint_every",
    "--keep": "save_total_limit max_checkpoints",
    "--tracker": "report_to log_with metric_logger",
    "--tracker wandb": "wandb use_wandb wandb_project",
    "--config": "config_file yaml",
    "--method dpo": "dpo",
    "--method": "rl stage task method_name",
    "--variant": "loss_type",
    "--gamma": "simpo_gamma gamma_beta_ratio",
    "--nll-weight": "rpo_alpha cpo_alpha",
    "--precompute-reference": "precompute_ref_log_probs",
    "--reward": "reward_funcs reward_function reward_fn",
    "--num-samples": "num_generations rollouts_per_prompt",
    "--teacher": "teacher_model teacher_model_name_or_path",
    "--divergence": "kd_loss",
    "--mask-fraction": "mlm_probability",
    "--mesh": "fsdp fsdp_config deepspeed tensor_parallel_size tensor_parallel_dim tp",
    "--max-new-tokens": "max_completion_length max_length max_tokens n_predict num_tokens length",
    "--temperature": "temp",
    "--stop": "stop_strings stop_sequences stop_words",
    "--draft": "assistant_model draft_model speculative_model",
    "--prompt-lookup": "prompt_lookup_num_tokens",
    "--chat-template": "template chat_template_path",
    "--system": "system_prompt system_message",
    "--batch": "input_file prompts_file",
    "--api-key": "key token",
    "--name": "served_model_name model_alias alias",
    "--max-context": "max_model_len ctx_size n_ctx context_length",
    "--max-cache-tokens": "gpu_memory_utilization",
    "--adapter": "lora lora_modules peft_model adapter_name_or_path lora_path lora_dir",
    "--import": "trust_remote_code plugin user_dir custom_module import_path",
    "--device": "device_map",
    "--tasks": "task eval_tasks",
    "--pooling": "pooling_mode pooler",
    "--dimensions": "truncate_dim dim",
    "--normalize": "normalize_embeddings",
}
"""Our options of the command line, and those of other libraries. One may mean another option for another command."""

_ENDINGS = {
    "RMSNorm": "ligerzoo.layers.RMSNorm",
    "RotaryEmbedding": "ligerzoo.layers.RotaryEmbedding",
    "SparseMoeBlock": "ligerzoo.layers.MoE",
    "DecoderLayer": "ligerzoo.layers.PreNormBlock",
    "Attention": "ligerzoo.layers.Attention",
    "MLP": "ligerzoo.layers.GatedMLP",
    "Model": "ligerzoo.AutoModel",
}
"""Endings of the names of transformers' classes, such as LlamaRMSNorm, and ours."""

_MODULES = {
    "transformers": (
        "functional monkey_patch auto_model rms_norm rope swiglu geglu layer_norm cross_entropy jsd kl_div "
        "fused_linear_cross_entropy fused_linear_jsd trainer"
    ),
    "ops": "rms_norm rope swiglu geglu layer_norm cross_entropy jsd kl_div fused_linear_cross_entropy fused_linear_jsd",
    "chunked_loss": "functional dpo_loss grpo_loss kto_loss orpo_loss cpo_loss simpo_loss jsd_loss",
    "functional nn megatron triton utils": "",
}

MODULES = [
    *" ".join(_MODULES).split(),
    *(f"{package}.{name}" for package, names in _MODULES.items() for name in names.split()),
]
"""Modules of liger-kernel, without its name."""

_NO_LAYER = "no architecture of ligerzoo has it"

_REASONS = {
    _NO_LAYER: (
        "LigerDyT liger_dyt LigerDyTFunction LigerPolyNorm liger_poly_norm LigerPolyNormFunction LigerGroupNorm "
        "liger_group_norm LigerGroupNormFunction LigerSparsemax liger_sparsemax LigerSparsemaxFunction "
        "LigerModulatedRMSNorm liger_modulated_rms_norm LigerModulatedRMSNormFunction LigerMultiTokenAttention "
        "liger_multi_token_attention LigerMultiTokenAttentionFunction LigerFusedNeighborhoodAttention "
        "LigerFusedNeighborhoodAttentionLayer LigerFusedNeighborhoodAttentionConfig "
        "liger_fused_neighborhood_attention LigerFusedNeighborhoodAttentionFunction LigerMHC liger_mhc_apply "
        "liger_mhc_coeffs liger_mhc_forward liger_mhc_post_res liger_mhc_pre LigerMHCCoeffsFunction "
        "LigerMHCPostResFunction LigerMHCPreFunction liger_attn_res LigerAttnResFunction"
    ),
    "the teacher is a head, not probabilities: see ligerzoo.kernels.linear_kl_div": (
        "LigerFusedLinearKLDivLoss liger_fused_linear_kl_div LigerFusedLinearKLDivFunction"
    ),
    'ligerzoo.parallel.parallelize(model, "expert=2") divides the experts of a model': "LigerExpertParallelFusedMoe",
    "ligerzoo has no integration with Megatron-Core": "apply_liger_kernel_to_megatron",
    "ligerzoo uses the cache manager of Triton": "apply_liger_triton_cache_manager LigerTritonFileCacheManager",
    "ligerzoo needs no transformers": "is_transformers_available",
    "ligerzoo has causal language models, their classifiers, and encoders with a head for masked tokens": (
        "AutoModelForSeq2SeqLM AutoModelForQuestionAnswering"
    ),
}


def _by_name(groups: dict[str, str]) -> dict[str, str]:
    return {name: answer for answer, names in groups.items() for name in names.split()}


NAMES = _by_name(_NAMES)
"""Their public names -> ours."""

MISSING = _by_name(_REASONS)
"""Their public names that ligerzoo has no counterpart of -> the reason."""


def our_name(theirs: object) -> str | None:
    """Returns a remedy with our name for a variant or an option; None if the other libraries lack it too."""
    if not is_text(theirs):
        return None
    if theirs in OURS:
        return f"Use {OURS[theirs]} instead of {theirs!r} of other libraries"
    if theirs in UNSUPPORTED:
        return f"{theirs!r} of other libraries is not supported: {UNSUPPORTED[theirs]}"
    return None


def our_option(theirs: str, accepted: Collection[str]) -> str | None:
    """Returns a remedy with those of our options that a layer accepts for an option of another library's layer."""
    ours = [one for one, names in _LAYER_OPTIONS.items() if one in accepted and theirs in names.split()]
    return f"Use {' and '.join(ours)} instead of {theirs!r} of other libraries" if ours else our_name(theirs)


def our_flag(theirs: str, accepted: Collection[str]) -> str | None:
    """Returns our option of the command line for one of another library, possibly with its value; None if not known.

    Args:
        theirs: such as "--learning_rate", "per-device-train-batch-size" or "train.max_steps".
        accepted: our options.
    """
    names = {theirs.lstrip("-").replace("-", "_").lower()}
    names |= {name.rpartition(".")[2] for name in names} | {name.replace(".", "_") for name in names}
    ours = (one for one, foreign in _FLAGS.items() if one.split()[0] in accepted and names & {*foreign.split()})
    return next(ours, None)


def our_public_name(theirs: str) -> str | None:
    """Returns a remedy with our name for a class or a function of another library; None if it is not known."""
    if theirs.startswith("apply_liger_kernel_to_") and theirs not in MISSING:
        return f"Use ligerzoo.integrations.apply(model) instead of {theirs!r}"
    if theirs.endswith(("ForCausalLM", "ForConditionalGeneration")) and theirs not in NAMES:
        return f"Use ligerzoo.AutoModel instead of {theirs!r}"
    if theirs in MISSING:
        return f"{theirs!r} is not supported: {MISSING[theirs]}"
    ours = NAMES.get(theirs) or next((one for ending, one in _ENDINGS.items() if theirs.endswith(ending)), None)
    return f"Use {ours} instead of {theirs!r}" if ours else None

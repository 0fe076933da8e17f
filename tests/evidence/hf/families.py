#!/usr/bin/env python3
"""Writes families.jsonl: a tiny model of each family, and what PyTorch and transformers compute from it on a CPU in f32.

    python families.py families.jsonl [--tokens 16] [--only NAME] [--more]

Each line has the config.json, the names and shapes of the stored tensors, the loss before training and after one and two
AdamW steps, and greedy tokens. The elements of tensors are not stored: `element` computes them from the tensor's name and
the case's salt, and tests/hugging_face/families.rs does the same. In names, `#` stands for the number of a layer or of an
expert; `layers` and `experts` list them. --more adds further options of the families, which the repository does not have.
"""

import argparse, json, math, os, re, sys, tempfile, warnings
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
warnings.filterwarnings("ignore")

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()

TOKENS, STEPS = 20, 2


def small(**changes):
    base = dict(vocab_size=80, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=None)
    return {**base, **changes}


def rope(**options):
    return dict(rope_parameters=dict(rope_theta=10000.0, **options))


YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0)
LONG = dict(rope_type="longrope", short_factor=[1.0, 1.1, 1.3, 1.6], long_factor=[1.0, 2.0, 3.0, 4.0])
SPARSE = dict(num_experts_per_tok=2, moe_intermediate_size=20)
DEEPSEEK = small(num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
                 first_k_dense_replace=1, n_routed_experts=6, n_shared_experts=1, **SPARSE)
LLAMA4_LONG = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, max_position_embeddings=64, beta_fast=32.0,
                   beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
FULL, SLIDING = "full_attention", "sliding_attention"
VISION = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4)
CLIP = dict(VISION, vocab_size=16, projection_dim=16)
QWEN_VISION = dict(depth=1, hidden_size=16, intermediate_size=20, num_heads=2, patch_size=4, out_hidden_size=32)
MROPE = dict(rope_type="default", mrope_section=[2, 1, 1])

# (name, model_type, config). The first case of each family is in the repository.
CASES = [
    ("gemma", "gemma", small(head_dim=12, hidden_activation="gelu_pytorch_tanh")),
    ("phi3_long", "phi3", small(num_key_value_heads=1, max_position_embeddings=64, original_max_position_embeddings=4, **rope(**LONG))),
    ("olmo3_yarn", "olmo3", small(num_hidden_layers=4, sliding_window=6, rope_scaling=YARN, rope_theta=10000.0)),
    ("olmoe", "olmoe", small(num_experts=6, num_experts_per_tok=2, clip_qkv=1.5)),
    ("granite", "granite", small(embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.4, attention_multiplier=0.2)),
    ("granitemoe", "granitemoe", small(num_local_experts=4, num_experts_per_tok=2, embedding_multiplier=3.0, logits_scaling=2.0,
                                       residual_multiplier=0.4, attention_multiplier=0.2)),
    ("glm", "glm", small(head_dim=12, partial_rotary_factor=0.5)),
    ("glm4", "glm4", small(head_dim=8)),
    ("smollm3", "smollm3", small(no_rope_layers=[1, 0], rms_norm_eps=1e-5)),
    ("gpt_neox", "gpt_neox", dict(small(rotary_pct=0.5, layer_norm_eps=1e-4), num_key_value_heads=None)),
    ("starcoder2", "starcoder2", small(sliding_window=6, tie_word_embeddings=False)),
    ("stablelm", "stablelm", small(use_qkv_bias=True, partial_rotary_factor=0.5)),
    ("cohere", "cohere", small(logit_scale=0.25)),
    ("cohere2", "cohere2", small(num_hidden_layers=3, sliding_window=6, logit_scale=0.25, layer_types=[SLIDING, FULL, SLIDING])),
    ("deepseek_v2", "deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "routed_scaling_factor": 1.5}),
    ("deepseek_v2_groups", "deepseek_v2", {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2}),
    ("deepseek_v3_mtp", "deepseek_v3", {**DEEPSEEK, "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 1}),
    ("ernie4_5", "ernie4_5", small(head_dim=12, use_bias=True)),
    ("seed_oss", "seed_oss", small(head_dim=12, attention_out_bias=True)),
    ("hunyuan_v1_dense", "hunyuan_v1_dense", small(head_dim=8, **rope(rope_type="dynamic", alpha=50.0, factor=1.0))),
    ("exaone4", "exaone4", small(num_hidden_layers=3, sliding_window=6, layer_types=[SLIDING, FULL, SLIDING])),
    ("arcee", "arcee", small(mlp_bias=True)),
    ("apertus", "apertus", small()),
    ("ministral", "ministral", small(head_dim=12, sliding_window=6, layer_types=[SLIDING, FULL])),
    ("ministral3", "ministral3", small(head_dim=12, **rope(**LLAMA4_LONG))),
    ("glm4_moe", "glm4_moe", small(head_dim=12, n_routed_experts=6, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True,
                                   n_group=2, topk_group=1, routed_scaling_factor=1.5, num_nextn_predict_layers=0, **SPARSE)),
    ("dots1", "dots1", small(head_dim=12, n_routed_experts=4, n_shared_experts=2, first_k_dense_replace=1, norm_topk_prob=True,
                             sliding_window=6, max_window_layers=1, **SPARSE)),
    ("minimax_m2", "minimax_m2", small(head_dim=12, num_local_experts=4, num_experts_per_tok=2, rotary_dim=6)),
    ("llama4_text", "llama4_text", small(num_hidden_layers=4, head_dim=12, intermediate_size_mlp=52, num_local_experts=4, num_experts_per_tok=2,
                                         attention_chunk_size=8, floor_scale=5, interleave_moe_layer_step=2)),
    ("gpt_oss", "gpt_oss", small(head_dim=12, num_local_experts=4, num_experts_per_tok=2, sliding_window=6, swiglu_limit=0.8,
                                 **rope(**YARN, truncate=False))),
    ("llama_dynamic", "llama", small(max_position_embeddings=12, hidden_act="gelu", **rope(rope_type="dynamic", factor=2.0))),
    ("exaone", "exaone", small(rms_norm_eps=1e-4)),
    ("cwm", "cwm", small(num_hidden_layers=4, head_dim=12, sliding_window=6)),
    ("helium", "helium", small(head_dim=8, attention_bias=True)),
    ("internlm3", "internlm3", small(head_dim=12, attention_bias=True, mlp_bias=True)),
    ("iquestcoder", "iquestcoder", small(head_dim=12)),
    ("jais2", "jais2", small()),
    ("nemotron", "nemotron", small(head_dim=12)),
    ("olmo", "olmo", small(clip_qkv=1.5)),
    ("vaultgemma", "vaultgemma", small(head_dim=12, sliding_window=6, query_pre_attn_scalar=20)),
    ("hyperclovax", "hyperclovax", small(embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.4)),
    ("granitemoehybrid", "granitemoehybrid", small(layer_types=[FULL, FULL], num_local_experts=0, shared_intermediate_size=44, position_embedding_type="rope",
                                                   embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.4, attention_multiplier=0.2, mamba_n_heads=4)),
    ("granitemoeshared", "granitemoeshared", small(num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=24, embedding_multiplier=3.0,
                                                   logits_scaling=2.0, residual_multiplier=0.4, attention_multiplier=0.2)),
    ("flex_olmo", "flex_olmo", small(num_experts=6, num_experts_per_tok=2)),
    ("solar_open", "solar_open", small(head_dim=12, n_routed_experts=6, n_group=2, topk_group=1, attention_bias=True, **SPARSE)),
    ("glm4_moe_lite", "glm4_moe_lite", {**{k: v for k, v in DEEPSEEK.items() if k != "first_k_dense_replace"}, "n_group": 2, "topk_group": 1,
                                        "mlp_layer_types": ["sparse", "dense"]}),
    ("youtu", "youtu", {k: v for k, v in DEEPSEEK.items() if k not in ("first_k_dense_replace", "n_routed_experts", "n_shared_experts", *SPARSE)}),
    ("minicpm3", "minicpm3", small(num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10,
                                   scale_emb=3.0, scale_depth=0.7, dim_model_base=16, tie_word_embeddings=False)),
    ("hunyuan_v1_moe", "hunyuan_v1_moe", small(head_dim=8, num_experts=4, moe_topk=2)),
    ("ernie4_5_moe", "ernie4_5_moe", small(num_hidden_layers=3, head_dim=12, use_bias=True, moe_num_experts=5, moe_k=2, moe_intermediate_size=20,
                                           moe_num_shared_experts=2, moe_layer_end_index=1)),
    ("exaone_moe", "exaone_moe", small(num_hidden_layers=3, sliding_window=6, layer_types=[SLIDING, FULL, SLIDING], num_experts=6, n_group=2, topk_group=1,
                                       mlp_layer_types=["sparse", "dense", "sparse"], **SPARSE)),
    ("afmoe", "afmoe", small(num_hidden_layers=3, head_dim=12, sliding_window=6, layer_types=[SLIDING, FULL, SLIDING], num_experts=5, num_shared_experts=2,
                             route_scale=1.5, mup_enabled=True, **SPARSE)),
    ("hy_v3", "hy_v3", small(num_hidden_layers=3, head_dim=12, num_experts=5, mlp_layer_types=["sparse", "dense", "sparse"], num_shared_experts=2,
                             attention_bias=True, **SPARSE)),
    ("mellum", "mellum", small(head_dim=12, sliding_window=6, layer_types=[SLIDING, FULL], num_experts=5, **SPARSE)),
    ("phi", "phi", small()),
    ("falcon", "falcon", dict(vocab_size=80, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
                              tie_word_embeddings=False)),
    ("persimmon", "persimmon", dict(small(), num_key_value_heads=None)),
    ("gptj", "gptj", dict(vocab_size=80, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, bos_token_id=1, eos_token_id=2)),
    ("nanochat", "nanochat", small(final_logit_softcapping=5.0)),
    # Multimodal models, of which texts use the text part.
    ("gemma3", "gemma3", dict(text_config=small(num_hidden_layers=3, head_dim=12, sliding_window=6, query_pre_attn_scalar=20,
                                                layer_types=[SLIDING, FULL, SLIDING]), vision_config=VISION, mm_tokens_per_image=4)),
    ("llama4", "llama4", dict(text_config=small(num_hidden_layers=4, head_dim=12, intermediate_size_mlp=52, num_local_experts=4, num_experts_per_tok=2,
                                                attention_chunk_size=8, floor_scale=5, interleave_moe_layer_step=2),
                              vision_config=dict(VISION, intermediate_size=64, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16))),
    ("mistral3", "mistral3", dict(text_config=small(model_type="mistral", head_dim=12, sliding_window=6), vision_config=dict(VISION, head_dim=8),
                                  tie_word_embeddings=False)),
    ("llava", "llava", dict(text_config=small(model_type="llama", attention_bias=True), vision_config=CLIP)),
    ("internvl", "internvl", dict(text_config=small(model_type="qwen2"), vision_config=dict(VISION, image_size=[8, 8], patch_size=[4, 4]))),
    ("idefics3", "idefics3", dict(text_config=small(model_type="llama", pad_token_id=5), vision_config=VISION)),
    ("qwen2_vl", "qwen2_vl", dict(text_config=small(**rope(**MROPE)), vision_config=dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2, patch_size=4, mlp_ratio=2))),
    ("qwen2_5_vl", "qwen2_5_vl", dict(text_config=small(rope_scaling=dict(type="mrope", mrope_section=[2, 1, 1]), rope_theta=5000.0),
                                      vision_config=dict(QWEN_VISION, fullatt_block_indexes=[0]), tie_word_embeddings=True)),
    ("qwen3_vl", "qwen3_vl", dict(text_config=small(head_dim=12, **rope(rope_type="default", mrope_section=[2, 2, 2], mrope_interleaved=True)),
                                  vision_config=dict(QWEN_VISION, num_position_embeddings=16, deepstack_visual_indexes=[0]))),
    ("qwen3_vl_moe", "qwen3_vl_moe", dict(text_config=small(head_dim=12, num_experts=4, **SPARSE, **rope(rope_type="default", mrope_section=[2, 2, 2], mrope_interleaved=True)),
                                          vision_config=dict(QWEN_VISION, num_position_embeddings=16, deepstack_visual_indexes=[0]))),
    ("glm4v", "glm4v", dict(text_config=small(**rope(rope_type="default", partial_rotary_factor=0.5, mrope_section=[1, 1, 0])),
                            vision_config=dict(QWEN_VISION, image_size=8))),
]

MORE = [
    ("exaone_tied", "exaone", small(head_dim=12, tie_word_embeddings=True)),
    ("hy_v3_plain", "hy_v3", small(head_dim=8, num_experts=4, num_shared_experts=1, mlp_bias=True, router_scaling_factor=1.0, **SPARSE)),
    ("granitemoeshared_none", "granitemoeshared", small(num_local_experts=3, num_experts_per_tok=1, attention_bias=True, tie_word_embeddings=True)),
    ("falcon_serial", "falcon", dict(vocab_size=80, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
                                     parallel_attn=False, multi_query=False, bias=True, ffn_hidden_size=40, activation="gelu_new")),
    ("persimmon_plain", "persimmon", dict(small(qk_layernorm=False, partial_rotary_factor=1.0, tie_word_embeddings=True, hidden_act="gelu"), num_key_value_heads=None)),
    ("gptj_whole", "gptj", dict(vocab_size=80, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=8, n_inner=40, activation_function="relu", bos_token_id=1, eos_token_id=2)),
    ("cwm_full", "cwm", small(layer_types=[FULL, FULL], tie_word_embeddings=True)),
    ("helium_plain", "helium", small(num_key_value_heads=1, head_dim=8, mlp_bias=True, tie_word_embeddings=True)),
    ("jais2_plain", "jais2", small(attention_bias=False, mlp_bias=False, tie_word_embeddings=True)),
    ("nemotron_bias", "nemotron", small(attention_bias=True, mlp_bias=True, partial_rotary_factor=1.0)),
    ("olmo_tied", "olmo", small(attention_bias=True, tie_word_embeddings=True)),
    ("vaultgemma_plain", "vaultgemma", small(head_dim=8, num_hidden_layers=3, sliding_window=5, attention_bias=True, final_logit_softcapping=None)),
    ("hyperclovax_plain", "hyperclovax", small(use_post_norm=False, attention_multiplier=0.2, head_dim=12)),
    ("granitemoehybrid_nope", "granitemoehybrid", small(layer_types=[FULL, FULL], num_local_experts=0, shared_intermediate_size=36, tie_word_embeddings=True, mamba_n_heads=4, attention_bias=True)),
    ("flex_olmo_norm", "flex_olmo", small(num_experts=4, num_experts_per_tok=3, norm_topk_prob=True, num_key_value_heads=4)),
    ("solar_open_plain", "solar_open", small(head_dim=16, n_routed_experts=4, norm_topk_prob=False, routed_scaling_factor=1.5, **SPARSE)),
    ("glm4_moe_lite_plain", "glm4_moe_lite", {**{k: v for k, v in DEEPSEEK.items() if k != "first_k_dense_replace"}, "q_lora_rank": None, "attention_bias": True, "routed_scaling_factor": 1.0}),
    ("youtu_plain", "youtu", {**{k: v for k, v in DEEPSEEK.items() if k not in ("first_k_dense_replace", "n_routed_experts", "n_shared_experts", *SPARSE)}, "q_lora_rank": None,
                              "rope_interleave": False, "tie_word_embeddings": False, "attention_bias": True}),
    ("minicpm3_plain", "minicpm3", small(num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, attention_bias=True, tie_word_embeddings=False)),
    ("hunyuan_moe_bias", "hunyuan_v1_moe", small(head_dim=12, num_experts=5, moe_topk=3, attention_bias=True, tie_word_embeddings=True)),
    ("ernie4_5_moe_plain", "ernie4_5_moe", small(num_hidden_layers=4, moe_num_experts=4, moe_k=3, moe_intermediate_size=20, moe_num_shared_experts=0, moe_layer_interval=2, tie_word_embeddings=False)),
    ("exaone_moe_plain", "exaone_moe", small(num_hidden_layers=4, sliding_window=5, num_experts=4, num_shared_experts=2, norm_topk_prob=False, **SPARSE)),
    ("afmoe_plain", "afmoe", small(num_hidden_layers=4, head_dim=8, sliding_window=5, num_experts=4, num_dense_layers=2, num_shared_experts=1, attention_bias=True, tie_word_embeddings=True, **SPARSE)),
    ("mellum_rope", "mellum", small(num_hidden_layers=3, head_dim=8, sliding_window=5, layer_types=[FULL, SLIDING, SLIDING], num_experts=4, norm_topk_prob=False,
                                    mlp_layer_types=["dense", "sparse", "sparse"], rope_parameters={FULL: dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=5e5),
                                    SLIDING: dict(rope_type="default", rope_theta=1e3)}, **SPARSE)),
    ("phi_norm", "phi", small(qk_layernorm=True, partial_rotary_factor=1.0, hidden_act="gelu")),
    ("nanochat_plain", "nanochat", small(num_key_value_heads=4, final_logit_softcapping=None, attention_bias=True)),
    ("gemma3_whole_linear", "gemma3", dict(text_config=small(num_hidden_layers=7, head_dim=16, sliding_window=5, pad_token_id=0, rope_parameters={
        FULL: dict(rope_type="linear", factor=8.0, rope_theta=1e6), SLIDING: dict(rope_type="default", rope_theta=1e4)}), vision_config=VISION, mm_tokens_per_image=4)),
    ("mistral3_ministral3", "mistral3", dict(text_config=small(model_type="ministral3", head_dim=12, **rope(**LLAMA4_LONG)), vision_config=dict(VISION, head_dim=8))),
    ("llava_mistral", "llava", dict(text_config=small(model_type="mistral", sliding_window=5, tie_word_embeddings=True), vision_config=CLIP)),
    ("llava_next", "llava_next", dict(text_config=small(model_type="qwen2"), vision_config=CLIP)),
    ("smolvlm", "smolvlm", dict(text_config=small(model_type="llama", tie_word_embeddings=True), vision_config=VISION)),
    ("internvl_qwen3", "internvl", dict(text_config=small(model_type="qwen3", head_dim=12), vision_config=dict(VISION, image_size=[8, 8], patch_size=[4, 4]), tie_word_embeddings=False)),
    ("qwen2_vl_window", "qwen2_vl", dict(text_config=small(num_hidden_layers=3, use_sliding_window=True, sliding_window=5, max_window_layers=1, **rope(**MROPE)),
                                         vision_config=dict(depth=1, embed_dim=16, hidden_size=32, num_heads=2, patch_size=4, mlp_ratio=2))),
    ("qwen3_vl_tied", "qwen3_vl", dict(text_config=small(head_dim=16, attention_bias=False, **rope(rope_type="default", mrope_section=[4, 2, 2])),
                                       vision_config=dict(QWEN_VISION, num_position_embeddings=16, deepstack_visual_indexes=[0]), tie_word_embeddings=True)),
    ("glm4v_whole", "glm4v", dict(text_config=small(num_key_value_heads=4, **rope(rope_type="default", mrope_section=[2, 1, 1])), vision_config=dict(QWEN_VISION, image_size=8))),
    ("gemma_bias", "gemma", small(head_dim=8, attention_bias=True, hidden_act="gelu", **rope(rope_type="linear", factor=2.0))),
    ("phi3", "phi3", small(partial_rotary_factor=0.5, sliding_window=6)),
    ("phi3_short", "phi3", small(original_max_position_embeddings=128, max_position_embeddings=512, tie_word_embeddings=True, **rope(**LONG))),
    ("phi3_partial_long", "phi3", small(hidden_size=64, original_max_position_embeddings=4, max_position_embeddings=128,
                                        partial_rotary_factor=0.5, **rope(**LONG))),
    ("olmo3", "olmo3", small(num_hidden_layers=3, sliding_window=5, layer_types=[FULL, SLIDING, FULL], attention_bias=True)),
    ("olmo3_theta", "olmo3", small(num_hidden_layers=4, sliding_window=7, rope_theta=5000.0)),
    ("olmoe_norm", "olmoe", small(num_experts=4, num_experts_per_tok=3, norm_topk_prob=True)),
    ("granite_bias", "granite", small(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, attention_multiplier=0.5)),
    ("granitemoe_plain", "granitemoe", small(num_local_experts=3, num_experts_per_tok=1, attention_bias=True)),
    ("glm_nobias", "glm", small(head_dim=16, attention_bias=False, tie_word_embeddings=True)),
    ("glm4_nobias", "glm4", small(head_dim=16, attention_bias=False, partial_rotary_factor=1.0)),
    ("smollm3_window", "smollm3", small(num_hidden_layers=4, use_sliding_window=True, sliding_window=6, attention_bias=True, mlp_bias=True)),
    ("smollm3_yarn", "smollm3", small(num_hidden_layers=4, no_rope_layer_interval=2, tie_word_embeddings=False, **rope(**YARN))),
    ("gpt_neox_serial", "gpt_neox", dict(small(use_parallel_residual=False, attention_bias=False, hidden_act="gelu_new"), num_key_value_heads=None)),
    ("gpt_neox_tied", "gpt_neox", dict(small(rotary_pct=1.0, tie_word_embeddings=True, rotary_emb_base=5000), num_key_value_heads=None)),
    ("starcoder2_tied", "starcoder2", small(use_bias=False, hidden_act="gelu")),
    ("stablelm_parallel", "stablelm", small(use_parallel_residual=True, partial_rotary_factor=0.25)),
    ("cohere_dynamic", "cohere", small(max_position_embeddings=12, **rope(rope_type="dynamic", factor=2.0))),
    ("glm_dynamic", "glm", small(max_position_embeddings=12, head_dim=16, **rope(rope_type="dynamic", factor=2.0, partial_rotary_factor=0.5))),
    ("cohere_bias", "cohere", small(attention_bias=True, tie_word_embeddings=False)),
    ("cohere_norm", "cohere", small(use_qk_norm=True)),
    ("stablelm_norm", "stablelm", small(qk_layernorm=True, use_qkv_bias=True)),
    ("llama4_plain", "llama4_text", small(head_dim=8, intermediate_size_mlp=40, num_local_experts=3, num_experts_per_tok=1, attention_bias=True,
                                          use_qk_norm=False, attn_temperature_tuning=False, moe_layers=[1])),
    ("llama4_scout", "llama4_text", small(num_hidden_layers=4, head_dim=16, intermediate_size_mlp=40, num_local_experts=4, num_experts_per_tok=1,
                                          no_rope_layers=[], attention_chunk_size=40, floor_scale=7, **rope(
                                              rope_type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=32))),
    ("llama4_dense", "llama4_text", small(head_dim=8, intermediate_size_mlp=40, moe_layers=[], attention_chunk_size=6, no_rope_layers=[1, 1],
                                          tie_word_embeddings=True, num_local_experts=1)),
    ("cohere2_pattern", "cohere2", small(num_hidden_layers=4, sliding_window=4, attention_bias=True)),
    ("cohere2_full", "cohere2", small(layer_types=[FULL, FULL])),
    ("deepseek_v2_bias", "deepseek_v2", {**DEEPSEEK, "attention_bias": True, "n_shared_experts": 2, "first_k_dense_replace": 0}),
    ("deepseek_v2_yarn", "deepseek_v2", {**DEEPSEEK, **rope(**YARN, mscale=0.707, mscale_all_dim=0.707)}),
    ("ernie4_5_plain", "ernie4_5", small(head_dim=8, tie_word_embeddings=False)),
    ("seed_oss_plain", "seed_oss", small(attention_bias=False, head_dim=8, mlp_bias=True)),
    ("hunyuan_plain", "hunyuan_v1_dense", small(attention_bias=True, tie_word_embeddings=True, head_dim=12)),
    ("exaone4_full", "exaone4", small(sliding_window=None, layer_types=[FULL, FULL], tie_word_embeddings=True)),
    ("exaone4_pattern", "exaone4", small(num_hidden_layers=4, sliding_window=5, sliding_window_pattern=2, **rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32))),
    ("arcee_yarn", "arcee", small(attention_bias=True, head_dim=12, **rope(**YARN))),
    ("apertus_bias", "apertus", small(attention_bias=True, **rope(rope_type="default"))),
    ("apertus_silu", "apertus", small(hidden_act="silu", tie_word_embeddings=True)),
    ("ministral_plain", "ministral", small(sliding_window=5, head_dim=8)),
    ("ministral3_window", "ministral3", small(sliding_window=6, head_dim=8, **rope(**{**LLAMA4_LONG, "original_max_position_embeddings": 32}))),
    ("glm4_moe_plain", "glm4_moe", small(head_dim=16, n_routed_experts=4, first_k_dense_replace=0, n_shared_experts=2, norm_topk_prob=False, **SPARSE)),
    ("dots1_plain", "dots1", small(head_dim=8, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=2, num_hidden_layers=3, attention_bias=True, **SPARSE)),
    ("minimax_m2_whole", "minimax_m2", small(head_dim=8, num_local_experts=5, num_experts_per_tok=3)),
    ("llama_relu", "llama", small(hidden_act="relu", **rope(rope_type="dynamic", factor=3.0))),
    ("llama_gelu_new", "llama", small(hidden_act="gelu_new", tie_word_embeddings=True)),
    ("gpt_oss_plain", "gpt_oss", small(head_dim=8, num_local_experts=5, num_experts_per_tok=3, attention_bias=False, tie_word_embeddings=True,
                                       layer_types=[FULL, SLIDING], sliding_window=4)),
    ("phi3_su", "phi3", small(original_max_position_embeddings=4, max_position_embeddings=64, rope_theta=10000.0, sliding_window=9,
                              rope_scaling={**{k: v for k, v in LONG.items() if k != "rope_type"}, "type": "longrope"})),
    ("gemma_mqa", "gemma", small(num_key_value_heads=1, head_dim=16, pad_token_id=0)),
    ("olmo3_all", "olmo3", small(num_hidden_layers=4, sliding_window=6, num_key_value_heads=4, tie_word_embeddings=True)),
    ("olmoe_bias", "olmoe", small(num_experts=6, num_experts_per_tok=2, attention_bias=True, num_key_value_heads=4, tie_word_embeddings=True)),
    ("granite_yarn", "granite", small(embedding_multiplier=12.0, logits_scaling=16.0, residual_multiplier=0.22, attention_multiplier=0.0625, **rope(**YARN))),
    ("granitemoe_tied", "granitemoe", small(num_local_experts=4, num_experts_per_tok=3, tie_word_embeddings=True, embedding_multiplier=0.5,
                                            logits_scaling=6.0, residual_multiplier=1.5, attention_multiplier=0.25)),
    ("gemma3_linear", "gemma3_text", small(num_hidden_layers=7, head_dim=12, sliding_window=6, query_pre_attn_scalar=20, final_logit_softcapping=5.0,
                                           rope_parameters={FULL: dict(rope_type="linear", factor=8.0, rope_theta=1e6), SLIDING: dict(rope_type="default", rope_theta=1e4)})),
    ("glm_mqa", "glm", small(num_key_value_heads=1, head_dim=16, pad_token_id=3, **rope(rope_type="linear", factor=4.0, partial_rotary_factor=0.5))),
    ("glm4_moe_mtp", "glm4_moe", small(head_dim=16, n_routed_experts=6, n_group=3, topk_group=2, first_k_dense_replace=2, num_hidden_layers=3, num_nextn_predict_layers=1,
                                       routed_scaling_factor=2.5, **SPARSE, **rope(**YARN, partial_rotary_factor=0.5))),
    ("gpt_oss_tied", "gpt_oss", small(num_hidden_layers=3, head_dim=16, num_local_experts=6, num_experts_per_tok=1, sliding_window=3, **rope(rope_type="default"))),
    ("ministral_yarn", "ministral", small(num_hidden_layers=3, sliding_window=4, head_dim=8, layer_types=[FULL, SLIDING, FULL], **rope(**YARN))),
    ("ministral3_tied", "ministral3", small(head_dim=16, tie_word_embeddings=True, **rope(**{**LLAMA4_LONG, "llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 4}))),
    ("deepseek_v2_lite", "deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2, "norm_topk_prob": False, "topk_method": "greedy", "tie_word_embeddings": True,
                                         **rope(rope_type="yarn", factor=40.0, original_max_position_embeddings=8, beta_fast=32, beta_slow=1, mscale=0.707, mscale_all_dim=0.707)}),
    ("deepseek_v3_yarn", "deepseek_v3", {**DEEPSEEK, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "norm_topk_prob": False, "num_nextn_predict_layers": 1,
                                         **rope(rope_type="yarn", factor=40.0, original_max_position_embeddings=8, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)}),
    ("deepseek_v3_plain", "deepseek_v3", {**DEEPSEEK, "q_lora_rank": None, "n_group": 3, "topk_group": 2, "rope_interleave": False, "attention_bias": True, "first_k_dense_replace": 2,
                                          "num_hidden_layers": 3, "num_nextn_predict_layers": 2}),
    ("ernie4_5_linear", "ernie4_5", small(head_dim=8, num_key_value_heads=1, **rope(rope_type="linear", factor=2.0))),
    ("seed_oss_yarn", "seed_oss", small(head_dim=16, num_key_value_heads=1, tie_word_embeddings=True, **rope(**YARN))),
    ("hunyuan_plain_dynamic", "hunyuan_v1_dense", small(head_dim=16, **rope(rope_type="dynamic", alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.0))),
    ("exaone4_yarn", "exaone4", small(num_hidden_layers=4, sliding_window=4, head_dim=12, **rope(**YARN))),
    ("arcee_dynamic", "arcee", small(hidden_act="silu", max_position_embeddings=12, **rope(rope_type="dynamic", factor=4.0))),
    ("apertus_tied", "apertus", small(num_key_value_heads=1, head_dim=16, tie_word_embeddings=True)),
    ("cohere_plain", "cohere", small(num_key_value_heads=4, logit_scale=1.0, hidden_act="gelu_fast", **rope(rope_type="linear", factor=2.0))),
    ("cohere2_tied", "cohere2", small(num_hidden_layers=4, sliding_window=3, head_dim=12, logit_scale=0.5, tie_word_embeddings=False)),
    ("stablelm_yarn", "stablelm", small(num_key_value_heads=1, tie_word_embeddings=True, qk_layernorm=True, use_parallel_residual=True, hidden_size=64, **rope(**YARN, partial_rotary_factor=0.5))),
    ("starcoder2_mqa", "starcoder2", small(num_key_value_heads=1, sliding_window=None, hidden_act="gelu_python", norm_epsilon=1e-3)),
    ("gpt_neox_fast", "gpt_neox", dict(small(hidden_act="gelu_fast", rotary_pct=0.25, hidden_size=64, rotary_emb_base=100000), num_key_value_heads=None)),
    ("gpt_neox_relu", "gpt_neox", dict(small(hidden_act="relu", use_parallel_residual=False, **rope(rope_type="linear", factor=2.0, partial_rotary_factor=0.5)), num_key_value_heads=None)),
    ("minimax_m2_tied", "minimax_m2", small(head_dim=16, num_local_experts=6, num_experts_per_tok=2, rotary_dim=8, tie_word_embeddings=True)),
    ("dots1_groups", "dots1", small(head_dim=16, n_routed_experts=6, n_shared_experts=1, n_group=3, topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True,
                                    num_hidden_layers=3, sliding_window=4, max_window_layers=2, **SPARSE)),
    ("llama_long", "llama", small(max_position_embeddings=64, head_dim=8, **rope(**LONG, factor=8.0, original_max_position_embeddings=4))),
    ("llama_yarn_factor", "llama", small(hidden_act="gelu_accurate", **rope(**YARN, attention_factor=1.3, truncate=False))),
    ("qwen3_dynamic", "qwen3", small(head_dim=12, max_position_embeddings=10, **rope(rope_type="dynamic", factor=4.0))),
    ("mixtral_window", "mixtral", small(num_local_experts=4, num_experts_per_tok=2, sliding_window=5, head_dim=12, **rope(**YARN))),
    ("qwen3_moe_sparse", "qwen3_moe", small(num_hidden_layers=4, head_dim=12, num_local_experts=5, decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=True, **SPARSE)),
    ("qwen2_moe_sparse", "qwen2_moe", small(num_hidden_layers=3, num_experts=5, shared_expert_intermediate_size=24, mlp_only_layers=[1], qkv_bias=False, **SPARSE)),
    ("mistral_gelu", "mistral", small(hidden_act="gelu_pytorch_tanh")),
]


def element_bits(name, salt, count):
    """64 random bits per element: splitmix64 from the FNV-1a hash of the name and the salt."""
    state = 0xCBF29CE484222325
    for byte in f"{name}:{salt}".encode():
        state = ((state ^ byte) * 0x100000001B3) % 2**64
    with np.errstate(over="ignore"):
        z = np.uint64(state) + (np.arange(count, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def elements(name, shape, salt):
    """The elements of a stored tensor: uniform, with a mean and a width that make every option visible."""
    count = math.prod(shape)
    uniform = (element_bits(name, salt, count) >> np.uint64(11)).astype(np.float64) / 2**52 - 1.0
    fan_in = shape[-1] if shape else 1
    if name.endswith("bias"):
        mean, width = 0.0, 0.4
    elif len(shape) == 1 and "act_fn" not in name:
        mean, width = 1.0, 0.4
    elif len(shape) <= 1:
        mean, width = 0.0, 0.5
    elif re.search(r"embed_tokens|embed_in", name):
        mean, width = 0.0, 0.4
    elif re.search(r"lm_head|embed_out|q_proj|k_proj|qkv|query_key|q_b_proj|mlp\.(gate|router)\.|block_sparse_moe\.(gate|router)|feed_forward\.router", name):
        mean, width = 0.0, 3.0 / fan_in**0.5
    else:
        mean, width = 0.0, 1.8 / fan_in**0.5
    return torch.from_numpy((mean + width * uniform).astype(np.float32).reshape(shape))


def ids(what, salt, count, vocabulary):
    return [3 + int(bits % np.uint64(vocabulary - 3)) for bits in element_bits(what, salt, count)]


def make(case, tokens):
    name, model_type, options = case
    options = {key: value for key, value in options.items() if value is not None or key in ("sliding_window", "q_lora_rank", "pad_token_id")}
    why = ""
    for salt in range(40):
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            config = AutoConfig.for_model(model_type, **json.loads(json.dumps(options)))
            whole = AutoModelForImageTextToText if "vision_config" in options else AutoModelForCausalLM
            model = whole.from_config(config, dtype=torch.float32)
            model.save_pretrained(folder)
            stored = load_file(folder / "model.safetensors")
            fixed = {n for n in stored if re.search(r"act_fn\.(beta|eps)$", n)}
            stored = {n: t if n in fixed else elements(n, list(t.shape), salt) for n, t in stored.items()}
            save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
            opened = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else whole
            load = lambda: opened.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                  experts_implementation="eager", local_files_only=True).eval()
            model = load()
            vocabulary = config.get_text_config().vocab_size
            losses = train(model, ids("input_ids", salt, 2 * TOKENS, vocabulary))
            prompt = ids("prompt", salt, 5, vocabulary)
            found, gap = greedy(load(), prompt, tokens)
            if gap < 2e-4 or len(set(found)) < min(5, tokens):
                why = f"gap {gap:.1e}, {len(set(found))} different tokens"
                continue
            written = json.loads((folder / "config.json").read_text())
            written = {k: v for k, v in written.items() if k not in ("transformers_version", "architectures", "dtype", "use_cache")}
            shapes = {n: list(t.shape) for n, t in stored.items() if n not in fixed}
            return dict(name=name, salt=salt, config=written, tensors=shortened(shapes), losses=losses, prompt=prompt, tokens=found)
    raise ValueError(f"no salt with clear greedy choices; last: {why}")


def shortened(shapes):
    """[name with #, shape, layers, number of experts]"""
    rows = {}
    for name, shape in shapes.items():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        expert = re.search(r"\.experts\.(\d+)\.", name)
        short = re.sub(r"\.experts\.\d+\.", ".experts.#.", re.sub(r"\.layers\.\d+\.", ".layers.#.", name))
        row = rows.setdefault((short, tuple(shape)), [short, shape, [], 0])
        if layer and int(layer[1]) not in row[2]:
            row[2] = sorted(row[2] + [int(layer[1])])
        if expert:
            row[3] = max(row[3], int(expert[1]) + 1)
    return [rows[key] for key in sorted(rows)]


def train(model, flat):
    """Losses before and after AdamW steps, as in the README of the other cases."""
    batch = torch.tensor(flat).reshape(2, TOKENS)
    # As in transformers' Trainer, biases of experts and norms of heads are vectors, although they are stored together.
    is_matrix = lambda name, p: p.dim() >= 2 and not name.endswith(("bias", "norm.weight"))
    matrices = [p for name, p in model.named_parameters() if is_matrix(name, p)]
    others = [p for name, p in model.named_parameters() if not is_matrix(name, p)]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], foreach=False,
                                  lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for step in range(STEPS + 1):
        # One token less: the model sees what the losses are of, and dynamic rotary positions depend on the length.
        logits = model(batch[:, :-1]).logits
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))
        losses.append(loss.item())
        if step < STEPS:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses


@torch.no_grad()
def greedy(model, prompt, count):
    """Greedy tokens, generated with a cache, and the least lead of a chosen token's logit."""
    model.generation_config.eos_token_id = None
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    tops = [step[0].topk(2)[0] for step in out.logits]
    return out.sequences[0, len(prompt):].tolist(), min((top[0] - top[1]).item() for top in tops)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--only")
    parser.add_argument("--more", action="store_true")
    args = parser.parse_args()
    lines = []
    for case in CASES + (MORE if args.more else []):
        if args.only is None or case[0] == args.only:
            try:
                lines.append(json.dumps(make(case, args.tokens), separators=(",", ":")))
            except Exception as error:
                if not args.more:
                    raise
                print(f"{case[0]}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

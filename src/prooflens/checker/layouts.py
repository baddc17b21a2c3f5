"""Names that Hugging Face families give to what every transformer has, as the checker knows them."""

KEYS = ("n_layers", "n_heads", "d_model", "activation", "norm_eps", "context")
_USUAL = "num_hidden_layers num_attention_heads hidden_size"
_LLAMA = """q self_attn.q_proj k self_attn.k_proj v self_attn.v_proj o self_attn.o_proj
 gate mlp.gate_proj up mlp.up_proj down mlp.down_proj"""
_NORMS = "norm1 input_layernorm norm2 post_attention_layernorm"
_HEADS = "q_norm self_attn.q_norm k_norm self_attn.k_norm"
_BERT = """q attention.self.query k attention.self.key v attention.self.value o attention.output.dense
 norm1 attention.output.LayerNorm up intermediate.dense down output.dense norm2 output.LayerNorm"""
_RMS = '"norm_place": "pre", "causal": true, "norm_kind": "rms", "gated": true'
_PRE = '"norm_place": "pre", "causal": true'

# Per family: its names of KEYS; its trunk; where its blocks are; its names of our parts of a block; its names of our
# other parts; what is always so.
FAMILIES = f"""
bert | {_USUAL} hidden_act layer_norm_eps max_position_embeddings | bert. | encoder.layer | {_BERT}
 | embed.norm embeddings.LayerNorm pooler pooler.dense head classifier | {{}}

roberta | {_USUAL} hidden_act layer_norm_eps max_position_embeddings | roberta. | encoder.layer | {_BERT}
 | embed.norm embeddings.LayerNorm pooler pooler.dense head classifier | {{}}

electra | {_USUAL} hidden_act layer_norm_eps max_position_embeddings | electra. | encoder.layer | {_BERT}
 | embed.norm embeddings.LayerNorm pooler classifier.dense head classifier.out_proj
 embed.project embeddings_project | {{}}

distilbert | n_layers n_heads dim activation - max_position_embeddings | distilbert. | transformer.layer
 | q attention.q_lin k attention.k_lin v attention.v_lin o attention.out_lin norm1 sa_layer_norm
 up ffn.lin1 down ffn.lin2 norm2 output_layer_norm
 | embed.norm embeddings.LayerNorm pooler pre_classifier head classifier | {{"norm_eps": 1e-12}}

mpnet | {_USUAL} hidden_act layer_norm_eps max_position_embeddings | mpnet. | encoder.layer
 | q attention.attn.q k attention.attn.k v attention.attn.v o attention.attn.o norm1 attention.LayerNorm
 up intermediate.dense down output.dense norm2 output.LayerNorm
 | embed.norm embeddings.LayerNorm pooler pooler.dense | {{"relative_buckets": 32}}

gpt2 | n_layer n_head n_embd activation_function layer_norm_epsilon n_positions | transformer. | h
 | q attn.c_attn k attn.c_attn v attn.c_attn o attn.c_proj up mlp.c_fc down mlp.c_proj norm1 ln_1 norm2 ln_2
 | final_norm ln_f | {{{_PRE}}}

gpt_neo | num_layers num_heads hidden_size activation_function layer_norm_epsilon max_position_embeddings
 | transformer. | h | norm1 ln_1 q attn.attention.q_proj k attn.attention.k_proj v attn.attention.v_proj
 o attn.attention.out_proj norm2 ln_2 up mlp.c_fc down mlp.c_proj | final_norm ln_f | {{{_PRE}, "attention_scale": 1.0}}

gptj | n_layer n_head n_embd activation_function layer_norm_epsilon n_positions | transformer. | h
 | norm1 ln_1 q attn.q_proj k attn.k_proj v attn.v_proj o attn.out_proj up mlp.fc_in down mlp.fc_out
 | final_norm ln_f | {{{_PRE}, "parallel": true, "shared_norm": true, "rope_given": true}}

gpt_neox | {_USUAL} hidden_act layer_norm_eps max_position_embeddings | gpt_neox. | layers
 | norm1 input_layernorm q attention.query_key_value k attention.query_key_value v attention.query_key_value
 o attention.dense norm2 post_attention_layernorm up mlp.dense_h_to_4h down mlp.dense_4h_to_h
 | final_norm final_layer_norm | {{{_PRE}}}

bloom | n_layer n_head hidden_size - layer_norm_epsilon - | transformer. | h
 | norm1 input_layernorm q self_attention.query_key_value k self_attention.query_key_value
 v self_attention.query_key_value o self_attention.dense norm2 post_attention_layernorm up mlp.dense_h_to_4h
 down mlp.dense_4h_to_h | final_norm ln_f embed.norm word_embeddings_layernorm
 | {{{_PRE}, "activation": "gelu_tanh", "alibi": true}}

phi | {_USUAL} hidden_act layer_norm_eps max_position_embeddings | model. | layers
 | norm1 input_layernorm q self_attn.q_proj k self_attn.k_proj v self_attn.v_proj o self_attn.dense
 up mlp.fc1 down mlp.fc2
 | final_norm final_layernorm | {{{_PRE}, "parallel": true, "shared_norm": true}}

opt | {_USUAL} activation_function - max_position_embeddings | model.decoder. | layers
 | norm1 self_attn_layer_norm q self_attn.q_proj k self_attn.k_proj v self_attn.v_proj o self_attn.out_proj
 norm2 final_layer_norm up fc1 down fc2 | final_norm final_layer_norm
 | {{{_PRE}, "norm_eps": 1e-5, "position_offset": 2}}

llama | {_USUAL} hidden_act rms_norm_eps max_position_embeddings | model. | layers | {_LLAMA} {_NORMS}
 | final_norm norm | {{{_RMS}}}

qwen3 | {_USUAL} hidden_act rms_norm_eps max_position_embeddings | model. | layers | {_LLAMA} {_NORMS} {_HEADS}
 | final_norm norm | {{{_RMS}, "qk_norm": "head"}}

gemma | {_USUAL} hidden_act/hidden_activation rms_norm_eps max_position_embeddings | model. | layers | {_LLAMA} {_NORMS}
 | final_norm norm | {{{_RMS}}}

gemma2 | {_USUAL} hidden_act/hidden_activation rms_norm_eps max_position_embeddings | model. | layers | {_LLAMA}
 norm1 input_layernorm norm1_out post_attention_layernorm norm2 pre_feedforward_layernorm
 norm2_out post_feedforward_layernorm
 | final_norm norm | {{"norm_place": "sandwich", "causal": true, "norm_kind": "rms", "gated": true}}

gemma3_text | {_USUAL} hidden_act/hidden_activation rms_norm_eps max_position_embeddings | model. | layers | {_LLAMA}
 norm1 input_layernorm norm1_out post_attention_layernorm norm2 pre_feedforward_layernorm
 norm2_out post_feedforward_layernorm {_HEADS} | final_norm norm
 | {{"norm_place": "sandwich", "causal": true, "norm_kind": "rms", "gated": true, "qk_norm": "head"}}

phi3 | {_USUAL} hidden_act rms_norm_eps max_position_embeddings | model. | layers
 | q self_attn.qkv_proj k self_attn.qkv_proj v self_attn.qkv_proj o self_attn.o_proj gate mlp.gate_up_proj
 up mlp.gate_up_proj down mlp.down_proj {_NORMS} | final_norm norm | {{{_RMS}}}

olmo | {_USUAL} hidden_act - max_position_embeddings | model. | layers | {_LLAMA} |
 | {{{_PRE}, "gated": true, "norm_eps": 1e-5}}

olmo2 | {_USUAL} hidden_act rms_norm_eps max_position_embeddings | model. | layers | {_LLAMA} {_HEADS}
 norm1_out post_attention_layernorm norm2_out post_feedforward_layernorm
 | final_norm norm | {{"norm_place": "output", "causal": true, "norm_kind": "rms", "gated": true, "qk_norm": "whole"}}

stablelm | {_USUAL} hidden_act layer_norm_eps max_position_embeddings | model. | layers | {_LLAMA} {_NORMS}
 | final_norm norm | {{{_PRE}, "gated": true}}

vit | {_USUAL} hidden_act layer_norm_eps - | vit. | layers
 | norm1 layernorm_before q attention.q_proj k attention.k_proj v attention.v_proj o attention.o_proj
 norm2 layernorm_after up mlp.fc1 down mlp.fc2 | final_norm layernorm head classifier | {{"norm_place": "pre"}}

dinov2 | {_USUAL} hidden_act layer_norm_eps - | dinov2. | layer
 | norm1 norm1 q attention.q_proj k attention.k_proj v attention.v_proj o attention.o_proj
 norm2 norm2 up mlp.fc1 down mlp.fc2 | final_norm layernorm | {{"norm_place": "pre"}}

modernbert | {_USUAL} hidden_activation norm_eps max_position_embeddings | model. | layers
 | norm1 attn_norm q attn.Wqkv k attn.Wqkv v attn.Wqkv o attn.Wo norm2 mlp_norm gate mlp.Wi up mlp.Wi down mlp.Wo
 | final_norm final_norm embed.norm embeddings.norm
 | {{"norm_place": "pre", "gated": true, "first_norm": false, "rope_given": true, "rope_local": true}}
"""
ALIASES = {"mistral": "llama", "qwen2": "llama", "xlm-roberta": "roberta", "camembert": "roberta"}
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}
TABLES = {
    "tokens": (
        *("wte", "embed_tokens", "embed_in", "word_embeddings"),
        *("embeddings.word_embeddings", "embeddings.tok_embeddings"),
    ),
    "positions": ("wpe", "embed_positions", "embeddings.position_embeddings"),
    "types": ("embeddings.token_type_embeddings",),
}
# Heads may share keys and values.
GROUPED = ("llama", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2", "stablelm")
# Embedding and unembedding are one, where the configuration does not say.
TIED = ("gpt2", "gpt_neo", "opt", "bloom")
OLD_IMAGE = {
    "layers": "encoder.layer",
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}

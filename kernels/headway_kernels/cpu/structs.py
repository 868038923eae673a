"""The C structs of a decoder, as ``decoder_structs.h`` declares them.

Owns: their fields, in order. Must not know: what they mean.
"""

import ctypes


class NormStruct(ctypes.Structure):
    """``norm_weights``."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p))


class LayerInputsStruct(ctypes.Structure):
    """``layer_inputs``."""

    _fields_ = (
        ("size", ctypes.c_int64),
        ("projection", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("is_narrow", ctypes.c_int64),
        ("projection_factor", ctypes.c_float),
        ("table_factor", ctypes.c_float),
        ("sum_factor", ctypes.c_float),
    )


class ShapeStruct(ctypes.Structure):
    """``decoder_shape``."""

    _fields_ = (
        ("num_layers", ctypes.c_int64),
        ("hidden_size", ctypes.c_int64),
        ("intermediate_size", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("true_head_dim", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("all_heads", ctypes.c_int64),
        ("first_head", ctypes.c_int64),
        ("hidden_start", ctypes.c_int64),
        ("hidden_columns", ctypes.c_int64),
        ("activation_start", ctypes.c_int64),
        ("logits_start", ctypes.c_int64),
        ("norm_kind", ctypes.c_int64),
        ("is_parallel", ctypes.c_int64),
        ("norms_all_heads", ctypes.c_int64),
        ("norms_rotated", ctypes.c_int64),
        ("norms_values", ctypes.c_int64),
        ("gates", ctypes.c_int64),
        ("head_norm_kind", ctypes.c_int64),
        ("clips_normed", ctypes.c_int64),
        ("norms_sums", ctypes.c_int64),
        ("norm_eps", ctypes.c_float),
        ("post_norm_eps", ctypes.c_float),
        ("score_scale", ctypes.c_float),
        ("score_softcap", ctypes.c_float),
        ("qkv_clip", ctypes.c_float),
        ("residual_factor", ctypes.c_float),
        ("logits_factor", ctypes.c_float),
        ("logits_softcap", ctypes.c_float),
        ("kv_form", ctypes.c_int64),
        ("embedding", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("score_biases", ctypes.c_void_p),
        ("bias_stride", ctypes.c_int64),
        ("last_distance", ctypes.c_int64),
        ("final_norm", NormStruct),
        ("before_head", ctypes.c_void_p),
        ("head_activation", ctypes.c_int64),
        ("head_norm", NormStruct),
        ("inputs", ctypes.c_void_p),
    )


class HeadsStruct(ctypes.Structure):
    """``layer_heads``."""

    _fields_ = (
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("true_head_dim", ctypes.c_int64),
        ("kv_layer", ctypes.c_int64),
        ("kv_first", ctypes.c_int64),
        ("is_reading", ctypes.c_int64),
    )


class LayerStruct(ctypes.Structure):
    """``layer_weights``."""

    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("state_inputs", ctypes.c_void_p),
        ("state_selection", ctypes.c_void_p),
        ("state_steps", ctypes.c_void_p),
        ("state_gates", ctypes.c_void_p),
        ("state_output", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("attention_norm", NormStruct),
        ("attention_post_norm", NormStruct),
        ("mlp_norm", NormStruct),
        ("mlp_post_norm", NormStruct),
        ("output_norm", ctypes.c_void_p),
        ("down_norm", ctypes.c_void_p),
        ("qk_norm", ctypes.c_void_p),
        ("qk_norm_bias", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("query_factors", ctypes.c_void_p),
        ("window", ctypes.c_int64),
        ("activation", ctypes.c_int64),
        ("is_gated", ctypes.c_int64),
        ("curve", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("latent", ctypes.c_void_p),
        ("recurrence", ctypes.c_void_p),
        ("input_gate", ctypes.c_void_p),
        ("input_back", ctypes.c_void_p),
        ("input_norm", NormStruct),
        ("heads", HeadsStruct),
        ("factor", ctypes.c_float),
    )


class SharedRowsStruct(ctypes.Structure):
    """``shared_rows``."""

    _fields_ = (
        ("meet", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("is_shared", ctypes.c_int64),
        ("hidden", ctypes.c_void_p),
        ("attended", ctypes.c_void_p),
        ("activations", ctypes.c_void_p),
        ("pairs", ctypes.c_void_p),
        ("shared_expert", ctypes.c_void_p),
        ("hidden_in", ctypes.c_void_p),
    )


class StepStruct(ctypes.Structure):
    """``decoder_step``."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("num_sampled", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("row_starts", ctypes.c_void_p),
        ("row_tokens", ctypes.c_void_p),
        ("row_positions", ctypes.c_void_p),
        ("row_numbers", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("sampled", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("layer_stride", ctypes.c_int64),
        ("shared", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
        ("most_rank", ctypes.c_int64),
        ("most_expert_rank", ctypes.c_int64),
    )

"""GGUF files of tiny random models, written with the `gguf` package, for tests."""

from __future__ import annotations

import zlib

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants

from fasteagle.loading import gguf as gguf_file

GGUF_NAMES = {hf: gguf for gguf, hf in gguf_file.GLOBAL_NAMES.items()}


def gguf_name(name: str) -> str:
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    short = next(g for g, hf in gguf_file.BLOCK_NAMES.items() if hf == rest)
    return f"blk.{layer}.{short}"


def permute(weight: np.ndarray, n_head: int) -> np.ndarray:
    """llama.cpp's row order for interleaved RoPE, written out row by row."""
    head_dim = weight.shape[0] // n_head
    order = [
        h * head_dim + i // 2 + (i % 2) * (head_dim // 2)
        for h in range(n_head)
        for i in range(head_dim)
    ]
    return weight[order]


# Of the types that the gguf package cannot write: where fp16 d lies in a block, and where dmin,
# and dmin / d that makes the mean of random weights 0.
PLACES = {"Q2_K": (80, 82, 1.5), "Q3_K": (108, None, 0), "Q4_K": (0, 2, 7.5)}
PLACES |= {"Q5_K": (0, 2, 15.5), "Q6_K": (208, None, 0)}
PLACES |= dict.fromkeys(("IQ4_NL", "IQ4_XS"), (0, None, 0))


def random_rows(kind, shape, spread=0.06, seed=1):
    """Rows [N, row bytes] of random blocks, with weights of standard deviation `spread`."""
    rng = np.random.default_rng(seed)
    qtype = GGMLQuantizationType[kind]
    n_values, n_bytes = GGML_QUANT_SIZES[qtype]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // n_values, n_bytes), dtype=np.uint8)
    size = rng.uniform(0.5, 1.5, blocks.shape[:2])

    def fill(d):
        at, min_at, ratio = PLACES[kind]
        for place, values in ((at, size * d), (min_at, size * d * ratio)):
            if place is not None:
                fp16 = values.astype(np.float16)[..., None].view(np.uint8)
                blocks[..., place : place + 2] = fp16
        return blocks.reshape(shape[0], -1)

    unscaled = quants.dequantize(fill(1.0), qtype)
    return fill(spread / unscaled.std())


def stored_rows(kind, data):
    """A matrix as GGUF stores it; random values in the types that cannot be written."""
    if kind in PLACES and data.ndim == 3:
        return np.stack([stored_rows(kind, expert) for expert in data])
    if kind in PLACES:
        return random_rows(kind, data.shape, seed=zlib.crc32(data.tobytes()))
    return quants.quantize(data, GGMLQuantizationType[kind])


def finish(writer: GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_parts(name: str, tensor):
    """A tensor of a transformers model as llama.cpp has it: gate and up apart."""
    name = name.replace(".block_sparse_moe.", ".mlp.").replace(".router.weight", ".gate.weight")
    name = name.replace(".shared_mlp.", ".mlp.shared_expert.")
    name = name.replace(".shared_experts.", ".shared_expert.").replace(".moe_statics.", ".")
    for joined in ("gate_up_proj", "input_linear.weight"):
        if name.endswith(joined):
            gate, up = tensor.chunk(2, dim=-2)
            stem = name.removesuffix(joined)
            return [(f"{stem}gate_proj.weight", gate), (f"{stem}up_proj.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", tensor)]
    name = name.replace("output_linear.", "down_proj.")
    if name.endswith(("shared_expert_gate.weight", "e_score_correction_bias")):
        return [(name, tensor[0])]
    return [(name, tensor)]


def write_experts_metadata(writer: GGUFWriter, config, architecture: str) -> None:
    """Return what llama.cpp's converter writes of a mixture of experts."""
    n_expert = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not n_expert:
        return
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture.startswith(("qwen", "ernie")):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if architecture == "ernie4_5-moe":
        n_shared = config.moe_num_shared_experts
        writer.add_expert_shared_count(n_shared)
        writer.add_expert_shared_feed_forward_length(n_shared * config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    if architecture == "granitemoe":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        if getattr(config, "shared_intermediate_size", 0):
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def write_gguf(path, model, kind="F32", architecture="llama", extra=None, drop=()):
    """Write a transformers model as GGUF; matrices in `kind`, or `kind(name)`, vectors in F32."""
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    write_experts_metadata(writer, config, architecture)
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}
        add |= {float: writer.add_float32, bool: writer.add_bool}
        add[type(value)](key, value)
    stored = {}
    parts = [part for item in model.state_dict().items() for part in gguf_parts(*item)]
    for name, tensor in parts:
        if name in drop or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        data = tensor.float().numpy()
        is_small = data.ndim == 1 or name.endswith("mlp.gate.weight")
        own_kind = "F32" if is_small else kind(name) if callable(kind) else kind
        qtype = GGMLQuantizationType[own_kind]
        data = stored_rows(own_kind, data)
        stored[name] = quants.dequantize(data, qtype)
        reordered = architecture in ("llama", "granitemoe")
        if reordered and name.endswith("q_proj.weight"):
            data = permute(data, config.num_attention_heads)
        if reordered and name.endswith("k_proj.weight"):
            data = permute(data, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), data, raw_dtype=qtype)
    finish(writer)
    return stored

"""Load a target: choose the reader of its files, and fill a `Transformer` from it.

Loading goes tensor by tensor, so that the peak is one copy of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fasteagle.compile.int8_cache import cache_bytes
from fasteagle.config import ModelConfig
from fasteagle.config_gguf import multipliers_from_gguf
from fasteagle.config_hf import ERNIES, from_hf, multipliers_from_hf
from fasteagle.device import available_bytes
from fasteagle.errors import FasteagleError, shortened, size_of
from fasteagle.loading import stored
from fasteagle.loading.changed import ChangedCheckpoint
from fasteagle.loading.gguf import GGUFFile
from fasteagle.loading.imported import QuantizedFolder
from fasteagle.loading.memory import smaller_fit
from fasteagle.loading.names import CHOICE_BIAS, MTP_LAYERS, block_linears, expected_shapes
from fasteagle.loading.source import Linears
from fasteagle.loading.tensors import Checkpoint, WeightsFolder, load_floats, read_json
from fasteagle.model import KEY_BLOCK, Block, MoE, Transformer
from fasteagle.paths import require_no_pipe
from fasteagle.uninitialized import Uninitialized

# Architectures of which llama.cpp turns adjacent values of queries and keys
PAIRED_IN_GGUF = ("LlamaForCausalLM", "MixtralForCausalLM", "GraniteMoeForCausalLM", *ERNIES)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file or a Hugging Face folder.

    Raises `FasteagleError` for anything else, and where tensors do not fit the config.
    """
    if not path.exists():
        raise FasteagleError(f"{path}: no such file or folder")
    require_no_pipe(path)
    multipliers, halved = None, False
    checkpoint: Checkpoint
    if path.is_file():
        checkpoint = gguf = GGUFFile(path)
        multipliers = multipliers_from_gguf(gguf.fields)
        halved = checkpoint.config.architecture in PAIRED_IN_GGUF
    else:
        raw = read_json(path / "config.json")
        checkpoint = _open_folder(path, raw)
        if not isinstance(checkpoint, stored.StoredFolder):  # whose weights have them inside
            multipliers = multipliers_from_hf(raw, str(path / "config.json"))
            halved = checkpoint.config.architecture in ERNIES
    if _has_own_head(checkpoint):
        checkpoint.config = dataclasses.replace(checkpoint.config, tie_embeddings=False)
    if multipliers is not None or halved:
        checkpoint = ChangedCheckpoint(checkpoint, multipliers, halved)
    check_complete(checkpoint, str(path))
    return checkpoint


def _has_own_head(checkpoint: Checkpoint) -> bool:
    """Return whether the files of a tied model hold an LM head with other values.

    transformers does not tie such models either. A copy that is quantized is one of the embedding.
    """
    name, embedding = "lm_head.weight", "model.embed_tokens.weight"
    names = checkpoint.names()
    if not checkpoint.config.tie_embeddings or not {name, embedding} <= names:
        return False
    config = checkpoint.config
    shapes = {checkpoint.shape(name), checkpoint.shape(embedding)}
    if checkpoint.bits(name) is not None or shapes != {(config.vocab_size, config.dim)}:
        return False
    head, other = (load_floats(checkpoint, each) for each in (name, embedding))
    return not torch.equal(head, other.to(head.dtype))


def _open_folder(path: Path, raw: dict[str, Any]) -> Checkpoint:
    if stored.is_stored(raw):
        return stored.StoredFolder(path, raw)
    # Early GPTQ tools wrote a separate file and nothing into config.json.
    if raw.get("quantization_config") or (path / "quantize_config.json").exists():
        return QuantizedFolder(path, raw)
    config = from_hf(raw, str(path / "config.json"))
    return WeightsFolder(path, config)


def check_complete(checkpoint: Checkpoint, source: str) -> None:
    """Raise `FasteagleError` listing tensors that are missing, unknown or of the wrong shape."""
    expected, names = expected_shapes(checkpoint.config), checkpoint.names()
    problems = [f"missing {name}" for name in expected if name not in names]
    for name in expected.keys() & names:
        if checkpoint.shape(name) != expected[name]:
            problems.append(f"{name} is {checkpoint.shape(name)}, expected {expected[name]}")
    # Old files contain RoPE buffers; tied models may contain a copy of the LM head. Layers for
    # multi-token prediction are draft heads, see `heads.mtp`.
    extra = {n for n in names - expected.keys() if not n.endswith("inv_freq")} - {"lm_head.weight"}
    problems += [f"unknown {name}" for name in extra if not name.startswith(MTP_LAYERS)]
    if problems:
        raise FasteagleError(
            f"{source}: {len(problems)} wrong tensors: {shortened(problems)}: fetch them again"
        )


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_seq_len: int,
    quantized: Linears | None = None,
    kv: str = "auto",
) -> Transformer:
    """Build the target and fill it tensor by tensor; linears come from `quantized` if given.

    `kv` is the format that the KV cache will have. Raises `FasteagleError` when the memory does
    not suffice.
    """
    config = checkpoint.config
    require_memory(config, dtype, device, max_seq_len, quantized, kv)
    with torch.device("meta"), Uninitialized():
        model = Transformer(config)

    def get(*names: str, dtype: torch.dtype = dtype) -> nn.Parameter:
        """Return tensors stacked along their rows as one parameter, one in memory at a time."""
        data = load_floats(checkpoint, names[0]).to(device=device, dtype=dtype)
        if len(names) > 1:
            n_rows = [checkpoint.shape(name)[0] for name in names]
            first, data = data, data.new_empty(sum(n_rows), *data.shape[1:])
            places = data.split(n_rows)
            places[0].copy_(first)
            for place, name in zip(places[1:], names[1:], strict=True):
                place.copy_(load_floats(checkpoint, name))
        return nn.Parameter(data.contiguous(), requires_grad=False)

    model.embedding.weight = get("model.embed_tokens.weight")
    model.norm.weight = get("model.norm.weight")
    lm_head = None if quantized is None else quantized.lm_head()
    if lm_head is not None:
        model.lm_head = lm_head
    else:
        tied = config.tie_embeddings
        model.lm_head.weight = model.embedding.weight if tied else get("lm_head.weight")
    for i, block in enumerate(model.blocks):
        _fill_block(block, i, config, get, quantized)
    model.init_rope(max_seq_len + KEY_BLOCK, device)
    return model.eval()


def _fill_block(
    block: Block,
    i: int,
    config: ModelConfig,
    get: Callable[..., nn.Parameter],
    quantized: Linears | None,
) -> None:
    """Fill block `i`, built on `meta`, with weights; linears come from `quantized` if given."""
    p = f"model.layers.{i}."
    block.attention_norm.weight = get(p + "input_layernorm.weight")
    block.mlp_norm.weight = get(p + "post_attention_layernorm.weight")
    if config.qk_norm or config.qk_norm_whole:
        block.attention.q_norm.weight = get(p + "self_attn.q_norm.weight")
        block.attention.k_norm.weight = get(p + "self_attn.k_norm.weight")
    if isinstance(block.mlp, MoE):
        block.mlp.router.weight = get(p + "mlp.gate.weight", dtype=torch.float32)
        if block.mlp.choice_bias is not None:
            block.mlp.choice_bias = get(p + CHOICE_BIAS, dtype=torch.float32)
        if block.mlp.shared_gate is not None:
            gate = get(p + "mlp.shared_expert_gate.weight", dtype=torch.float32)
            block.mlp.shared_gate.weight = gate
    for path, names in block_linears(config, i).items():
        has_bias = path == "attention.qkv" and config.qkv_bias
        bias = get(*(n.replace(".weight", ".bias") for n in names)) if has_bias else None
        made = None if quantized is None else quantized.linear(names, bias)
        if made is not None:
            block.set_submodule(path, made)
            continue
        linear = block.get_submodule(path)
        linear.weight, linear.bias = get(*names), bias


def required_bytes(
    config: ModelConfig, dtype: torch.dtype, max_seq_len: int, kv: str = "auto"
) -> tuple[int, int]:
    """Return the bytes of the weights and of the KV cache."""
    size = dtype.itemsize
    return config.params * size, cache_bytes(config, max_seq_len + KEY_BLOCK, size, kv)


def require_memory(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    max_seq_len: int,
    quantized: Linears | None = None,
    kv: str = "auto",
) -> None:
    """Raise `FasteagleError` before loading a model that does not fit into memory."""
    weights, cache = required_bytes(config, dtype, max_seq_len, kv)
    weights = weights if quantized is None else quantized.weight_bytes()
    free = available_bytes(device)
    if free is None or weights + cache <= free:
        return
    scheme = None if quantized is None else quantized.scheme
    raise FasteagleError(
        f"weights need {size_of(weights)} and the KV cache of {max_seq_len:,} tokens "
        f"{size_of(cache)}, {size_of(free)} free on {device}: "
        f"{smaller_fit(config, free, scheme, kv, max_seq_len)}"
    )

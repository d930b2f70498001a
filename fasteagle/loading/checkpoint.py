"""From files to a loaded target: Hugging Face folders, GGUF files, or random weights of a shape.

A checkpoint is anything with `config`, `names()`, `shape(name)` and `load(name)` under Hugging Face
tensor names. Loading goes tensor by tensor, so that the peak is one copy of the model.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fasteagle import config as model_config
from fasteagle.config import ModelConfig
from fasteagle.device import available_bytes
from fasteagle.errors import FasteagleError, shortened
from fasteagle.loading.gguf import GGUFFile, rows_for
from fasteagle.model import KEY_BLOCK, Block, Transformer

GIB = 2**30


class Checkpoint(Protocol):
    """Named tensors of one model, under Hugging Face names."""

    config: ModelConfig

    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def load(self, name: str) -> Tensor: ...

    def start(self, name: str, n: int) -> Tensor:
        """The first `n` values, or more; cheaper than all of them."""
        ...


class QuantizedLinears(Protocol):
    """Makes linears that are not dense, in place of those the model was built with."""

    def weight_bytes(self) -> int: ...

    def linear(self, names: Sequence[str], bias: Tensor | None) -> nn.Module | None:
        """One module for the weights `names` above each other, or None for a dense one."""

    def lm_head(self) -> nn.Module | None: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a `.gguf` file or a Hugging Face folder. Raises `FasteagleError` for anything else."""
    if path.is_file():
        return GGUFFile(path)
    if not path.is_dir():
        raise FasteagleError(f"{path}: no such file or folder")
    raw = read_json(path / "config.json")
    # GPTQ tools of the first years wrote a file of their own and nothing into config.json.
    if raw.get("quantization_config") or (path / "quantize_config.json").exists():
        from fasteagle.loading.folders import open_quantized

        return open_quantized(path, raw)
    config = model_config.from_hf(raw, str(path))
    if any(path.glob("*.safetensors")):
        return SafetensorsFolder(path, config)
    if any(path.glob("pytorch_model*.bin")):
        return TorchBinFolder(path, config)
    raise FasteagleError(f"{path}: no *.safetensors and no pytorch_model*.bin in the folder")


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise FasteagleError(f"{path}: file is missing") from None
    except (ValueError, OSError) as error:
        raise FasteagleError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise FasteagleError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class SafetensorsFolder:
    """One or more `*.safetensors` files; an index file, where present, says which shards belong."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        from safetensors import SafetensorError, safe_open

        self.path, self.config = path, config
        self._files: dict[str, Any] = {}
        for file in _shards(path, "model.safetensors", "*.safetensors"):
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise FasteagleError(
                    f"{file}: damaged or truncated safetensors ({error}); fetch it again"
                ) from error
            self._files.update(dict.fromkeys(handle.keys(), handle))

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def load(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def start(self, name: str, n: int) -> Tensor:
        return self._files[name].get_slice(name)[: rows_for(self.shape(name), n)]


class TorchBinFolder:
    """`pytorch_model*.bin`, memory-mapped and read with `weights_only=True`."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self.path, self.config = path, config
        self._tensors: dict[str, Tensor] = {}
        for file in _shards(path, "pytorch_model.bin", "pytorch_model*.bin"):
            try:
                part = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:  # pickle, zip and RuntimeError, depending on the damage
                reason = (str(error) or type(error).__name__).splitlines()[0]
                raise FasteagleError(
                    f"{file}: cannot be read as a weights-only torch file ({reason})"
                ) from error
            self._tensors.update({k: v for k, v in part.items() if isinstance(v, Tensor)})

    def names(self) -> set[str]:
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def load(self, name: str) -> Tensor:
        return self._tensors[name]

    def start(self, name: str, n: int) -> Tensor:
        return self._tensors[name][: rows_for(self.shape(name), n)]


class DummyCheckpoint:
    """Random weights of a given shape, the same ones for the same name, for benchmarks."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._shapes = expected_shapes(config)

    def names(self) -> set[str]:
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def load(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.randn(shape, generator=generator) * 0.02

    def start(self, name: str, n: int) -> Tensor:
        return self.load(name)


def _shards(path: Path, single: str, pattern: str) -> list[Path]:
    index = path / f"{single}.index.json"
    if not index.exists():
        return [path / single] if (path / single).exists() else sorted(path.glob(pattern))
    names = sorted(set(read_json(index).get("weight_map", {}).values()))
    absent = [name for name in names if not (path / name).exists()]
    if absent:
        raise FasteagleError(
            f"{path}: shards named by {index.name} are missing: {', '.join(absent)}"
        )
    return [path / name for name in names]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a model of this shape consists of, under Hugging Face names."""
    D, E, F = config.dim, config.head_dim, config.ffn_dim
    q_rows, kv_rows = config.n_head * E, config.n_kv_head * E
    block: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (q_rows, D),
        "self_attn.k_proj.weight": (kv_rows, D),
        "self_attn.v_proj.weight": (kv_rows, D),
        "self_attn.o_proj.weight": (D, q_rows),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }
    if config.qkv_bias:
        block |= {f"self_attn.{n}_proj.bias": (q_rows if n == "q" else kv_rows,) for n in "qkv"}
    if config.qk_norm:
        block |= {"self_attn.q_norm.weight": (E,), "self_attn.k_norm.weight": (E,)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, D),
        "model.norm.weight": (D,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, D)
    for i in range(config.n_layer):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    return shapes


def check_complete(checkpoint: Checkpoint, source: str) -> None:
    """Raise `FasteagleError` listing missing, misshapen and unknown tensors."""
    expected, found = expected_shapes(checkpoint.config), checkpoint.names()
    problems = [f"missing {name}" for name in expected if name not in found]
    for name in expected.keys() & found:
        if checkpoint.shape(name) != expected[name]:
            problems.append(f"{name} is {checkpoint.shape(name)}, expected {expected[name]}")
    # Old files carry RoPE buffers; tied models may carry a copy of the head.
    extra = {n for n in found - expected.keys() if not n.endswith("inv_freq")} - {"lm_head.weight"}
    problems += [f"unknown {name}" for name in extra]
    if problems:
        raise FasteagleError(f"{source}: {len(problems)} wrong tensors: {shortened(problems)}")


def fingerprint(checkpoint: Checkpoint) -> str:
    """Identity of the weights as stored: sha256 over every tensor's name, shape and first values.

    The first 1,024 values of each, dequantized to fp32, in the order of the names: a repack that
    loses nothing keeps the fingerprint, another quantization does not.
    """
    digest = hashlib.sha256()
    for name in sorted(expected_shapes(checkpoint.config)):
        head = checkpoint.start(name, 1024).flatten()[:1024].float().contiguous()
        digest.update(f"{name}{checkpoint.shape(name)}".encode())
        digest.update(head.numpy().tobytes())
    return digest.hexdigest()


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    max_seq_len: int,
    source: str = "checkpoint",
    quantized: QuantizedLinears | None = None,
) -> Transformer:
    """Build the target and fill it tensor by tensor; linears come from `quantized` if given.

    Raises `FasteagleError` when tensors do not fit the config or the memory does not suffice.
    """
    config = checkpoint.config
    check_complete(checkpoint, source)
    weight_bytes = None if quantized is None else quantized.weight_bytes()
    require_memory(config, dtype, device, max_seq_len, weight_bytes)
    with torch.device("meta"):
        model = Transformer(config)

    def get(name: str) -> nn.Parameter:
        return _joined(checkpoint, [name], device, dtype)

    model.embedding.weight = get("model.embed_tokens.weight")
    model.norm.weight = get("model.norm.weight")
    lm_head = None if quantized is None else quantized.lm_head()
    if lm_head is not None:
        model.lm_head = lm_head
    else:
        tied = config.tie_embeddings
        model.lm_head.weight = model.embedding.weight if tied else get("lm_head.weight")
    for i, block in enumerate(model.blocks):
        fill_block(block, i, checkpoint, device, dtype, quantized)
    model.init_rope(max_seq_len + KEY_BLOCK, device)
    return model.eval()


def block_linears(i: int) -> dict[str, list[str]]:
    """The names of the weights that make up each linear of block `i`."""
    p = f"model.layers.{i}."
    return {
        "attention.qkv": [f"{p}self_attn.{n}_proj.weight" for n in "qkv"],
        "attention.out": [f"{p}self_attn.o_proj.weight"],
        "mlp.gate_up": [f"{p}mlp.gate_proj.weight", f"{p}mlp.up_proj.weight"],
        "mlp.down": [f"{p}mlp.down_proj.weight"],
    }


def fill_block(
    block: Block,
    i: int,
    checkpoint: Checkpoint,
    device: torch.device | str,
    dtype: torch.dtype,
    quantized: QuantizedLinears | None = None,
) -> None:
    """Give block `i`, built on `meta`, its weights; linears come from `quantized` if given."""

    def get(*names: str) -> nn.Parameter:
        return _joined(checkpoint, names, device, dtype)

    p = f"model.layers.{i}."
    block.attention_norm.weight = get(p + "input_layernorm.weight")
    block.mlp_norm.weight = get(p + "post_attention_layernorm.weight")
    if checkpoint.config.qk_norm:
        block.attention.q_norm.weight = get(p + "self_attn.q_norm.weight")
        block.attention.k_norm.weight = get(p + "self_attn.k_norm.weight")
    for path, names in block_linears(i).items():
        has_bias = path == "attention.qkv" and checkpoint.config.qkv_bias
        bias = get(*(n.replace(".weight", ".bias") for n in names)) if has_bias else None
        made = None if quantized is None else quantized.linear(names, bias)
        if made is not None:
            block.set_submodule(path, made)
            continue
        linear = block.get_submodule(path)
        linear.weight, linear.bias = get(*names), bias


def _joined(
    checkpoint: Checkpoint, names: Sequence[str], device: torch.device | str, dtype: torch.dtype
) -> nn.Parameter:
    """Tensors above each other, as one parameter."""
    parts = [checkpoint.load(name).to(device=device, dtype=dtype) for name in names]
    data = parts[0] if len(parts) == 1 else torch.cat(parts)
    return nn.Parameter(data.contiguous(), requires_grad=False)


def required_bytes(config: ModelConfig, dtype: torch.dtype, max_seq_len: int) -> tuple[int, int]:
    """(weights, KV cache) in bytes."""
    size = dtype.itemsize
    return config.params * size, config.kv_bytes(max_seq_len + KEY_BLOCK, size)


def require_memory(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    max_seq_len: int,
    weight_bytes: int | None = None,
) -> None:
    """Raise `FasteagleError` before loading what cannot fit.

    `weight_bytes` is what quantized weights take; None: all of them in `dtype`.
    """
    weights, cache = required_bytes(config, dtype, max_seq_len)
    weights = weights if weight_bytes is None else weight_bytes
    free = available_bytes(device)
    if free is None or weights + cache <= free:
        return
    if weights > free:
        fix = _smaller_weights(config, dtype, free, weight_bytes is not None)
    else:
        fix = "lower --max-seq-len"
    raise FasteagleError(
        f"weights need {weights / GIB:.1f} GiB and the KV cache of {max_seq_len:,} tokens "
        f"{cache / GIB:.1f} GiB, {free / GIB:.1f} GiB free on {device}: {fix}"
    )


def _smaller_weights(config: ModelConfig, dtype: torch.dtype, free: int, is_quantized: bool) -> str:
    """What a person can do whose weights do not fit."""
    from fasteagle.quant.scheme import INT8, int4_for

    for scheme, option in ((INT8, "--int8"), (int4_for(config), "--int4")):
        size = scheme.model_bytes(config)
        if not is_quantized and size < free:
            return f"use {option} ({size / GIB:.1f} GiB)"
    too_wide = dtype.itemsize > 2 and not is_quantized
    return "use --dtype bf16 --int4" if too_wide else "choose a smaller model"

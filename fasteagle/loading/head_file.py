"""Draft head directories: `config.json` and weights in the official EAGLE-1/2 key layout.

A head of our own is `model.safetensors` whose metadata key `fasteagle` holds a JSON header. Reads
published heads too (`pytorch_model.bin`); embeddings in a file are ignored for the target's.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fasteagle.config import HeadConfig, ModelConfig, head_from_hf
from fasteagle.config_fields import Fields, parse_json
from fasteagle.errors import FasteagleError, shortened
from fasteagle.loading.tensors import read_json
from fasteagle.model import EagleHead
from fasteagle.paths import replacing

HEADER_KEY = "fasteagle"
IGNORED = ("embed_tokens.weight", "lm_head.weight")


def official_state(head: EagleHead) -> dict[str, Tensor]:
    """The head's tensors under the official keys."""
    c = head.config.block
    attention, mlp = head.block.attention, head.block.mlp
    q_rows, kv_rows = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    sizes = [q_rows, kv_rows, kv_rows]
    p = "layers.0."
    state = {"fc.weight": head.fc.weight}
    if head.fc.bias is not None:
        state["fc.bias"] = head.fc.bias
    for name, part in zip("qkv", attention.qkv.weight.split(sizes), strict=True):
        state[f"{p}self_attn.{name}_proj.weight"] = part
    if c.qkv_bias:
        for name, part in zip("qkv", attention.qkv.bias.split(sizes), strict=True):
            state[f"{p}self_attn.{name}_proj.bias"] = part
    gate, up = mlp.gate_up.weight.chunk(2)
    state |= {
        f"{p}self_attn.o_proj.weight": attention.out.weight,
        f"{p}mlp.gate_proj.weight": gate,
        f"{p}mlp.up_proj.weight": up,
        f"{p}mlp.down_proj.weight": mlp.down.weight,
        f"{p}post_attention_layernorm.weight": head.block.mlp_norm.weight,
    }
    if head.config.draft_vocab_size != c.vocab_size:
        state["d2t"] = head.d2t
    return {name: tensor.detach() for name, tensor in state.items()}


def load_official_state(head: EagleHead, state: dict[str, Tensor], source: str) -> None:
    """Copy official tensors into `head`. Raises `FasteagleError` listing all that do not fit."""
    require_official(head, state, source)
    with torch.no_grad():
        # The parts are views of the fused weights, so this writes into the parameters.
        for name, part in official_state(head).items():
            part.copy_(state[name])


def require_official(head: EagleHead, state: dict[str, Tensor], source: str) -> None:
    """Raise `FasteagleError` listing all tensors of `state` that `head` has no place for."""
    expected = {name: tuple(t.shape) for name, t in official_state(head).items()}
    problems = [f"missing {name}" for name in expected if name not in state]
    problems += [
        f"{name} is {tuple(state[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    problems += [f"unknown {n}" for n in state if n not in expected and n not in IGNORED]
    if problems:
        raise FasteagleError(f"{source}: not a draft head we can load: {shortened(problems)}")


def save_head(folder: Path, head: EagleHead, header: dict[str, Any], dtype: torch.dtype) -> None:
    """Write a head directory; each file is written completely or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: (t if name == "d2t" else t.to(dtype)).contiguous().clone()
        for name, t in official_state(head).items()
    }
    with replacing(folder / "model.safetensors") as temporary:
        save_file(state, temporary, metadata={"format": "pt", HEADER_KEY: json.dumps(header)})
        temporary.chmod(0o644)  # safetensors writes private files
    with replacing(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(_hf_config(head.config, dtype), indent=1) + "\n")


def load_head(folder: Path, target: ModelConfig) -> tuple[EagleHead, dict[str, Any] | None]:
    """A head in fp32 on the CPU, and its header (None for published heads).

    Raises `FasteagleError` when it does not fit the target's width or vocabulary.
    """
    config = head_from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
    for what, ours, theirs in (
        ("width", config.block.dim, target.dim),
        ("vocabulary", config.block.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise FasteagleError(
                f"{folder}: the head is for a {what} of {ours:,}, the model has {theirs:,}: "
                "choose the head trained for this model, or run with --no-spec"
            )
    state, header = _read_state(folder)
    with torch.device("meta"):  # nothing is allocated before the file is known to hold it
        require_official(EagleHead(config), state, str(folder))
    head = EagleHead(config)
    load_official_state(head, state, str(folder))
    ids = head.target_ids()
    if ids.min() < 0 or ids.max() >= target.vocab_size or (ids.diff() <= 0).any():
        raise FasteagleError(f"{folder}: d2t does not list ascending ids of the target")
    return head.eval(), header


def with_vocabulary(head: EagleHead, draft_ids: Tensor) -> EagleHead:
    """The same head, drafting only `draft_ids` (ascending target ids)."""
    changed = EagleHead(dataclasses.replace(head.config, draft_vocab_size=len(draft_ids)))
    state = official_state(head) | {"d2t": draft_ids - torch.arange(len(draft_ids))}
    if len(draft_ids) == head.config.block.vocab_size:
        del state["d2t"]
    load_official_state(changed, state, "head")
    return changed


def read_header(folder: Path) -> dict[str, Any] | None:
    """The JSON header of a head of our own, None for others; reads no tensor."""
    try:
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            return _header(file.metadata() or {}, f"{folder}: its header")
    except (SafetensorError, OSError, FasteagleError):
        return None


def _header(metadata: dict[str, str], source: str) -> dict[str, Any] | None:
    """The header in a file's metadata, None where there is none. Raises `FasteagleError`."""
    if HEADER_KEY not in metadata:
        return None
    try:
        header = parse_json(metadata[HEADER_KEY])
    except ValueError as error:
        raise FasteagleError(f"{source} cannot be read as JSON ({error})") from error
    if not isinstance(header, dict):
        raise FasteagleError(f"{source} must be a JSON object: train or fetch the head again")
    fields = Fields(header, source)
    for key in ("target_fingerprint", "head_scheme"):
        fields.text(key, "")
    fields.shares("ranks")
    return header


def _read_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if safe.exists():
        try:
            with safe_open(safe, framework="pt") as file:
                metadata = file.metadata() or {}
                header = _header(metadata, f"{safe}: its header")
                return {name: file.get_tensor(name) for name in file.keys()}, header  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise FasteagleError(f"{safe}: damaged or truncated ({error})") from error
    if pickled.exists():
        try:
            state = torch.load(pickled, map_location="cpu", weights_only=True)
            if not all(isinstance(tensor, Tensor) for tensor in state.values()):
                raise ValueError("it holds more than tensors")
            return state, None
        except Exception as error:  # pickle, zip and RuntimeError, depending on the damage
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise FasteagleError(f"{pickled}: not a weights-only torch file ({reason})") from error
    raise FasteagleError(f"{folder}: no model.safetensors and no pytorch_model.bin")


def _hf_config(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    block = config.block
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": block.dim,
        "intermediate_size": block.ffn_dim,
        "num_attention_heads": block.n_head,
        "num_key_value_heads": block.n_kv_head,
        "head_dim": block.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": block.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": block.norm_eps,
        "rope_theta": block.rope_base,
        "bias": config.fc_bias,
        "qkv_bias": block.qkv_bias,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }

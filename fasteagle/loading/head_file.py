"""Draft head files: reading those of every dialect, and writing our own directories.

A head of our own is `config.json` and `model.safetensors` under the official names, whose metadata
key `fasteagle` holds a JSON header. Published heads have none.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fasteagle.config import ANY_LENGTH, HeadConfig, ModelConfig
from fasteagle.config_fields import Fields, parse_json
from fasteagle.errors import FasteagleError, first_line, shortened
from fasteagle.loading.head_dialects import (
    HeadSource,
    check_fit,
    checked_config,
    described,
    refuse_others,
)
from fasteagle.loading.head_gguf import gguf_of, open_gguf_head
from fasteagle.loading.tensors import read_json
from fasteagle.model import Eagle3Head, EagleHead, make_head
from fasteagle.paths import replacing
from fasteagle.uninitialized import Uninitialized

HEADER_KEY = "fasteagle"


def official_state(head: EagleHead) -> dict[str, Tensor]:
    """The head's tensors under the names of the public EAGLE code, as views of its parameters."""
    c = head.config.block
    attention, mlp = head.block.attention, head.block.mlp
    q_rows, kv_rows = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    sizes = [q_rows, kv_rows, kv_rows]
    p = "layers.0." if head.config.eagle3 is None else "midlayer."
    state = {"fc.weight": head.fc.weight}
    if head.fc.bias is not None:
        state["fc.bias"] = head.fc.bias
    for name, part in zip("qkv", attention.qkv.weight.split(sizes), strict=True):
        state[f"{p}self_attn.{name}_proj.weight"] = part
    if c.qkv_bias:
        for name, part in zip("qkv", attention.qkv.bias.split(sizes), strict=True):
            state[f"{p}self_attn.{name}_proj.bias"] = part
    if c.qk_norm:
        state[f"{p}self_attn.q_norm.weight"] = attention.q_norm.weight
        state[f"{p}self_attn.k_norm.weight"] = attention.k_norm.weight
    gate, up = mlp.gate_up.weight.chunk(2)
    state |= {
        f"{p}self_attn.o_proj.weight": attention.out.weight,
        f"{p}mlp.gate_proj.weight": gate,
        f"{p}mlp.up_proj.weight": up,
        f"{p}mlp.down_proj.weight": mlp.down.weight,
        f"{p}post_attention_layernorm.weight": head.block.mlp_norm.weight,
    }
    if isinstance(head, Eagle3Head):
        state |= _eagle3_state(head)
    if head.config.draft_vocab_size != c.vocab_size:
        state["d2t"] = head.d2t
    return {name: tensor.detach() for name, tensor in state.items()}


def _eagle3_state(head: Eagle3Head) -> dict[str, Tensor]:
    """What only EAGLE-3 heads have."""
    state = {
        "midlayer.input_layernorm.weight": head.embedding_norm.weight,
        "midlayer.hidden_norm.weight": head.feature_norm.weight,
        "norm.weight": head.norm.weight,
    }
    own = head.config.eagle3
    assert own is not None, "the config of an EAGLE-3 head"
    for i, norm in enumerate(head.tap_norms):
        state["input_norm.weight" if own.tap_norm == "all" else f"fc_norm.{i}.weight"] = norm.weight
    if head.own_lm_head is not None:
        state["lm_head.weight"] = head.own_lm_head.weight
    if head.own_embedding is not None:
        state["embed_tokens.weight"] = head.own_embedding.weight
    return state


def load_official_state(head: EagleHead, state: dict[str, Tensor], source: str) -> None:
    """Copy official tensors into `head`. Raises `FasteagleError` listing all that do not fit."""
    check_state(head, state, source)
    _copy_state(head, state)


@torch.no_grad()
def _copy_state(head: EagleHead, state: dict[str, Tensor]) -> None:
    # The parts are views of the fused weights, so this writes into the parameters.
    for name, part in official_state(head).items():
        part.copy_(state[name])


def check_state(head: EagleHead, state: dict[str, Tensor], source: str) -> None:
    """Raise `FasteagleError` listing all official tensors that do not fit `head`."""
    expected = {name: tuple(t.shape) for name, t in official_state(head).items()}
    problems = [f"missing {name}" for name in expected if name not in state]
    problems += [
        f"{name} is {tuple(state[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    problems += [f"unknown {n}" for n in state if n not in expected]
    if problems:
        raise FasteagleError(
            f"{source}: not a draft head we can load: {shortened(problems)}: fetch it again, or "
            "choose another with --head"
        )
    size, d2t = head.config.block.vocab_size, state.get("d2t")
    if d2t is None:
        return
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    if not len(ids) or ids.min() < 0 or ids.max() >= size or (ids.diff() <= 0).any():
        raise FasteagleError(
            f"{source}: d2t does not list ascending ids below {size:,}, the target's vocabulary: "
            "fetch the head again"
        )


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


def open_head(path: Path, target: ModelConfig | None = None) -> HeadSource:
    """The head in a folder or a GGUF file, of whichever dialect.

    Raises `FasteagleError` for what cannot run; given a `target`, before its tensors are read if it
    is for another one.
    """
    file = gguf_of(path)
    if file is not None:
        return open_gguf_head(file)
    raw, where = read_json(path / "config.json"), f"{path}/config.json"
    flat = checked_config(where, raw)
    refuse_others(str(path), raw, ())
    if target is not None:
        check_fit(where, flat, target)
    state, header = _read_state(path)
    return described(str(path), raw, _with_frequent_list(path, state), header)


def load_head(
    path: Path, target: ModelConfig, tap_layers: tuple[int, ...] | None = None
) -> tuple[EagleHead, dict[str, Any] | None]:
    """A head in fp32 on the CPU, and its header (None for published heads).

    `tap_layers` stand in for those that an EAGLE-3 head's files say. Raises `FasteagleError` when
    it does not fit the target.
    """
    source = open_head(path, target)
    return built_head(source, target, tap_layers), source.header


def built_head(
    source: HeadSource, target: ModelConfig, tap_layers: tuple[int, ...] | None = None
) -> EagleHead:
    """The head of `source`, see `load_head`."""
    config = fitted(source, target, tap_layers)
    with Uninitialized():  # all of it is loaded
        head = make_head(config)
    _copy_state(head, source.state)
    return head.eval()


def fitted(
    source: HeadSource, target: ModelConfig, tap_layers: tuple[int, ...] | None = None
) -> HeadConfig:
    """The head's shape over `target`, which its tensors have; allocates nothing.

    Raises `FasteagleError`, see `HeadSource.config` and `check_state`.
    """
    config = source.config(target, tap_layers)
    with torch.device("meta"), Uninitialized():
        check_state(make_head(config), source.state, source.name)
    return config


def _with_frequent_list(folder: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with the vocabulary of an FR-Spec list `freq_*.pt`, where the folder has one."""
    lists = sorted(folder.glob("freq_*.pt"))
    if not lists or "d2t" in state:
        return state
    try:
        ids = torch.as_tensor(_unpickled(lists[0])).flatten().sort().values
    except (TypeError, ValueError, RuntimeError) as error:
        raise FasteagleError(f"{lists[0]}: not a list of token ids: fetch it again") from error
    return state | {"d2t": ids - torch.arange(len(ids))}


def with_vocabulary(
    head: EagleHead, draft_ids: Tensor, rows: Callable[[Tensor], Tensor] | None = None
) -> EagleHead:
    """The same head, drafting only `draft_ids` (ascending target ids).

    `rows` gives the target's LM head rows [n, D] of ids, for tokens that are new to an LM head of
    the draft head's own.
    """
    changed = make_head(dataclasses.replace(head.config, draft_vocab_size=len(draft_ids)))
    state = official_state(head) | {"d2t": draft_ids - torch.arange(len(draft_ids))}
    if len(draft_ids) == head.config.block.vocab_size:
        del state["d2t"]
    if "lm_head.weight" in state:
        assert rows is not None, "new rows come from the target"
        known = head.target_ids().cpu()
        at = torch.searchsorted(known, draft_ids).clamp(max=len(known) - 1)
        is_known = (known[at] == draft_ids).unsqueeze(1)
        old = state["lm_head.weight"]
        state["lm_head.weight"] = torch.where(is_known, old.cpu()[at], rows(draft_ids).cpu())
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
        state = _unpickled(pickled)
        if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
            raise FasteagleError(f"{pickled}: not a weights-only torch file (no dict of tensors)")
        return state, None
    raise FasteagleError(f"{folder}: no model.safetensors and no pytorch_model.bin")


def _unpickled(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and RuntimeError, depending on the damage
        reason = first_line(error)
        raise FasteagleError(
            f"{path}: not a weights-only torch file ({reason}): it is damaged or would run code, "
            "use a safetensors version of it"
        ) from error


def layer_config(block: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What the config of a Llama decoder layer says in every layout."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": block.dim,
        "intermediate_size": block.ffn_dim,
        "num_attention_heads": block.n_head,
        "num_key_value_heads": block.n_kv_head,
        "head_dim": block.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": block.vocab_size,
        "rms_norm_eps": block.norm_eps,
        "rope_theta": block.rope_base,
        "rope_scaling": rope_scaling(block),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _hf_config(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    block = config.block
    raw = {
        "architectures": ["LlamaForCausalLM"],
        **layer_config(block, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "bias": config.fc_bias,
        "qkv_bias": block.qkv_bias,
    }
    if block.max_seq_len < ANY_LENGTH:
        raw["max_position_embeddings"] = block.max_seq_len
    if not config.shifted:
        raw["shifted"] = False
    if block.rope_freq_factors is not None:
        raw["rope_freq_factors"] = list(block.rope_freq_factors)
    if config.eagle3 is not None:
        own = config.eagle3
        raw |= {
            "tap_layers": list(own.tap_layers),
            "target_hidden_size": own.target_dim,
            "norm_before_residual": own.norm_before_residual,
            "norm_output": own.norm_output,
        }
    return raw


def rope_scaling(block: ModelConfig) -> dict[str, Any] | None:
    """The entry of a `config.json`; `type` is what code of the time of transformers 4 reads."""
    if block.rope_scaling is not None:
        scaling = block.rope_scaling
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_seq_len,
        }
    if block.rope_linear_factor != 1.0:
        return {"type": "linear", "rope_type": "linear", "factor": block.rope_linear_factor}
    return None

"""Write draft heads: our own folders, and those of other engines.

Tensors of an export go out bit for bit, in the dtype they came in. Traits for which a layout has no
field are refused by name: an engine would ignore them and accept fewer tokens without a warning.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasteagle.config import ANY_LENGTH, HeadConfig, ModelConfig, default_aux_layers
from fasteagle.errors import FasteagleError, shortened
from fasteagle.loading.heads.gguf import write_gguf_head
from fasteagle.loading.heads.read import HEADER_KEY, HeadSource
from fasteagle.loading.heads.tables import (
    AUX_IDS,
    EMBEDDING,
    LM_HEAD,
    MAP,
    State,
    layer_config,
    official_state,
    target_ids,
)
from fasteagle.loading.tensors import Checkpoint, save_tensors
from fasteagle.model import EagleHead
from fasteagle.options import EXPORT_FORMATS
from fasteagle.paths import atomic_dir, require_writable, write_json

Config = dict[str, Any]  # a config.json


@dataclasses.dataclass(frozen=True)
class HeadTarget:
    """Target of a draft head: the name that others know it by, and its files."""

    name: str
    checkpoint: Checkpoint

    def tensor(self, name: str) -> Tensor:
        """Return the target's embedding or LM head by its name in the draft head."""
        is_own = name == LM_HEAD and not self.checkpoint.config.tie_embeddings
        return self.checkpoint.load(LM_HEAD if is_own else f"model.{EMBEDDING}")


def save_head(folder: Path, head: EagleHead, header: Config, dtype: torch.dtype) -> None:
    """Write a draft head folder of ours; each file is written completely or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: (t if name == MAP else t.to(dtype)).clone()
        for name, t in official_state(head).items()
    }
    _fill(folder, config_json("ours", head.config, dtype), state, {HEADER_KEY: json.dumps(header)})


def _fill(folder: Path, raw: Config, state: State, metadata: dict[str, str] | None = None) -> None:
    save_tensors(state, folder / "model.safetensors", metadata)
    write_json(folder / "config.json", raw)


# Layouts: the keys of their config.json, beside those of a decoder layer. "eagle1" is the official
# one of EAGLE-1/2; others but "ours" hold EAGLE-3 heads only.
_USUAL = ("attention_bias", "mlp_bias", "tie_word_embeddings")
_WINDOW = ("layer_types", "sliding_window")
_KEYS = {
    "ours": (
        *("bias", "qkv_bias", "rope_freq_factors", "draft_vocab_size"),
        *("tap_layers", "target_hidden_size", "norm_before_residual", "norm_output"),
        *(*_WINDOW, "mtp"),
    ),
    "eagle1": (*_USUAL, "bias", "qkv_bias"),
    "eagle": (*_USUAL, "draft_vocab_size"),
    "specforge": (
        *(*_USUAL, "draft_vocab_size", "target_hidden_size", "fc_norm", "norm_output"),
        *("architectures", "eagle_config"),
    ),
    "speculators": (
        *(*_USUAL, *_WINDOW, "draft_vocab_size"),
        *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    ),
    "gguf": ("target_hidden_size", "norm_before_residual", "norm_before_fc", "rope_freq_factors"),
}
_EAGLE3_ONLY = {
    "specforge": "SpecForge trains EAGLE-3 heads only",
    "speculators": "the speculators package reads EAGLE-1/2 heads no longer",
    "gguf": "llama.cpp runs EAGLE-3 heads only",
}
WINDOW = "a sliding window"
_TRAITS = {  # of a head whose config has such a key
    "bias": "a bias in fc",
    "qkv_bias": "biases of q, k and v",
    "rope_freq_factors": "RoPE factors",
    "fc_norm": "a norm for each auxiliary layer",
    "norm_before_fc": "one norm over all auxiliary layers",
    "norm_output": "a normed next feature",
    "sliding_window": WINDOW,
    "norm_before_residual": "a residual stream that begins normed",
}


def _values(config: HeadConfig) -> Config:
    """Return the values of all keys of layouts that a draft head has."""
    own, factors = config.eagle3, config.block.rope_freq_factors
    values: Config = {
        **dict.fromkeys(_USUAL, False),
        "bias": config.fc_bias,
        "qkv_bias": config.block.qkv_bias,
        "draft_vocab_size": config.draft_vocab_size,
    }
    if factors is not None:
        values["rope_freq_factors"] = list(factors)
    if config.block.sliding_window is not None:
        values["layer_types"] = ["sliding_attention"]
        values["sliding_window"] = config.block.sliding_window
    if config.mtp:
        values["mtp"] = True
    if own is None:
        return values
    outputs = [layer - 1 for layer in own.aux_layers]  # SGLang adds one: the blocks' outputs
    return values | {
        "tap_layers": list(own.aux_layers),
        "target_hidden_size": own.target_dim,
        "norm_before_residual": own.norm_before_residual,
        "norm_before_fc": own.aux_norm == "all",
        "fc_norm": own.aux_norm == "each",
        "norm_output": own.norm_output,
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {AUX_IDS: outputs, "use_aux_hidden_state": True},
    }


def unsayable(config: HeadConfig, target: ModelConfig, layout: str) -> list[str]:
    """Return the unusual traits of a draft head for which `layout` has no field."""
    block, own, values = config.block, config.eagle3, _values(config)
    official = layout in ("eagle1", "eagle")
    own_head_dim = block.head_dim * block.n_head != block.dim
    traits = {
        **{trait: values.get(key) and key not in _KEYS[layout] for key, trait in _TRAITS.items()},
        "norms of q and k": block.qk_norm and layout != "speculators",
        "a head_dim other than width / heads": own_head_dim and official,
        "llama3 RoPE scaling": block.rope_scaling is not None and official,
    }
    if own is not None:
        usual = own.aux_layers == default_aux_layers(target.n_layer)
        other_width = own.target_dim != block.dim
        traits |= {
            "a width other than the target's": other_width and layout == "speculators",
            "auxiliary layers other than 2, L // 2, L - 3": not usual and official,
            "other than 3 auxiliary layers": len(own.aux_layers) != 3 and layout == "gguf",
            "an auxiliary layer before all": own.aux_layers[0] == 0 and layout == "specforge",
        }
    return [trait for trait, applies in traits.items() if applies]


def config_json(layout: str, config: HeadConfig, dtype: torch.dtype) -> Config:
    """Return the `config.json` of a draft head."""
    values = _values(config)
    keys = _KEYS["eagle1" if layout == "eagle" and config.eagle3 is None else layout]
    raw = layer_config(config.block, dtype) | {k: values[k] for k in keys if k in values}
    return _speculators(raw, config) if layout == "speculators" else raw


def _speculators(raw: Config, config: HeadConfig) -> Config:
    """Return a flat config as the speculators package nests it."""
    top = _KEYS["speculators"][len(_USUAL) + len(_WINDOW) :]
    layer = {key: value for key, value in raw.items() if key not in (*top, "architectures")}
    layer |= {"model_type": "qwen3"} if config.block.qk_norm else {}
    return {key: raw[key] for key in (*top, "tie_word_embeddings", "torch_dtype")} | {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": layer,
        AUX_IDS: list(config.aux_layers),
    }


# Export


def export_head(
    source: HeadSource,
    to: str,
    out: Path,
    target: HeadTarget | None = None,
    aux_layers: tuple[int, ...] | None = None,
    tokenizer: Path | None = None,
) -> list[str]:
    """Write a draft head into the folder `out` (a file for "gguf"); return lines for the user.

    `target` may be left out where neither its tensors nor its depth are needed. `tokenizer` is
    the GGUF file whose tokenizer a GGUF head carries. Raises `FasteagleError`.
    """
    if tokenizer is not None and to != "gguf":
        raise FasteagleError(f"--tokenizer-from is for --to gguf, this is --to {to}: drop it")
    if target is None:
        _check_needs_no_target(source, to, aux_layers)
    shape = source.likely_target(aux_layers) if target is None else target.checkpoint.config
    config = source.fitted(shape, aux_layers)
    check_exportable(config, to, shape)
    if not shape.max_seq_len and to != "eagle":  # engines tabulate RoPE as far as the config says
        raise FasteagleError(f"{source.name}: its files do not say how long texts are: add --model")
    state = _complete(source, config, target, to)
    length = min(shape.max_seq_len, 2**20) or ANY_LENGTH
    block = dataclasses.replace(config.block, max_seq_len=length)
    config = dataclasses.replace(config, block=block)
    if to == "gguf":
        require_writable(out)
        write_gguf_head(out, config, state, tokenizer or _tokenizer_of(target))
        return []
    raw = config_json(to, config, state["fc.weight"].dtype)
    if to == "eagle" and EMBEDDING in state and config.eagle3 is not None:
        raw["target_hidden_size"] = shape.dim  # the official code looks for an embedding then
    if to == "speculators":
        state = {name.replace("midlayer.", "layers.0."): t for name, t in state.items()}
        if target is not None:
            verifier = {"name_or_path": target.name, "architectures": [shape.architecture]}
            raw["speculators_config"]["verifier"] = verifier
    ids = target_ids(state.pop(MAP)) if config.eagle3 is None and MAP in state else None
    with atomic_dir(out) as folder:
        _fill(folder, raw, state)
        if ids is not None:
            torch.save(ids.tolist(), folder / f"freq_{len(ids)}.pt")
    return _remarks(config, ids, to)


def _remarks(config: HeadConfig, ids: Tensor | None, to: str) -> list[str]:
    """Return lines for the user: what other engines do not read in the exported files."""
    lines, window = [], config.block.sliding_window
    if ids is not None:
        lines.append(
            f"its {len(ids):,} draft tokens are the list freq_{len(ids)}.pt, which FR-Spec and "
            "fasteagle read; other engines draft all tokens"
        )
    if window is not None and to == "eagle":
        lines.append(
            f"its window of {window:,} keys is left out, for which the layout has no field: other "
            "engines draft with all keys"
        )
    return lines


def check_exportable(config: HeadConfig, to: str, target: ModelConfig) -> None:
    """Raise `FasteagleError` for draft heads that the layout `to` cannot describe."""
    if config.mtp:
        raise FasteagleError(
            "other engines read a layer for multi-token prediction (MTP) in the model's own files "
            "only: give --head to fasteagle instead"
        )
    eagle1 = config.eagle3 is None
    if eagle1 and to != "eagle":
        raise FasteagleError(f"{_EAGLE3_ONLY[to]}, this is EAGLE-1/2: export it --to eagle")
    problems = unsayable(config, target, "eagle1" if eagle1 else to)
    if eagle1 and WINDOW in problems:  # no other layout has it, and without it a head drafts too
        problems.remove(WINDOW)
    if problems:
        layouts = () if eagle1 else EXPORT_FORMATS
        others = [layout for layout in layouts if not unsayable(config, target, layout)]
        way = f"export it --to {' or '.join(others)}" if others else "run it with fasteagle"
        raise FasteagleError(f"--to {to} cannot hold a head with {shortened(problems)}: {way}")


def _check_needs_no_target(source: HeadSource, to: str, aux_layers: tuple[int, ...] | None) -> None:
    """Raise `FasteagleError` where the layout depends on the model's depth."""
    layers = aux_layers or source.aux_layers
    if source.eagle3 and (layers is None) == (to != "eagle"):
        reason = "its files do not say the auxiliary layers, which depend on the model's depth"
        if to == "eagle":
            reason = "its auxiliary layers fit the official layout at one depth of the model only"
        raise FasteagleError(f"{source.name}: {reason}: add --model")


def _complete(source: HeadSource, config: HeadConfig, target: HeadTarget | None, to: str) -> State:
    """Return the draft head's tensors and those of the target that the layout needs."""
    state = dict(source.state)
    dtype = state["fc.weight"].dtype

    def borrowed(name: str) -> Tensor:
        if target is None:
            raise FasteagleError(f"{source.name}: it has no {name} of its own: add --model")
        return target.tensor(name).to(dtype, copy=True)  # a tied model gives one tensor twice

    if config.eagle3 is None:
        if target is not None:  # as in official files, whose strict loader wants it
            state[EMBEDDING] = borrowed(EMBEDDING)
        return state
    if LM_HEAD not in state:
        rows = borrowed(LM_HEAD)
        state[LM_HEAD] = rows[target_ids(state[MAP])] if MAP in state else rows
    if to == "speculators" and EMBEDDING not in state:
        state[EMBEDDING] = borrowed(EMBEDDING)
    if MAP in state and to != "gguf":
        state["t2d"] = torch.zeros(config.block.vocab_size, dtype=torch.bool)
        state["t2d"][target_ids(state[MAP])] = True
    return state


def _tokenizer_of(target: HeadTarget | None) -> Path:
    files = [] if target is None else target.checkpoint.files
    if not files or files[0].suffix != ".gguf":
        raise FasteagleError(
            "a GGUF head carries the target's tokenizer: give a .gguf file of the model with "
            "--tokenizer-from"
        )
    return files[0]

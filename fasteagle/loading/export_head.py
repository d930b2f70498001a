"""Draft heads written as other engines read them: official EAGLE, SpecForge, speculators, GGUF.

Tensors go out bit for bit, in the dtype they came in. What a layout has no field for is refused by
name: an engine would leave it out and accept fewer tokens without a word.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fasteagle.config import HeadConfig, ModelConfig
from fasteagle.errors import FasteagleError, shortened
from fasteagle.loading.gguf import GGUFFile
from fasteagle.loading.head_dialects import HeadSource, default_taps
from fasteagle.loading.head_file import fitted, layer_config
from fasteagle.loading.head_gguf import N_TAPS, write_gguf_head
from fasteagle.loading.tensors import Checkpoint
from fasteagle.options import EXPORT_FORMATS
from fasteagle.paths import atomic_dir, require_writable

_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_NORM_EACH, _NORM_ALL = "a norm for each tap", "one norm over all taps"
_NORM_OUTPUT, _NORM_FIRST = "a normed next feature", "a residual stream that begins normed"
_UNSHIFTED = "inputs that are not shifted"
_FC_BIAS, _QKV_BIAS, _QK_NORM = "a bias in fc", "biases of q, k and v", "norms of q and k"
_HEAD_DIM, _WIDTH = "a head_dim other than width / heads", "a width other than the target's"
_LLAMA3, _LINEAR, _FACTORS = "llama3 RoPE scaling", "linear RoPE scaling", "RoPE factors"
_TAPS, _NUMBER, _FIRST = "taps other than 2, L // 2, L - 3", "other than 3 taps", "a tap before all"

# What each layout can say, beside what all of them can. Of EAGLE-1/2 heads only "eagle" has one.
_SAYS: dict[str, frozenset[str]] = {
    "eagle": frozenset({_WIDTH, _LINEAR}),
    "specforge": frozenset(
        {_NORM_EACH, _NORM_OUTPUT, _HEAD_DIM, _WIDTH, _LLAMA3, _LINEAR, _TAPS, _NUMBER}
    ),
    "speculators": frozenset(
        {_NORM_EACH, _NORM_ALL, _NORM_OUTPUT, _NORM_FIRST, _QK_NORM, _HEAD_DIM, _LLAMA3, _LINEAR}
        | {_TAPS, _NUMBER, _FIRST}
    ),
    "gguf": frozenset(
        {_NORM_ALL, _NORM_FIRST, _HEAD_DIM, _WIDTH, _LLAMA3, _LINEAR, _FACTORS, _TAPS, _FIRST}
    ),
}
_OF_EAGLE1 = frozenset({_FC_BIAS, _QKV_BIAS})


@dataclasses.dataclass(frozen=True)
class ExportTarget:
    """The model that a head is for: the name others know it by, and its files."""

    name: str
    checkpoint: Checkpoint

    def embedding(self) -> Tensor:
        return self.checkpoint.load("model.embed_tokens.weight")

    def lm_head(self) -> Tensor:
        tied = self.checkpoint.config.tie_embeddings
        return self.embedding() if tied else self.checkpoint.load("lm_head.weight")


def export_head(
    source: HeadSource,
    to: str,
    out: Path,
    target: ExportTarget | None = None,
    tap_layers: tuple[int, ...] | None = None,
    tokenizer: Path | None = None,
) -> list[str]:
    """Write a head into the folder `out` (a file for "gguf"); lines for the person.

    `target` may be left out where neither tensors nor the depth of it are needed. `tokenizer` is
    the GGUF file whose tokenizer a GGUF head carries. Raises `FasteagleError`.
    """
    if target is None:
        _check_needs_no_target(source, to, tap_layers)
    shape = source.likely_target(tap_layers) if target is None else target.checkpoint.config
    config = fitted(source, shape, tap_layers)
    check_exportable(config, to, shape)
    if not shape.max_seq_len and to != "eagle":  # engines tabulate RoPE as far as the config says
        raise FasteagleError(f"{source.name}: its files do not say how long texts are: add --model")
    if config.eagle3 is None:
        return _write_eagle1(source, config, shape, target, out)
    state = _complete(source, config, target, to)
    if to == "gguf":
        require_writable(out)
        tokenizer = tokenizer or _tokenizer_of(target)
        write_gguf_head(out, config, state, shape, tokenizer)
    else:
        _write_folder(out, *_LAYOUTS[to](config, shape, target, state))
    return []


def check_exportable(config: HeadConfig, to: str, target: ModelConfig) -> None:
    """Raise `FasteagleError` for heads that the layout `to` cannot describe."""
    if config.eagle3 is None and to != "eagle":
        reasons = {
            "specforge": "SpecForge trains EAGLE-3 heads only",
            "speculators": "the speculators package reads EAGLE-1/2 heads no longer",
            "gguf": "llama.cpp runs EAGLE-3 heads only",
        }
        raise FasteagleError(f"{reasons[to]}, this is EAGLE-1/2: export it --to eagle")
    says = _SAYS[to] | (_OF_EAGLE1 if config.eagle3 is None else set())
    problems = [trait for trait in _traits(config, target) if trait not in says]
    if problems:
        others = [name for name in EXPORT_FORMATS if not set(_traits(config, target)) - _SAYS[name]]
        way = f"export it --to {' or '.join(others)}" if others else "run it with fasteagle"
        raise FasteagleError(f"--to {to} cannot hold a head with {shortened(problems)}: {way}")


def _traits(config: HeadConfig, target: ModelConfig) -> list[str]:
    """What is unusual about a head."""
    block, own = config.block, config.eagle3
    traits = {
        _UNSHIFTED: not config.shifted,
        _FC_BIAS: config.fc_bias,
        _QKV_BIAS: block.qkv_bias,
        _QK_NORM: block.qk_norm,
        _HEAD_DIM: block.head_dim * block.n_head != block.dim,
        _LLAMA3: block.rope_scaling is not None,
        _LINEAR: block.rope_linear_factor != 1.0,
        _FACTORS: block.rope_freq_factors is not None,
    }
    if own is not None:
        traits |= {
            _NORM_EACH: own.tap_norm == "each",
            _NORM_ALL: own.tap_norm == "all",
            _NORM_OUTPUT: own.norm_output,
            _NORM_FIRST: own.norm_before_residual,
            _WIDTH: own.target_dim != block.dim,
            _TAPS: own.tap_layers != default_taps(target.n_layer),
            _NUMBER: len(own.tap_layers) != N_TAPS,
            _FIRST: own.tap_layers[0] == 0,
        }
    return [trait for trait, applies in traits.items() if applies]


def _check_needs_no_target(source: HeadSource, to: str, asked: tuple[int, ...] | None) -> None:
    if not source.eagle3:
        return
    said = asked or source.tap_layers
    if to == "eagle" and said is not None:
        reason = "its taps fit the official layout at one depth of the model only"
    elif to != "eagle" and said is None:
        reason = "its files do not say the taps, which depend on the model's depth"
    else:
        return
    raise FasteagleError(f"{source.name}: {reason}: add --model")


def _complete(
    source: HeadSource, config: HeadConfig, target: ExportTarget | None, to: str
) -> dict[str, Tensor]:
    """Its tensors, with an LM head of its own and, where the layout wants one, an embedding."""
    state = dict(source.state)
    dtype = state["fc.weight"].dtype

    def borrowed(name: str, tensor: Callable[[ExportTarget], Tensor]) -> Tensor:
        if target is None:
            raise FasteagleError(f"{source.name}: it has no {name} of its own: add --model")
        return tensor(target).to(dtype, copy=True)  # a tied model gives one tensor twice

    if _LM_HEAD not in state:
        rows = borrowed(_LM_HEAD, ExportTarget.lm_head)
        state[_LM_HEAD] = rows[_ids(state)].contiguous() if "d2t" in state else rows
    if to == "speculators" and _EMBEDDING not in state:
        state[_EMBEDDING] = borrowed(_EMBEDDING, ExportTarget.embedding)
    if "d2t" in state and to != "gguf":
        state["t2d"] = torch.zeros(config.block.vocab_size, dtype=torch.bool)
        state["t2d"][_ids(state)] = True
    return state


def _ids(state: dict[str, Tensor]) -> Tensor:
    """The target id of every draft id."""
    return state["d2t"] + torch.arange(len(state["d2t"]))


def _tokenizer_of(target: ExportTarget | None) -> Path:
    if target is None or not isinstance(target.checkpoint, GGUFFile):
        raise FasteagleError(
            "a GGUF head carries the target's tokenizer: give a .gguf file of the model with "
            "--tokenizer-from"
        )
    return target.checkpoint.path


# The layouts


def _write_folder(out: Path, raw: dict[str, Any], state: dict[str, Tensor]) -> None:
    with atomic_dir(out) as folder:
        _fill(folder, raw, state)


def _fill(folder: Path, raw: dict[str, Any], state: dict[str, Tensor]) -> None:
    folder.chmod(0o755)  # temporary folders are private, and so are files of safetensors
    tensors = {name: t.contiguous() for name, t in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")


def _layer(config: HeadConfig, target: ModelConfig, state: dict[str, Tensor]) -> dict[str, Any]:
    """What the config of a Llama decoder layer says in every layout."""
    length = min(target.max_seq_len, 2**20)
    return {
        **layer_config(config.block, state["fc.weight"].dtype),
        **({"max_position_embeddings": length} if length else {}),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def _write_eagle1(
    source: HeadSource,
    config: HeadConfig,
    shape: ModelConfig,
    target: ExportTarget | None,
    out: Path,
) -> list[str]:
    """The official EAGLE-1/2 layout, which has no draft vocabulary: FR-Spec's list lies beside."""
    state = {name: t for name, t in source.state.items() if name != "d2t"}
    if target is not None:  # as in official files, whose strict loader wants it
        state[_EMBEDDING] = target.embedding().to(state["fc.weight"].dtype)
    raw = _layer(config, shape, state) | {
        "architectures": ["LlamaForCausalLM"],
        "bias": config.fc_bias,
        "qkv_bias": config.block.qkv_bias,
    }
    ids = _ids(source.state).tolist() if "d2t" in source.state else []
    with atomic_dir(out) as folder:
        _fill(folder, raw, state)
        if ids:
            torch.save(ids, folder / f"freq_{len(ids)}.pt")
    if not ids:
        return []
    return [
        f"its {len(ids):,} draft tokens are the list freq_{len(ids)}.pt, which FR-Spec and "
        "fasteagle read; other engines draft all tokens"
    ]


def _official(
    config: HeadConfig, shape: ModelConfig, target: ExportTarget | None, state: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    raw = _layer(config, shape, state) | {
        "architectures": ["LlamaForCausalLM"],
        "draft_vocab_size": config.draft_vocab_size,
    }
    if _EMBEDDING in state:  # the official code looks for one where this is said
        raw["target_hidden_size"] = shape.dim
    return raw, state


def _specforge(
    config: HeadConfig, shape: ModelConfig, target: ExportTarget | None, state: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """SGLang adds one to the numbers of blocks, which are those whose output is read."""
    own = config.eagle3
    assert own is not None, "see export_head"
    raw = _layer(config, shape, state) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": own.target_dim,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in own.tap_layers],
            "use_aux_hidden_state": True,
        },
        "fc_norm": own.tap_norm == "each",
        "norm_output": own.norm_output,
    }
    return raw, state


def _speculators(
    config: HeadConfig, shape: ModelConfig, target: ExportTarget | None, state: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    own = config.eagle3
    assert own is not None, "see export_head"
    layer = _layer(config, shape, state)
    if config.block.qk_norm:
        layer["model_type"] = "qwen3"
    greedy = {"proposal_type": "greedy", "speculative_tokens": 3}
    verifier = {
        "name_or_path": None if target is None else target.name,
        "architectures": [] if target is None else [shape.architecture],
    }
    raw = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": verifier,
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(own.tap_layers),
        "norm_before_residual": own.norm_before_residual,
        "norm_before_fc": own.tap_norm == "all",
        "fc_norm": own.tap_norm == "each",
        "norm_output": own.norm_output,
        "tie_word_embeddings": False,
        "torch_dtype": layer["torch_dtype"],
    }
    return raw, {name.replace("midlayer.", "layers.0."): t for name, t in state.items()}


_LAYOUTS = {"eagle": _official, "specforge": _specforge, "speculators": _speculators}

"""Draft head dialects as data: tensor names, config keys, and the marks that identify them.

The names of the public EAGLE code are the common ones: every dialect is read into them and written
from them. Nothing here opens a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasteagle.config import ANY_LENGTH, ModelConfig
from fasteagle.errors import FasteagleError
from fasteagle.model import EagleHead

Raw = Mapping[str, Any]  # a config.json
State = dict[str, Tensor]  # tensors by name

# Tensors

EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"  # EAGLE-1/2 heads borrow both
TRAINING_ONLY = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
MAP, VLLM_MAP = "d2t", "draft_id_to_target_id"  # offsets from draft ids to target ids
# Prefixes of names in EAGLE-3 files of others
RENAMED = {"layers.0.": "midlayer.", "fcs.": "fc_norm.", VLLM_MAP: MAP}
_MODULES = {  # the official tensors of our modules; "*" stands for the decoder layer
    "fc": ["fc"],
    "block.attention.qkv": ["*.self_attn.q_proj", "*.self_attn.k_proj", "*.self_attn.v_proj"],
    "block.attention.q_norm": ["*.self_attn.q_norm"],
    "block.attention.k_norm": ["*.self_attn.k_norm"],
    "block.attention.out": ["*.self_attn.o_proj"],
    "block.mlp.gate_up": ["*.mlp.gate_proj", "*.mlp.up_proj"],
    "block.mlp.down": ["*.mlp.down_proj"],
    "block.mlp_norm": ["*.post_attention_layernorm"],
    "embedding_norm": ["*.input_layernorm"],
    "feature_norm": ["*.hidden_norm"],
    "norm": ["norm"],
    "own_lm_head": ["lm_head"],
    "own_embedding": ["embed_tokens"],
}
_MTP_MODULES = _MODULES | {  # a layer for multi-token prediction; the names are MiMo's
    "embedding_norm": ["token_layernorm"],
    "feature_norm": ["hidden_layernorm"],
    "block.attention_norm": ["*.input_layernorm"],
}


def official_state(head: EagleHead) -> State:
    """Return the draft head's tensors under the names of the public EAGLE code, as views."""
    block, own = head.config.block, head.config.eagle3
    modules = _MTP_MODULES if head.config.mtp else _MODULES
    layer = "layers.0" if own is None else "midlayer"
    kv_rows = block.n_kv_head * block.head_dim
    fused = {
        "block.attention.qkv": [block.n_head * block.head_dim, kv_rows, kv_rows],
        "block.mlp.gate_up": [block.ffn_dim, block.ffn_dim],
    }
    state = {}
    for path, parameter in head.named_parameters():
        module, _, kind = path.rpartition(".")
        names = modules.get(module)
        if names is None:  # a norm before fc
            is_one = own is not None and own.aux_norm == "all"
            names = ["input_norm" if is_one else module.replace("aux_norms", "fc_norm")]
        parts = parameter.split(fused.get(module, [len(parameter)]))
        for name, part in zip(names, parts, strict=True):
            state[f"{name.replace('*', layer)}.{kind}"] = part.detach()
    if head.config.draft_vocab_size != block.vocab_size:
        state["d2t"] = head.d2t
    return state


def official_name(name: str, eagle3: bool = True) -> str:
    """Return the official name of a tensor of an EAGLE-3 file, or of an EAGLE-1/2 file."""
    names = RENAMED if eagle3 else {VLLM_MAP: MAP}
    start = next((start for start in names if name.startswith(start)), "")
    return names.get(start, "") + name.removeprefix(start)


def layer_config(block: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config of a Llama decoder layer that all layouts share."""
    length, scaling = block.max_seq_len, None  # code for transformers 4 reads `type`
    if block.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **dataclasses.asdict(block.rope_scaling)}
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_seq_len")
    elif block.rope_linear_factor != 1.0:
        scaling = {"type": "linear", "rope_type": "linear", "factor": block.rope_linear_factor}
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
        "rms_norm_eps": block.norm_eps,
        "rope_theta": block.rope_base,
        "rope_scaling": scaling,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **({"max_position_embeddings": length} if length < ANY_LENGTH else {}),
    }


def target_ids(d2t: Tensor) -> Tensor:
    """Return the target id of every draft id."""
    return d2t.flatten() + torch.arange(d2t.numel(), device=d2t.device)


# Dialects of EAGLE-3


class Dialect(NamedTuple):
    """Files of one project: their marks, and the key that lists blocks of the target."""

    name: str
    marks: tuple[str, ...]  # keys of config.json, of its eagle_config, or architectures
    layers: str = ""  # key of the list; "" where there is none
    shift: int = 0  # 1 where the list has the blocks whose output is read


AUX_IDS = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config."
OURS, EAGLE12, IN_MODEL = "fasteagle", "official EAGLE-1/2", "a model's own files"
GGUF_LAYERS = "eagle3.target_layers"
# The first one that has a mark. The key AUX_IDS has two meanings: speculators and vLLM list blocks
# whose input is read, SpecForge, SGLang and ModelOpt those whose output is, one block earlier.
EAGLE3_DIALECTS = (
    Dialect(OURS, ("tap_layers",), "tap_layers"),
    Dialect("llama.cpp GGUF EAGLE-3", (GGUF_LAYERS,), GGUF_LAYERS),
    Dialect("speculators / vLLM EAGLE-3", ("speculators_model_type", AUX_IDS), AUX_IDS),
    Dialect(
        "NVIDIA ModelOpt EAGLE-3",
        (NESTED + "use_input_layernorm_in_first_layer", NESTED + "use_last_layernorm"),
        NESTED + AUX_IDS,
        shift=1,
    ),
    Dialect(
        "SpecForge / SGLang EAGLE-3",
        ("eagle_config", "LlamaForCausalLMEagle3"),
        NESTED + AUX_IDS,
        shift=1,
    ),
    Dialect("official EAGLE-3", ()),
)


def eagle3_dialect(raw: Raw) -> Dialect:
    """Return the dialect of an EAGLE-3 head."""
    marks = {key for key, value in dotted(raw).items() if value not in (None, {})}
    marks |= set(raw.get("architectures") or [])
    return next((d for d in EAGLE3_DIALECTS if marks & set(d.marks)), EAGLE3_DIALECTS[-1])


def dotted(raw: Raw) -> dict[str, Any]:
    """Return a config.json with the keys of its `eagle_config` beside its own."""
    return {**raw, **{NESTED + key: v for key, v in (raw.get("eagle_config") or {}).items()}}


def is_eagle3(raw: Raw, names: Iterable[str]) -> bool:
    """Return whether a config or names of tensors belong to an EAGLE-3 head."""
    marks = ("midlayer.", "layers.0.hidden_norm.weight")
    return "eagle3" in _kinds(raw) or any(name.startswith(marks) for name in names)


def listed(layers: Iterable[int]) -> str:
    """Return block numbers as text, with commas between them."""
    return ", ".join(str(layer) for layer in layers)


# Draft models that do not run here, with words in the names of their architectures, model types,
# tensors, or keys of the config that are set; of methods akin to EAGLE, what they would need
_REFUSED = {
    "parallel drafting (P-EAGLE, which needs one pass of the draft head for all depths, over mask "
    "tokens with mask_hidden in place of features)": ("peagle", "mask_hidden", "parallel_drafting"),
    "block diffusion (DFlash, which needs a block of mask tokens that attend both ways, and the "
    "target's features as keys and values of every layer)": ("dflash",),
    "multi-token prediction layers (MTP)": ("mtp", "nextn", "eh_proj"),
    "Medusa heads": ("medusa",),
    "an MLP speculator": ("mlp_speculator",),
    "latent attention (MLA)": ("kv_a_proj",),
    "a mixture of experts": (".experts.",),
    "more than one decoder layer": ("layers.1.",),
    "norms of HASS variants": ("embed_layernorm",),
    "the EAGLE-1 form that speculators has given up": ("fusion_fc",),
}
_REFUSED_KEYS = ("parallel_drafting", "dflash_config", "medusa_num_heads")


def refuse_others(name: str, raw: Raw, tensors: Iterable[str] = ()) -> None:
    """Raise `FasteagleError` for drafting methods that are not EAGLE-1, -2 or -3.

    `raw` is a config whose decoder layer is flat, `tensors` are names.
    """
    keys = [key for key in _REFUSED_KEYS if raw.get(key) not in (None, False)]
    words = " ".join([_kinds(raw), *tensors, *keys])
    traits = {what: any(mark in words for mark in marks) for what, marks in _REFUSED.items()} | {
        "no auxiliary features": dotted(raw).get(NESTED + "use_aux_hidden_state") is False,
        "features that are read with their own token (shifted is false)": (
            raw.get("shifted") is False
        ),
    }
    problem = next((what for what, applies in traits.items() if applies), None)
    if problem is not None:
        raise FasteagleError(
            f"{name}: this draft model has {problem}, which fasteagle does not run: use an "
            "EAGLE-1, EAGLE-2 or EAGLE-3 head, or --drafter ngram"
        )


def _kinds(raw: Raw) -> str:
    """Return the architectures and model types of a config in lower case."""
    kinds = [raw.get(key) for key in ("architectures", "model_type", "speculators_model_type")]
    return str(kinds).lower()

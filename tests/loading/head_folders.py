"""Draft heads written in every dialect of the field, for the tests that read them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fasteagle.config import Eagle3Config
from fasteagle.loading.heads.tables import official_state
from fasteagle.model import EagleHead, Transformer
from helpers import random_head

# 2, L // 2, L - 3: what the public code reads of 8 blocks if nothing is said
AUX_LAYERS = (2, 4, 5)
DRAFT_IDS = torch.arange(0, 60, 2)
Raw = dict[str, Any]
State = dict[str, Tensor]


def flat_config(head: EagleHead, **more: Any) -> Raw:
    """The decoder layer as every dialect but one writes it; no RoPE base, as official files."""
    c = head.config.block
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": c.dim,
        "intermediate_size": c.ffn_dim,
        "num_attention_heads": c.n_head,
        "num_key_value_heads": c.n_kv_head,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16,
        "num_hidden_layers": 40,
        **more,
    }


def tensors(head: EagleHead) -> State:
    return {name: t.clone() for name, t in official_state(head).items()}


def with_mask(head: EagleHead, state: State) -> State:
    """`state` with the mask t2d, as published files have it."""
    mask = torch.zeros(head.config.block.vocab_size, dtype=torch.bool)
    mask[head.target_ids()] = True
    return state | {"t2d": mask}


def official_eagle1(head: EagleHead) -> tuple[Raw, State]:
    copy = {"embed_tokens.weight": torch.zeros(60, 32)}
    raw = flat_config(head, qkv_bias=head.config.block.qkv_bias)
    return raw | ({} if head.config.fc_bias else {"bias": False}), tensors(head) | copy


def official_eagle3(head: EagleHead) -> tuple[Raw, State]:
    return flat_config(head, draft_vocab_size=30), with_mask(head, tensors(head))


def specforge(head: EagleHead) -> tuple[Raw, State]:
    """Lists blocks whose output is read."""
    own = head.config.eagle3
    ids = {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in own.aux_layers]}
    raw = flat_config(head, draft_vocab_size=30, rope_theta=5e5, eagle_config=ids)
    raw |= {"architectures": ["LlamaForCausalLMEagle3"], "norm_output": own.norm_output}
    return raw | {"fc_norm": own.aux_norm == "each"}, with_mask(head, tensors(head))


def nvidia(head: EagleHead) -> tuple[Raw, State]:
    raw, state = specforge(head)
    raw["eagle_config"] |= {
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
    }
    return raw, state


def speculators(head: EagleHead) -> tuple[Raw, State]:
    own = head.config.eagle3
    layer = flat_config(head, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    raw = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": 30,
        "eagle_aux_hidden_state_layer_ids": list(own.aux_layers),
        "norm_before_residual": own.norm_before_residual,
        "norm_before_fc": own.aux_norm == "all",
        "norm_output": own.norm_output,
        "speculators_config": {"verifier": {"name_or_path": "owner/Some-Model"}},
    }
    state = {k.replace("midlayer.", "layers.0."): v for k, v in tensors(head).items()}
    return raw, with_mask(head, state) | {"verifier_norm.weight": torch.ones(32)}


def head_for(target: Transformer, dialect: str, **changes: Any) -> EagleHead:
    """A random head, norms and biases too, of a kind that `dialect` holds."""
    if "EAGLE-3" not in dialect:
        head = random_head(target, **changes)
    else:
        eagle3 = Eagle3Config(
            **{"aux_layers": AUX_LAYERS, "target_dim": target.config.dim, **changes}
        )
        head = random_head(target, DRAFT_IDS, eagle3=eagle3, fc_bias=False)
    with torch.no_grad():
        for p in head.parameters():
            if p.ndim == 1:
                p.add_(0.2 * torch.randn_like(p))
    return head


DIALECTS: dict[str, Callable[[EagleHead], tuple[Raw, State]]] = {
    "official EAGLE-1/2": official_eagle1,
    "official EAGLE-3": official_eagle3,
    "SpecForge / SGLang EAGLE-3": specforge,
    "NVIDIA ModelOpt EAGLE-3": nvidia,
    "speculators / vLLM EAGLE-3": speculators,
}


def write_folder(folder: Path, raw: Raw, state: State, pickled: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if pickled:
        torch.save(state | {"epoch": 3}, folder / "pytorch_model.bin")  # not only tensors
    else:
        save_file({k: t.contiguous() for k, t in state.items()}, folder / "model.safetensors")
    return folder

"""Folders of quantized weights as other tools write them, packed by plain loops."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

CONFIG = dict(architectures=["LlamaForCausalLM"], hidden_size=128, intermediate_size=256)
CONFIG |= dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
CONFIG |= dict(vocab_size=64, max_position_embeddings=128)
GROUP = 32
LINEARS = {
    f"model.layers.{i}.{name}": shape
    for i in range(2)
    for name, shape in {
        "self_attn.q_proj": (128, 128),
        "self_attn.k_proj": (64, 128),
        "self_attn.v_proj": (64, 128),
        "self_attn.o_proj": (128, 128),
        "mlp.gate_proj": (256, 128),
        "mlp.up_proj": (256, 128),
        "mlp.down_proj": (128, 256),
    }.items()
}
Q_PROJ = "model.layers.0.self_attn.q_proj"


@dataclasses.dataclass
class Oracle:
    """A quantized weight spelled out: unsigned q [N, K], zeros [N, G], and each column's group."""

    bits: int
    q: np.ndarray
    scales: torch.Tensor  # [N, G]
    zeros: np.ndarray
    groups: np.ndarray  # [K]

    def weight(self) -> torch.Tensor:
        scales = self.scales.float().numpy()
        out = np.empty(self.q.shape, dtype=np.float32)
        for k, group in enumerate(self.groups):
            levels = (self.q[:, k] - self.zeros[:, group]).astype(np.float32)
            out[:, k] = levels * scales[:, group]
        return torch.from_numpy(out)


def make(
    N: int,
    K: int,
    *,
    bits: int = 4,
    group: int = GROUP,
    zeros: tuple[int, int] = (0, 15),
    act_order: bool = False,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Oracle:
    rng = np.random.default_rng((seed, N, K))
    G = K // group
    groups = np.arange(K) // group
    if act_order:
        rng.shuffle(groups)
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, (N, G))).to(dtype)
    q = rng.integers(0, 2**bits, (N, K))
    return Oracle(bits, q, scales, rng.integers(zeros[0], zeros[1] + 1, (N, G)), groups)


def words(fields: list[int], bits: int, order: tuple[int, ...] | None = None) -> list[int]:
    """Fields into int32 words, the first in the lowest bits, or in the given order."""
    per_word = 32 // bits
    fields = fields + [0] * (-len(fields) % per_word)
    packed = []
    for start in range(0, len(fields), per_word):
        word = 0
        for i in range(per_word):
            field = int(fields[start + (order[i] if order else i)])
            assert 0 <= field < 2**bits
            word |= field << (bits * i)
        packed.append(word - 2**32 if word >= 2**31 else word)
    return packed


def word_rows(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Each row of `values` packed along itself."""
    rows = [words([int(v) for v in row], bits, order) for row in values]
    return torch.tensor(rows, dtype=torch.int32)


def gptq_parts(oracle: Oracle, less: int = 1, g_idx: bool = True) -> dict[str, torch.Tensor]:
    """`less` 1: zeros stored less one (v1), 0: as they are (v2)."""
    parts = {
        "qweight": word_rows(oracle.q, oracle.bits).T.contiguous(),
        "qzeros": word_rows(oracle.zeros.T - less, oracle.bits),
        "scales": oracle.scales.T.contiguous(),
    }
    if g_idx:
        parts["g_idx"] = torch.from_numpy(oracle.groups).to(torch.int32)
    return parts


AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


def awq_parts(oracle: Oracle) -> dict[str, torch.Tensor]:
    return {
        "qweight": word_rows(oracle.q.T, 4, AWQ_NIBBLES),
        "qzeros": word_rows(oracle.zeros.T, 4, AWQ_NIBBLES),
        "scales": oracle.scales.T.contiguous(),
    }


def compressed_parts(
    oracle: Oracle, zero_point: str | None = "packed", g_idx: bool = False
) -> dict[str, torch.Tensor]:
    midpoint = 2 ** (oracle.bits - 1)
    parts = {
        "weight_packed": word_rows(oracle.q, oracle.bits),
        "weight_scale": oracle.scales,
        "weight_shape": torch.tensor(oracle.q.shape),
    }
    if zero_point == "packed":
        parts["weight_zero_point"] = word_rows(oracle.zeros.T, oracle.bits).T.contiguous()
    elif zero_point == "int8":
        parts["weight_zero_point"] = torch.from_numpy(oracle.zeros - midpoint).to(torch.int8)
    if g_idx:
        parts["weight_g_idx"] = torch.from_numpy(oracle.groups).to(torch.int32)
    return parts


def gptq_settings(**changes) -> dict:
    base = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
    return {**base, **changes}


def awq_settings(**changes) -> dict:
    base = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}
    return {**base, "version": "gemm", **changes}


def compressed_settings(weights: dict | None = None, group: dict | None = None, **changes) -> dict:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    scheme |= {"symmetric": False, **(weights or {})}
    entry = {"targets": ["Linear"], "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {**entry, "weights": scheme, **(group or {})}},
        **changes,
    }


# How each case makes a weight, packs it, and describes itself in config.json.
CASES = {
    "gptq": ({"zeros": (1, 16)}, gptq_parts, gptq_settings()),
    "gptq-no-g_idx": (
        {"zeros": (1, 16)},
        lambda o: gptq_parts(o, g_idx=False),
        gptq_settings(checkpoint_format="gptq"),
    ),
    "gptq-v2": ({}, lambda o: gptq_parts(o, less=0), gptq_settings(checkpoint_format="gptq_v2")),
    "gptq-act-order": (
        {"zeros": (1, 16), "act_order": True},
        gptq_parts,
        gptq_settings(desc_act=True),
    ),
    "gptq-row": ({"zeros": (1, 16), "group": 0}, gptq_parts, gptq_settings(group_size=-1)),
    "gptq-8bit": ({"bits": 8, "zeros": (128, 128)}, gptq_parts, gptq_settings(bits=8, sym=True)),
    "gptq-mislabelled": (
        {"zeros": (8, 8)},
        lambda o: gptq_parts(o, less=0),
        gptq_settings(sym=True, checkpoint_format="gptq"),
    ),
    "awq": ({}, awq_parts, awq_settings()),
    "compressed": ({"dtype": torch.bfloat16}, compressed_parts, compressed_settings()),
    "compressed-int8-zeros": ({}, lambda o: compressed_parts(o, "int8"), compressed_settings()),
    "compressed-symmetric": (
        {"zeros": (8, 8)},
        lambda o: compressed_parts(o, None),
        compressed_settings({"symmetric": True}),
    ),
    "compressed-act-order": (
        {"act_order": True},
        lambda o: compressed_parts(o, g_idx=True),
        compressed_settings({"actorder": "group"}),
    ),
    "compressed-channel": (
        {"group": 0},
        compressed_parts,
        compressed_settings({"strategy": "channel", "group_size": None}),
    ),
    "compressed-8bit": (
        {"bits": 8, "zeros": (128, 128)},
        lambda o: compressed_parts(o, None),
        compressed_settings({"num_bits": 8, "symmetric": True}),
    ),
}


def plain_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    tensors = {
        "model.embed_tokens.weight": torch.randn(64, 128).half(),
        "lm_head.weight": torch.randn(64, 128).half(),
        "model.norm.weight": torch.rand(128).half(),
    }
    for i in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = torch.rand(128).half()
    return tensors


@functools.cache
def packed_case(case: str) -> tuple[dict[str, torch.Tensor], dict[str, Oracle]]:
    """Tensors of the format `case`, and what they hold by weight name; the loops are slow."""
    recipe, pack, _ = CASES[case]
    tensors, oracles = plain_tensors(), {}
    for seed, (linear, (N, K)) in enumerate(LINEARS.items()):
        oracle = make(N, K, seed=seed, **{**recipe, "group": recipe.get("group", GROUP) or K})
        oracles[f"{linear}.weight"] = oracle
        tensors |= {f"{linear}.{part}": value for part, value in pack(oracle).items()}
    return tensors, oracles


def write_case(folder: Path, case: str) -> dict[str, Oracle]:
    """A whole folder in the format `case`; returns what it holds by weight name."""
    tensors, oracles = packed_case(case)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    settings = CASES[case][2]
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))
    return oracles

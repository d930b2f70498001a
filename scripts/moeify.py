"""Write a dense Llama model as a mixture of experts: a real one, small enough for any machine.

python scripts/moeify.py copies/ --data answers.jsonl --gguf copies.gguf

Every expert is the whole FFN, as in mixtures that were trained on from a dense model, and the
router tells clusters of inputs apart. The weights of a row's experts add up to 1: but for rounding
it is the dense model, with the draft heads of that, and costs what a mixture costs.

The text comes from `fasteagle generate-data`. The result is a Mixtral: a Hugging Face folder, and
with --gguf a file of llama.cpp's layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fasteagle.cli.command import Script
from fasteagle.cli.options import FILE, FOLDER, RESULT
from fasteagle.config import ModelConfig, MoEConfig, dense_width
from fasteagle.errors import FasteagleError, note
from fasteagle.loading.changed import rope_order
from fasteagle.loading.checkpoint import load_model
from fasteagle.loading.gguf import BLOCK_NAMES, GLOBAL_NAMES
from fasteagle.loading.heads.tables import layer_config
from fasteagle.loading.names import expected_shapes
from fasteagle.loading.open import OpenedModel, open_model
from fasteagle.loading.tensors import Checkpoint, save_tensors
from fasteagle.model import MLP, MoE, Target, Transformer, causal_mask
from fasteagle.options import DEFAULT_MODEL
from fasteagle.paths import atomic_dir, replacing, require_place, write_json
from fasteagle.prompts import read_conversations

TOKENS, WINDOW = 4096, 512  # of the text that routers are made from, and of one pass
ROUNDS = 10  # of clustering
RIDGE = 1e-3  # of the mean square of an input


@click.command(cls=Script)
@click.argument("out", type=FOLDER)
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Dense Llama model.")
@click.option("--experts", default=8, show_default=True, type=click.IntRange(2, 256))
@click.option("--top-k", default=2, show_default=True, type=click.IntRange(1, 256))
@click.option("--data", type=FILE, required=True, help="JSONL of generate-data to fit routers.")
@click.option("--gguf", type=RESULT, help="Also write this GGUF file; --model must be one.")
@click.option("--gguf-type", default="Q8_0", show_default=True, help="Type of its block linears.")
def main(
    out: Path, model: str, experts: int, top_k: int, data: Path, gguf: Path | None, gguf_type: str
) -> None:
    """Write MODEL into the folder OUT as a mixture of EXPERTS experts, TOP_K of them for a row."""
    opened = open_model(model)
    checkpoint, source = opened.checkpoint, opened.path
    assert source is not None, "its weights come from files"
    if gguf is not None and not source.is_file():
        raise FasteagleError(
            f"{model} is no GGUF file, whose tokenizer --gguf copies: leave it out"
        )
    require_place(out)
    if gguf is not None:
        if gguf.exists():
            raise FasteagleError(f"{gguf} is there already: give another --gguf")
        kinds = "Q8_0", "Q4_0", "Q4_1", "F16", "F32"
        if gguf_type not in kinds:
            raise FasteagleError(f"GGUF type {gguf_type!r} is unknown: use {', '.join(kinds)}")
    config = moe_config(checkpoint.config, experts, top_k)
    text = read_text(data, config)
    model = load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=WINDOW)
    layers = fit(model, config, text)
    tensors = all_tensors(checkpoint, config, layers)
    write_folder(out, opened, config, tensors)
    if gguf is not None:
        with replacing(gguf) as temporary:
            write_gguf(temporary, source, config, tensors, gguf_type)


def moe_config(config: ModelConfig, experts: int, top_k: int) -> ModelConfig:
    """Return the config of the mixture. Raises `FasteagleError` where it cannot be made."""
    if config.architecture != "LlamaForCausalLM":
        raise FasteagleError(f"{config.architecture}: only Llama models become Mixtrals: give one")
    if config.rope_scaling or config.rope_freq_factors or config.rope_linear_factor != 1:
        raise FasteagleError("scaled RoPE is not written: choose another model")
    if top_k > experts:
        raise FasteagleError(f"top-k {top_k} is more than there are experts: use 1 to {experts}")
    moe = MoEConfig(n_expert=experts, top_k=top_k, ffn_dim=config.ffn_dim, renormalize=True)
    return dataclasses.replace(
        config, moe=moe, ffn_dim=dense_width(moe, config.dim), architecture="MixtralForCausalLM"
    )


def read_text(data: Path, config: ModelConfig) -> Tensor:
    """Return the windows [N, W] that routers are made from: conversations one after the other."""
    conversations = read_conversations(data, config.vocab_size, config.max_seq_len)
    ids = torch.tensor([token for conversation in conversations for token in conversation.ids])
    if len(ids) < TOKENS:
        raise FasteagleError(f"{data} has {len(ids):,} tokens, routers need {TOKENS:,}: give more")
    return ids[:TOKENS].view(-1, WINDOW)


@torch.no_grad()
def fit(model: Transformer, config: ModelConfig, text: Tensor) -> list[MoE]:
    """Return the mixture of each block of the dense `model`, which reads windows `text` [N, W]."""
    assert config.moe is not None, "see moe_config"
    inputs: list[list[Tensor]] = [[] for _ in model.blocks]
    hooks = [
        block.mlp_norm.register_forward_hook(lambda _module, _args, x, seen=seen: seen.append(x))
        for block, seen in zip(model.blocks, inputs, strict=True)
    ]
    rows, cache = torch.arange(text.shape[1]), Target(model).new_cache(text.shape[1])
    mask = causal_mask(0, len(rows), cache.n_slots, config.sliding_window, "cpu")
    for window in text:
        model.encode(window, rows, rows, mask, cache)
    for hook in hooks:
        hook.remove()
    layers = []
    for i, (block, seen) in enumerate(zip(model.blocks, inputs, strict=True)):
        layers.append(copied(block.mlp, torch.cat(seen), config.moe))
        note(f"block {i + 1} of {config.n_layer}")
    return layers


def all_tensors(
    checkpoint: Checkpoint, config: ModelConfig, layers: list[MoE]
) -> dict[str, Tensor]:
    """Return the tensors of the mixture by name: those of `checkpoint`, and of its `layers`."""
    new = expected_shapes(config)
    tensors = {name: checkpoint.load(name) for name in new if name in checkpoint.names()}
    for i, layer in enumerate(layers):
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in named(layer)}
    return {name: tensors[name].contiguous() for name in new}


def copied(mlp: MLP, x: Tensor, config: MoEConfig) -> MoE:
    """Return experts that are all the MLP, and a router of clusters of inputs like x [N, D]."""
    n_expert, dim = config.n_expert, x.shape[1]
    layer = MoE(dim, config).requires_grad_(False)
    layer.gate_up.weight.copy_(mlp.gate_up.weight.repeat(n_expert, 1))
    layer.down.weight.copy_(mlp.down.weight.repeat(n_expert, 1))
    x = x[: len(x) // n_expert * n_expert]
    wanted = F.one_hot(clusters(F.normalize(x - x.mean(0), dim=1), n_expert), n_expert).float()
    layer.router.weight.copy_(solve(x, n_expert * wanted - 1).T)
    return layer


def solve(x: Tensor, y: Tensor) -> Tensor:
    """Return the ridge solution [K, M] of `x @ w = y` for x [N, K], y [N, M]."""
    square = x.T @ x
    square.diagonal().add_(RIDGE * float(square.diagonal().mean()))
    return torch.linalg.solve(square, x.T @ y)


def clusters(points: Tensor, n_clusters: int) -> Tensor:
    """Return the cluster [M] of each of the points [M, N] of length 1; all are equally large."""
    size = len(points) // n_clusters
    centers = points[torch.arange(n_clusters) * size]
    groups = torch.empty(0)
    for _ in range(ROUNDS):
        groups = balanced(points @ centers.T, size)
        centers = F.normalize(F.one_hot(groups, n_clusters).float().T @ points, dim=1)
    return groups


def balanced(likeness: Tensor, size: int) -> Tensor:
    """Return the cluster [M] of each point, the likest pairs first, `size` points in each."""
    n_clusters = likeness.shape[1]
    groups = [-1] * len(likeness)
    room = [size] * n_clusters
    for pair in likeness.flatten().argsort(descending=True, stable=True).tolist():
        point, cluster = divmod(pair, n_clusters)
        if groups[point] < 0 and room[cluster]:
            groups[point] = cluster
            room[cluster] -= 1
    return torch.tensor(groups)


def named(moe: MoE) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a layer by their names in `expected_shapes`."""
    n_expert = moe.config.n_expert
    yield "mlp.gate.weight", moe.router.weight
    for e, (gate_up, down) in enumerate(
        zip(moe.gate_up.weight.chunk(n_expert), moe.down.weight.chunk(n_expert), strict=True)
    ):
        gate, up = gate_up.chunk(2)
        yield f"mlp.experts.{e}.gate_proj.weight", gate
        yield f"mlp.experts.{e}.up_proj.weight", up
        yield f"mlp.experts.{e}.down_proj.weight", down


_MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def write_folder(
    out: Path, opened: OpenedModel, config: ModelConfig, tensors: dict[str, Tensor]
) -> None:
    """Write a Hugging Face folder in the names and settings of Mixtral."""
    assert config.moe is not None, "see moe_config"
    with atomic_dir(out) as folder:
        opened.tokenizer.save(folder)
        renamed = {}
        for name, tensor in tensors.items():
            name = name.replace(".mlp.", ".block_sparse_moe.")
            for ours, theirs in _MIXTRAL_NAMES.items():
                name = name.replace(f"{ours}.", f"{theirs}.") if ".experts." in name else name
            renamed[name] = tensor
        save_tensors(renamed, folder / "model.safetensors")
        dtype = tensors["model.embed_tokens.weight"].dtype
        write_json(
            folder / "config.json",
            {
                **layer_config(config, dtype),
                "architectures": [config.architecture],
                "model_type": "mixtral",
                "intermediate_size": config.moe.ffn_dim,
                "num_hidden_layers": config.n_layer,
                "num_local_experts": config.moe.n_expert,
                "num_experts_per_tok": config.moe.top_k,
                "sliding_window": None,
                "tie_word_embeddings": config.tie_embeddings,
                "eos_token_id": min(opened.tokenizer.eos_ids, default=None),
            },
        )


def write_gguf(
    path: Path, source: Path, config: ModelConfig, tensors: dict[str, Tensor], kind: str
) -> None:
    """Write a GGUF file, its metadata those of `source` and the experts'."""
    import gguf

    assert config.moe is not None, "see moe_config"
    writer = gguf.GGUFWriter(path, "llama")
    own = ("general.architecture", "llama.feed_forward_length", "general.file_type")
    for key, field in gguf.GGUFReader(source).fields.items():
        if not key.startswith("GGUF.") and key not in own:
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub)
    writer.add_feed_forward_length(config.moe.ffn_dim)
    writer.add_expert_count(config.moe.n_expert)
    writer.add_expert_used_count(config.moe.top_k)
    for name, data in _gguf_tensors(config, tensors):
        qtype = gguf.GGMLQuantizationType[kind]
        if data.ndim == 1 or "ffn_gate_inp" in name:
            qtype = gguf.GGMLQuantizationType.F32
        elif name in GLOBAL_NAMES and kind not in ("F32", "F16"):
            qtype = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(data, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_tensors(
    config: ModelConfig, tensors: dict[str, Tensor]
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield tensors as llama.cpp names and lays them out: rows of q and k in pairs for RoPE."""
    known = {hf: own for own, hf in (GLOBAL_NAMES | BLOCK_NAMES).items()}
    for name, tensor in tensors.items():
        data = tensor.float()
        if name in known:
            yield known[name], data.numpy()
            continue
        _, _, layer, rest = name.split(".", 3)
        if rest.startswith("mlp.experts."):
            _, _, e, what, _ = rest.split(".")
            if e != "0":
                continue
            n_expert = config.moe.n_expert if config.moe else 0
            stem = f"model.layers.{layer}.mlp.experts"
            each = [tensors[f"{stem}.{i}.{what}.weight"] for i in range(n_expert)]
            data, rest = torch.stack(each).float(), f"mlp.experts.{what}.weight"
        for proj, n_head in (("q_proj", config.n_head), ("k_proj", config.n_kv_head)):
            if proj in rest:
                data = data[rope_order(len(data), n_head).argsort()]
        yield f"blk.{layer}.{known[rest]}", data.numpy()


if __name__ == "__main__":
    main()

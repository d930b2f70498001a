"""Write a dense Llama model as a mixture of experts: a real one, small enough for any machine.

python scripts/moeify.py moe8/                                  # the same model again
python scripts/moeify.py moe6/ --top-k 6 --data answers.jsonl --steps 150
python scripts/moeify.py copies/ --copies --top-k 2 --data answers.jsonl --gguf copies.gguf

Every FFN is cut into experts of equal width. Where a row takes all of them, the router is zero, so
that each has the weight 1 / experts, and the down projections are multiplied by the number of
experts: the dense model again. Where it takes fewer, neurons that are active together become one
expert, the router predicts from the block's input how much each expert adds, by least squares, and
so do new down projections predict the dense FFN's output from the experts that are taken. Blocks
are fitted one after the other, on the text as the blocks before them leave it. With --steps all
experts and routers are then trained to predict what the dense model predicts (`distil.py`).

With --copies every expert is the whole FFN, as in mixtures that were trained on from a dense model,
and the router tells clusters of inputs apart. The weights of a row's experts add up to 1: but
for rounding it is the dense model, with the draft heads of that, and costs what a mixture costs.

The text comes from `fasteagle generate-data`. The result is a Mixtral: a Hugging Face folder, and
with --gguf a file of llama.cpp's layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import distil
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fasteagle.cli.command import Script
from fasteagle.cli.options import FILE, FOLDER
from fasteagle.config import ModelConfig, MoEConfig, dense_width
from fasteagle.errors import FasteagleError, note
from fasteagle.loading.checkpoint import load_model
from fasteagle.loading.gguf import BLOCK_NAMES, GLOBAL_NAMES, GGUFFile
from fasteagle.loading.names import expected_shapes
from fasteagle.loading.open import OpenedModel, open_model
from fasteagle.loading.rope_order import rope_order
from fasteagle.loading.tensors import Checkpoint, save_tensors, write_json
from fasteagle.model import MLP, MoE, Transformer
from fasteagle.options import DEFAULT_MODEL
from fasteagle.paths import atomic_dir, require_place, require_writable
from fasteagle.prompts import read_conversations

ROUNDS = 10  # of clustering
MOST_ROWS = 4096  # of the text that clusters are made from
RIDGE = 1e-3  # of the mean square of an input


@click.command(cls=Script)
@click.argument("out", type=FOLDER)
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="Dense Llama model.")
@click.option("--experts", default=8, show_default=True, type=click.IntRange(2, 256))
@click.option("--top-k", type=click.IntRange(1, 256), help="Experts of a row.  [default: all]")
@click.option("--copies", is_flag=True, help="Every expert is the whole FFN.")
@click.option("--data", type=FILE, help="JSONL of generate-data, to fit the router on.")
@click.option(
    "--tokens", default=8192, show_default=True, type=click.IntRange(2048), help="Of it, to fit on."
)
@click.option(
    "--steps",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Of training, 1,024 tokens each.",
)
@click.option("--lr", default=1e-3, show_default=True, help="Learning rate of that.")
@click.option("--gguf", type=FILE, help="Write this file too; MODEL must be a GGUF file.")
@click.option("--gguf-type", default="Q8_0", show_default=True, help="Type of its block linears.")
def main(
    out: Path,
    model: str,
    experts: int,
    top_k: int | None,
    copies: bool,
    data: Path | None,
    tokens: int,
    steps: int,
    lr: float,
    gguf: Path | None,
    gguf_type: str,
) -> None:
    """Write MODEL into the folder OUT as a mixture of EXPERTS experts, TOP_K of them for a row."""
    opened = open_model(model)
    checkpoint = opened.checkpoint
    if gguf is not None and not isinstance(checkpoint, GGUFFile):
        raise FasteagleError(
            f"{model} is no GGUF file, whose tokenizer --gguf copies: leave it out"
        )
    require_place(out)
    if not 0 < lr <= 1:
        raise FasteagleError(f"lr {lr} is out of range: use > 0 and <= 1")
    if gguf is not None:
        if gguf.exists():
            raise FasteagleError(f"{gguf} is there already: give another --gguf")
        require_writable(gguf)
        kinds = "Q8_0", "Q4_0", "Q4_1", "F16", "F32"
        if gguf_type not in kinds:
            raise FasteagleError(f"GGUF type {gguf_type!r} is unknown: use {', '.join(kinds)}")
    top_k = top_k or experts
    config = moe_config(checkpoint.config, experts, top_k, copies)
    text = read_text(data, config, tokens, needed=top_k < experts or steps > 0)
    model = load_model(
        checkpoint, dtype=torch.float32, device="cpu", max_seq_len=distil.WINDOW
    ).requires_grad_(False)
    layers = fit(model, config, text[: tokens // distil.WINDOW])
    if steps:
        distil.distil(model, layers, text, steps, lr, tell)
    tensors = all_tensors(checkpoint, config, layers)
    write_folder(out, opened, config, tensors)
    if gguf is not None:
        assert isinstance(checkpoint, GGUFFile), "checked above"
        write_gguf(gguf, checkpoint, config, tensors, gguf_type)


def tell(step: int, loss: float) -> None:
    """Print the divergence of some steps of training."""
    if step % 10 == 0:
        note(f"step {step}: {loss:.3f} nats a token from the dense model")


def moe_config(config: ModelConfig, experts: int, top_k: int, copies: bool = False) -> ModelConfig:
    """Return the config of the mixture. Raises `FasteagleError` where it cannot be made."""
    if config.architecture != "LlamaForCausalLM":
        raise FasteagleError(f"{config.architecture}: only Llama models have a Mixtral of theirs")
    if config.rope_scaling or config.rope_freq_factors or config.rope_linear_factor != 1:
        raise FasteagleError("scaled RoPE is not written: choose another model")
    if (config.ffn_dim % experts and not copies) or top_k > experts:
        raise FasteagleError(
            f"{experts} experts do not divide an FFN of {config.ffn_dim:,}, or are fewer than "
            f"{top_k}: choose other numbers"
        )
    width = config.ffn_dim if copies else config.ffn_dim // experts
    moe = MoEConfig(n_expert=experts, top_k=top_k, ffn_dim=width, renormalize=True)
    return dataclasses.replace(
        config, moe=moe, ffn_dim=dense_width(moe, config.dim), architecture="MixtralForCausalLM"
    )


def read_text(data: Path | None, config: ModelConfig, tokens: int, needed: bool) -> Tensor:
    """Return the windows of `data` [N, W], N = 0 where it is None and not `needed`."""
    if data is None:
        if needed:
            raise FasteagleError("experts that are fitted or trained need text: give --data")
        return torch.empty(0, distil.WINDOW, dtype=torch.long)
    text = distil.windows(read_conversations(data, config.vocab_size, config.max_seq_len))
    if text.numel() < tokens:
        raise FasteagleError(f"{data} has {text.numel():,} tokens, and --tokens is {tokens:,}")
    return text


@torch.no_grad()
def fit(model: Transformer, config: ModelConfig, text: Tensor) -> list[MoE]:
    """Return the mixture of each block, fitted on windows `text` [N, W] of the dense `model`."""
    moe = config.moe
    assert moe is not None, "see moe_config"
    states = model.embedding(text).float()  # [N, W, D]
    layers = []
    for i, block in enumerate(model.blocks):
        mlp = block.mlp
        assert isinstance(mlp, MLP), "a dense model"
        if len(text):
            states = states + distil.attention(model, block, states)
        x = block.mlp_norm(states).flatten(0, 1)
        if moe.ffn_dim == mlp.down.in_features:
            layers.append(copied(mlp, x, moe))
        elif moe.top_k < moe.n_expert:
            layers.append(fitted(mlp, x, moe))
        else:
            layers.append(cut(mlp, moe, torch.arange(mlp.down.in_features)))
        if len(text):
            states = states + distil.experts(layers[-1], x).view_as(states)
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


def cut(mlp: MLP, config: MoEConfig, order: Tensor) -> MoE:
    """Return the experts of a dense MLP, its neurons taken in `order` [F], and a router of zeros.

    With all experts of a row its output is that of the MLP.
    """
    n_expert, width = config.n_expert, config.ffn_dim
    dim = mlp.gate_up.in_features
    moe = MoE(dim, config).requires_grad_(False)
    gate, up = (part[order].view(n_expert, width, dim) for part in mlp.gate_up.weight.chunk(2))
    moe.gate_up.weight.copy_(torch.cat((gate, up), dim=1).flatten(0, 1))
    down = mlp.down.weight[:, order].view(dim, n_expert, width).transpose(0, 1)
    moe.down.weight.copy_(n_expert * down.flatten(0, 1))
    moe.router.weight.zero_()
    return moe


def copied(mlp: MLP, x: Tensor, config: MoEConfig) -> MoE:
    """Return experts that are all the MLP, and a router of clusters of inputs like x [N, D]."""
    n_expert, dim = config.n_expert, x.shape[1]
    layer = MoE(dim, config).requires_grad_(False)
    layer.gate_up.weight.copy_(mlp.gate_up.weight.repeat(n_expert, 1))
    layer.down.weight.copy_(mlp.down.weight.repeat(n_expert, 1))
    x = x[: min(MOST_ROWS, len(x)) // n_expert * n_expert]
    wanted = F.one_hot(clusters(F.normalize(x - x.mean(0), dim=1), n_expert), n_expert).float()
    layer.router.weight.copy_(solve(x, n_expert * wanted - 1).T)
    return layer


def fitted(mlp: MLP, x: Tensor, config: MoEConfig) -> MoE:
    """Return experts of a dense MLP, and a router that chooses for inputs like x [N, D]."""
    n_expert, width, dim = config.n_expert, config.ffn_dim, x.shape[1]
    gate, up = mlp.gate_up(x).chunk(2, dim=-1)
    hidden = F.silu(gate) * up  # [N, F]
    active = (hidden[:MOST_ROWS] * mlp.down.weight.norm(dim=0)).abs()
    groups = clusters(F.normalize(active.T.contiguous(), dim=1), n_expert)
    order = groups.argsort(stable=True)
    moe = cut(mlp, config, order)
    hidden = hidden[:, order]
    down = moe.down.weight.view(n_expert, dim, width) / n_expert
    added = [h @ w.T for h, w in zip(hidden.split(width, dim=1), down, strict=True)]
    sizes = torch.stack([part.norm(dim=1) for part in added], dim=1)  # [N, X]
    sizes = sizes - sizes.mean(dim=1, keepdim=True)
    moe.router.weight.copy_(solve(x, sizes / sizes.std()).T)
    ids, weights = moe.route(x)
    taken = torch.zeros(len(x), n_expert).scatter(1, ids, weights)
    inputs = hidden * taken.repeat_interleave(width, dim=1)
    start = config.top_k * down.permute(0, 2, 1).flatten(0, 1)  # [F, D]
    better = start + solve(inputs, sum(added) - inputs @ start)
    moe.down.weight.copy_(better.view(n_expert, width, dim).transpose(1, 2).flatten(0, 1))
    return moe


def solve(x: Tensor, y: Tensor) -> Tensor:
    """Return the ridge solution [K, M] of `x @ w = y` for x [N, K], y [N, M]."""
    square = x.T @ x
    square.diagonal().add_(RIDGE * float(square.diagonal().mean()))
    return torch.linalg.solve(square, x.T @ y)


def clusters(points: Tensor, n_clusters: int) -> Tensor:
    """Return the cluster [M] of each of the points [M, N] of length 1; clusters are equally large.

    Neurons are near each other that are active in the same rows.
    """
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
        dtype = str(tensors["model.embed_tokens.weight"].dtype).removeprefix("torch.")
        write_json(
            {
                "architectures": [config.architecture],
                "model_type": "mixtral",
                "hidden_act": "silu",
                "hidden_size": config.dim,
                "intermediate_size": config.moe.ffn_dim,
                "num_hidden_layers": config.n_layer,
                "num_attention_heads": config.n_head,
                "num_key_value_heads": config.n_kv_head,
                "head_dim": config.head_dim,
                "num_local_experts": config.moe.n_expert,
                "num_experts_per_tok": config.moe.top_k,
                "vocab_size": config.vocab_size,
                "max_position_embeddings": config.max_seq_len,
                "rms_norm_eps": config.norm_eps,
                "rope_theta": config.rope_base,
                "sliding_window": None,
                "tie_word_embeddings": config.tie_embeddings,
                "torch_dtype": dtype,
                "eos_token_id": min(opened.tokenizer.eos_ids, default=None),
            },
            folder / "config.json",
        )


def write_gguf(
    path: Path, source: GGUFFile, config: ModelConfig, tensors: dict[str, Tensor], kind: str
) -> None:
    """Write a GGUF file, its metadata those of `source` and the experts'."""
    import gguf

    assert config.moe is not None, "see moe_config"
    writer = gguf.GGUFWriter(path, "llama")
    own = ("general.architecture", "llama.feed_forward_length", "general.file_type")
    for key, field in gguf.GGUFReader(source.path).fields.items():
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

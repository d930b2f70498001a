"""Names and shapes of a model's tensors: the ones we expect, and what files call them.

Every checkpoint lists its tensors under the names of `expected_shapes`. Experts are listed one by
one there, as most files hold them; files that hold all experts of a block in one tensor give
views of it.

Shapes: D model dim, F FFN dim, X experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from fasteagle.config import ModelConfig

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]

MTP_LAYERS = "model.mtp_layers."  # layers for multi-token prediction, as MiMo names them
CHOICE_BIAS = "mlp.gate.e_score_correction_bias"
_FFN = ("gate", "up", "down")
_RENAMED = (  # files of Mixtral, Granite-MoE and Ernie-4.5
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.mlp\.router\.layer\."), ".mlp.gate."),
    (re.compile(r"\.shared_mlp\."), ".mlp.shared_expert."),
    (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
    (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
    (re.compile(r"\.mlp\.(gate\.)?moe_statics\."), ".mlp.gate."),
    (re.compile(r"\.shared_experts\."), ".shared_expert."),
    (re.compile(r"^model\.mtp_block\.(\d+)\."), rf"{MTP_LAYERS}\1."),
    (re.compile(r"^model\.mtp_emb_norm\.(\d+)\."), rf"{MTP_LAYERS}\1.token_layernorm."),
    (re.compile(r"^model\.mtp_hidden_norm\.(\d+)\."), rf"{MTP_LAYERS}\1.hidden_layernorm."),
    (re.compile(r"^model\.mtp_linear_proj\.(\d+)\."), rf"{MTP_LAYERS}\1.eh_proj."),
)
_EXPERTS = re.compile(
    r"(?P<mlp>model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\.mlp\.)(experts\.)?"
    r"(?P<what>(gate|up|gate_up|down)_proj|(input|output)_linear)(\.weight)?"
)
_SHARED = re.compile(r"(?P<mlp>.*\.mlp\.shared_expert\.)(?P<what>(input|output)_linear)\.weight")


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every tensor of a model, under Hugging Face names."""
    D, E = config.dim, config.head_dim
    q_rows, kv_rows = config.n_head * E, config.n_kv_head * E
    attention: dict[str, Shape] = {
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (q_rows, D),
        "self_attn.k_proj.weight": (kv_rows, D),
        "self_attn.v_proj.weight": (kv_rows, D),
        "self_attn.o_proj.weight": (D, q_rows),
    }
    if config.qkv_bias:
        attention |= {f"self_attn.{n}_proj.bias": (q_rows if n == "q" else kv_rows,) for n in "qkv"}
    if config.qk_norm:
        attention |= {"self_attn.q_norm.weight": (E,), "self_attn.k_norm.weight": (E,)}
    if config.qk_norm_whole:
        attention |= {"self_attn.q_norm.weight": (q_rows,), "self_attn.k_norm.weight": (kv_rows,)}
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, D),
        "model.norm.weight": (D,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, D)
    for i in range(config.n_layer):
        block = attention | _ffn_shapes(config, i)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    return shapes


def _ffn_shapes(config: ModelConfig, i: int) -> dict[str, Shape]:
    """Return the shapes of the MLP of block `i`, or of its router and experts."""
    D, moe = config.dim, config.moe

    def mlp(prefix: str, F: int) -> dict[str, Shape]:
        return {f"{prefix}.{n}_proj.weight": (D, F) if n == "down" else (F, D) for n in _FFN}

    if moe is None or not config.has_experts(i):
        return mlp("mlp", config.ffn_dim)
    shapes: dict[str, Shape] = {"mlp.gate.weight": (moe.n_expert, D)}
    if moe.choice_bias:
        shapes[CHOICE_BIAS] = (moe.n_expert,)
    for expert in range(moe.n_expert):
        shapes |= mlp(f"mlp.experts.{expert}", moe.ffn_dim)
    if moe.shared_ffn_dim:
        shapes |= mlp("mlp.shared_expert", moe.shared_ffn_dim)
    if moe.shared_gate:
        shapes["mlp.shared_expert_gate.weight"] = (1, D)
    return shapes


def mtp_name(name: str, n_layer: int) -> str:
    """Return the name in `MTP_LAYERS` of a tensor in a block after the first `n_layer`."""
    match = re.fullmatch(r"model\.layers\.(\d{1,9})\.(.+)", name)
    if match is None or int(match[1]) < n_layer:
        return name
    return f"{MTP_LAYERS}{int(match[1]) - n_layer}.{match[2]}"


def is_block_linear(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def block_linears(config: ModelConfig, i: int) -> dict[str, list[str]]:
    """Return the names of the weights that make up each linear of block `i`, in their order."""
    p = f"model.layers.{i}."
    linears = {
        "attention.qkv": [f"{p}self_attn.{n}_proj.weight" for n in "qkv"],
        "attention.out": [f"{p}self_attn.o_proj.weight"],
    }
    mlps = {"mlp": [f"{p}mlp"]}
    if config.moe is not None and config.has_experts(i):
        mlps = {"mlp": [f"{p}mlp.experts.{e}" for e in range(config.moe.n_expert)]}
        if config.moe.shared_ffn_dim:
            mlps["mlp.shared"] = [f"{p}mlp.shared_expert"]
    for path, parts in mlps.items():
        linears[f"{path}.gate_up"] = [
            f"{part}.{n}_proj.weight" for part in parts for n in ("gate", "up")
        ]
        linears[f"{path}.down"] = [f"{part}.down_proj.weight" for part in parts]
    return linears


def _experts_of(config: ModelConfig, name: str, shape: Shape) -> re.Match[str] | None:
    """Return the match of a tensor of all the experts of a block, as many as the model has."""
    match = _EXPERTS.fullmatch(name) if len(shape) == 3 else None
    if match is None or config.moe is None or shape[0] != config.moe.n_expert:
        return None
    return match if int(match["layer"]) < config.n_layer else None


def parts_of(config: ModelConfig, name: str, shape: Shape) -> Iterator[tuple[str, Index]]:
    """Yield the expected names of what a file's tensor holds, each with its index in the tensor.

    A tensor [X, ., .] holds all experts, and one of `gate_up` or `input_linear` has its gate rows
    before the up rows. The index of a whole tensor is (), and one with other experts than the
    model's counts as whole: a few bytes of a file may say that there are billions. A router's bias
    may be [1, X].
    """
    for pattern, new in _RENAMED:
        name = pattern.sub(new, name)
    if name.endswith(CHOICE_BIAS) and len(shape) == 2 and shape[0] == 1:
        yield name, (0, slice(0, shape[1]))
        return
    match = _SHARED.fullmatch(name) if len(shape) == 2 else _experts_of(config, name, shape)
    if match is None:
        yield name, ()
        return
    mlp, what = match["mlp"], match["what"]
    rows = slice(0, shape[-2])
    views = {"down_proj" if what == "output_linear" else what: rows}
    if what in ("gate_up_proj", "input_linear"):
        half = rows.stop // 2
        views = {"gate_proj": slice(0, half), "up_proj": slice(half, rows.stop)}
    for proj, part in views.items():
        if len(shape) == 2:
            yield f"{mlp}{proj}.weight", (part,)
        else:
            for e in range(shape[0]):
                yield f"{mlp}experts.{e}.{proj}.weight", (e, part)

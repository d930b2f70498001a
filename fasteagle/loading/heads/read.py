"""Read draft heads of any dialect: as their files describe them, and loaded for a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasteagle.config import (
    Eagle3Config,
    HeadConfig,
    ModelConfig,
    checked_aux_layers,
    default_aux_layers,
)
from fasteagle.config_fields import Fields, parse_json
from fasteagle.config_hf import head_from_hf
from fasteagle.errors import FasteagleError, shortened, within
from fasteagle.loading.heads import tables
from fasteagle.loading.heads.gguf import gguf_of, read_gguf_head
from fasteagle.loading.heads.mtp import read_layer
from fasteagle.loading.heads.tables import (
    EMBEDDING,
    LM_HEAD,
    MAP,
    Raw,
    State,
    listed,
    official_state,
    refuse_others,
    target_ids,
)
from fasteagle.loading.pickles import is_plain, unpickled
from fasteagle.loading.tensors import mapped_tensors, open_safetensors, read_json, weight_files
from fasteagle.model import EagleHead, make_head
from fasteagle.paths import require_no_pipe
from fasteagle.uninitialized import Uninitialized

HEADER_KEY = "fasteagle"  # key of the JSON header in the metadata of our own draft heads
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "shifted", "mtp")
_INTEGERS = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}
Header = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class HeadSource:
    """Draft head as its files describe it, not yet fitted to a target."""

    name: str  # path or file, for messages
    dialect: str
    raw: Raw  # flat config of the decoder layer
    state: State  # tensors under the official names
    eagle3: bool
    header: Header | None = None  # of heads of our own
    aux_layers: tuple[int, ...] | None = None  # None: the files do not say them
    lists_outputs: bool = False  # its files name the blocks whose output is read

    @property
    def where(self) -> str:
        """File that describes the shape of the draft head, for messages."""
        return self.name if self.name.endswith(".gguf") else f"{self.name}/config.json"

    @property
    def algorithm(self) -> str:
        """Name of the method, for messages."""
        if self.raw.get("mtp"):
            return "MTP"
        return "EAGLE-3" if self.eagle3 else "EAGLE-1/2"

    @property
    def made_for(self) -> str | None:
        """Name of the model that the draft head was trained for, in a speculators config."""
        verifier = Fields(self.raw, self.where).part("speculators_config").part("verifier")
        return verifier.text("name_or_path", "") or None

    @property
    def aux_norm(self) -> str:
        """Kind of norms before fc, as the config or the tensors name them.

        A config that names norms without their tensors fails to load.
        """
        if self.raw.get("norm_before_fc") or "input_norm.weight" in self.state:
            return "all"
        each = self.raw.get("fc_norm") or "fc_norm.0.weight" in self.state
        return "each" if each else "none"

    def likely_target(self, aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
        """Return the shape of a target that the draft head would fit, as deep as it needs.

        `aux_layers` replace those of the files. `max_seq_len` is 0 where it is not known.
        """
        block = head_from_hf(self.raw, self.where).block
        dim = self.raw.get("target_hidden_size") or block.dim
        n_layer = max((*(aux_layers or self.aux_layers or ()), 32))
        fields, key = Fields(self.raw, self.where), "max_position_embeddings"
        length = fields.integer(key) if key in fields else 0
        return dataclasses.replace(block, dim=dim, n_layer=n_layer, max_seq_len=length)

    def fitted(self, target: ModelConfig, aux_layers: tuple[int, ...] | None = None) -> HeadConfig:
        """Return the shape of the draft head for `target`, checked against the head's tensors.

        `aux_layers` replace those of the files. Raises `FasteagleError` for what does not fit.
        Allocates no tensors.
        """
        raw, state, names = self.raw, self.state, " ".join(self.state)
        shape = head_from_hf(raw, self.where)
        n_tokens, width = shape.block.vocab_size, raw.get("target_hidden_size") or shape.block.dim
        sizes = {"width": (width, target.dim), "vocabulary": (n_tokens, target.vocab_size)}
        for what, (theirs, ours) in sizes.items():
            if theirs != ours:
                raise FasteagleError(
                    f"{self.where}: the head is for a {what} of {theirs:,}, the model has "
                    f"{ours:,}: choose the head trained for this model, or run with --no-spec"
                )
        block = dataclasses.replace(
            shape.block,
            qk_norm="self_attn.q_norm.weight" in names,
            qkv_bias=bool(raw.get("qkv_bias")) or "self_attn.q_proj.bias" in names,
        )
        size = raw.get("draft_vocab_size") or n_tokens
        if size == n_tokens and MAP in state:  # a list of FR-Spec
            size = state[MAP].numel()
        if self.eagle3:
            config = HeadConfig(block, size, "fc.bias" in state, self._eagle3(target, aux_layers))
        elif aux_layers is None:
            config = HeadConfig(block, size, shape.fc_bias, mtp=bool(raw.get("mtp")))
        else:
            raise FasteagleError(
                f"{self.name}: an {self.algorithm} head reads no auxiliary layers: leave out "
                "--tap-layers"
            )
        check_state(config, state, self.name)
        return config

    def _eagle3(self, target: ModelConfig, aux_layers: tuple[int, ...] | None) -> Eagle3Config:
        """Return what is EAGLE-3's own in the config. Raises `FasteagleError`."""
        raw, state, width = self.raw, self.state, self.raw["hidden_size"]
        layers = aux_layers or self.aux_layers or default_aux_layers(target.n_layer)
        with within(self.name):
            checked_aux_layers(layers, target.n_layer)
        fc = state.get("fc.weight")
        n_out, n_in = fc.shape if fc is not None and fc.ndim == 2 else (0, 0)
        if n_out == width and n_in != len(layers) * target.dim:
            raise FasteagleError(
                f"{self.name}: fc reads {n_in:,} values, {n_in / target.dim:g} layers of "
                f"{target.dim:,}, but the layers are {listed(layers)}: give --tap-layers"
            )
        if width != target.dim and not {EMBEDDING, LM_HEAD} <= state.keys():
            raise FasteagleError(
                f"{self.name}: a head {width:,} wide for a model {target.dim:,} wide needs an "
                "embedding and an LM head of its own: choose the head trained for this model"
            )
        return Eagle3Config(
            aux_layers=tuple(layers),
            target_dim=target.dim,
            own_embedding=EMBEDDING in state,
            own_lm_head=LM_HEAD in state,
            # Absent in a speculators config: the package that defines the format says False, which
            # is what such a head was trained as; it always writes the key. vLLM assumes True.
            norm_before_residual=bool(raw.get("norm_before_residual")),
            aux_norm=self.aux_norm,
            # In the meaning of vLLM, SGLang and speculators; SpecForge had another one before its
            # pull request 879.
            norm_output=bool(raw.get("norm_output")),
        )

    def head(self, target: ModelConfig, aux_layers: tuple[int, ...] | None = None) -> EagleHead:
        """Load the draft head in fp32 on the CPU. Raises `FasteagleError` as `fitted` does."""
        config = self.fitted(target, aux_layers)
        with Uninitialized():  # all of it is loaded
            head = make_head(config)
        _load_state(head, self.state)
        return head.eval()


@torch.no_grad()
def _load_state(head: EagleHead, state: State) -> None:
    # The parts are views of the fused weights, so this writes into the parameters.
    for key, part in official_state(head).items():
        part.copy_(state[key])


def check_state(config: HeadConfig, state: State, name: str) -> None:
    """Raise `FasteagleError` listing all official tensors that do not fit a head of `config`."""
    with torch.device("meta"), Uninitialized():
        expected = official_state(make_head(config))
    problems = [f"missing {key}" for key in expected if key not in state]
    for key, tensor in state.items():
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if key not in expected:
            problems.append(f"unknown {key}")
        elif tensor.is_floating_point() == (key == MAP) or tensor.dtype.itemsize < 2:
            needed = "integers" if key == MAP else "16 or 32 bit floats of a plain head"
            problems.append(f"{key} is {dtype}, expected {needed}")
        elif shape != expected[key].shape:
            problems.append(f"{key} is {shape}, expected {tuple(expected[key].shape)}")
        elif not tensor.sum(dtype=torch.float32).isfinite():
            problems.append(f"{key} holds NaN or inf")
    if problems:
        raise FasteagleError(
            f"{name}: not a draft head we can load: {shortened(problems)}: fetch it again, or "
            "choose another with --head"
        )
    size = config.block.vocab_size
    ids = target_ids(state[MAP]) if MAP in state else torch.zeros(1)
    if not len(ids) or ids.min() < 0 or ids.max() >= size or (ids.diff() <= 0).any():
        raise FasteagleError(
            f"{name}: d2t does not list ascending ids below {size:,}, the target's vocabulary: "
            "fetch the head again"
        )


# From files


def open_head(path: Path) -> HeadSource:
    """Open the draft head in a folder or a GGUF file of any dialect, or in a model's.

    Raises `FasteagleError` for heads that cannot run.
    """
    require_no_pipe(path)
    layer = read_layer(path)
    if layer is not None:
        return HeadSource(str(path), tables.IN_MODEL, *layer, eagle3=False)
    file = gguf_of(path)
    if file is not None:
        return _described(str(file), *read_gguf_head(file), None)
    raw = _flat_config(f"{path}/config.json", read_json(path / "config.json"))
    refuse_others(str(path), raw)
    return _described(str(path), raw, *_read_state(path))


def _flat_config(where: str, raw: Raw) -> Raw:
    """Return the flat config of the decoder layer, with the types of its fields checked.

    The speculators format nests it, and RoPE by the kind of layer. Raises `FasteagleError`.
    """
    fields = Fields(raw, where)
    fields.part("eagle_config")
    fields.texts("architectures")
    fields.part("transformer_layer_config")
    layer = dict(raw.get("transformer_layer_config") or {})
    kinds = {key: raw.get(key) for key in ("architectures", "model_type")}  # not the layer's
    flat = {**raw, **layer, **kinds}
    fields = Fields(flat, where)
    fields.texts("layer_types")
    for key in _FLAGS:
        fields.flag(key)
    fields.width("target_hidden_size", 1)
    fields.part("rope_scaling")
    if "full_attention" in fields.part("rope_parameters"):
        fields.part("rope_parameters").part("full_attention")
        flat["rope_parameters"] = flat["rope_parameters"]["full_attention"]
    return flat


def _read_state(folder: Path) -> tuple[State, Header | None]:
    """Read the tensors of a folder, with the list `freq_*.pt` of FR-Spec as their map."""
    files = weight_files(folder)
    if not files:
        raise FasteagleError(
            f"{folder}: no model.safetensors and no pytorch_model.bin: give the folder of a head"
        )
    header = read_header(folder) if files[0].name == "model.safetensors" else None
    state = {name: tensor for file in files for name, tensor in mapped_tensors(file).items()}
    lists = sorted(folder.glob("freq_*.pt"), key=lambda path: (len(path.name), path.name))
    if lists and MAP not in state:
        ids = _token_ids(lists[-1])  # the longest of them
        state[MAP] = ids - torch.arange(len(ids))
    return state, header


def _token_ids(path: Path) -> Tensor:
    """Read a list of token ids, in ascending order. Raises `FasteagleError` for other files."""
    value = unpickled(path)
    try:
        if isinstance(value, list) and all(type(i) is int for i in value):
            value = torch.tensor(value)
        if not isinstance(value, Tensor) or not is_plain(value) or value.dtype not in _INTEGERS:
            raise TypeError("no integers")
        ids: Tensor = value.long().flatten().sort().values
        return ids
    except (TypeError, ValueError, RuntimeError) as error:
        raise FasteagleError(f"{path}: not a list of token ids: fetch it again") from error


def read_header(folder: Path) -> Header | None:
    """Read the JSON header of a head of our own, None for others; reads no tensor.

    Raises `FasteagleError` for a damaged one.
    """
    file = folder / "model.safetensors"
    metadata, where = open_safetensors(file).metadata() or {}, f"{file}: its header"
    if HEADER_KEY not in metadata:
        return None
    try:
        header = parse_json(metadata[HEADER_KEY])
    except ValueError as error:
        raise FasteagleError(f"{where} is no JSON ({error}): fetch it again") from error
    if not isinstance(header, dict):
        raise FasteagleError(f"{where} must be a JSON object: train or fetch the head again")
    fields = Fields(header, where)
    for key in ("target", "target_fingerprint", "scheme", "recipe"):
        fields.text(key, "")
    fields.shares("ranks")
    return header


def _described(name: str, raw: Raw, state: State, header: Header | None) -> HeadSource:
    """Describe a flat config and its tensors. Raises `FasteagleError` for heads that cannot run."""
    state = {k: t for k, t in state.items() if "rotary_emb" not in k}
    state = _renamed(name, state, lambda k: k.removeprefix("model."))
    refuse_others(name, raw, state)
    t2d, eagle3 = state.get("t2d"), tables.is_eagle3(raw, state)
    unused = tables.TRAINING_ONLY if eagle3 else (*tables.TRAINING_ONLY, EMBEDDING, LM_HEAD)
    state = {k: tensor for k, tensor in state.items() if k not in unused}
    state = _renamed(name, state, lambda k: tables.official_name(k, eagle3))
    if not eagle3:
        dialect = tables.EAGLE12 if header is None else tables.OURS
        return HeadSource(name, dialect, raw, state, eagle3, header)
    d2t = state.get(MAP)
    if d2t is not None and (raw.get("draft_vocab_size") or d2t.numel()) == raw.get("vocab_size"):
        del state[MAP]  # the identity, which some files hold as zeros
    elif d2t is not None and not d2t.is_floating_point():  # else it is refused later
        d2t = state[MAP] = d2t.long()
        ids = set(target_ids(d2t).tolist())
        if t2d is not None and ids != set(t2d.bool().nonzero().flatten().tolist()):
            raise FasteagleError(f"{name}: d2t and t2d do not agree: fetch the head again")
    layout = tables.eagle3_dialect(raw)
    layers = tables.dotted(raw).get(layout.layers) or None  # speculators writes [] as its default
    if layers is not None:
        if not (isinstance(layers, list) and all(type(i) is int for i in layers)):
            where = f"{name}: {layout.layers} is {layers!r}"
            raise FasteagleError(f"{where}: must be a list of block numbers: fetch the head again")
        layers = tuple(layer + layout.shift for layer in layers)
    return HeadSource(name, layout.name, raw, state, eagle3, header, layers, layout.shift == 1)


def _renamed(where: str, state: State, name_of: Callable[[str], str]) -> State:
    """Return tensors under other names. Raises `FasteagleError` where two have the same name."""
    names = [name_of(key) for key in state]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FasteagleError(f"{where} holds {twice} twice: fetch the head again")
    return dict(zip(names, state.values(), strict=True))


def with_vocabulary(
    head: EagleHead, ids: Tensor, rows: Callable[[Tensor], Tensor] | None = None
) -> EagleHead:
    """Return a copy of the draft head that drafts only `ids` (ascending target ids).

    `rows` returns the target's LM head rows [n, D] of ids. They are needed for ids that are new to
    a draft head with an LM head of its own.
    """
    changed = make_head(dataclasses.replace(head.config, draft_vocab_size=len(ids)))
    state = official_state(head) | {MAP: ids - torch.arange(len(ids))}
    if LM_HEAD in state:
        assert rows is not None, "new rows come from the target"
        known, old = head.target_ids().cpu(), state[LM_HEAD].cpu()
        at = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
        is_known = (known[at] == ids).unsqueeze(1)
        state[LM_HEAD] = torch.where(is_known, old[at], rows(ids).cpu())
    _load_state(changed, state)
    return changed

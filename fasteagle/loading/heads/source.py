"""Draft head as its files describe it, and its shape for a target."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fasteagle.config import (
    Eagle3Config,
    HeadConfig,
    ModelConfig,
    checked_aux_layers,
    default_aux_layers,
    head_from_hf,
)
from fasteagle.config_fields import Fields
from fasteagle.errors import FasteagleError, shortened
from fasteagle.loading.heads import tables
from fasteagle.loading.heads.tables import EMBEDDING, LM_HEAD, MAP, Raw, State, listed
from fasteagle.model import make_head
from fasteagle.uninitialized import Uninitialized


@dataclasses.dataclass(frozen=True)
class HeadSource:
    """Draft head as its files describe it, not yet fitted to a target."""

    name: str  # path or file, for messages
    dialect: str
    raw: Raw  # flat config of the decoder layer
    state: State  # tensors under the official names
    eagle3: bool
    header: dict[str, Any] | None = None  # of heads of our own
    aux_layers: tuple[int, ...] | None = None  # None: the files do not say them
    lists_outputs: bool = False  # its files name the blocks whose output is read

    @property
    def where(self) -> str:
        """File that describes the shape of the draft head, for messages."""
        return self.name if self.name.endswith(".gguf") else f"{self.name}/config.json"

    @property
    def algorithm(self) -> str:
        """Name of the method, for messages."""
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
        check_fit(self.where, self.raw, target)
        shape, names = head_from_hf(self.raw, self.where), " ".join(self.state)
        block = dataclasses.replace(
            shape.block,
            qk_norm="self_attn.q_norm.weight" in names,
            qkv_bias=bool(self.raw.get("qkv_bias")) or "self_attn.q_proj.bias" in names,
            rope_freq_factors=tuple(self.raw.get("rope_freq_factors") or ()) or None,
        )
        size = self.raw.get("draft_vocab_size") or block.vocab_size
        if size == block.vocab_size and MAP in self.state:  # a list of FR-Spec
            size = self.state[MAP].numel()
        if self.eagle3:
            own = self._eagle3(block.dim, target, aux_layers)
            config = HeadConfig(block, size, "fc.bias" in self.state, own)
        elif aux_layers is not None:
            raise FasteagleError(
                f"{self.name}: an {self.algorithm} head reads no auxiliary layers: leave out "
                "--tap-layers"
            )
        else:
            if not self.raw.get("shifted", True):
                raise FasteagleError(
                    f"{self.name}: shifted is false: a head that reads each feature with its own "
                    "token cannot draft"
                )
            config = HeadConfig(block, size, shape.fc_bias)
        check_state(config, self.state, self.name)
        return config

    def _eagle3(
        self, dim: int, target: ModelConfig, aux_layers: tuple[int, ...] | None
    ) -> Eagle3Config:
        """Return the EAGLE-3 config of a draft head of width `dim`. Raises `FasteagleError`."""
        own = Eagle3Config(
            aux_layers=self._aux_layers(target, aux_layers),
            target_dim=target.dim,
            own_embedding=EMBEDDING in self.state,
            own_lm_head=LM_HEAD in self.state,
            # Absent in a speculators config: the package that defines the format says False, which
            # is what such a head was trained as; it always writes the key. vLLM assumes True.
            norm_before_residual=bool(self.raw.get("norm_before_residual")),
            aux_norm=self.aux_norm,
            # In the meaning of vLLM, SGLang and speculators; SpecForge had another one before its
            # pull request 879.
            norm_output=bool(self.raw.get("norm_output")),
        )
        if dim != target.dim and not (own.own_embedding and own.own_lm_head):
            raise FasteagleError(
                f"{self.name}: a head {dim:,} wide for a model {target.dim:,} wide needs an "
                "embedding and an LM head of its own: choose the head trained for this model"
            )
        return own

    def _aux_layers(
        self, target: ModelConfig, aux_layers: tuple[int, ...] | None
    ) -> tuple[int, ...]:
        """Return the target blocks whose input the head reads. Raises `FasteagleError`."""
        aux_layers = aux_layers or self.aux_layers or default_aux_layers(target.n_layer)
        try:
            checked_aux_layers(aux_layers, target.n_layer)
        except FasteagleError as error:
            raise FasteagleError(f"{self.name}: {error}") from error
        fc = self.state.get("fc.weight")
        n_out, n_in = fc.shape if fc is not None and fc.ndim == 2 else (0, 0)
        if n_out == self.raw.get("hidden_size") and n_in != len(aux_layers) * target.dim:
            raise FasteagleError(
                f"{self.name}: fc reads {n_in:,} values, {n_in / target.dim:g} layers of "
                f"{target.dim:,}, but the layers are {listed(aux_layers)}: give --tap-layers"
            )
        return tuple(aux_layers)


def check_fit(where: str, raw: Raw, target: ModelConfig) -> None:
    """Raise `FasteagleError` if a draft head's config has another width or vocabulary."""
    block = head_from_hf(raw, where).block
    width = raw.get("target_hidden_size") or block.dim
    sizes = {"width": (width, target.dim), "vocabulary": (block.vocab_size, target.vocab_size)}
    for what, (theirs, ours) in sizes.items():
        if theirs != ours:
            raise FasteagleError(
                f"{where}: the head is for a {what} of {theirs:,}, the model has {ours:,}: "
                "choose the head trained for this model, or run with --no-spec"
            )


def check_state(config: HeadConfig, state: State, name: str) -> None:
    """Raise `FasteagleError` listing all official tensors that do not fit a head of `config`."""
    with torch.device("meta"), Uninitialized():
        expected = tables.official_state(make_head(config))
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


def target_ids(d2t: Tensor) -> Tensor:
    """Return the target id of every draft id."""
    return d2t.flatten() + torch.arange(d2t.numel(), device=d2t.device)


# From a config and tensors


def flat_config(where: str, raw: Raw) -> Raw:
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
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "shifted"):
        fields.flag(key)
    for key in ("target_hidden_size", "draft_vocab_size", "vocab_size"):
        fields.width(key, 1)
    fields.numbers("rope_freq_factors")
    fields.part("rope_scaling")
    if "full_attention" in fields.part("rope_parameters"):
        fields.part("rope_parameters").part("full_attention")
        flat["rope_parameters"] = flat["rope_parameters"]["full_attention"]
    return flat


def described(name: str, raw: Raw, state: State, header: dict[str, Any] | None) -> HeadSource:
    """Describe a flat config and its tensors. Raises `FasteagleError` for heads that cannot run."""
    state = {k.removeprefix("model."): v for k, v in state.items() if "rotary_emb" not in k}
    tables.refuse_others(name, raw, state)
    if tables.VLLM_MAP in state:
        state.setdefault(MAP, state.pop(tables.VLLM_MAP))
    eagle3, t2d = tables.is_eagle3(raw, state), state.get("t2d")
    if not eagle3:
        borrowed = (*tables.TRAINING_ONLY, EMBEDDING, LM_HEAD)
        state = {key: tensor for key, tensor in state.items() if key not in borrowed}
        dialect = tables.EAGLE12 if header is None else tables.OURS
        return HeadSource(name, dialect, raw, state, eagle3, header)
    unused = tables.TRAINING_ONLY
    state = {tables.official_name(k): tensor for k, tensor in state.items() if k not in unused}
    d2t = state.get(MAP)
    if d2t is not None and (raw.get("draft_vocab_size") or d2t.numel()) == raw.get("vocab_size"):
        del state[MAP]  # the identity, which some files hold as zeros
    elif d2t is not None and t2d is not None:
        ids = set(target_ids(d2t).tolist())
        if ids != set(t2d.nonzero().flatten().tolist()):
            raise FasteagleError(f"{name}: d2t and t2d do not agree: fetch the head again")
    layout = tables.eagle3_dialect(raw, has_header=header is not None)
    layers = tables.dotted(raw).get(layout.layers) or None  # speculators writes [] as its default
    if layers is not None:
        layers = tables.block_numbers(f"{name}: {layout.layers}", layers, layout.shift)
    return HeadSource(name, layout.name, raw, state, eagle3, header, layers, layout.shift == 1)

"""Draft heads as different projects publish them: their kind, and their way to one set of names.

Whatever the dialect, a head becomes a `HeadSource`: the flat config of its decoder layer, and its
tensors under the names of the public EAGLE code. Nothing here knows how a head computes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fasteagle.config import (
    Eagle3Config,
    HeadConfig,
    ModelConfig,
    checked_taps,
    default_taps,
    head_from_hf,
)
from fasteagle.config_fields import Fields
from fasteagle.errors import FasteagleError

# Copies of the target's tensors, and what only training needs.
IGNORED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
VLLM_MAP = "draft_id_to_target_id"  # the name of d2t as vLLM holds it
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "shifted", "qkv_bias")
COPIES = ("embed_tokens.weight", "lm_head.weight")  # which EAGLE-1/2 heads take from the target


@dataclasses.dataclass(frozen=True)
class HeadSource:
    """A head as its files say, not yet fitted to a target."""

    name: str  # path or file, for messages
    dialect: str
    raw: Mapping[str, Any]  # the flat config of its decoder layer
    state: dict[str, Tensor]  # under the official names
    header: dict[str, Any] | None  # of heads of our own
    eagle3: bool
    tap_layers: tuple[int, ...] | None = None  # None: not said
    lists_outputs: bool = False  # its files name the blocks whose output is read

    @property
    def where(self) -> str:
        """The file that says its shape."""
        return self.name if self.name.endswith(".gguf") else f"{self.name}/config.json"

    @property
    def algorithm(self) -> str:
        return "EAGLE-3" if self.eagle3 else "EAGLE-1/2"

    @property
    def made_for(self) -> str | None:
        """The model that a speculators config says it was trained for: a repository or a folder."""
        verifier = Fields(self.raw, self.where).part("speculators_config").part("verifier")
        return verifier.text("name_or_path", "") or None

    @property
    def tap_norm(self) -> str:
        """Said by the config or seen in the tensors: what only one has is missed at loading."""
        if self.raw.get("norm_before_fc") or "input_norm.weight" in self.state:
            return "all"
        each = self.raw.get("fc_norm") or "fc_norm.0.weight" in self.state
        return "each" if each else "none"

    def likely_target(self, tap_layers: tuple[int, ...] | None = None) -> ModelConfig:
        """A model that the head says it is for, as deep as its taps, or those asked for, need.

        `max_seq_len` is 0 where the files do not say it.
        """
        block = head_from_hf(self.raw, self.where).block
        dim = self.raw.get("target_hidden_size") or block.dim
        n_layer = max((*(tap_layers or self.tap_layers or ()), 32))
        fields, key = Fields(self.raw, self.where), "max_position_embeddings"
        length = fields.integer(key) if self.raw.get(key) is not None else 0
        return dataclasses.replace(block, dim=dim, n_layer=n_layer, max_seq_len=length)

    def config(self, target: ModelConfig, tap_layers: tuple[int, ...] | None = None) -> HeadConfig:
        """Its shape over `target`. `tap_layers` stand in for what the files say.

        Raises `FasteagleError` where it is made for another width or vocabulary.
        """
        check_fit(self.where, self.raw, target)
        found = head_from_hf(self.raw, self.where)
        block = dataclasses.replace(
            found.block,
            vocab_size=target.vocab_size,
            qk_norm=_ends_with(self.state, "self_attn.q_norm.weight"),
            qkv_bias=_ends_with(self.state, "self_attn.q_proj.bias"),
            rope_freq_factors=self._rope_factors(),
        )
        if self.raw.get("qkv_bias") and not block.qkv_bias:
            raise FasteagleError(
                f"{self.where}: qkv_bias is true, but self_attn.q_proj.bias is missing: "
                "fetch the head again"
            )
        draft_vocab_size = len(self.state["d2t"]) if "d2t" in self.state else target.vocab_size
        if not self.eagle3:
            if tap_layers is not None:
                raise FasteagleError(
                    f"{self.name}: an {self.algorithm} head reads no taps: leave out --tap-layers"
                )
            shifted = bool(self.raw.get("shifted", True))
            return HeadConfig(block, draft_vocab_size, found.fc_bias, shifted=shifted)
        own = Eagle3Config(
            tap_layers=self._taps(target, tap_layers),
            target_dim=target.dim,
            own_embedding="embed_tokens.weight" in self.state,
            own_lm_head="lm_head.weight" in self.state,
            # Absent in a speculators config: the package that defines the format says False, which
            # is what such a head was trained as; it always writes the key. vLLM assumes True.
            norm_before_residual=bool(self.raw.get("norm_before_residual", False)),
            tap_norm=self.tap_norm,
            # In the meaning of vLLM, SGLang and speculators; SpecForge had another one before its
            # pull request 879.
            norm_output=bool(self.raw.get("norm_output", False)),
        )
        if block.dim != target.dim and not (own.own_embedding and own.own_lm_head):
            raise FasteagleError(
                f"{self.name}: a head {block.dim:,} wide for a model {target.dim:,} wide needs an "
                "embedding and an LM head of its own: choose the head trained for this model"
            )
        return HeadConfig(block, draft_vocab_size, "fc.bias" in self.state, own)

    def _rope_factors(self) -> tuple[float, ...] | None:
        """Divisors of the RoPE frequencies: GGUF files and heads saved of them have these."""
        factors = self.raw.get("rope_freq_factors")
        return tuple(factors) if factors else None

    def _taps(self, target: ModelConfig, asked: tuple[int, ...] | None) -> tuple[int, ...]:
        """Blocks whose input it reads. Raises `FasteagleError` for those the target lacks."""
        taps = asked or self.tap_layers or default_taps(target.n_layer)
        try:
            checked_taps(taps, target.n_layer)
        except FasteagleError as error:
            raise FasteagleError(f"{self.name}: {error}") from error
        n_out, n_in = _matrix(self.state.get("fc.weight"))
        if n_out == self.raw.get("hidden_size") and n_in != len(taps) * target.dim:
            raise FasteagleError(
                f"{self.name}: fc reads {n_in:,} values, {n_in / target.dim:g} taps of "
                f"{target.dim:,}, but the taps are {listed(taps)}: give --tap-layers"
            )
        return tuple(taps)


def check_fit(where: str, raw: Mapping[str, Any], target: ModelConfig) -> None:
    """Raise `FasteagleError` if the head of a flat config is for another width or vocabulary."""
    block = head_from_hf(raw, where).block
    said = raw.get("target_hidden_size") or block.dim
    for what, theirs, ours in (
        ("width", said, target.dim),
        ("vocabulary", block.vocab_size, target.vocab_size),
    ):
        if theirs != ours:
            raise FasteagleError(
                f"{where}: the head is for a {what} of {theirs:,}, the model has {ours:,}: "
                "choose the head trained for this model, or run with --no-spec"
            )


def checked_config(where: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The flat config of the decoder layer, every field that is read here of its type.

    speculators nests it, and RoPE by the kind of layer. Raises `FasteagleError`.
    """
    fields = Fields(raw, where)
    fields.part("eagle_config")
    fields.texts("architectures")
    fields.part("transformer_layer_config")
    flat = {**raw, **(raw.get("transformer_layer_config") or {})}
    fields = Fields(flat, where)
    fields.texts("layer_types")
    for key in FLAGS:
        fields.flag(key)
    for key in ("target_hidden_size", "draft_vocab_size", "vocab_size"):
        fields.width(key, 1)
    fields.numbers("rope_freq_factors")
    fields.part("rope_scaling")
    if "full_attention" in fields.part("rope_parameters"):
        fields.part("rope_parameters").part("full_attention")
        flat["rope_parameters"] = flat["rope_parameters"]["full_attention"]
    return flat


def _matrix(tensor: Tensor | None) -> tuple[int, int]:
    """The shape of a matrix, zeros for what is none."""
    return (0, 0) if tensor is None or tensor.ndim != 2 else (tensor.shape[0], tensor.shape[1])


def listed(taps: Iterable[int]) -> str:
    """Block numbers for a person."""
    return ", ".join(str(tap) for tap in taps)


def _ends_with(names: Iterable[str], end: str) -> bool:
    return any(name.endswith(end) for name in names)


def described(
    name: str, raw: Mapping[str, Any], state: dict[str, Tensor], header: dict[str, Any] | None
) -> HeadSource:
    """What a `config.json` and its tensors are. Raises `FasteagleError` for what cannot run."""
    flat = checked_config(f"{name}/config.json", raw)
    state = {k.removeprefix("model."): v for k, v in state.items() if "rotary_emb" not in k}
    if VLLM_MAP in state:
        state.setdefault("d2t", state.pop(VLLM_MAP))
    refuse_others(name, raw, state)
    if not _is_eagle3(raw, state):
        dialect = "official EAGLE-1/2" if header is None else "fasteagle"
        kept = {k: v for k, v in state.items() if k not in (*IGNORED, *COPIES)}
        kept = _checked(name, kept)
        size = flat.get("draft_vocab_size")
        if size and size != flat.get("vocab_size"):  # without it, a list of FR-Spec says it
            _check_maps(name, size, kept.get("d2t"), None)
        return HeadSource(name, dialect, flat, kept, header, eagle3=False)
    dialect, taps, shift = _eagle3_dialect(name, raw, header)
    official = {_official(k): v for k, v in state.items()}
    kept = _checked(name, {k: v for k, v in official.items() if k not in IGNORED})
    if "draft_vocab_size" not in raw and "d2t" in kept:
        flat["draft_vocab_size"] = len(kept["d2t"])
    if (flat.get("draft_vocab_size") or flat.get("vocab_size")) == flat.get("vocab_size"):
        kept.pop("d2t", None)  # the identity, which some files hold as zeros
    else:
        _check_maps(name, flat["draft_vocab_size"], kept.get("d2t"), official.get("t2d"))
    return HeadSource(name, dialect, flat, kept, header, True, taps, lists_outputs=shift == 1)


def _is_eagle3(raw: Mapping[str, Any], names: Iterable[str]) -> bool:
    return _says(raw, "eagle3") or any(
        name.startswith("midlayer.") or name == "layers.0.hidden_norm.weight" for name in names
    )


def _official(name: str) -> str:
    """The official EAGLE-3 name of a tensor."""
    if name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    return "fc_norm." + name.removeprefix("fcs.") if name.startswith("fcs.") else name


def _is_speculators(raw: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in raw


def _eagle3_dialect(
    name: str, raw: Mapping[str, Any], header: dict[str, Any] | None
) -> tuple[str, tuple[int, ...] | None, int]:
    """The dialect, the blocks whose input is read, and what was added to their numbers.

    One key has two meanings: speculators and vLLM list blocks whose input is read, SpecForge,
    SGLang and ModelOpt those whose output is, which is the input of the next one.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    if "tap_layers" in raw or header is not None:
        return "fasteagle", _ids(name, "tap_layers", raw.get("tap_layers"), 0), 0
    nested = raw.get("eagle_config") or {}
    if _is_speculators(raw) or key in raw:
        return "speculators / vLLM EAGLE-3", _ids(name, key, raw.get(key), 0), 0
    taps = _ids(name, key, nested.get(key), 1)
    if "use_input_layernorm_in_first_layer" in nested or "use_last_layernorm" in nested:
        return "NVIDIA ModelOpt EAGLE-3", taps, 1
    if nested or "LlamaForCausalLMEagle3" in (raw.get("architectures") or []):
        return "SpecForge / SGLang EAGLE-3", taps, 1
    return "official EAGLE-3", None, 0


def _ids(name: str, key: str, value: Any, shift: int) -> tuple[int, ...] | None:
    if value is None or value == []:  # as not said: speculators writes its default so
        return None
    if not (isinstance(value, list) and value and all(type(i) is int for i in value)):
        raise FasteagleError(f"{name}: {key} is {value!r}: must be a list of block numbers")
    return tuple(i + shift for i in value)


def _check_maps(name: str, size: int, d2t: Tensor | None, t2d: Tensor | None) -> None:
    """Raise `FasteagleError` for maps of a draft vocabulary of `size` tokens that are wrong."""
    if d2t is None:
        problem = f"a draft vocabulary of {size:,} tokens needs the map d2t, which is missing"
    elif tuple(d2t.shape) != (size,):
        problem = f"d2t is {tuple(d2t.shape)}, expected ({size},)"
    elif t2d is not None and not torch.equal(
        (d2t + torch.arange(size)).sort().values, t2d.nonzero().flatten()
    ):
        problem = "d2t and t2d do not agree"
    else:
        return
    raise FasteagleError(f"{name}: {problem}: fetch the head again")


def _checked(name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` if its values can be weights. Raises `FasteagleError` for quantized tensors."""
    for key, tensor in state.items():
        wrong = tensor.is_floating_point() == (key == "d2t")
        if wrong or tensor.dtype.itemsize < 2:
            dtype = str(tensor.dtype).removeprefix("torch.")
            needed = "integers" if key == "d2t" else "16 or 32 bit floats"
            raise FasteagleError(f"{name}: {key} is {dtype}: must be {needed}: use the plain head")
        if key == "d2t" and (tensor.ndim != 1 or not len(tensor)):
            shape = tuple(tensor.shape)
            raise FasteagleError(f"{name}: d2t is {shape}: must be a list: fetch the head again")
    return state


def _says(raw: Mapping[str, Any], word: str) -> bool:
    """Whether a config names its architecture or model type like `word`."""
    said = [raw.get("model_type"), raw.get("speculators_model_type")]
    architectures = raw.get("architectures")
    said += architectures if isinstance(architectures, list) else [architectures]
    return any(word in str(part).lower() for part in said)


def _has(part: str) -> Callable[[Mapping[str, Any], Iterable[str]], bool]:
    return lambda raw, names: any(part in name for name in names)


def _odd_rope(raw: Mapping[str, Any]) -> bool:
    flat = checked_config("", raw)
    rope = flat.get("rope_parameters") or flat.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return kind not in ("default", "linear", "llama3")


# What is refused, by the name a person knows it under.
_OTHERS: tuple[tuple[str, Callable[[Mapping[str, Any], Iterable[str]], bool]], ...] = (
    (
        "parallel drafting (P-EAGLE)",
        lambda raw, names: (
            bool(raw.get("parallel_drafting"))
            or _says(raw, "peagle")
            or any("mask_hidden" in name for name in names)
        ),
    ),
    ("block diffusion (DFlash)", lambda raw, names: _says(raw, "dflash") or "dflash_config" in raw),
    (
        "multi-token prediction layers (MTP)",
        lambda raw, names: (
            _says(raw, "mtp")
            or _says(raw, "nextn")
            or any("eh_proj" in name or name.startswith("mtp.") for name in names)
        ),
    ),
    ("Medusa heads", lambda raw, names: _says(raw, "medusa") or "medusa_num_heads" in raw),
    ("an MLP speculator", lambda raw, names: _says(raw, "mlp_speculator")),
    ("latent attention (MLA)", _has("kv_a_proj")),
    ("a mixture of experts", _has(".experts.")),
    ("more than one decoder layer", _has("layers.1.")),
    ("norms of HASS variants", _has("embed_layernorm")),
    ("the EAGLE-1 form that speculators has given up", _has("fusion_fc")),
    ("RoPE scaling that is neither linear nor llama3", lambda raw, names: _odd_rope(raw)),
    (
        "sliding-window attention",
        lambda raw, names: (
            "sliding_attention"
            in ((raw.get("transformer_layer_config") or raw).get("layer_types") or [])
        ),
    ),
    (
        "no auxiliary features",
        lambda raw, names: (raw.get("eagle_config") or {}).get("use_aux_hidden_state") is False,
    ),
)


def refuse_others(name: str, raw: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise `FasteagleError` for drafting methods that are not EAGLE-1, -2 or -3."""
    for what, applies in _OTHERS:
        if applies(raw, names):
            raise FasteagleError(
                f"{name}: this draft model has {what}, which fasteagle does not run: use an "
                "EAGLE-1, EAGLE-2 or EAGLE-3 head, or --drafter ngram"
            )

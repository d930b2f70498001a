"""Layers for multi-token prediction (MTP) in a model's own files, read as draft heads.

Files are folders of MiMo and Ernie-4.5, GGUF files with `nextn` tensors, and our own folders made
of either. Such a layer was trained with the model to predict one token more; as a draft head it
reads its own output for each further one. Of several layers the first is read.
"""

from __future__ import annotations

from pathlib import Path

from fasteagle.config import mtp_layer
from fasteagle.config_fields import Fields
from fasteagle.config_gguf import mtp_layers
from fasteagle.config_hf import ERNIES, MIMO
from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import open_checkpoint
from fasteagle.loading.gguf_index import read_index
from fasteagle.loading.heads.gguf import gguf_of
from fasteagle.loading.heads.tables import Raw, State, layer_config
from fasteagle.loading.names import MTP_LAYERS
from fasteagle.loading.stored import is_stored
from fasteagle.loading.tensors import (
    Checkpoint,
    load_floats,
    mapped_tensors,
    read_json,
    weight_files,
)

FIRST = f"{MTP_LAYERS}0."
_IN_FOLDERS = "model.mtp_"  # how names begin in all folders: those of Ernie are changed when read
# Names in a draft head's folder of what is not the decoder layer's; "" is the target's, and used
# instead of the copy here
_NAMES = {
    "input_proj": "fc",
    "eh_proj": "fc",
    "token_layernorm": "token_layernorm",
    "hidden_layernorm": "hidden_layernorm",
    "final_layernorm": "norm",
    "embed_tokens": "",
    "lm_head": "",
}


def holds_layer(checkpoint: Checkpoint) -> bool:
    """Return whether a model's files hold a layer for multi-token prediction."""
    return any(name.startswith(FIRST) for name in checkpoint.names())


def layer_names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of the layer's tensors in a model's files, in their order; may be none.

    Those that are copies of the target's are left out.
    """
    names = sorted(name for name in checkpoint.names() if name.startswith(FIRST))
    return [name for name in names if _NAMES.get(_module(name), name)]


def _module(name: str) -> str:
    return name.removeprefix(FIRST).rpartition(".")[0]


def read_layer(path: Path) -> tuple[Raw, State] | None:
    """Read the layer in a model's folder or GGUF file as the config and tensors of a draft head.

    Returns None for other files. Raises `FasteagleError` for models that do not run here.
    """
    file = gguf_of(path)
    if file is not None:
        may_hold = file.is_file() and mtp_layers(Fields(read_index(file).fields, str(file))) > 0
    else:
        raw = read_json(path / "config.json")
        architectures = Fields(raw, str(path / "config.json")).texts("architectures")
        may_hold = is_stored(raw) or not {MIMO, *ERNIES}.isdisjoint(architectures)
        may_hold = may_hold and any(
            name.startswith(_IN_FOLDERS) for f in weight_files(path) for name in mapped_tensors(f)
        )
    if not may_hold or not holds_layer(checkpoint := open_checkpoint(file or path)):
        return None
    config, state = mtp_layer(checkpoint.config), _state(checkpoint)
    if not state:
        raise FasteagleError(
            f"{path}: its layer for multi-token prediction has no weights: choose another head"
        )
    raw = layer_config(config.block, next(iter(state.values())).dtype)
    return raw | {"bias": False, "mtp": True}, state


def _state(checkpoint: Checkpoint) -> State:
    state = {}
    for name in layer_names(checkpoint):
        module, tensor = _module(name), load_floats(checkpoint, name)
        official = _NAMES.get(module, f"layers.0.{module}") + name.removeprefix(FIRST + module)
        if module == "input_proj" and tensor.dim():  # MiMo's reads the embedding last, not first
            tensor = tensor.roll(tensor.shape[-1] // 2, -1)
        state[official] = tensor
    if checkpoint.config.architecture in ERNIES:  # they use the model's last norm
        state.setdefault("norm.weight", load_floats(checkpoint, "model.norm.weight"))
    return state

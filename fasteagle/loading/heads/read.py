"""Read draft heads: a folder or GGUF file of any dialect, its description, the loaded head."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from fasteagle.config import ModelConfig
from fasteagle.config_fields import Fields, parse_json
from fasteagle.errors import FasteagleError
from fasteagle.loading.heads.gguf import gguf_of, open_gguf_head
from fasteagle.loading.heads.source import (
    HeadSource,
    check_fit,
    check_state,
    described,
    flat_config,
)
from fasteagle.loading.heads.tables import LM_HEAD, MAP, State, official_state, refuse_others
from fasteagle.loading.tensors import open_safetensors, read_json, unpickled
from fasteagle.model import EagleHead, make_head
from fasteagle.uninitialized import Uninitialized

HEADER_KEY = "fasteagle"  # key of the JSON header in the metadata of our own draft heads
Header = dict[str, Any]


def load_head(
    path: Path, target: ModelConfig, aux_layers: tuple[int, ...] | None = None
) -> tuple[EagleHead, Header | None]:
    """Load a draft head in fp32 on the CPU, and its header (None for published heads).

    `aux_layers` replace those of an EAGLE-3 head's files. Raises `FasteagleError` when the head
    does not fit the target.
    """
    source = open_head(path, target)
    return make_fitted(source, target, aux_layers), source.header


def make_fitted(
    source: HeadSource, target: ModelConfig, aux_layers: tuple[int, ...] | None = None
) -> EagleHead:
    """Make the draft head of `source` for `target`, see `load_head`."""
    config = source.fitted(target, aux_layers)
    with Uninitialized():  # all of it is loaded
        head = make_head(config)
    load_official_state(head, source.state, source.name)
    return head.eval()


@torch.no_grad()
def load_official_state(head: EagleHead, state: State, name: str) -> None:
    """Copy official tensors into `head`. Raises `FasteagleError` listing all that do not fit."""
    check_state(head.config, state, name)
    # The parts are views of the fused weights, so this writes into the parameters.
    for key, part in official_state(head).items():
        part.copy_(state[key])


def open_head(path: Path, target: ModelConfig | None = None) -> HeadSource:
    """Open the draft head in a folder or a GGUF file of any dialect.

    Raises `FasteagleError` for heads that cannot run, and for one that was made for another target
    than `target` before its tensors are read.
    """
    file = gguf_of(path)
    if file is not None:
        return open_gguf_head(file)
    raw = flat_config(f"{path}/config.json", read_json(path / "config.json"))
    refuse_others(str(path), raw)
    if target is not None:
        check_fit(f"{path}/config.json", raw, target)
    state, header = _read_state(path)
    return described(str(path), raw, state, header)


def _read_state(folder: Path) -> tuple[State, Header | None]:
    """Read the tensors of a folder, with the list `freq_*.pt` of FR-Spec as their map."""
    safe, pickled, header = folder / "model.safetensors", folder / "pytorch_model.bin", None
    if safe.exists():
        with open_safetensors(safe) as file:
            header = _header(file.metadata() or {}, f"{safe}: its header")
            try:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (SafetensorError, ValueError) as error:  # a dtype that torch does not have
                raise FasteagleError(f"{safe}: {error}: use the plain head") from error
    elif pickled.exists():
        state = unpickled(pickled)
        if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
            raise FasteagleError(f"{pickled}: not a weights-only torch file (no dict of tensors)")
    else:
        raise FasteagleError(f"{folder}: no model.safetensors and no pytorch_model.bin")
    lists = sorted(folder.glob("freq_*.pt"))
    if not lists or MAP in state:
        return state, header
    try:
        ids = torch.as_tensor(unpickled(lists[0])).flatten().sort().values
    except (TypeError, ValueError, RuntimeError) as error:
        raise FasteagleError(f"{lists[0]}: not a list of token ids: fetch it again") from error
    return state | {MAP: ids - torch.arange(len(ids))}, header


def read_header(folder: Path) -> Header | None:
    """Read the JSON header of a head of our own, None for others; reads no tensor."""
    try:
        with open_safetensors(folder / "model.safetensors") as file:
            return _header(file.metadata() or {}, f"{folder}: its header")
    except FasteagleError:
        return None


def _header(metadata: dict[str, str], where: str) -> Header | None:
    """Return the header in a file's metadata, None without one. Raises `FasteagleError`."""
    if HEADER_KEY not in metadata:
        return None
    try:
        header = parse_json(metadata[HEADER_KEY])
    except ValueError as error:
        raise FasteagleError(f"{where} cannot be read as JSON ({error})") from error
    if not isinstance(header, dict):
        raise FasteagleError(f"{where} must be a JSON object: train or fetch the head again")
    fields = Fields(header, where)
    for key in ("target_fingerprint", "head_scheme"):
        fields.text(key, "")
    fields.shares("ranks")
    return header


def with_vocabulary(
    head: EagleHead, ids: Tensor, rows: Callable[[Tensor], Tensor] | None = None
) -> EagleHead:
    """Return a copy of the draft head that drafts only `ids` (ascending target ids).

    `rows` returns the target's LM head rows [n, D] of ids. They are needed for ids that are new to
    a draft head with an LM head of its own.
    """
    changed = make_head(dataclasses.replace(head.config, draft_vocab_size=len(ids)))
    state = official_state(head) | {MAP: ids - torch.arange(len(ids))}
    if len(ids) == head.config.block.vocab_size:
        del state[MAP]
    if LM_HEAD in state:
        assert rows is not None, "new rows come from the target"
        known, old = head.target_ids().cpu(), state[LM_HEAD].cpu()
        at = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
        is_known = (known[at] == ids).unsqueeze(1)
        state[LM_HEAD] = torch.where(is_known, old[at], rows(ids).cpu())
    load_official_state(changed, state, "head")
    return changed

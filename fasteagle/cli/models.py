"""Run `fasteagle models`: list the models of the registry and which are on this machine."""

from __future__ import annotations

from fasteagle.config import ModelConfig
from fasteagle.loading.entries import EAGLE2, REGISTRY, Entry
from fasteagle.loading.heads.find import has_known_head, head_shape, is_shipped
from fasteagle.loading.memory import CARDS, CUDA_BYTES, best_fit, needed_bytes, settings
from fasteagle.loading.registry import local_path
from fasteagle.options import DEFAULT_MODEL, RuntimeOptions
from fasteagle.quant.scheme import int4_for
from fasteagle.tables import print_table

HEADINGS = ("name", "params", "int4 GiB", "draft head", "gated", "here", "licence")
NUMERIC = ("params", "int4 GiB")
NOTES = (
    "int4 GiB: weights, draft head and the cache of the default context, "
    f"{RuntimeOptions.DEFAULT_MAX_SEQ_LEN:,} tokens or the model's own limit;",
    "the embedding takes 16 bits, the LM head 8. Chat takes the first draft head of a model, the",
    "faster one by its authors' figures. A mixture of experts has all parameters in memory; a",
    "token reads those counted second.",
)


def print_models() -> None:
    """Print a row for every model, and one for every draft head besides the one a chat takes."""
    rows = []
    for name, entry in REGISTRY.items():
        heads = _heads(name, entry)
        cells = (
            name + (" (default)" if name == DEFAULT_MODEL else ""),
            _params(entry.config),
            f"{int4_bytes(name) / 2**30:.1f}",
            heads[0],
            "yes" if entry.gated else "no",
            _presence(name, entry),
            entry.licence,
        )
        rows += [cells, *(("", "", "", head) for head in heads[1:])]
    print_table(HEADINGS, rows, numeric=NUMERIC)
    print("\n".join(NOTES))


MEMORY_NOTES = (
    "What runs on a card of that size with the default context, "
    f"{RuntimeOptions.DEFAULT_MAX_SEQ_LEN:,} tokens or the model's own limit, or with the",
    "context that is named: weights, draft head, KV caches, a prompt's buffers, and "
    f"{CUDA_BYTES / 2**20:.0f} MiB for CUDA (an estimate; a desktop takes more).",
)


def print_memory() -> None:
    """Print a row for every model: GB by precision, and the most exact setting for each card."""
    sizes = ("bf16 GB", "int8 GB", "int4 GB", "+ kv int8")
    headings = ("name", *sizes, *(f"{size} GiB" for size in CARDS))
    rows = [(name, *memory_cells(name)) for name in REGISTRY]
    print_table(headings, rows, numeric=sizes)
    print("\n".join(MEMORY_NOTES))


def memory_cells(name: str) -> list[str]:
    """Return the cells of one row of the memory table, after the name."""
    config = REGISTRY[name].config
    context = RuntimeOptions().seq_len_for(config.max_seq_len, name)
    head = head_shape(name, config) if has_known_head(name) else None
    whole = [s for s in settings(config, context) if s.context == context]
    cells = [f"{needed_bytes(config, setting, head) / 1e9:.1f}" for setting in whole]
    for size in CARDS:
        fit = best_fit(config, size * 2**30, context, head)
        shorter = f", {fit.context:,} tokens" if fit and fit.context < context else ""
        cells.append(f"{fit}{shorter}" if fit else "-")
    return cells


def int4_bytes(name: str) -> int:
    """Return the bytes of a registry model at int4 with its draft head and default context."""
    config = REGISTRY[name].config
    scheme = int4_for(config)
    total = scheme.model_bytes(config)
    context = RuntimeOptions().seq_len_for(config.max_seq_len, name)
    total += config.kv_bytes(context)
    if has_known_head(name):
        head = head_shape(name, config)
        total += scheme.draft_head_bytes(head) + head.block.kv_bytes(context)
    return total


def _heads(name: str, entry: Entry) -> list[str]:
    """Return the draft heads in words, first the one that a chat takes by default."""
    heads = [f"{EAGLE2} shipped with fasteagle"] if is_shipped(name) else []
    for head in entry.heads:
        words = f"or {head.algorithm}: --head" if heads else head.algorithm
        heads.append(f"{words} {head.repo}")
    return heads or ["none"]


def _presence(name: str, entry: Entry) -> str:
    if entry.repo is None and entry.wheel is None:
        return "shape only"
    return "yes" if local_path(name) else "no"


def _params(config: ModelConfig) -> str:
    """Return the number of parameters in words, and of those that a token reads of experts."""
    if config.moe is None:
        return _count(config.params)
    unused = config.linear_params - config.active_linear_params
    return f"{_count(config.params)}, {_count(config.params - unused)} a token"


def _count(n: int) -> str:
    return f"{n / 1e9:.2f}B" if n >= 1e9 else f"{n / 1e6:.0f}M"

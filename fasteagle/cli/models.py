"""`fasteagle models`: what the registry knows, and what of it is here."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from fasteagle.loading.find_head import has_head
from fasteagle.loading.registry import DEFAULT_MODEL, REGISTRY, local_path
from fasteagle.quant.scheme import BF16, INT8, int4_for


def print_models() -> None:
    """One row a model: name, source, size, memory by precision, head, presence, licence."""
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "source", "params", "bf16", "int8", "int4", "head", "local", "licence"):
        table.add_column(heading, justify="right" if heading in _NUMERIC else "left", no_wrap=True)
    for name, entry in REGISTRY.items():
        config = entry.config
        sizes = [s.model_bytes(config) for s in (BF16, INT8, int4_for(config))]
        table.add_row(
            name + (" (default)" if name == DEFAULT_MODEL else ""),
            entry.source + (" (gated)" if entry.gated else ""),
            _count(config.params),
            *(_gib(size) for size in sizes),
            "yes" if has_head(name) else "no",
            "yes" if local_path(name) else "no",
            entry.licence,
        )
    console = Console(width=160, soft_wrap=True)
    console.print(table)
    console.print("Memory is for weights, in GiB; int8 and int4 keep the embedding in 16 bits.")


_NUMERIC = {"params", "bf16", "int8", "int4"}


def _count(n: int) -> str:
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.0f}M"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f}"

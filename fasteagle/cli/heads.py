"""Run `fasteagle inspect-head` and `fasteagle export-head`."""

from __future__ import annotations

from pathlib import Path

import click

from fasteagle.cli.command import refuse_options
from fasteagle.cli.options import ExportOptions
from fasteagle.errors import FasteagleError, note
from fasteagle.loading import registry
from fasteagle.loading.checkpoint import open_checkpoint
from fasteagle.loading.heads.find import HeadFiles, named_head
from fasteagle.loading.heads.inspect import inspect_head, measure_aux_layers
from fasteagle.loading.heads.read import open_head
from fasteagle.loading.heads.tables import listed
from fasteagle.loading.heads.write import HeadTarget, export_head
from fasteagle.loading.open import Runtime, open_model
from fasteagle.options import RuntimeOptions
from fasteagle.paths import require_place

# Options that say which weights a draft head is compared with
OF_WEIGHTS = ("device", "threads", "precision", "int4", "int8")


def run_inspect_head(
    path: str,
    model: str | None,
    runtime_options: RuntimeOptions,
    aux_layers: tuple[int, ...] | None,
    probe: bool,
) -> None:
    """Print the report on a draft head; exit with code 2 if it does not run."""
    if probe and model is None:
        raise FasteagleError("--probe measures on a model: add --model")
    params = click.get_current_context().command.params
    of_model = {param.name or "" for param in params} - {"path", "model", "aux_layers"}
    if model is None:
        refuse_options(of_model, "needs a model: add --model, or drop it")
    elif not probe:
        refuse_options(of_model - {*OF_WEIGHTS}, "needs a model that runs: add --probe, or drop it")
    files = named_head(path)
    opened = open_model(model, runtime_options) if model else None
    target = None
    if opened is not None:
        opened.check(runtime_options)
        weights = opened if runtime_options.quant is None else opened.prepared(runtime_options)
        target = HeadTarget(opened.name, weights.checkpoint)
    lines, problem = inspect_head(files, target, aux_layers)
    click.echo("\n".join(lines))
    if problem is not None:
        click.get_current_context().exit(2)
    if probe and opened is not None:
        _print_probes(files, opened.loaded(runtime_options), aux_layers)


def _print_probes(files: HeadFiles, runtime: Runtime, aux_layers: tuple[int, ...] | None) -> None:
    """Print the acceptance for each list of auxiliary layers, and the best list."""
    note("drafting chains of four on four built-in prompts ...")
    probes: dict[tuple[int, ...], float] = {}
    for layers, accepted in measure_aux_layers(
        files, runtime.engine, runtime.tokenizer, aux_layers
    ):
        probes[layers] = accepted
        what = f"with layers {listed(layers)}" if layers else "acceptance"
        click.echo(f"  {what}: {accepted:.2f} drafted tokens accepted a pass")
    as_read, *others = probes
    best = max(probes, key=probes.__getitem__)
    if best != as_read:
        click.echo(f"  better: --tap-layers {','.join(map(str, best))}")
    elif others:
        click.echo("  best as read")


def run_export_head(head: str, out: Path, options: ExportOptions) -> None:
    """Write the draft head for another engine and print remarks on it."""
    files = named_head(head)
    require_place(out)
    if options.to == "gguf" and out.suffix != ".gguf":
        raise FasteagleError(f"-o {out} must be the name of a .gguf file")
    target = None if options.model is None else _export_target(options.model)
    source = open_head(files.path)
    for line in export_head(
        source, options.to, out, target, options.tap_layers, options.tokenizer_from
    ):
        note(line)
    note(f"{source.algorithm} head ({source.dialect}) written to {out} for {options.to}")


def _export_target(model: str) -> HeadTarget:
    path = registry.resolve(model)
    entry = registry.REGISTRY.get(model)
    name = entry.repo if entry is not None and entry.repo else model
    return HeadTarget(name, open_checkpoint(path))

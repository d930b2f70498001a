"""What `fasteagle inspect-head` and `export-head` do."""

from __future__ import annotations

import click

from fasteagle.errors import FasteagleError, note
from fasteagle.loading.find_head import FoundHead, named_head
from fasteagle.loading.head_dialects import listed
from fasteagle.loading.inspect_head import inspect_head, measure_taps
from fasteagle.loading.open import load_runtime, open_model
from fasteagle.options import RuntimeOptions


def run_inspect_head(
    path: str,
    model: str | None,
    runtime_options: RuntimeOptions,
    tap_layers: tuple[int, ...] | None,
    probe: bool,
) -> None:
    """Print the report; leave with exit code 2 if the head does not run."""
    if probe and model is None:
        raise FasteagleError("--probe measures on a model: add --model")
    found = named_head(path)
    report = inspect_head(found, open_model(model) if model else None, tap_layers)
    for line in report.lines():
        click.echo(line)
    if report.problem is not None:
        click.get_current_context().exit(2)
    if probe and model is not None:
        _print_probes(found, model, runtime_options, tap_layers)


def _print_probes(
    found: FoundHead, model: str, options: RuntimeOptions, tap_layers: tuple[int, ...] | None
) -> None:
    """Acceptance by taps, and which are best."""
    runtime = load_runtime(model, options)
    note("drafting chains of four on four built-in prompts ...")
    results = []
    for result in measure_taps(found, runtime, tap_layers):
        results.append(result)
        taps = f"with taps {listed(result.tap_layers)}" if result.tap_layers else "acceptance"
        click.echo(f"  {taps}: {result.accepted:.2f} drafted tokens accepted a pass")
    best = max(results, key=lambda result: result.accepted)
    if best is not results[0] and best.tap_layers is not None:
        click.echo(f"  better: --tap-layers {','.join(map(str, best.tap_layers))}")
    elif len(results) > 1:
        click.echo("  best as read")

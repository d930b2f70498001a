"""Command `fasteagle`: parse, call the library, print. Imports torch only inside commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fasteagle import __version__
from fasteagle.bench.options import EvalOptions
from fasteagle.cli.command import Cli, Numbers, UserPath, uncollected
from fasteagle.cli.options import (
    ANSWERS,
    DRAFT,
    FOLDER,
    MODEL,
    OPTIONAL_MODEL,
    QUALITY_MODEL,
    RESULT,
    SERVED_ANSWERS,
    WEIGHTS,
    ChatOptions,
    ExportOptions,
    TalkOptions,
    gone,
    group,
    groups,
    model_options,
)
from fasteagle.errors import FasteagleError
from fasteagle.options import TAP_LAYERS_TEXT, DraftOptions, RuntimeOptions, ServeOptions
from fasteagle.training.options import CalibrateOptions, DataOptions, TrainOptions, TrainRun

# Commands import what they call inside their body: --help answers without importing torch.


@click.group(cls=Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fasteagle")
def main() -> None:
    """Fast, lossless text from one Llama-family model on one device."""


@main.command()
@groups(MODEL, DRAFT, ANSWERS)
@group(ChatOptions, "options")
def chat(**arguments: Any) -> None:
    """Talk to a model. Text goes to stdout, everything else to stderr."""
    with uncollected():
        from fasteagle.cli.chat import run_chat

    run_chat(**arguments)


@main.command()
@groups(MODEL, DRAFT, SERVED_ANSWERS)
@group(TalkOptions, "talk")
@group(ServeOptions, "options")
@click.option(
    "--api-key", envvar="FASTEAGLE_API_KEY", show_envvar=True, help="Key that clients must send."
)
def serve(**arguments: Any) -> None:
    """Serve a model in the form of OpenAI's API, with a page to chat."""
    with uncollected():
        from fasteagle.cli.serve import run_serve

    run_serve(**arguments)


@main.command()
@groups(MODEL, DRAFT)
def tune(model: str, runtime_options: RuntimeOptions, draft: DraftOptions) -> None:
    """Measure what trees cost on this device, and show which one is chosen when."""
    from fasteagle.cli.tune import run_tune

    run_tune(model, runtime_options, draft)


@main.command()
@click.option(
    "--memory", is_flag=True, help="Show the memory that each needs, and which GPUs it fits."
)
def models(memory: bool) -> None:
    """List the models known by name."""
    from fasteagle.cli.models import print_memory, print_models

    print_memory() if memory else print_models()


@main.command("eval")
@groups(QUALITY_MODEL)
@group(EvalOptions, "options")
@click.option("--md", is_flag=True, help="Print the table in Markdown.")
@click.option("--json", "json_path", type=RESULT, help="File for the results.")
def eval_(
    model: str,
    runtime_options: RuntimeOptions,
    options: EvalOptions,
    md: bool,
    json_path: Path | None,
) -> None:
    """Compute perplexity and KL divergence to the unquantized model, by precision."""
    from fasteagle.bench.quality import run_eval

    run_eval(model, runtime_options, options, md=md, json_path=json_path)


@main.command()
@click.argument("name", required=False)
@groups(WEIGHTS)
@click.option(
    "-o", "--out", type=FOLDER, required=True, help="Folder to write; chat takes it as --model."
)
@gone("--data", lambda value: "leave it out: no scheme reads text")
def quantize(name: str | None, model: str, runtime_options: RuntimeOptions, out: Path) -> None:
    """Write model NAME's weights in the scheme of --int4, --int8 or --precision."""
    from fasteagle.cli.quantize import run_quantize

    source = click.get_current_context().get_parameter_source("model")
    if name is not None and source is not ParameterSource.DEFAULT:
        raise FasteagleError(f"{name} and --model {model} contradict each other: give one")
    run_quantize(name or model, runtime_options, out)


@main.command("calibrate-head")
@model_options
@group(CalibrateOptions, "options")
def calibrate_head(model: str, runtime_options: RuntimeOptions, options: CalibrateOptions) -> None:
    """Fit a draft head to a quantized model; the new one is kept only if it is better."""
    from fasteagle.training.calibrate_head import calibrate_head as calibrate

    calibrate(model, runtime_options, options)


@main.command("inspect-head")
@click.argument("path")
@groups(OPTIONAL_MODEL)
@click.option("--tap-layers", "aux_layers", type=Numbers(), help=TAP_LAYERS_TEXT)
@click.option(
    "--probe", is_flag=True, help="Load --model and measure acceptance by auxiliary layers."
)
def inspect_head(**arguments: Any) -> None:
    """Report what the draft head PATH is and whether it fits a model.

    PATH is a folder, a .gguf file, a Hugging Face id, or a registry model whose head is known.
    """
    from fasteagle.cli.heads import run_inspect_head

    run_inspect_head(**arguments)


@main.command("export-head")
@click.argument("head")
@click.option(
    "-o", "--out", type=UserPath(), required=True, help="Folder to write; a .gguf file for gguf."
)
@group(ExportOptions, "options")
def export_head(head: str, out: Path, options: ExportOptions) -> None:
    """Write the draft head HEAD as another engine reads it.

    HEAD is a folder, a .gguf file, a Hugging Face id, or a registry model whose head is known.
    """
    from fasteagle.cli.heads import run_export_head

    run_export_head(head, out, options)


@main.command("train-head")
@model_options
@group(TrainRun, "run")
@group(TrainOptions, "options")
@gone("--inputs", lambda value: "an EAGLE-1 head reads a feature and the token after it")
def train_head(
    model: str, runtime_options: RuntimeOptions, run: TrainRun, options: TrainOptions
) -> None:
    """Train an EAGLE draft head on text that its target wrote."""
    from fasteagle.training.train_head import train_head as train

    train(model, runtime_options, run, options)


@main.command("generate-data")
@model_options
@group(DataOptions, "options")
@click.option(
    "--api-key",
    envvar="FASTEAGLE_API_KEY",
    show_envvar=True,
    help="Key of the server at --base-url, if it wants one.",
)
def generate_data(
    model: str, runtime_options: RuntimeOptions, options: DataOptions, api_key: str | None
) -> None:
    """Write training text for draft heads: answers of the model to prompts."""
    from fasteagle.training.generate_data import generate_data as generate

    generate(model, runtime_options, options, api_key)

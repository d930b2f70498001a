"""The `fasteagle` command: parse, call the library, print. Imports torch only inside commands."""

from __future__ import annotations

import dataclasses
import errno
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fasteagle import __version__
from fasteagle.errors import FasteagleError
from fasteagle.options import (
    DEFAULT_TREE,
    DRAFTERS,
    DTYPES,
    QUANTIZED_TREE,
    AnswerOptions,
    DraftOptions,
    RuntimeOptions,
    SamplingParams,
    TrainOptions,
    fresh_seed,
)

_SAMPLING = SamplingParams()
_ANSWER = AnswerOptions()
_DRAFT = DraftOptions()
DEFAULT_MODEL = "smollm2-135m"


class UserError(click.ClickException):
    """One line on stderr, exit code 2."""

    exit_code = 2


class _OneLineErrors(click.Command):
    """Turns what users can mend into one line; everything else keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FasteagleError as error:
            raise UserError(str(error)) from error
        except MemoryError as error:
            raise UserError(
                "out of memory: lower --max-seq-len or choose a smaller model"
            ) from error
        except OSError as error:
            if error.errno == errno.ENOSPC:
                where = f" at {error.filename}" if error.filename else ""
                raise UserError(
                    f"disk full{where}: free some space, or set XDG_CACHE_HOME to another disk"
                ) from error
            if error.errno == errno.EPIPE:  # the reader of a pipe has left
                sys.stderr.close()
                sys.exit(1)
            raise


class Script(_OneLineErrors):
    """A command of its own with fasteagle's manners about errors."""


class Cli(_OneLineErrors, click.Group):
    """The `fasteagle` group."""


@click.group(cls=Cli, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fasteagle")
def main() -> None:
    """Fast, lossless text from one Llama-family model on one device."""


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options every command that loads a model takes; arrive as one `RuntimeOptions`."""

    @click.option(
        "--model",
        default=DEFAULT_MODEL,
        show_default=True,
        help="Registry name, Hugging Face id, folder or .gguf file.",
    )
    @click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda[:N].")
    @click.option("--dtype", default="auto", show_default=True, help=f"auto, {', '.join(DTYPES)}.")
    @click.option(
        "--max-seq-len",
        type=int,
        help="Context in tokens; fixes the KV cache.  [default: the model's, "
        f"at most {RuntimeOptions.DEFAULT_MAX_SEQ_LEN}]",
    )
    @click.option("--threads", type=int, help="CPU threads.  [default: all cores]")
    @click.option("--int4", is_flag=True, help="The checkpoint's own 4 bits, or HQQ.")
    @click.option("--int8", is_flag=True, help="8 bits, one scale a row.")
    @click.option("--quant", help="A scheme by name: int4-g64, int4-g128-hqq, int4-g32-gptq ...")
    @click.option(
        "--lm-head",
        default=RuntimeOptions.lm_head,
        show_default=True,
        help="Of a quantized model: int8, int4 or keep.",
    )
    @click.option(
        "--quant-backend",
        default=RuntimeOptions.backend,
        show_default=True,
        help="fasteagle, or torchao's own formats and kernels.",
    )
    @functools.wraps(command)
    def wrapped(
        device: str,
        dtype: str,
        max_seq_len: int | None,
        threads: int | None,
        int4: bool,
        int8: bool,
        quant: str | None,
        lm_head: str,
        quant_backend: str,
        **kwargs: Any,
    ) -> Any:
        asked = [*(["int4"] if int4 else []), *(["int8"] if int8 else []), *filter(None, [quant])]
        if len(asked) > 1:
            raise FasteagleError(f"{' and '.join(asked)} contradict each other: give one")
        runtime = RuntimeOptions(
            device, dtype, max_seq_len, threads, asked[0] if asked else None, lm_head, quant_backend
        )
        return command(runtime_options=runtime, **kwargs)

    return wrapped


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of drawing tokens and ending answers; arrive as two dataclasses."""

    @click.option(
        "--temperature", default=_SAMPLING.temperature, show_default=True, help="0 is greedy."
    )
    @click.option("--top-k", default=_SAMPLING.top_k, show_default=True, help="0 is off.")
    @click.option("--top-p", default=_SAMPLING.top_p, show_default=True)
    @click.option("--min-p", default=_SAMPLING.min_p, show_default=True)
    @click.option("--repetition-penalty", default=_SAMPLING.repetition_penalty, show_default=True)
    @click.option("--seed", type=int, help="Same seed, same text.  [default: drawn and printed]")
    @click.option("--max-new-tokens", default=_ANSWER.max_new_tokens, show_default=True)
    @click.option("--stop", multiple=True, help="End the answer before this text (repeatable).")
    @functools.wraps(command)
    def wrapped(
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        seed: int | None,
        max_new_tokens: int,
        stop: tuple[str, ...],
        **kwargs: Any,
    ) -> Any:
        drawn = fresh_seed() if seed is None else seed
        params = SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty, drawn)
        answer = AnswerOptions(max_new_tokens, stop)
        announce = seed is None and not params.greedy
        return command(params=params, answer=answer, announce_seed=announce, **kwargs)

    return wrapped


def draft_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of guessing ahead; arrive as one `DraftOptions`."""

    @click.option(
        "--head", help="Draft head: folder or Hugging Face id.  [default: found by itself]"
    )
    @click.option(
        "--drafter", default=_DRAFT.drafter, show_default=True, help=f"{', '.join(DRAFTERS)}."
    )
    @click.option("--no-spec", is_flag=True, help="The same as --drafter none.")
    @click.option(
        "--tree",
        default="auto",
        show_default=True,
        help="auto: what pays here, chosen from measured costs and what was accepted lately; "
        "until it was measured "
        f"{', '.join(map(str, DEFAULT_TREE))}, or {', '.join(map(str, QUANTIZED_TREE))} for a "
        "quantized model on the CPU; or a JSON file of child-rank paths. Any of the three sizes "
        "below fixes the tree.",
    )
    @click.option("--tree-depth", type=int, help="Levels (SGLang: num-steps).")
    @click.option("--tree-topk", type=int, help="Nodes expanded a level (SGLang: eagle-topk).")
    @click.option(
        "--draft-noise",
        default=_DRAFT.noise,
        show_default=True,
        help="shared or none: at temperature > 0, rank guesses with the target's own noise.",
    )
    @click.option(
        "--verify",
        default=_DRAFT.verify,
        show_default=True,
        help="match, or multi-round: the paper's sampling, for eagle-static and eagle-chain.",
    )
    @click.option(
        "--tree-nodes",
        type=int,
        help="Nodes verified a pass (SGLang: num-draft-tokens less the root).",
    )
    @functools.wraps(command)
    def wrapped(
        head: str | None,
        drafter: str,
        no_spec: bool,
        tree: str,
        tree_depth: int | None,
        tree_topk: int | None,
        tree_nodes: int | None,
        draft_noise: str,
        verify: str,
        **kwargs: Any,
    ) -> Any:
        draft = DraftOptions(
            "none" if no_spec else drafter,
            head,
            tree_depth,
            tree_topk,
            tree_nodes,
            None if tree == "auto" else tree,
            draft_noise,
            verify,
        )
        return command(draft=draft, **kwargs)

    return wrapped


def comma_list(text: str) -> tuple[str, ...]:
    """The parts of `a, b,c`; empty ones are left out."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def hyper_parameters(command: Callable[..., Any]) -> Callable[..., Any]:
    """One option for every field of `TrainOptions`; arrive as a dict of those given."""
    names = []
    for field in reversed(dataclasses.fields(TrainOptions)):
        if isinstance(field.default, (int, float)):
            names.append(field.name)
            flag = f"--{field.name.replace('_', '-')}"
            command = click.option(flag, field.name, default=field.default, show_default=True)(
                command
            )

    @functools.wraps(command)
    def wrapped(**kwargs: Any) -> Any:
        options = {name: kwargs.pop(name) for name in names}
        return command(options=options, **kwargs)

    return wrapped


@main.command()
@model_options
@draft_options
@sampling_options
@click.option("-p", "--prompt", help="Answer this once and leave; '-' reads standard input.")
@click.option("--system", help="System prompt.  [default: the model's own]")
@click.option(
    "--compile/--no-compile",
    "compile_",
    default=None,
    help="Compile first, or never.  [default: in the background; not for -p]",
)
@click.option("--show-accepted", is_flag=True, help="Colour the text that was guessed right.")
@click.option("--quiet", is_flag=True, help="Only answers, no numbers.")
def chat(
    model: str,
    runtime_options: RuntimeOptions,
    draft: DraftOptions,
    params: SamplingParams,
    answer: AnswerOptions,
    announce_seed: bool,
    prompt: str | None,
    system: str | None,
    compile_: bool | None,
    show_accepted: bool,
    quiet: bool,
) -> None:
    """Talk to a model. Text goes to stdout, everything else to stderr."""
    from fasteagle.cli.chat import run_chat

    run_chat(
        model,
        runtime_options,
        draft,
        params,
        answer,
        announce_seed=announce_seed,
        show_accepted=show_accepted,
        prompt=prompt,
        system=system,
        compile_blocks=compile_,
        quiet=quiet,
    )


@main.command()
@model_options
@draft_options
def tune(model: str, runtime_options: RuntimeOptions, draft: DraftOptions) -> None:
    """Measure what trees cost on this device, and show which one pays when."""
    from fasteagle.cli.tune import run_tune

    run_tune(model, runtime_options, draft)


@main.command()
def models() -> None:
    """List the models known by name."""
    from fasteagle.cli.models import print_models

    print_models()


@main.command("eval")
@model_options
@click.option(
    "--text",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="Text file to predict.",
)
@click.option(
    "--precision",
    default="bf16,int8,int4",
    show_default=True,
    help="Comma list: bf16, fp32, int8, int4, schemes like int4-g64-hqq, int4-torchao.",
)
@click.option("--tokens", default=8192, show_default=True, help="Of the text, at most.")
@click.option("--window", default=512, show_default=True, help="Tokens predicted in one go.")
@click.option("--md", is_flag=True, help="Print the table in Markdown.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False))
def eval_(
    model: str,
    runtime_options: RuntimeOptions,
    text: Path,
    precision: str,
    tokens: int,
    window: int,
    md: bool,
    json_path: Path | None,
) -> None:
    """Perplexity, and KL divergence to the unquantized model, by precision."""
    from fasteagle.bench.quality import EvalOptions, run_eval

    options = EvalOptions(text, comma_list(precision), tokens, window)
    run_eval(model, runtime_options, options, md, json_path)


@main.command()
@click.argument("name", required=False)
@model_options
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder to write; chat takes it as --model.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSONL of token ids to calibrate GPTQ on.  [default: text the model writes]",
)
def quantize(
    name: str | None, model: str, runtime_options: RuntimeOptions, out: Path, data: Path | None
) -> None:
    """Write model NAME's weights in the scheme of --int4, --int8 or --quant."""
    from fasteagle.loading.quantize import quantize_to

    quantize_to(name or model, runtime_options, out, data)


@main.command("calibrate-head")
@model_options
@click.option("--head", help="Head to begin from.  [default: the one chat would use]")
@click.option(
    "--data",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSONL of token ids the quantized model wrote.  [default: it writes some now]",
)
@click.option("--tokens", default=50_000, show_default=True, help="Of text to write.")
@click.option("--minutes", default=30.0, show_default=True, help="For all of it.")
@click.option(
    "--steps",
    type=int,
    help="Of each of the two training runs.  [default: as many as fit into --minutes]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the head.  [default: the user cache, where chat finds it]",
)
@click.option("--resume", is_flag=True, help="Continue the run that was cut off.")
def calibrate_head(model: str, runtime_options: RuntimeOptions, **options: Any) -> None:
    """Fit a draft head to a quantized model; each stage is kept only if it helps."""
    from fasteagle.training.calibrate_head import CalibrateOptions
    from fasteagle.training.calibrate_head import calibrate_head as calibrate

    calibrate(model, runtime_options, CalibrateOptions(**options))


@main.command("train-head")
@model_options
@click.option(
    "--data",
    "data",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="JSONL of token ids the model wrote itself (repeatable).",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path, dir_okay=False),
    help='JSONL with {"turns": [...]} lines; the model answers them first.',
)
@click.option("--answer-tokens", default=256, show_default=True, help="Longest answer to those.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the head.",
)
@click.option("--resume", is_flag=True, help="Continue the run in --out.")
@click.option("--held-out", default=100, show_default=True, help="Conversations to measure on.")
@click.option("--max-len", default=640, show_default=True, help="Longer conversations are cut.")
@click.option("--every", default=200, show_default=True, help="Steps between evaluations.")
@click.option(
    "--init",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Begin from this head.",
)
@click.option(
    "--features",
    type=click.Choice(["cached", "live"]),
    default="cached",
    show_default=True,
    help="Keep the target's features on disk, or compute them for every batch.",
)
@click.option("--patience", type=int, help="Stop after so many evaluations without gain.")
@hyper_parameters
def train_head(
    model: str, runtime_options: RuntimeOptions, options: dict[str, Any], **run: Any
) -> None:
    """Train an EAGLE draft head on text its target wrote."""
    from fasteagle.training.train_head import TrainRun
    from fasteagle.training.train_head import train_head as train

    train(model, runtime_options, TrainRun(**run), TrainOptions(**options))

"""Write text by the default model and train draft heads on it, all on one card.

    python scripts/head_prompts.py --seeds seeds.jsonl --count 40000 --seed 101 --out prompts.jsonl
    python scripts/train_on_card.py --prompts prompts.jsonl --exclude mt_bench.jsonl \
        --measure-on answers.jsonl --write-seconds 120 --recipes recipes.json --out DIR

A thousand texts are written at a time, every other one to a question that the model makes up
itself. The target's features of all text stay in the card's memory. RECIPES holds, by name,
{"seconds": s, "options": {...}} of each draft head, perhaps with "init", the head to begin from;
options are those of `TrainOptions`. DIR/NAME is the head, measured on --measure-on: greedy answers
that no training reads. DIR/text.jsonl is the text.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch

from fasteagle.cli.command import Script, refuse_options
from fasteagle.cli.options import group
from fasteagle.config import ModelConfig
from fasteagle.config_fields import parse_json
from fasteagle.device import TORCH_DTYPES, pick_device, pick_dtype
from fasteagle.errors import FasteagleError, note
from fasteagle.loading.checkpoint import load_model
from fasteagle.loading.open import OpenedModel, open_model
from fasteagle.model import EagleHead, Transformer
from fasteagle.option_fields import check, option
from fasteagle.options import DEFAULT_MODEL
from fasteagle.paths import require_writable
from fasteagle.prompts import Conversation, expecting, read_conversations
from fasteagle.training.data import Features
from fasteagle.training.dialogues import Conversations, Conversing, hold
from fasteagle.training.many_texts import ManyTexts, features_of
from fasteagle.training.options import DataOptions, TrainOptions
from fasteagle.training.train import Trainer
from fasteagle.training.train_head import head_to_train, init_head, write_head

TEMPERATURES = ("0", "0", "0.8", "1")
WAITING = 256  # requests ready for slots that become free
PROBE = 24  # steps that tell how many fit into a recipe's seconds
EVALUATIONS = 3  # in a run
MOST_SECONDS = 86_400.0
OF_WRITING = "prompts", "exclude", "write_seconds", "slots", "answer_tokens"  # not with --text


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardOptions:
    """Text of a run, the heads to train on it, and their place."""

    model: str = DEFAULT_MODEL
    device: str = "auto"
    prompts: Path | None = option(None, "JSONL of further questions.", kind="file")
    exclude: tuple[Path, ...] = option((), kind="file")
    text: Path | None = option(None, "Train on the text of an earlier run.", kind="file")
    measure_on: Path = option(kind="file")
    recipes: Path = option(kind="file")
    write_seconds: float = option(120.0, above=0, below=math.inf)
    slots: int = option(1024, "Texts at once.", least=1)
    length: int = option(704, "Tokens of the longest text.", least=1)
    answer_tokens: int = option(256, least=1)
    feature_gib: float = option(40.0, "GPU GiB for features.", above=0, below=math.inf)
    out: Path = option(kind="folder")

    def __post_init__(self) -> None:
        check(self)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of the training of one draft head; `init` is the head to begin from."""

    name: str
    options: TrainOptions
    seconds: float
    init: Path | None = None


def read_recipes(path: Path, config: ModelConfig) -> list[Recipe]:
    """Read the recipes; raise `FasteagleError` for what is none, and for heads of another kind."""
    recipes = []
    known = {field.name for field in dataclasses.fields(TrainOptions)}
    with expecting('{"NAME": {"seconds": 60, "options": {"lr": 0.001}}}', str(path)):
        content = parse_json(path.read_text("utf-8"))
        if type(content) is not dict:
            raise ValueError("it is no JSON object")
        for name, raw in content.items():
            own, seconds = {**raw["options"]}, float(raw["seconds"])
            unknown = (raw.keys() - {"seconds", "options", "init"}) | (own.keys() - known)
            if unknown:
                raise ValueError(f"{name} has an unknown {sorted(unknown)[0]!r}")
            if not 0 < seconds < MOST_SECONDS:
                raise ValueError(f"{name} has {seconds:g} seconds")
            if Path(name).name != name:
                raise ValueError(f"{name!r} is no folder's name")
            init = Path(raw["init"]) if "init" in raw else None
            recipes.append(Recipe(name, TrainOptions(**own), seconds, init))
    for recipe in recipes:
        init_head(config, recipe.init, recipe.options)
    return recipes


def sources_of(options: CardOptions) -> list[Conversations]:
    """Return the conversations of a run: questions of the model itself, and those of a file."""
    common: dict[str, Any] = {
        "out": options.out / "text.jsonl",
        "temperature": TEMPERATURES,
        "top_p": 1.0,
        "max_new_tokens": options.answer_tokens,
        "exclude": options.exclude,
    }
    sources = [Conversations(DataOptions(self_written=True, count=1 << 40, **common))]
    if options.prompts is not None:
        sources.append(Conversations(DataOptions(prompts=options.prompts, **common)))
    return sources


def write_texts(
    model: Transformer, opened: OpenedModel, options: CardOptions
) -> list[Conversation]:
    """Return the answers that are complete in time, of all sources in turn."""
    sources, dropped = sources_of(options), Counter[str]()

    def started() -> Iterator[Conversing]:
        for number in itertools.count():
            source, place = sources[number % len(sources)], number // len(sources)
            if source.count is None or place < source.count:
                yield source.start(place)

    texts: list[Conversation] = []
    seen: set[tuple[int, ...]] = set()
    deadline = time.monotonic() + options.write_seconds
    writer = ManyTexts(model, opened.tokenizer, options.slots, options.length)
    for dialogue in hold(started(), writer, options.slots + WAITING):
        if dialogue.dropped:
            dropped[dialogue.dropped] += 1
        for reply, params in dialogue.answers:
            ids = reply.prompt + reply.ids
            if tuple(ids) not in seen:
                seen.add(tuple(ids))
                texts.append(Conversation(ids, len(reply.prompt), params.temperature == 0))
        if texts and time.monotonic() > deadline:
            break
    n_answers = sum(len(c.ids) - c.prompt_len for c in texts)
    note(f"{len(texts):,} texts, {n_answers:,} tokens of answers, dropped: {dict(dropped)}")
    return texts


def write_lines(path: Path, texts: list[Conversation]) -> None:
    """Write texts as `read_conversations` reads them; those that are drawn have T 1."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for text in texts:
            line = {"ids": text.ids, "prompt_len": text.prompt_len, "T": 0 if text.greedy else 1}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def features_in_memory(
    target: Transformer,
    measured: list[Conversation],
    texts: list[Conversation],
    layers: tuple[int, ...],
    gib: float,
) -> Features:
    """Return as many conversations as there is room for, with their features on the device."""
    row_bytes = 2 * (len(layers) + 1) * target.config.dim
    room, everything = gib * 2**30, []
    for text in [*measured, *texts]:
        room -= row_bytes * len(text.ids)
        if room < 0:
            break
        everything.append(text)
    if len(everything) <= len(measured):
        raise FasteagleError(f"--feature-gib {gib:g} has no room for any text: give more")
    begin = time.perf_counter()
    parts = features_of(target, everything, layers)
    seconds = time.perf_counter() - begin
    note(f"features of {sum(len(c.ids) for c in everything):,} tokens in {seconds:.1f} s")
    return Features(everything, len(layers), parts.__getitem__)


def train(
    recipe: Recipe,
    target: Transformer,
    opened: OpenedModel,
    store: Features,
    n_measured: int,
    out: Path,
) -> None:
    """Train the draft head of one recipe and write it to `out`."""
    options, texts = recipe.options, store.conversations[n_measured:]
    init = init_head(target.config, recipe.init, options)
    head, loss_ids = head_to_train(target, texts, init, options)
    held_out = list(range(n_measured))

    def trainer(head: EagleHead, steps: int) -> Trainer:
        chosen = dataclasses.replace(options, steps=steps)
        return Trainer(head, target, store, held_out, loss_ids, chosen, out)

    each = trainer(copy.deepcopy(head), PROBE).seconds_a_step()
    run = trainer(head, max(EVALUATIONS, int(recipe.seconds / each)))
    steps = run.options.steps
    note(f"{recipe.name}: {steps:,} steps of {1e3 * each:.1f} ms; before: {run.evaluate()}")
    run.run(-(-steps // EVALUATIONS), save_every=1 << 30)
    begun = {"seconds": recipe.seconds, "init": str(recipe.init) if recipe.init else None}
    write_head(run, opened, ["python", *sys.argv], recipe=begun)


@click.command(cls=Script, help=__doc__)
@group(CardOptions, "options")
def main(options: CardOptions) -> None:
    require_writable(options.out / "text.jsonl")
    if options.text is not None:
        refuse_options(OF_WRITING, "has no meaning with --text: drop one")
    opened = open_model(options.model)
    place, config = pick_device(options.device), opened.checkpoint.config
    chosen = read_recipes(options.recipes, config)
    measured = read_conversations(options.measure_on, config.vocab_size, options.length)
    # On Hopper torch takes cuDNN's attention. A step whose shape was new took two to three times as
    # long there as one whose shape had been seen before.
    torch.backends.cuda.enable_cudnn_sdp(False)
    target = load_model(
        opened.checkpoint,
        dtype=TORCH_DTYPES[pick_dtype("auto", place)],
        device=place,
        max_seq_len=options.length,
    )
    target.requires_grad_(False)
    if options.text is None:
        texts = write_texts(target, opened, options)
        write_lines(options.out / "text.jsonl", texts)
    else:
        texts = read_conversations(options.text, config.vocab_size, options.length)
    store: Features | None = None
    computed, failed = None, []
    for recipe in chosen:
        layers = recipe.options.aux_layers_of(config.n_layer)
        try:
            if store is None or computed != layers:
                store = None  # before the next one takes its memory
                store = features_in_memory(target, measured, texts, layers, options.feature_gib)
                computed = layers
            train(recipe, target, opened, store, len(measured), options.out / recipe.name)
        except FasteagleError as error:  # the others may end well
            note(f"{recipe.name}: {error}")
            failed.append(recipe.name)
    if failed:
        raise FasteagleError(f"not trained: {', '.join(failed)}")


if __name__ == "__main__":
    main()

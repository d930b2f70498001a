"""Tokens per second on real prompts: rows that answer the same questions in turn, in one run.

A row is one way to decode at one precision. Rows take turns prompt by prompt, so that a machine
that slows down slows them all. See `scripts/tokens_per_sec.py` for the command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import resource
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import torch

from fasteagle.checkpoint import Checkpoint, available_bytes, required_bytes
from fasteagle.drafters import Drafter, EagleDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine, Stats, choose_plain_rows
from fasteagle.heads import make_drafter
from fasteagle.hf_baseline import hf_generate, hf_model
from fasteagle.options import DraftOptions, RuntimeOptions, SamplingParams
from fasteagle.quant.scheme import is_scheme_name
from fasteagle.runtime import (
    TORCH_DTYPES,
    TORCHAO,
    build_engine,
    compile_now,
    note,
    pick_device,
    pick_dtype,
    precision_options,
    quantized_checkpoint,
    scheme_of,
)
from fasteagle.tokenizer import ChatTokenizer, Message

ROW_NAMES = ("hf", "hf-pld", "plain", "eagle", "eagle-static", "eagle-chain", "ngram")
DEFAULT_ROWS = ("hf", "plain", "eagle")
PRECISIONS = ("bf16", "fp16", "fp32", "int8", "int4", "a scheme like int4-g64-hqq")
WARM_UP_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """What to run."""

    model: str = "smollm2-135m"
    rows: tuple[str, ...] = DEFAULT_ROWS
    precisions: tuple[str, ...] = ("bf16",)
    data: Path | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    compile: bool = True
    draft: DraftOptions = dataclasses.field(default_factory=DraftOptions)
    tree_value: str = "cumulative"  # "confidence": EAGLE-2's ablation without cumulative scores
    rerank: bool = True  # False: its ablation that keeps nodes in the order they were found

    def __post_init__(self) -> None:
        for value, known, what in (
            *((row, ROW_NAMES, "row") for row in self.rows),
            *(
                (precision, PRECISIONS, "precision")
                for precision in self.precisions
                if not is_scheme_name(precision.removesuffix(TORCHAO))
            ),
            (self.tree_value, ("cumulative", "confidence"), "tree value"),
        ):
            if value not in known:
                raise FasteagleError(f"unknown {what} {value!r}: use {', '.join(known)}")
        SamplingParams(self.temperature, top_p=self.top_p, seed=self.seed)  # checks them
        if self.limit is not None and self.limit < 1:
            raise FasteagleError(f"limit {self.limit} is out of range: use 1 or more")
        if self.max_new_tokens < 2:
            raise FasteagleError(
                f"max-new-tokens {self.max_new_tokens} is out of range: a rate needs 2 or more"
            )


@dataclasses.dataclass(frozen=True)
class Question:
    turns: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Turn:
    """One answer, measured. Times in seconds."""

    tokens: list[int]
    ttft: float
    seconds: float  # first to last token
    passes: int  # target passes after prefill
    stats: Stats | None = None  # of our own engine
    first: int = 1  # tokens that came with the first one, at `ttft`


class Decoder(Protocol):
    """One way to answer: `turn` gets a whole prompt, `restart` begins a new question."""

    def turn(self, prompt: list[int], max_new_tokens: int) -> Turn: ...

    def restart(self) -> None: ...


class EngineDecoder:
    """Our own engine; keeps the KV cache over the turns of a question."""

    def __init__(self, engine: Engine, params: SamplingParams, eos_ids: frozenset[int]) -> None:
        self.engine, self.params, self.eos_ids = engine, params, eos_ids

    def restart(self) -> None:
        self.engine.cached.clear()
        self.engine.use(self.engine.drafter)

    def turn(self, prompt: list[int], max_new_tokens: int) -> Turn:
        cycles = self.engine.generate(prompt, self.params, max_new_tokens, self.eos_ids)
        tokens = [token for ids in cycles for token in ids]
        stats = self.engine.stats
        return Turn(tokens, stats.ttft, stats.decode_seconds, stats.passes, stats)


class HFDecoder:
    """transformers' `generate` on the same weights, with prompt lookup or without."""

    def __init__(
        self, model: Any, params: SamplingParams, eos_ids: frozenset[int], lookup: bool = False
    ) -> None:
        self.model, self.params, self.eos_ids = model, params, eos_ids
        self.lookup = lookup

    def restart(self) -> None:
        pass

    def turn(self, prompt: list[int], max_new_tokens: int) -> Turn:
        tokens, ttft, seconds, passes, first = hf_generate(
            self.model, prompt, self.params, max_new_tokens, self.eos_ids, self.lookup
        )
        return Turn(tokens, ttft, seconds, passes, first=first)


@dataclasses.dataclass
class Row:
    """One line of the table, while it is being measured."""

    name: str
    precision: str
    decoder: Decoder
    weight_bytes: int  # read by every pass
    turns: list[Turn] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0
    plain_rows: int | None = None

    @property
    def tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def seconds(self) -> float:
        return sum(turn.seconds for turn in self.turns)

    @property
    def tok_s(self) -> float:
        return self._later_tokens / self.seconds if self.seconds else 0.0

    @property
    def tau(self) -> float:
        passes = sum(turn.passes for turn in self.turns)
        return self._later_tokens / passes if passes else 1.0

    @property
    def _later_tokens(self) -> int:
        """Tokens after each answer's first ones: those that `seconds` and passes account for."""
        return self.tokens - sum(turn.first for turn in self.turns)

    @property
    def stats(self) -> list[Stats]:
        """Of the turns that drafted."""
        return [turn.stats for turn in self.turns if turn.stats and turn.stats.path_lengths]

    @property
    def path_lengths(self) -> list[int]:
        """Accepted tokens of every drafted pass."""
        return [n for stats in self.stats for n in stats.path_lengths]

    @property
    def turn_rates(self) -> list[float]:
        """tok/s of each answer of at least two tokens."""
        return [(len(t.tokens) - t.first) / t.seconds for t in self.turns if t.seconds > 0]


def read_questions(path: Path | None, limit: int | None) -> list[Question]:
    """Questions of a JSONL file with `turns`, or the ten shipped with the package."""
    try:
        if path is None:
            text = (resources.files("fasteagle") / "data/prompts.jsonl").read_text("utf-8")
        else:
            text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FasteagleError(f"cannot read {path}: {error}") from error
    questions = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
            if not turns or not all(isinstance(turn, str) and turn for turn in turns):
                raise ValueError("turns must be texts")
        except (ValueError, TypeError, KeyError) as error:
            raise FasteagleError(
                f'{path}, line {number}: expected {{"turns": ["text", ...]}} ({error!r})'
            ) from error
        questions.append(Question(tuple(turns)))
    if not questions:
        raise FasteagleError(f"{path}: no questions in it")
    return questions[:limit]


def run(
    options: BenchOptions, runtime: RuntimeOptions, checkpoint: Checkpoint,
    tokenizer: ChatTokenizer, questions: Sequence[Question],
) -> list[Row]:  # fmt: skip
    """Measure every row. Precisions run together where they fit in memory, else one by one."""
    device = pick_device(runtime.device)
    rows: list[Row] = []
    for precisions in _fitting_groups(options, runtime, checkpoint, device):
        group = []
        for precision in precisions:
            group += _build_rows(precision, options, runtime, checkpoint, tokenizer, device)
        _warm_up(group, questions[0], tokenizer)
        for number, question in enumerate(questions, 1):
            note(f"question {number} of {len(questions)} ({', '.join(precisions)})")
            for row in group:
                _answer(row, question, tokenizer, options.max_new_tokens, device)
        for row in group:
            row.decoder = _Spent()  # the next precision needs the memory
        rows += group
    return rows


class _Spent:
    """Stands where a decoder was whose model is no longer in memory."""

    def turn(self, prompt: list[int], max_new_tokens: int) -> Turn:
        raise AssertionError("this row has been measured")

    def restart(self) -> None:
        raise AssertionError("this row has been measured")


def _fitting_groups(
    options: BenchOptions, runtime: RuntimeOptions, checkpoint: Checkpoint, device: torch.device
) -> list[tuple[str, ...]]:
    max_seq_len = runtime.seq_len_for(checkpoint.config.max_seq_len, options.model)
    dtypes = [TORCH_DTYPES.get(p, torch.bfloat16) for p in options.precisions]  # at most
    needed = sum(
        sum(required_bytes(checkpoint.config, dtype, max_seq_len)) * 2  # theirs, ours
        for dtype in dtypes
    )
    free = available_bytes(device)
    together = free is None or needed * 1.2 < free
    return [options.precisions] if together else [(p,) for p in options.precisions]


def _build_rows(
    precision: str, options: BenchOptions, runtime: RuntimeOptions, checkpoint: Checkpoint,
    tokenizer: ChatTokenizer, device: torch.device,
) -> list[Row]:  # fmt: skip
    """The rows of one precision; they share one copy of the weights, and transformers has one."""
    params = SamplingParams(options.temperature, top_p=options.top_p, seed=options.seed)
    runtime = precision_options(runtime, precision)
    source = quantized_checkpoint(checkpoint, runtime, tokenizer)
    scheme = scheme_of(source, runtime)
    dtype_name = pick_dtype(runtime.dtype, device, scheme is not None)
    config, dtype = checkpoint.config, TORCH_DTYPES[dtype_name]
    read_per_pass = int(
        config.linear_params * (scheme.linear_bytes if scheme else dtype.itemsize)
        + config.vocab_size * config.dim * (scheme.head_bytes if scheme else dtype.itemsize)
    )
    names = [n for n in options.rows if not (scheme and n.startswith("hf"))]  # theirs are dense
    theirs = None
    if any(name.startswith("hf") for name in names):
        theirs = hf_model(checkpoint, dtype, device)
    base = None
    if any(not name.startswith("hf") for name in names):
        base = build_engine(source, dtype_name, device, runtime, options.model)
    rows = []
    for name in names:
        if name.startswith("hf"):
            decoder: Decoder = HFDecoder(theirs, params, tokenizer.eos_ids, name == "hf-pld")
        else:
            assert base is not None
            engine = Engine(base.model, base.max_seq_len)
            engine.use(_drafter(name, engine, source, options))
            decoder = EngineDecoder(engine, params, tokenizer.eos_ids)
        rows.append(Row(name, precision, decoder, read_per_pass))
    engines = [row.decoder.engine for row in rows if isinstance(row.decoder, EngineDecoder)]
    if options.compile:
        _compile(engines)
    for row in rows:
        if row.name == "plain" and isinstance(row.decoder, EngineDecoder):
            row.plain_rows = choose_plain_rows(row.decoder.engine)
            row.decoder.engine.plain_rows = row.plain_rows
    return rows


def _drafter(
    name: str, engine: Engine, checkpoint: Checkpoint, options: BenchOptions
) -> Drafter | None:
    if name == "plain":
        return None
    tree_file = options.draft.tree_file if name == "eagle-static" else None
    verify = options.draft.verify if name in ("eagle-static", "eagle-chain") else "match"
    draft = dataclasses.replace(options.draft, drafter=name, tree_file=tree_file, verify=verify)
    drafter = make_drafter(options.model, engine, checkpoint, draft, lambda line: None)
    if name == "eagle" and isinstance(drafter, EagleDrafter):
        drafter.value, drafter.rerank = options.tree_value, options.rerank
    return drafter


def _compile(engines: Sequence[Engine]) -> None:
    """Compile the blocks of the shared model once, and those of every draft head."""
    for engine in engines:
        if not compile_now(engine):
            return


def _warm_up(rows: Sequence[Row], question: Question, tokenizer: ChatTokenizer) -> None:
    prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": question.turns[0]}]))
    for row in rows:
        row.decoder.turn(prompt, WARM_UP_TOKENS)


def _answer(
    row: Row, question: Question, tokenizer: ChatTokenizer, max_new_tokens: int,
    device: torch.device,
) -> None:  # fmt: skip
    """All turns of a question, with the row's own answers as history."""
    row.decoder.restart()
    messages: list[Message] = []
    reset_peak, read_peak = _peak_meter(device)
    for text in question.turns:
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.encode(tokenizer.render(messages))
        reset_peak()
        turn = row.decoder.turn(prompt, max_new_tokens)
        row.peak_bytes = max(row.peak_bytes, read_peak())
        row.turns.append(turn)
        messages.append({"role": "assistant", "content": tokenizer.decode(turn.tokens)})


def _peak_meter(device: torch.device) -> tuple[Callable[[], None], Callable[[], int]]:
    """How to reset and read the peak memory: of the device, or of this process on the CPU."""
    if device.type == "cuda":
        return (
            lambda: torch.cuda.reset_peak_memory_stats(device),
            lambda: torch.cuda.max_memory_allocated(device),
        )

    def reset() -> None:
        with contextlib.suppress(OSError):  # then the peak is that of the whole process so far
            Path("/proc/self/clear_refs").write_text("5")

    def read() -> int:
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    return reset, read

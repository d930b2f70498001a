"""Benchmark of tokens per second: rows answer each question in turn, in one run.

A row is one way to decode at one precision. Rows take turns prompt by prompt, so that a machine
that slows down slows them all. See `scripts/tokens_per_sec.py` for the command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fasteagle.bench.hf import hf_model
from fasteagle.bench.measure import peak_meter
from fasteagle.bench.progress import QuestionBar
from fasteagle.bench.rivals import rival
from fasteagle.bench.rivals.ablation import ablated
from fasteagle.bench.rivals.gpt_fast import GptFastDecoder, Job, gpt_fast_scheme
from fasteagle.bench.roofline import Storage
from fasteagle.bench.row_spec import LOOKUP_TOKENS, RowSpec, chain_shape, parse_rows
from fasteagle.bench.rows import Decoder, EngineDecoder, HFDecoder, Row, Spent
from fasteagle.bench.simulate import check_simulation, dummy_drafter, wants_dummy_head
from fasteagle.compile.blocks import compile_now
from fasteagle.compile.costs import choose_plain_rows, tune_now
from fasteagle.compile.int8_cache import cache_bytes
from fasteagle.device import TORCH_DTYPES, available_bytes, give_back, pick_device, pick_dtype
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.policy import Policy
from fasteagle.errors import FasteagleError, note
from fasteagle.generate import Engine
from fasteagle.loading.checkpoint import required_bytes
from fasteagle.loading.lookup_files import read_documents
from fasteagle.loading.make_drafter import check_draft, plan_drafting
from fasteagle.loading.open import OpenedModel, PreparedModel
from fasteagle.loading.tensors import Checkpoint, DummyCheckpoint
from fasteagle.loading.tokenizer import ChatTokenizer, Message
from fasteagle.options import DEFAULT_MODEL, DraftOptions, RuntimeOptions, SamplingParams
from fasteagle.prompts import Question
from fasteagle.quant.scheme import is_scheme_name
from fasteagle.sampling import SamplingMode
from fasteagle.shapes import AnyShape

DEFAULT_ROWS = ("hf", "plain", "eagle")
PRECISIONS = ("auto", "bf16", "fp16", "fp32", "int8", "int4", "a scheme like int4-g64-hqq")
WARM_UP_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Rows, precisions, prompts and settings of a run."""

    model: str = DEFAULT_MODEL
    rows: tuple[str, ...] = DEFAULT_ROWS
    precisions: tuple[str, ...] = ("auto",)
    data: Path | None = None
    limit: int | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    compile: bool = True
    draft: DraftOptions = dataclasses.field(default_factory=DraftOptions)
    medusa: Path | None = None  # trained heads of the medusa row
    tree_value: str = "cumulative"  # "confidence": EAGLE-2's ablation without cumulative scores
    rerank: bool = True  # False: its ablation that keeps nodes in the order of drafting
    simulate_tau: float | None = None  # of eagle rows on random weights; see `simulate`

    @property
    def specs(self) -> tuple[RowSpec, ...]:
        return parse_rows(self.rows, self.draft)

    def __post_init__(self) -> None:
        for precision in self.precisions:
            if not is_scheme_name(precision.removesuffix("-torchao")):
                _check_known("precision", precision, PRECISIONS)
        _check_known("tree value", self.tree_value, ("cumulative", "confidence"))
        self.params  # noqa: B018 - checks them
        rows = parse_rows(self.rows, self.draft)  # checks them
        if self.medusa is None and RowSpec("medusa") in rows:
            raise FasteagleError(
                "row medusa needs trained heads: add --medusa FILE (scripts/train_medusa.py "
                "makes one)"
            )
        if self.limit is not None and self.limit < 1:
            raise FasteagleError(f"limit {self.limit} is out of range: use 1 or more")
        if self.max_new_tokens < 2:
            raise FasteagleError(
                f"max-new-tokens {self.max_new_tokens} is out of range: a rate needs 2 or more"
            )

    @property
    def params(self) -> SamplingParams:
        """Parameters by which answers are sampled."""
        return SamplingParams(self.temperature, top_p=self.top_p, seed=self.seed)


def _check_known(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise FasteagleError(f"unknown {what} {value!r}: use {', '.join(known)}")


def run(
    options: BenchOptions,
    runtime: RuntimeOptions,
    opened: OpenedModel,
    questions: Sequence[Question],
) -> list[Row]:
    """Measure every row; precisions run together where they fit in memory, else one by one."""
    device = pick_device(runtime.device)
    torch.set_num_threads(runtime.threads or torch.get_num_threads())
    checkpoint, tokenizer = opened.checkpoint, opened.tokenizer
    check_simulated(options, runtime, isinstance(checkpoint, DummyCheckpoint))
    _check_drafts(options, runtime, opened)
    rows: list[Row] = []
    for parts in _fitting_groups(options, runtime, checkpoint, device):
        group = []
        for precision, specs in parts:
            chosen = runtime.at(precision)
            group += build_rows(precision, options, opened.prepared(chosen), specs)
        warm_up(group, questions[0], tokenizer)
        for row in group:
            if reason := _uncaptured(row.decoder):
                note(f"warning: {row.name} {row.precision} runs without CUDA graphs: {reason}")
        with QuestionBar(group, len(questions)) as bar:
            for question in questions:
                for row in group:
                    answer(row, question, tokenizer, options.max_new_tokens, device)
                bar.answered()
        for row in group:
            row.tree = _tree(row.decoder)
            if policy := _policy(row.decoder):
                row.auto, row.auto_shares = policy.explain(), policy.shares()
            if isinstance(row.decoder, GptFastDecoder):
                row.decoder.close()
            row.decoder = Spent()
        rows += group
        give_back()  # for the next group
    return rows


def _check_drafts(options: BenchOptions, runtime: RuntimeOptions, opened: OpenedModel) -> None:
    """Raise `FasteagleError` before weights are loaded if a draft head or a tree cannot run."""
    drafts = [spec.draft_options(options.draft) for spec in options.specs if spec.has_head]
    for precision in options.precisions:
        for draft in drafts:
            tree_alone = dataclasses.replace(draft, head=None)
            check_draft(tree_alone, opened, runtime.at(precision))
    read_documents(options.draft.lookup, opened.tokenizer, note)
    for draft in {draft.head: draft for draft in drafts}.values():
        check_draft(draft, opened, runtime)


def check_simulated(options: BenchOptions, runtime: RuntimeOptions, is_dummy: bool) -> None:
    """Raise `FasteagleError` if `simulate_tau` cannot be reached; needs no weights."""
    runtimes = (runtime.at(precision) for precision in options.precisions)
    # torchao's formats leave the draft head dense, and the tree as it is for a dense target.
    quantized = tuple(r.quant is not None and r.backend == "fasteagle" for r in runtimes)
    on_cpu = pick_device(runtime.device).type == "cpu"
    check_simulation(
        options.simulate_tau, is_dummy, options.specs, quantized, options.draft, on_cpu
    )


def _tree(decoder: Decoder) -> AnyShape | None:
    """Return the tree that was drafted."""
    if isinstance(decoder, HFDecoder):
        return chain_shape(LOOKUP_TOKENS) if decoder.lookup else None
    drafter = decoder.engine.drafter if isinstance(decoder, EngineDecoder) else None
    return None if drafter is None else drafter.shape


def _policy(decoder: Decoder) -> Policy | None:
    """Return the policy of a row whose tree is chosen while decoding, else None."""
    drafter = decoder.engine.drafter if isinstance(decoder, EngineDecoder) else None
    return None if drafter is None else drafter.policy


def _uncaptured(decoder: Decoder) -> str | None:
    """Return why cycles are not replayed as CUDA graphs, or None."""
    return decoder.engine.runner.error if isinstance(decoder, EngineDecoder) else None


Group = list[tuple[str, tuple[RowSpec, ...]]]  # rows of precisions that are in memory together


def _fitting_groups(
    options: BenchOptions, runtime: RuntimeOptions, checkpoint: Checkpoint, device: torch.device
) -> list[Group]:
    """Return groups that fit in memory: all rows, else each precision, else transformers alone."""
    max_seq_len = runtime.seq_len_for(checkpoint.config.max_seq_len, options.model)
    free = available_bytes(device)
    theirs = tuple(spec for spec in options.specs if spec.has_own_weights)
    ours = tuple(spec for spec in options.specs if not spec.has_own_weights)
    copies = bool(theirs) + bool(ours)  # of the weights

    def needed(precision: str) -> int:
        """Return the bytes of one copy at most: as if the weights were dense."""
        dtype = TORCH_DTYPES.get(precision, torch.bfloat16)
        return sum(required_bytes(checkpoint.config, dtype, max_seq_len, runtime.kv))

    def fits(n_bytes: int) -> bool:
        return free is None or n_bytes * 1.2 < free

    if fits(copies * sum(map(needed, options.precisions))):
        return [[(precision, options.specs) for precision in options.precisions]]
    groups: list[Group] = []
    for precision in options.precisions:
        if fits(copies * needed(precision)):
            groups.append([(precision, options.specs)])
        else:
            groups += [[(precision, part)] for part in (ours, theirs) if part]
    return groups


def build_rows(
    precision: str,
    options: BenchOptions,
    prepared: PreparedModel,
    specs: Sequence[RowSpec] | None = None,
) -> list[Row]:
    """Return the rows `specs` of one precision, or all; transformers has weights of its own.

    Ours share one copy of the weights and one KV cache: a row begins each question anew.
    """
    config, scheme = prepared.checkpoint.config, prepared.scheme
    dense = pick_dtype("auto", prepared.device) if precision == "auto" else prepared.dtype_name
    keeps_theirs = scheme is None or precision == "auto"  # in dense weights
    if precision == "auto":
        precision = f"int{scheme.bits}" if scheme else prepared.dtype_name
    wanted = options.specs if specs is None else specs
    is_int4 = scheme is not None and scheme.bits == 4
    specs = [spec for spec in wanted if keeps_theirs or not spec.is_hf]
    specs = [spec for spec in specs if is_int4 or not spec.is_gpt_fast]
    theirs = base = None
    if any(spec.is_hf for spec in specs):
        theirs = hf_model(prepared.checkpoint, TORCH_DTYPES[dense], prepared.device)
    if not all(spec.has_own_weights for spec in specs):
        base = prepared.engine()
    rows = []
    for spec in specs:
        decoder = _decoder(spec, theirs, base, prepared, options)
        held, name = (None, dense) if spec.is_hf else (scheme, prepared.dtype_name)
        if spec.is_gpt_fast:
            held, name = gpt_fast_scheme(config), "bf16"
        size = TORCH_DTYPES[name].itemsize
        kv = "auto" if spec.has_own_weights else prepared.options.kv
        row = Row(
            spec.label,
            dense if spec.is_hf else precision,
            decoder,
            weight_bytes=Storage.of(held, size).pass_bytes(config),
            kv_bytes=cache_bytes(config, 1, size, kv),
            scheme=held,
            dtype=name,
            simulated_tau=options.simulate_tau if spec.has_head else None,
        )
        rows.append(row)
    _tune(rows, options, SamplingMode.of(options.params, config.vocab_size))
    return rows


def _tune(rows: Sequence[Row], options: BenchOptions, kind: SamplingMode) -> None:
    """Compile what our rows run, and choose the trees and the plain passes that pay."""
    ours = [(row, row.decoder.engine) for row in rows if isinstance(row.decoder, EngineDecoder)]
    if options.compile and all(compile_now(engine, options.params) for _, engine in ours):
        for row, engine in ours:
            if tuned := tune_now(engine, note, kind, compiled=True):
                note(f"{row.precision}: tuned in {tuned[1]:.1f} s (0: kept from before)")
    for row, engine in ours:
        if row.name == "plain":
            row.plain_rows = engine.plain_rows = choose_plain_rows(engine)


def _decoder(
    spec: RowSpec, theirs: Any, base: Engine | None, prepared: PreparedModel, options: BenchOptions
) -> Decoder:
    """Return the decoder of row `spec`: transformers' `theirs`, or our engine over `base`."""
    params = options.params
    eos_ids = prepared.tokenizer.eos_ids
    if spec.is_hf:
        return HFDecoder(theirs, params, eos_ids, spec.looks_up)
    if spec.is_gpt_fast:
        checkpoint = prepared.checkpoint
        dummy = checkpoint.config if isinstance(checkpoint, DummyCheckpoint) else None
        return GptFastDecoder(Job(prepared.name, dummy, prepared.options, params, options.compile))
    assert base is not None
    engine = base.sibling(base.cache)
    engine.use(_drafter(spec, engine, prepared, options))
    return EngineDecoder(engine, params, eos_ids)


def _drafter(
    spec: RowSpec, engine: Engine, prepared: PreparedModel, options: BenchOptions
) -> Drafter | None:
    if spec.is_plain:
        return None
    if spec.is_rival:
        return rival(spec.kind, engine, options.medusa)
    checkpoint, draft = prepared.checkpoint, spec.draft_options(options.draft)
    drafter: Drafter | None
    if wants_dummy_head(spec, checkpoint, draft):
        drafter = dummy_drafter(prepared.name, engine, checkpoint, draft)
    else:
        target = OpenedModel(prepared.name, checkpoint, prepared.tokenizer)
        notify = note if spec.kind == "model" else lambda line: None
        planned = plan_drafting(draft, target, prepared.options, notify)
        drafter = planned.drafter(prepared.name, engine, checkpoint, notify)
    if draft.drafter != "eagle" or not isinstance(drafter, EagleDrafter):
        return drafter
    return ablated(drafter, options.tree_value == "confidence", options.rerank)


def warm_up(rows: Sequence[Row], question: Question, tokenizer: ChatTokenizer) -> None:
    prompt = tokenizer.encode(tokenizer.render([{"role": "user", "content": question.turns[0]}]))
    for row in rows:
        row.decoder.turn(prompt, WARM_UP_TOKENS)


def answer(
    row: Row,
    question: Question,
    tokenizer: ChatTokenizer,
    max_new_tokens: int,
    device: torch.device,
) -> None:
    """Answer all turns of a question, with the row's own answers as history."""
    row.decoder.restart()
    messages: list[Message] = []
    reset_peak, read_peak = peak_meter(device)
    for text in question.turns:
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.encode(tokenizer.render(messages))
        reset_peak()
        turn = row.decoder.turn(prompt, max_new_tokens)
        ours = row.decoder.peak_bytes if isinstance(row.decoder, GptFastDecoder) else read_peak()
        row.peak_bytes = max(row.peak_bytes, ours)
        row.turns.append(turn)
        messages.append({"role": "assistant", "content": tokenizer.decode(turn.tokens)})

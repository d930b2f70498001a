"""Benchmark of tokens per second: rows answer each question in turn, in one run.

A row is one way to decode at one precision. Rows take turns prompt by prompt, so that a machine
that slows down slows them all. Our own rows are engines over one copy of the weights, loaded and
given their drafters as chat and server do it. See `scripts/tokens_per_sec.py` for the command.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from fasteagle.bench.hf import HFDecoder, hf_model
from fasteagle.bench.measure import add_barrier, peak_bytes, reset_peak
from fasteagle.bench.options import BenchOptions
from fasteagle.bench.rivals.ablation import AblatedDrafter
from fasteagle.bench.rivals.gpt_fast import GptFastDecoder, Job, gpt_fast_scheme
from fasteagle.bench.rivals.lookahead import LookaheadDrafter
from fasteagle.bench.rivals.medusa import MedusaDrafter, load_medusa
from fasteagle.bench.roofline import Storage
from fasteagle.bench.row_spec import RowSpec
from fasteagle.bench.rows import Decoder, EngineDecoder, Row
from fasteagle.bench.simulate import dummy_drafter
from fasteagle.compile.blocks import compile_now
from fasteagle.compile.costs import tune_now
from fasteagle.compile.int8_cache import cache_bytes
from fasteagle.device import TORCH_DTYPES, available_bytes, give_back, pick_device, pick_dtype
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.errors import note, with_progress
from fasteagle.generate import Engine
from fasteagle.loading.checkpoint import required_bytes
from fasteagle.loading.make_drafter import Drafting, check_draft, plan_drafting
from fasteagle.loading.open import OpenedModel, PreparedModel
from fasteagle.loading.tensors import Checkpoint, DummyCheckpoint
from fasteagle.loading.tokenizer import ChatTokenizer, Message
from fasteagle.options import RuntimeOptions
from fasteagle.prompts import Question
from fasteagle.sampling import SamplingMode

WARM_UP_TOKENS = 16


def run(
    options: BenchOptions,
    runtime: RuntimeOptions,
    opened: OpenedModel,
    questions: Sequence[Question],
) -> list[Row]:
    """Measure every row; precisions run together where they fit in memory, else one by one."""
    device = pick_device(runtime.device)
    torch.set_num_threads(runtime.threads or torch.get_num_threads())
    once = functools.cache(note)
    for precision in options.precisions:  # what cannot run is refused before weights are loaded
        for spec in options.specs:
            plan_row(spec, options, opened, runtime.at(precision), once)
    rows: list[Row] = []
    for parts in _fitting_groups(options, runtime, opened.checkpoint, device):
        group = []
        for precision, specs in parts:
            group += build_rows(precision, options, opened, runtime, specs)
        warm_up(group, questions, opened.tokenizer)
        for question in with_speeds(questions, group):
            for row in group:
                answer(row, question, opened.tokenizer, options.max_new_tokens, device)
        for row in group:
            row.decoder.close()
        rows += group
        give_back()  # for the next group
    return rows


def plan_row(
    spec: RowSpec,
    options: BenchOptions,
    opened: OpenedModel,
    runtime: RuntimeOptions,
    notify: Callable[[str], None],
) -> Drafting | None:
    """Read the parts of a row's drafter; None where it has none, or a draft head at random.

    Raises `FasteagleError` where they cannot run on the target.
    """
    draft = spec.draft_options(options.draft)
    if not spec.drafts:
        return None
    if spec.has_head and isinstance(opened.checkpoint, DummyCheckpoint) and draft.head is None:
        check_draft(draft, opened, runtime)
        return None
    return plan_drafting(draft, opened, runtime, notify)


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

    def fit(*precisions: str) -> bool:
        """Return whether all copies fit, each of them as if the weights were dense."""
        dtypes = [TORCH_DTYPES.get(precision, torch.bfloat16) for precision in precisions]
        each = [required_bytes(checkpoint.config, d, max_seq_len, runtime.kv) for d in dtypes]
        return free is None or 1.2 * copies * sum(map(sum, each)) < free

    if fit(*options.precisions):
        return [[(precision, options.specs) for precision in options.precisions]]
    groups: list[Group] = []
    for precision in options.precisions:
        parts = [options.specs] if fit(precision) else [part for part in (ours, theirs) if part]
        groups += [[(precision, part)] for part in parts]
    return groups


def build_rows(
    precision: str,
    options: BenchOptions,
    opened: OpenedModel,
    runtime: RuntimeOptions,
    specs: Sequence[RowSpec] | None = None,
) -> list[Row]:
    """Return the rows `specs` of one precision, or all; transformers has weights of its own.

    Ours share one copy of the weights and one KV cache: a row begins each question anew.
    """
    runtime = runtime.at(precision)
    prepared = opened.prepared(runtime)
    config, scheme = prepared.checkpoint.config, prepared.scheme
    dense = pick_dtype("auto", prepared.device) if precision == "auto" else prepared.dtype_name
    runs_dense = scheme is None or precision == "auto"
    if precision == "auto":
        precision = f"int{scheme.bits}" if scheme else prepared.dtype_name
    is_int4 = scheme is not None and scheme.bits == 4
    chosen = [
        spec
        for spec in (options.specs if specs is None else specs)
        if (runs_dense or not spec.is_hf) and (is_int4 or spec.kind != "gpt-fast")
    ]
    theirs = base = None
    if any(spec.is_hf for spec in chosen):
        theirs = hf_model(prepared.checkpoint, TORCH_DTYPES[dense], prepared.device)
    if not all(spec.has_own_weights for spec in chosen):
        base = prepared.engine()
    rows = []
    for spec in chosen:
        row_scheme, dtype = scheme, prepared.dtype_name
        if spec.is_hf:
            row_scheme, dtype = None, dense
            decoder: Decoder = HFDecoder(
                theirs, options.params, opened.tokenizer.eos_ids, spec.kind == "hf-pld"
            )
        elif spec.kind == "gpt-fast":
            row_scheme, dtype = gpt_fast_scheme(config), "bf16"
            dummy = config if isinstance(opened.checkpoint, DummyCheckpoint) else None
            decoder = GptFastDecoder(
                Job(prepared.name, dummy, runtime, options.params, options.compile)
            )
        else:
            assert base is not None, "it has been loaded for these rows"
            engine = base.sibling(base.cache)
            engine.use(_drafter(spec, engine, options, opened, prepared))
            decoder = EngineDecoder(engine, options.params, opened.tokenizer.eos_ids)
        size = TORCH_DTYPES[dtype].itemsize
        kv = "auto" if spec.has_own_weights else runtime.kv
        rows.append(
            Row(
                str(spec),
                dense if spec.is_hf else precision,
                decoder,
                weight_bytes=Storage(row_scheme, size).pass_bytes(config),
                kv_bytes=cache_bytes(config, 1, size, kv),
                scheme=row_scheme,
                dtype=dtype,
                simulated_tau=options.simulate_tau if spec.has_head else None,
            )
        )
    _tune(rows, options, SamplingMode.of(options.params, config.vocab_size))
    return rows


def _drafter(
    spec: RowSpec,
    engine: Engine,
    options: BenchOptions,
    opened: OpenedModel,
    prepared: PreparedModel,
) -> Drafter | None:
    """Make the drafter of a row of ours."""
    config = engine.model.config
    if spec.kind == "lookahead":
        return LookaheadDrafter(config.vocab_size, engine.device)
    if spec.kind == "medusa":
        assert options.medusa is not None, "checked with the options"
        return MedusaDrafter(*load_medusa(options.medusa, config.dim), engine.model)
    checkpoint = prepared.checkpoint
    planned = plan_row(spec, options, opened, prepared.options, lambda line: None)
    if planned is not None:
        drafter = planned.drafter(prepared.name, engine, checkpoint, lambda line: None)
    elif spec.has_head:
        draft = spec.draft_options(options.draft)
        drafter = dummy_drafter(prepared.name, engine, checkpoint, draft)
    else:
        return None
    by_confidence = options.tree_value == "confidence"
    is_ablated = spec.kind == "eagle" and (by_confidence or not options.rerank)
    if is_ablated and isinstance(drafter, EagleDrafter):
        return AblatedDrafter(drafter, by_confidence, options.rerank)
    return drafter


def _tune(rows: Sequence[Row], options: BenchOptions, kind: SamplingMode) -> None:
    """Compile what our rows run, and choose the trees that pay."""
    ours = [(row.precision, engine) for row in rows if (engine := row.decoder.engine)]
    if options.compile and all(compile_now(engine, options.params) for _, engine in ours):
        for precision, engine in ours:
            if tuned := tune_now(engine, note, kind, compiled=True):
                note(f"{precision}: tuned in {tuned[1]:.1f} s (0: by an earlier run)")


def warm_up(rows: Sequence[Row], questions: Sequence[Question], tokenizer: ChatTokenizer) -> None:
    """Begin to answer the first question, and tell which rows replay no CUDA graphs.

    Raises `FasteagleError` if a question is too long.
    """
    firsts: list[list[Message]] = [[{"role": "user", "content": q[0]}] for q in questions]
    prompts = [tokenizer.encode(tokenizer.render(messages)) for messages in firsts]
    for row in rows:
        engine = row.decoder.engine
        if engine is not None:
            for prompt in prompts:
                engine.check_prompt(prompt)
        row.decoder.turn(prompts[0], WARM_UP_TOKENS)
        if engine is not None and (reason := engine.runner.error):
            note(f"warning: {row.name} {row.precision} runs without CUDA graphs: {reason}")


def with_speeds(questions: Sequence[Question], rows: Sequence[Row]) -> Iterator[Question]:
    """Yield the questions; tell now and then how many all rows have answered, at which speed."""

    def speeds() -> str:
        rates = ", ".join(f"{row.name} {row.precision} {row.tok_s:.1f}" for row in rows)
        return f": {rates} tok/s"

    return with_progress(questions, "answered", "questions", note, speeds)


def answer(
    row: Row,
    question: Question,
    tokenizer: ChatTokenizer,
    max_new_tokens: int,
    device: torch.device,
) -> None:
    """Answer all turns of a question, with the row's own answers as history."""
    decoder = row.decoder
    decoder.restart()
    messages: list[Message] = []
    row.questions.append([])
    if decoder.engine is not None:
        add_barrier(row.barriers, decoder.engine)
    for text in question:
        messages.append({"role": "user", "content": text})
        prompt = tokenizer.encode(tokenizer.render(messages))
        reset_peak(device)
        turn = decoder.turn(prompt, max_new_tokens)
        peak = peak_bytes(device) if decoder.peak_bytes is None else decoder.peak_bytes
        row.peak_bytes = max(row.peak_bytes, peak)
        row.questions[-1].append(turn)
        messages.append({"role": "assistant", "content": tokenizer.decode(turn.tokens)})

"""Quality lost by quantization: perplexity, and the change of the next-token distribution.

The unquantized model runs first; its features and LM head are kept, then the others load in turn.
Shapes: W windows of the text, L tokens in a window, D model dim, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fasteagle.bench.options import EvalOptions
from fasteagle.config_fields import text_of
from fasteagle.device import available_bytes, pick_device, pick_dtype
from fasteagle.errors import FasteagleError, note, with_progress
from fasteagle.generate import Engine
from fasteagle.loading.checkpoint import required_bytes
from fasteagle.loading.open import OpenedModel, PreparedModel, open_model
from fasteagle.loading.tokenizer import ChatTokenizer
from fasteagle.options import RuntimeOptions
from fasteagle.paths import write_json
from fasteagle.tables import print_table

ROWS_AT_ONCE = 128  # of logits
HEADINGS = "precision", "scheme", "perplexity", "KL nats/token", "same top token", "weights GB"


@dataclasses.dataclass(frozen=True)
class Quality:
    """Quality of one precision, compared with the unquantized model in `reference`."""

    precision: str
    scheme: str
    perplexity: float
    kl: float  # mean KL(unquantized || this), nats a token
    agreement: float  # share of positions with the same likeliest token
    weight_gb: float


def evaluate(model: str, options: EvalOptions, runtime: RuntimeOptions) -> list[Quality]:
    """Measure every precision; the first result is that of the unquantized model itself.

    That one runs in fp32 if it fits in memory, else in 16 bits.
    """
    device = pick_device(runtime.device)
    opened = open_model(model, runtime)
    windows = read_windows(options, opened.tokenizer)
    runtime = _with_room(runtime, options.window, opened)
    for name in options.precisions:  # a part in the name; that of `runtime` is of quantized ones
        opened.check(RuntimeOptions(max_seq_len=runtime.max_seq_len).at(name))
    need = sum(required_bytes(opened.checkpoint.config, torch.float32, options.window))
    free = available_bytes(device)
    dense = "fp32" if free is None or need * 1.1 < free else pick_dtype("auto", device)
    note(f"the unquantized model in {dense} ...")
    whole = opened.prepared(dataclasses.replace(runtime.at(dense), kv="auto"))
    chosen = [(name, opened.prepared(runtime.at(name))) for name in options.precisions]
    reference = Predictions(whole.engine(), windows)
    qualities = [_measure(dense, whole, reference, reference)]
    for precision, prepared in chosen:
        predictions = Predictions(prepared.engine(), windows)
        qualities.append(_measure(precision, prepared, predictions, reference))
        note(f"{precision}: perplexity {qualities[-1].perplexity:.3f}, KL {qualities[-1].kl:.5f}")
    return qualities


def _with_room(runtime: RuntimeOptions, window: int, opened: OpenedModel) -> RuntimeOptions:
    """Return options whose context holds a window; raise `FasteagleError` if none can."""
    limit = opened.checkpoint.config.max_seq_len
    if runtime.max_seq_len is None:
        longest = min(limit, max(window, runtime.DEFAULT_MAX_SEQ_LEN))
        runtime = dataclasses.replace(runtime, max_seq_len=longest)
    context = runtime.seq_len_for(limit, opened.name)
    if window > context:
        raise FasteagleError(
            f"window {window:,} is more than the context of {opened.name}: use at most {context:,}"
        )
    return runtime


def read_windows(options: EvalOptions, tokenizer: ChatTokenizer) -> list[list[int]]:
    """Return the text in windows of equal length; raise `FasteagleError` if it is too short."""
    ids = tokenizer.encode(text_of(options.text))[: options.tokens]
    n = len(ids) // options.window
    if n == 0:
        raise FasteagleError(
            f"{options.text} has {len(ids):,} tokens, fewer than one window of {options.window}: "
            "give a longer text, or a smaller --window"
        )
    return [ids[i * options.window : (i + 1) * options.window] for i in range(n)]


class Predictions:
    """Next-token distributions of a model on a text: its features, and its LM head."""

    @torch.no_grad()
    def __init__(self, engine: Engine, windows: Sequence[list[int]]) -> None:
        self.windows = windows
        steps = with_progress(windows, "predicted", "windows", note)
        self.features = [engine.features(ids) for ids in steps]
        self.lm_head: nn.Module = engine.model.lm_head

    def log_probs(self, window: int, rows: slice) -> Tensor:
        """Return log-probabilities [rows, V] in fp32."""
        return self.lm_head(self.features[window][rows]).float().log_softmax(-1)


@torch.no_grad()
def _measure(
    precision: str, prepared: PreparedModel, predictions: Predictions, reference: Predictions
) -> Quality:
    """Compare a model's predictions with the reference's, a few rows at a time."""
    loss = kl = same = 0.0
    windows = predictions.windows
    steps = with_progress(windows, f"{precision}: compared", "windows", note)
    for i, ids in enumerate(steps):
        last = len(ids) - 1  # which predicts nothing that is known
        for begin in range(0, last, ROWS_AT_ONCE):
            rows = slice(begin, min(begin + ROWS_AT_ONCE, last))
            ours, theirs = predictions.log_probs(i, rows), reference.log_probs(i, rows)
            next_ids = torch.tensor(ids[rows.start + 1 : rows.stop + 1], device=ours.device)
            loss += float(F.nll_loss(ours, next_ids, reduction="sum"))
            kl += float(F.kl_div(ours, theirs, reduction="sum", log_target=True))
            same += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
    n = sum(len(ids) - 1 for ids in windows)
    scheme, config = prepared.scheme, prepared.checkpoint.config
    dense = required_bytes(config, prepared.dtype, 0)[0]
    size = (scheme.model_bytes(config) if scheme else dense) / 1e9
    label = scheme.name if scheme else "unquantized"
    return Quality(precision, label, math.exp(loss / n), kl / n, same / n, size)


def run_eval(
    model: str, runtime: RuntimeOptions, options: EvalOptions, *, md: bool, json_path: Path | None
) -> None:
    """Measure quality and print it, as `fasteagle eval` does."""
    qualities = evaluate(model, options, runtime)
    cells = [
        (
            *(q.precision, q.scheme, f"{q.perplexity:.3f}", f"{q.kl:.5f}"),
            *(f"{100 * q.agreement:.2f} %", f"{q.weight_gb:.3f}"),
        )
        for q in qualities
    ]
    print_table(HEADINGS, cells, md=md)
    if json_path:
        record = {"model": model, "text": options.text.name, "rows": [vars(q) for q in qualities]}
        write_json(json_path, record)

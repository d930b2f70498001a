"""Comparison of fasteagle and llama.cpp on one GGUF file: questions in turn, in one process.

    CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python
    python scripts/versus_llamacpp.py --data questions.jsonl --limit 16
    python scripts/versus_llamacpp.py --model model.gguf --threads 4

All rows decode greedily from the same prompts, and every answer has `--max-new-tokens` tokens, or
ends at the model's end of text. tok/s counts the tokens after each answer's first. llama.cpp is
called through its C functions: one `llama_decode` a token, and its own greedy sampler.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from pathlib import Path
from typing import Any

import click
import torch

from fasteagle.bench.options import BenchOptions
from fasteagle.bench.rows import Decoder, Row, Turn
from fasteagle.bench.run import answer, build_rows, warm_up, with_speeds
from fasteagle.cli.command import Names, Script
from fasteagle.cli.options import FILE, RESULT
from fasteagle.decoding.context import common_prefix
from fasteagle.device import device_name
from fasteagle.errors import FasteagleError, counted, note
from fasteagle.loading.open import open_model
from fasteagle.options import DEFAULT_MODEL, RuntimeOptions
from fasteagle.paths import write_json
from fasteagle.prompts import read_questions
from fasteagle.tables import print_table

CONTEXT = 4096
BATCH = 512  # tokens of a prompt in one call


class LlamaCpp(Decoder):
    """Decoder that runs llama.cpp; keeps the keys and values of the turns before, as ours does."""

    def __init__(self, path: Path, threads: int, eos_ids: frozenset[int]) -> None:
        try:
            import llama_cpp
        except ImportError:
            raise FasteagleError(
                "llama-cpp-python is missing: see this script's first lines for how to build it"
            ) from None
        self._c: Any = llama_cpp
        self._eos_ids = eos_ids
        quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        self._quiet = quiet  # called as long as the library lives
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), model)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch = CONTEXT, BATCH
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._model or not self._context:
            raise FasteagleError(f"llama.cpp cannot load {path}")
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._cached: list[int] = []

    def restart(self) -> None:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)
        self._cached = []

    def turn(self, prompt: list[int], max_new_tokens: int) -> Turn:
        begin = time.perf_counter()
        same = min(common_prefix(self._cached, prompt), len(prompt) - 1)
        memory = self._c.llama_get_memory(self._context)
        self._c.llama_memory_seq_rm(memory, 0, same, -1)
        for at in range(same, len(prompt), BATCH):
            self._decode(prompt[at : at + BATCH], at)
        tokens, times = [self._sample()], [time.perf_counter()]
        while len(tokens) < max_new_tokens and tokens[-1] not in self._eos_ids:
            self._decode(tokens[-1:], len(prompt) + len(tokens) - 1)
            tokens.append(self._sample())
            times.append(time.perf_counter())
        self._cached = [*prompt, *tokens[:-1]]
        return Turn(
            tokens,
            times[0] - begin,
            times[-1] - times[0],
            len(tokens) - 1,
            prompt_tokens=len(prompt),
            chunks=tuple((1, b - a) for a, b in itertools.pairwise(times)),
        )

    def _decode(self, tokens: list[int], first: int) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = token, first + i, 0
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.logits[len(tokens) - 1] = 1
        if self._c.llama_decode(self._context, batch):
            raise FasteagleError("llama_decode failed")

    def _sample(self) -> int:
        return int(self._c.llama_sampler_sample(self._sampler, self._context, -1))


@click.command(cls=Script, help=__doc__)
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="GGUF model.")
@click.option("--data", type=FILE, help="JSONL of questions.  [default: ours]")
@click.option("--limit", type=int, help="Only the first N questions.")
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--threads", type=int, help="CPU threads of both.  [default: all]")
@click.option(
    "--rows", default="plain,eagle,fused,ngram", show_default=True, type=Names(), help="Our rows."
)
@click.option("--json", "json_path", type=RESULT)
def main(
    model: str,
    data: Path | None,
    limit: int | None,
    max_new_tokens: int,
    threads: int | None,
    rows: tuple[str, ...],
    json_path: Path | None,
) -> None:
    runtime = RuntimeOptions(threads=threads)
    options = BenchOptions(
        model=model, rows=rows, data=data, limit=limit, max_new_tokens=max_new_tokens
    )
    questions = read_questions(data)[:limit]
    opened = open_model(model, runtime)
    path = opened.path
    if path is None or not path.is_file():
        raise FasteagleError(f"{model} is no GGUF file, and llama.cpp reads only these")
    theirs = LlamaCpp(path, torch.get_num_threads(), opened.tokenizer.eos_ids)
    measured = [Row("llama.cpp", "file", theirs, path.stat().st_size)]
    measured += build_rows("auto", options, opened, runtime)
    device = torch.device("cpu")
    warm_up(measured, questions, opened.tokenizer)
    for number, question in enumerate(with_speeds(questions, measured), 1):
        # The first one pays for whatever ran before: everybody is it once.
        turn = number % len(measured)
        for row in [*measured[turn:], *measured[:turn]]:
            answer(row, question, opened.tokenizer, max_new_tokens, device)
    _print(measured, data, max_new_tokens)
    if json_path:
        record = [{"row": row.name, "tok_s": row.tok_s, "tau": row.tau} for row in measured]
        write_json(json_path, record)


def _print(rows: list[Row], data: Path | None, max_new_tokens: int) -> None:
    lines = []
    for row in rows:
        ttft = sorted(turn.ttft for turn in row.turns)[len(row.turns) // 2]
        speed = f"{row.tok_s:.1f}", f"{row.tok_s / rows[0].tok_s:.2f}"
        lines.append((row.name, row.precision, *speed, f"{row.tau:.2f}", f"{ttft:.3f}"))
    print_table(("row", "precision", "tok/s", "x llama.cpp", "tau", "TTFT s"), lines)
    note(
        f"{counted(len(rows[0].turns), 'turn')} of {data or 'our prompts'}, at most "
        f"{counted(max_new_tokens, 'token')}, "
        f"greedy; {device_name(torch.device('cpu'))}, {counted(torch.get_num_threads(), 'thread')}"
    )


if __name__ == "__main__":
    main()

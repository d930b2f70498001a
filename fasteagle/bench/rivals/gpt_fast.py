"""Benchmark row `gpt-fast`: captured plain decoding over torchao's int4 kernel, in its own process.

This is what gpt-fast does (https://github.com/meta-pytorch/gpt-fast), and the EAGLE paper's
baseline in table 4: min-max groups, the LM head in 4 bits too, tinygemm's products. It has its own
process because torchao changes settings of the compiler, and its weights are dense at first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import torch

from fasteagle.bench.measure import peak_meter
from fasteagle.bench.rows import EngineDecoder, Turn
from fasteagle.compile.blocks import compile_now
from fasteagle.config import ModelConfig
from fasteagle.device import pick_device
from fasteagle.errors import FasteagleError, first_line
from fasteagle.loading.open import OpenedModel, open_model
from fasteagle.loading.tensors import DummyCheckpoint
from fasteagle.loading.tokenizer import DummyTokenizer
from fasteagle.options import RuntimeOptions, SamplingParams
from fasteagle.quant.scheme import Scheme, int4_for

CLOSING_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Job:
    """Work of the process; `dummy` is the shape of a model with random weights."""

    model: str
    dummy: ModelConfig | None
    runtime: RuntimeOptions
    params: SamplingParams
    compile: bool


def gpt_fast_scheme(config: ModelConfig) -> Scheme:
    """Return a scheme of min-max values in the widest groups that fit, the LM head too."""
    return dataclasses.replace(int4_for(config, head_bits=4), method="minmax")


def gpt_fast_options(runtime: RuntimeOptions, config: ModelConfig) -> RuntimeOptions:
    """Return `runtime` with torchao's form of that scheme."""
    name = f"int4-g{gpt_fast_scheme(config).group_size}"
    return dataclasses.replace(
        runtime, dtype="bf16", quant=name, backend="torchao", lm_head="int4", kv="auto"
    )


class GptFastDecoder:
    """Decoder in another process, which it starts; raises `FasteagleError` where that fails."""

    def __init__(self, job: Job) -> None:
        context = multiprocessing.get_context("spawn")  # a fork cannot use CUDA
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, job), daemon=True)
        self._process.start()
        theirs.close()
        self.peak_bytes = 0
        self._ask(None)  # it says when it is ready

    def turn(self, prompt: list[int], max_new_tokens: int) -> Turn:
        turn, self.peak_bytes = self._ask(("turn", (prompt, max_new_tokens)))
        return turn

    def restart(self) -> None:
        self._ask(("restart", None))

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._connection.send(("close", None))
        self._process.join(CLOSING_SECONDS)
        self._process.kill()

    def _ask(self, request: tuple[str, Any] | None) -> Any:
        """Return the process's answer to `request`; raise its message where it has none."""
        try:
            if request is not None:
                self._connection.send(request)
            ok, answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(CLOSING_SECONDS)
            code = self._process.exitcode
            raise FasteagleError(f"row gpt-fast: its process ended with code {code}") from None
        if not ok:
            raise FasteagleError(f"row gpt-fast: {answer}")
        return answer


def serve(connection: Connection, job: Job) -> None:
    """Load the model, report that, and answer until the order to close."""
    try:
        decoder = _decoder(job)
        reset, read = peak_meter(decoder.engine.device)
        connection.send((True, None))
        while True:
            what, arguments = connection.recv()
            if what == "close":
                return
            if what == "restart":
                decoder.restart()
                connection.send((True, None))
                continue
            reset()
            turn = decoder.turn(*arguments)
            connection.send((True, (turn, read())))
    except EOFError:  # the other side has gone
        return
    except Exception as error:
        reason = first_line(error, 300)
        connection.send((False, reason))


def _decoder(job: Job) -> EngineDecoder:
    if job.runtime.threads:
        torch.set_num_threads(job.runtime.threads)
    opened = _opened(job)
    options = gpt_fast_options(job.runtime, opened.checkpoint.config)
    engine = opened.prepared(options, lambda line: None).engine()
    if job.compile:
        compile_now(engine, job.params)
    return EngineDecoder(engine, job.params, opened.tokenizer.eos_ids)


def _opened(job: Job) -> OpenedModel:
    pick_device(job.runtime.device)
    if job.dummy is None:
        return open_model(job.model, notify=lambda line: None)
    tokenizer = DummyTokenizer(job.dummy.vocab_size)
    return OpenedModel(job.model, DummyCheckpoint(job.dummy), tokenizer)

"""Benchmark row `gpt-fast`: captured plain decoding over torchao's int4 kernel, in its own process.

This is what gpt-fast does (https://github.com/meta-pytorch/gpt-fast), and the EAGLE paper's
baseline in table 4: min-max groups, the LM head in 4 bits too, tinygemm's products. It has its own
process because torchao changes settings of the compiler, and its weights are dense at first.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from fasteagle.bench.measure import peak_bytes, reset_peak
from fasteagle.bench.rows import Decoder, EngineDecoder, Turn
from fasteagle.compile.blocks import compile_now
from fasteagle.config import ModelConfig
from fasteagle.errors import FasteagleError, first_line
from fasteagle.loading.open import OpenedModel, open_model
from fasteagle.loading.tensors import DummyCheckpoint
from fasteagle.loading.tokenizer import dummy_tokenizer
from fasteagle.options import RuntimeOptions, SamplingParams
from fasteagle.quant.scheme import Scheme, int4_for


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


class GptFastDecoder(Decoder):
    """Decoder in another process, which it starts; raises `FasteagleError` where that fails."""

    def __init__(self, job: Job) -> None:
        self._job = job
        spawn = multiprocessing.get_context("spawn")  # a fork cannot use CUDA
        self._process = ProcessPoolExecutor(1, mp_context=spawn)
        self._run(_restart)  # loads the model

    def turn(self, prompt: list[int], max_new_tokens: int) -> Turn:
        turn, self.peak_bytes = self._run(_turn, prompt, max_new_tokens)
        return turn

    def restart(self) -> None:
        self._run(_restart)

    def close(self) -> None:
        """End the process."""
        self._process.shutdown()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._process.submit(function, self._job, *arguments).result()
        except BrokenProcessPool:
            raise FasteagleError("row gpt-fast: its process has ended") from None
        except Exception as error:
            self.close()
            raise FasteagleError(f"row gpt-fast: {first_line(error, 300)}") from error


def _restart(job: Job) -> None:
    _decoder(job).restart()


def _turn(job: Job, prompt: list[int], max_new_tokens: int) -> tuple[Turn, int]:
    """Return an answer and the peak memory of the process that gave it."""
    decoder = _decoder(job)
    device = decoder.engine.device
    reset_peak(device)
    return decoder.turn(prompt, max_new_tokens), peak_bytes(device)


@functools.cache  # the process has one job
def _decoder(job: Job) -> EngineDecoder:
    if job.dummy is None:
        opened = open_model(job.model, job.runtime, lambda line: None)
    else:
        torch.set_num_threads(job.runtime.threads or torch.get_num_threads())
        tokenizer = dummy_tokenizer(job.dummy.vocab_size)
        opened = OpenedModel(job.model, DummyCheckpoint(job.dummy), tokenizer)
    options = gpt_fast_options(job.runtime, opened.checkpoint.config)
    engine = opened.prepared(options, lambda line: None).engine()
    if job.compile:
        compile_now(engine, job.params)
    return EngineDecoder(engine, job.params, opened.tokenizer.eos_ids)

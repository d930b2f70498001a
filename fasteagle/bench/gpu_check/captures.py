"""Stage `captures`: a thousand captures of real cycles, their memory, and a capture that fails."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fasteagle.bench.gpu_check.models import (
    compile_pieces,
    eager_engine,
    opened_shape,
    replaying_engine,
    runtime,
    shape_of,
    use_tree,
)
from fasteagle.bench.gpu_check.stage import Context, require
from fasteagle.compile.graphs import CapturedRunner
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.shapes import TreeShape

# Small, but with attention heads that the kernels take.
SMALL: dict[str, Any] = {
    "dim": 256,
    "n_layer": 2,
    "n_head": 4,
    "n_kv_head": 2,
    "head_dim": 64,
    "ffn_dim": 512,
}
CAPTURES = 1000
FIRST = 40  # captures before memory is looked at: allocators and libraries keep some
MOST_BYTES = 64 * 2**20  # that the others may add
RESERVED = 8.0  # seconds, for what follows them
PROMPT = list(range(5, 45))
GREEDY = SamplingParams()


def run(context: Context) -> None:
    name = "llama2-7b"
    config = dataclasses.replace(shape_of(context, name), **SMALL, vocab_size=1024)
    prepared = opened_shape(name, config).prepared(runtime(context, "int4", 256), lambda line: None)
    engine = replaying_engine(context, prepared)
    use_tree(engine, prepared, TreeShape(3, 3, 8))
    runner = engine.runner
    assert isinstance(runner, CapturedRunner), "made by replaying_engine"
    expected = answer(eager_engine(engine))
    with context.part("compiled pieces"):
        context.save(compiled_pieces=compile_pieces(context, engine))
    with context.part("replayed tokens"):
        require(answer(engine) == expected, "replayed cycles give other tokens than eager ones")
    count_captures(context, engine, runner)
    with context.part("a capture that fails"):
        fail_once(context, runner, engine.device)
        runner.forget()
        require(answer(engine) == expected, "other tokens after a capture that failed")
        require(runner.error is None, f"no capture after one that failed: {runner.error}")
        context.say("after a capture that failed the next one works, with the same tokens")


def answer(engine: Engine, n: int = 40) -> list[int]:
    return [token for ids in engine.generate(PROMPT, GREEDY, n) for token in ids]


def count_captures(context: Context, engine: Engine, runner: CapturedRunner) -> None:
    """Capture plain cycles and trees anew until there were enough; the memory it took.

    Fewer are no failure where the time was short: how many fit says more about the compilers.
    """
    wanted = 20 if context.dry_run else CAPTURES
    first = 4 if context.dry_run else FIRST
    captured, before = 0, None
    with context.part("captures"):
        while captured < wanted and context.seconds_left > RESERVED:
            if before is None and captured >= first:
                before = used_bytes(engine.device)
            runner.forget()
            engine.prepare(GREEDY)
            require(runner.error is None, f"capture {captured + 1} failed: {runner.error}")
            require(runner.captured == 2, f"{runner.captured} of 2 cycles were captured")
            captured += runner.captured
            if captured % 100 == 0:
                context.save(captured=captured)
        context.save(captured=captured)
        if captured < wanted:
            context.say(f"there was time for {captured} captures of {wanted}")
        require(captured > 0, "there was no time for a capture")
        if before is None:
            context.say(f"{captured} captures are too few to say whether their memory grows")
            return
        grown = used_bytes(engine.device) - before
        context.save(grown_mib=round(grown / 2**20, 1))
        context.say(
            f"{captured} captures, the last {captured - first} took {grown / 2**20:.1f} MiB"
        )
        require(grown < MOST_BYTES, f"captures leak: {grown / 2**20:.0f} MiB")


def used_bytes(device: torch.device) -> int:
    """Of the device's memory, by whomever."""
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def fail_once(context: Context, runner: CapturedRunner, device: torch.device) -> None:
    """Let a capture fail as it does in practice: the host reads a value of the device."""
    x = torch.zeros(1, device=device)

    def step() -> None:
        x.add_(1).item()
        if context.dry_run:  # a CPU would allow it
            raise RuntimeError("operation not permitted when stream is capturing")

    try:
        runner.timed(step, lambda: None)
    except RuntimeError:
        return
    require(False, "a read on the host was captured")

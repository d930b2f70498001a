"""Models of the stages: random weights in the shape of a registry model, or tiny on a dry run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fasteagle.bench.gpu_check.stage import Context, require
from fasteagle.bench.simulate import dummy_drafter
from fasteagle.compile.blocks import compile_now
from fasteagle.compile.graphs import CapturedRunner, Place
from fasteagle.config import ModelConfig
from fasteagle.decoding.cycle import EAGER
from fasteagle.device import available_bytes
from fasteagle.generate import Engine
from fasteagle.loading.find_head import head_shape
from fasteagle.loading.memory import Setting, needed_bytes
from fasteagle.loading.open import OpenedModel, PreparedModel, precision_options
from fasteagle.loading.registry import preset
from fasteagle.loading.tensors import DummyCheckpoint
from fasteagle.loading.tokenizer import DummyTokenizer
from fasteagle.options import DraftOptions, RuntimeOptions
from fasteagle.quant.scheme import int4_for
from fasteagle.shapes import TreeShape

TINY: dict[str, Any] = {
    "dim": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_kv_head": 2,
    "head_dim": 16,
    "ffn_dim": 128,
    "vocab_size": 512,
    "max_seq_len": 512,
}
TREE = TreeShape(5, 4, 15)


def shape_of(context: Context, name: str, n_layer: int | None = None) -> ModelConfig:
    """The shape of registry model `name`, with fewer blocks if asked; a tiny one on a dry run."""
    config = preset(name)
    if context.dry_run:
        return dataclasses.replace(config, **TINY)
    return config if n_layer is None else dataclasses.replace(config, n_layer=n_layer)


def opened(context: Context, name: str, n_layer: int | None = None) -> OpenedModel:
    """Random weights in that shape."""
    return opened_shape(name, shape_of(context, name, n_layer))


def opened_shape(name: str, config: ModelConfig) -> OpenedModel:
    return OpenedModel(name, DummyCheckpoint(config), DummyTokenizer(config.vocab_size))


def runtime(context: Context, precision: str, max_seq_len: int = 1024) -> RuntimeOptions:
    """Options that run a model in `precision` on the device of this check."""
    length = min(max_seq_len, TINY["max_seq_len"]) if context.dry_run else max_seq_len
    # Our CPU kernels take half a minute to compile, and what runs there is not looked at.
    plain = RuntimeOptions(device=str(context.device), max_seq_len=length, cpu_kernels="aten")
    return precision_options(plain, precision)


def fitting_kv(context: Context, model: OpenedModel, max_seq_len: int) -> str | None:
    """How keys and values are kept for int4 weights and a draft head to fit; None: they do not.

    What is left out is told.
    """
    config = model.checkpoint.config
    length = runtime(context, "int4", max_seq_len).seq_len_for(config.max_seq_len, model.name)
    head, scheme = head_shape(model.name, config), int4_for(config)
    kinds = [Setting(scheme, kv, length) for kv in ("auto", "int8")]
    needs = {kind.kv: needed_bytes(config, kind, head) for kind in kinds}
    free = available_bytes(context.device)
    kv = next((kv for kv, need in needs.items() if free is None or need <= free), None)
    if kv is None:
        least = min(needs.values()) / 1e9
        context.say(
            f"{model.name} is left out: int4 needs {least:.1f} GB, {(free or 0) / 1e9:.1f} free"
        )
    return kv


def replaying_engine(context: Context, prepared: PreparedModel) -> Engine:
    """An engine that replays cycles, as CUDA graphs or, on a dry run, by running them again."""
    engine = prepared.engine()
    if context.dry_run:
        engine.runner = CapturedRunner(engine.model, engine.state, RunsAgain())
    return engine


def eager_engine(engine: Engine) -> Engine:
    """Another engine over the same weights that runs every operation anew."""
    return Engine(engine.model, engine.max_seq_len)


def use_tree(engine: Engine, prepared: PreparedModel, tree: TreeShape = TREE) -> None:
    """Draft trees of one size with a random draft head."""
    draft = DraftOptions(
        drafter="eagle", tree_depth=tree.depth, tree_topk=tree.topk, tree_nodes=tree.nodes
    )
    engine.use(dummy_drafter(prepared.name, engine, prepared.checkpoint, draft))


def compile_pieces(context: Context, engine: Engine) -> int:
    """Compile the pieces of the engine's cycles, as a chat does; how many are compiled.

    Raises `FasteagleError` unless drafting and committing are compiled in every variant of the
    cycle. A dry run compiles nothing.
    """
    if context.dry_run:
        return 0
    compile_now(engine)
    found = [
        pieces
        for (drafter, _), pieces in engine.runner.compiled.items()
        if drafter is engine.drafter
    ]
    n_shapes = 0 if engine.drafter is None else len(engine.drafter.shapes())
    n = sum(a is not b for pieces in found for a, b in zip(pieces, EAGER, strict=True))
    whole = all(p.draft is not EAGER.draft and p.finish is not EAGER.finish for p in found)
    require(
        whole and len(found) == 1 + n_shapes,
        f"{n} pieces of {len(found)} variants are compiled, of {1 + n_shapes} variants",
    )
    return n


class RunsAgain:
    """Stands for a device with graphs on a dry run: a captured step is simply run again."""

    def capture(self, step: Callable[[], None], restore: Callable[[], None]) -> Callable[[], None]:
        step()
        restore()
        return step

    def place(self, result: Tensor) -> Place:
        return _Copy()

    def synchronize(self) -> None:
        pass

    def milliseconds(self, replay: Callable[[], None]) -> float:
        replay()
        return 1.0


class _Copy:
    """A result, copied at once."""

    def __init__(self) -> None:
        self._values: list[int] = []

    def fill(self, result: Tensor) -> None:
        self._values = result.tolist()

    def read(self) -> list[int]:
        return self._values

"""What a draft head is and whether it fits a model, in words; and which taps it is accepted with.

Reads the head's own files. Of a model only its shape and the first values of its weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from fasteagle.config import ModelConfig, head_from_hf
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.errors import FasteagleError
from fasteagle.loading.find_head import FoundHead
from fasteagle.loading.head_dialects import HeadSource, listed
from fasteagle.loading.head_file import fitted, load_head, open_head
from fasteagle.loading.open import OpenedModel, Runtime
from fasteagle.loading.tensors import fingerprint
from fasteagle.options import SamplingParams
from fasteagle.prompts import read_questions
from fasteagle.shapes import TreeShape

PROBE_SHAPE = TreeShape(depth=4, topk=1, nodes=4)
PROBE_PROMPTS, PROBE_TOKENS = 4, 64


@dataclasses.dataclass(frozen=True)
class HeadReport:
    """One verdict, named facts, and what is wrong (None where nothing is)."""

    verdict: str
    facts: dict[str, str]
    problem: str | None

    def lines(self) -> Iterator[str]:
        """The verdict and the facts, aligned."""
        yield self.verdict
        width = max(len(name) for name in self.facts)
        for name, fact in self.facts.items():
            yield f"  {name:{width}}  {fact}"


def inspect_head(
    found: FoundHead,
    model: OpenedModel | None,
    tap_layers: tuple[int, ...] | None = None,
    identity: str | None = None,
) -> HeadReport:
    """What the head's files say, and whether it fits `model`.

    `identity` is the fingerprint of the weights that will run, where they are not the files' own.

    Raises `FasteagleError` for draft models that are not EAGLE heads and for damaged files.
    """
    source = open_head(found.path)
    block = head_from_hf(source.raw, source.name).block
    problem = None
    try:
        target = source.likely_target(tap_layers) if model is None else model.checkpoint.config
        fitted(source, target, tap_layers)
    except FasteagleError as error:
        problem = str(error).removeprefix(f"{source.name}: ")
    facts = _facts(source, block, tap_layers, found.origin)
    facts["fit"] = problem or (f"fits {model.name}" if model else "give --model to check it")
    if model is not None and problem is None:
        facts["calibration"] = _calibration(source, identity or fingerprint(model.checkpoint))
    name = f"{source.algorithm} head ({source.dialect})"
    if problem is not None:
        return HeadReport(f"{name} that does not run: {problem}", facts, problem)
    return HeadReport(f"{name}, {facts['fit']}", facts, None)


def _facts(
    source: HeadSource, block: ModelConfig, asked: tuple[int, ...] | None, origin: str
) -> dict[str, str]:
    facts = {"head": origin, "dialect": source.dialect, "algorithm": source.algorithm}
    if source.eagle3:
        facts["taps"] = _taps(source, asked)
        facts["norms"] = _norms(source)
    drafted = len(source.state["d2t"]) if "d2t" in source.state else block.vocab_size
    facts["draft vocabulary"] = f"{drafted:,} of {block.vocab_size:,}"
    facts["RoPE"] = _rope(source, block)
    own = "its own" if "embed_tokens.weight" in source.state else "the target's"
    facts["embedding"] = own
    rows = "the target's" if drafted == block.vocab_size else "rows of the target's"
    facts["LM head"] = "its own" if "lm_head.weight" in source.state else rows
    tensors = [t for name, t in source.state.items() if name != "d2t"]
    n_bytes = sum(t.nbytes for t in tensors)
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors})
    params = sum(t.numel() for t in tensors)
    facts["size"] = f"{params:,} parameters, {n_bytes / 1e6:,.1f} MB in {', '.join(dtypes)}"
    facts["header"] = _header(source)
    if source.made_for is not None:
        facts["made for"] = source.made_for
    return facts


def _taps(source: HeadSource, asked: tuple[int, ...] | None) -> str:
    if asked is not None:
        return f"the inputs of blocks {listed(asked)}, as asked"
    taps = source.tap_layers
    if taps is None:
        return "not said: the inputs of blocks 2, L // 2 and L - 3, as the public code"
    if source.lists_outputs:
        return f"the inputs of blocks {listed(taps)}; listed as outputs of the ones before"
    return f"the inputs of blocks {listed(taps)}; listed as such"


def _norms(source: HeadSource) -> str:
    kinds = {"none": "none", "all": "one over all taps", "each": "one for each tap"}
    said = [f"before fc {kinds[source.tap_norm]}"]
    if source.raw.get("norm_before_residual"):
        said.append("residual stream begins normed")
    if source.raw.get("norm_output"):
        said.append("next feature is normed")
    return ", ".join(said)


def _rope(source: HeadSource, block: ModelConfig) -> str:
    rope = source.raw.get("rope_parameters") or source.raw.get("rope_scaling") or {}
    is_said = source.raw.get("rope_theta") or rope.get("rope_theta")
    base = f"base {block.rope_base:,.0f}" + ("" if is_said else " (not said)")
    if block.rope_scaling is not None:
        return f"{base}, llama3 scaling x {block.rope_scaling.factor:g}"
    if block.rope_linear_factor != 1.0:
        return f"{base}, linear scaling x {block.rope_linear_factor:g}"
    factors = source.raw.get("rope_freq_factors")
    return f"{base}, " + ("a factor by frequency" if factors else "no scaling")


def _header(source: HeadSource) -> str:
    header = source.header
    if header is None:
        return "none: a published head"
    said = [f"made for {header.get('target', 'an unnamed model')}"]
    said.append(f"at {header.get('scheme') or 'full precision'}")
    if isinstance(header.get("tau"), float):
        said.append(f"tau {header['tau']:.2f}")
    return ", ".join(said)


def _calibration(source: HeadSource, identity: str) -> str:
    if source.header is None:
        return "unknown: published heads do not say which weights they were made for"
    if source.header.get("target_fingerprint") == identity:
        return "made for exactly these weights"
    return "made for other weights: it runs, but fewer guesses may be accepted"


# Which taps are right


@dataclasses.dataclass(frozen=True)
class Probe:
    """How many drafted tokens a pass accepts with these taps (none for EAGLE-1/2)."""

    tap_layers: tuple[int, ...]
    accepted: float


def measure_taps(
    found: FoundHead, runtime: Runtime, tap_layers: tuple[int, ...] | None = None
) -> Iterator[Probe]:
    """Greedy acceptance with the taps as read, then each one block lower, each one higher."""
    config = open_head(found.path).config(runtime.engine.model.config, tap_layers)
    taps = config.tap_layers
    yield Probe(taps, _accepted(found, runtime, tap_layers))
    if not taps:
        return
    for shift in (-1, 1):
        moved = tuple(tap + shift for tap in taps)
        if moved[0] >= 0 and moved[-1] <= runtime.engine.model.config.n_layer:
            yield Probe(moved, _accepted(found, runtime, moved))


def _accepted(found: FoundHead, runtime: Runtime, tap_layers: tuple[int, ...] | None) -> float:
    """Drafted tokens accepted by a pass, over the built-in prompts."""
    engine, tokenizer = runtime.engine, runtime.tokenizer
    head, _ = load_head(found.path, engine.model.config, tap_layers)
    head.requires_grad_(False)
    head.borrow(engine.model, engine.max_seq_len)
    engine.use(EagleDrafter(head, PROBE_SHAPE, engine.max_seq_len))
    passes = accepted = 0
    for question in read_questions(None, PROBE_PROMPTS):
        text = tokenizer.render([{"role": "user", "content": question.turns[0]}])
        cycles = engine.generate(
            tokenizer.encode(text), SamplingParams(), PROBE_TOKENS, tokenizer.eos_ids
        )
        for _ in cycles:
            pass
        passes += engine.stats.passes
        accepted += engine.stats.accepted
    engine.use(None)
    return accepted / passes if passes else math.nan

"""Describe a draft head and its fit to a model; measure its acceptance by auxiliary layers.

Reads the draft head's own files, and of a model only its shape and the first values of its weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fasteagle.config import ModelConfig
from fasteagle.config_hf import head_from_hf
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.heads.find import HeadFiles
from fasteagle.loading.heads.read import HeadSource, open_head
from fasteagle.loading.heads.tables import EMBEDDING, IN_MODEL, LM_HEAD, MAP, listed
from fasteagle.loading.heads.write import HeadTarget
from fasteagle.loading.tokenizer import ChatTokenizer
from fasteagle.options import SamplingParams
from fasteagle.prompts import read_questions
from fasteagle.shapes import TreeShape

PROBE_SHAPE = TreeShape(depth=4, topk=1, nodes=4)
PROBE_PROMPTS, PROBE_TOKENS = 4, 64


def inspect_head(
    files: HeadFiles, model: HeadTarget | None, aux_layers: tuple[int, ...] | None = None
) -> tuple[list[str], str | None]:
    """Describe a draft head by its files, and whether it fits `model`, with the weights it runs.

    Returns the lines of the report, and the problem (None where there is none). Raises
    `FasteagleError` for draft models that are not EAGLE heads and for damaged files.
    """
    source, problem = open_head(files.path), None
    try:
        target = source.likely_target(aux_layers) if model is None else model.checkpoint.config
        source.fitted(target, aux_layers)
    except FasteagleError as error:
        problem = str(error).removeprefix(f"{source.name}: ")
    fit = problem or (f"fits {model.name}" if model else "give --model to check it")
    facts = {"head": files.origin, **_facts(source, aux_layers), "fit": fit}
    if model is not None and problem is None:
        if source.dialect == IN_MODEL:
            fact = "trained with the model whose files hold it"
        elif source.header is None:
            fact = "unknown: published heads do not say which weights they were made for"
        elif source.header.get("target_fingerprint") == model.checkpoint.fingerprint:
            fact = "made for exactly these weights"
        else:
            fact = "made for other weights: it runs, but fewer guesses may be accepted"
        facts["calibration"] = fact
    verdict = f" that does not run: {problem}" if problem else f", {fit}"
    width = max(map(len, facts))
    lines = [f"{source.algorithm} head ({source.dialect}){verdict}"]
    return lines + [f"  {name:{width}}  {fact}" for name, fact in facts.items()], problem


def _facts(source: HeadSource, aux_layers: tuple[int, ...] | None) -> dict[str, str]:
    """Return the facts that the files state, by name."""
    block, state = head_from_hf(source.raw, source.name).block, source.state
    facts = {"dialect": source.dialect, "algorithm": source.algorithm}
    if source.eagle3:
        facts |= {"auxiliary layers": _aux_layers(source, aux_layers), "norms": _norms(source)}
    drafted = state[MAP].numel() if MAP in state else block.vocab_size
    rows = "the target's" if drafted == block.vocab_size else "rows of the target's"
    tensors = [t for name, t in state.items() if name != MAP]
    n_bytes, params = sum(t.nbytes for t in tensors), sum(t.numel() for t in tensors)
    dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
    header = "none: a part of a model" if source.dialect == IN_MODEL else "none: a published head"
    if source.header is not None:
        tau = source.header.get("tau")
        header = f"made for {source.header.get('target', 'an unnamed model')}, at "
        header += source.header.get("scheme") or "full precision"
        header += f", tau {tau:.2f}" if isinstance(tau, float) else ""
    if block.sliding_window is not None:
        facts["sliding window"] = f"{block.sliding_window:,} keys"
    facts |= {
        "draft vocabulary": f"{drafted:,} of {block.vocab_size:,}",
        "RoPE": _rope(source, block),
        "embedding": "its own" if EMBEDDING in state else "the target's",
        "LM head": "its own" if LM_HEAD in state else rows,
        "size": f"{params:,} parameters, {n_bytes / 1e6:,.1f} MB in {dtypes}",
        "header": header,
    }
    if source.header is not None and (recipe := source.header.get("recipe")):
        facts["training"] = recipe
    return facts if source.made_for is None else facts | {"made for": source.made_for}


def _aux_layers(source: HeadSource, aux_layers: tuple[int, ...] | None) -> str:
    if aux_layers is not None:
        return f"the inputs of blocks {listed(aux_layers)}, as asked"
    if source.aux_layers is None:
        return "not said: the inputs of blocks 2, L // 2 and L - 3, as the public code"
    way = "outputs of the ones before" if source.lists_outputs else "such"
    return f"the inputs of blocks {listed(source.aux_layers)}; listed as {way}"


def _norms(source: HeadSource) -> str:
    kinds = {"none": "none", "all": "one over all layers", "each": "one for each layer"}
    begins = ", residual stream begins normed" if source.raw.get("norm_before_residual") else ""
    output = ", next feature is normed" if source.raw.get("norm_output") else ""
    return f"before fc {kinds[source.aux_norm]}{begins}{output}"


def _rope(source: HeadSource, block: ModelConfig) -> str:
    raw = source.raw
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    is_stated = raw.get("rope_theta") or rope.get("rope_theta")
    scaling = "a factor by frequency" if raw.get("rope_freq_factors") else "no scaling"
    if block.rope_scaling is not None:
        scaling = f"llama3 scaling x {block.rope_scaling.factor:g}"
    elif block.rope_linear_factor != 1.0:
        scaling = f"linear scaling x {block.rope_linear_factor:g}"
    return f"base {block.rope_base:,.0f}{'' if is_stated else ' (not said)'}, {scaling}"


# Which auxiliary layers are right


def measure_aux_layers(
    files: HeadFiles,
    engine: Engine,
    tokenizer: ChatTokenizer,
    aux_layers: tuple[int, ...] | None = None,
) -> Iterator[tuple[tuple[int, ...], float]]:
    """Measure greedy acceptance with the layers as read, one block lower, and one block higher.

    Yields layers (none for EAGLE-1/2), and the mean number of drafted tokens that a pass accepts.
    """
    config = engine.model.config
    layers = open_head(files.path).fitted(config, aux_layers).aux_layers
    yield layers, _accepted(files, engine, tokenizer, aux_layers)
    for shift in (-1, 1) if layers else ():
        moved = tuple(layer + shift for layer in layers)
        if moved[0] >= 0 and moved[-1] <= config.n_layer:
            yield moved, _accepted(files, engine, tokenizer, moved)


def _accepted(
    files: HeadFiles, engine: Engine, tokenizer: ChatTokenizer, aux_layers: tuple[int, ...] | None
) -> float:
    """Return the mean number of drafted tokens a pass accepts, over the built-in prompts."""
    head = open_head(files.path).head(engine.model.config, aux_layers)
    head.requires_grad_(False)
    head.borrow(engine.model, engine.max_seq_len)
    engine.use(EagleDrafter(head, PROBE_SHAPE))
    passes = accepted = 0
    for question in read_questions()[:PROBE_PROMPTS]:
        text = tokenizer.render([{"role": "user", "content": question[0]}])
        prompt, eos_ids = tokenizer.encode(text), tokenizer.eos_ids
        for _ in engine.generate(prompt, SamplingParams(), PROBE_TOKENS, eos_ids):
            pass
        passes += engine.stats.passes
        accepted += engine.stats.accepted
    engine.use(None)
    return accepted / passes if passes else math.nan

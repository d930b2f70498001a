"""Options of the commands: frozen dataclasses that check themselves and need no torch."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import re
from pathlib import Path
from typing import ClassVar

from fasteagle.config_fields import parse_shallow_json
from fasteagle.errors import FasteagleError, shown
from fasteagle.option_fields import check, check_host_names, option, require
from fasteagle.shapes import MAX_DEPTH, MOST_NODES, FusedShape, TreeShape, head_pool

DEFAULT_MODEL = "smollm2-135m"
ORIGIN = r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:\d+)?"  # as browsers write it
DTYPES = ("bf16", "fp16", "fp32")

# Beyond these limits, fp32 logits overflow, and a sound model looks broken.
LEAST_TEMPERATURE = 1e-5
MOST_PENALTY = 100


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling from the target's logits; temperature 0 is greedy."""

    temperature: float = option(0.0, "Sampling temperature; 0: greedy.", least=0, most=100)
    top_k: int = option(0, "Sample from the k likeliest; 0: all.", least=0, most=2**31)
    top_p: float = option(1.0, "Sample from the likeliest of this sum.", above=0, most=1)
    min_p: float = option(0.0, "Least probability relative to the largest.", least=0, below=1)
    repetition_penalty: float = option(1.0, "1: none.", least=1 / MOST_PENALTY, most=MOST_PENALTY)
    seed: int = option(
        0, "Same seed, same text.  [default: drawn and printed]", unset=None, least=0, below=2**63
    )

    def __post_init__(self) -> None:
        check(self)
        require(
            self.greedy or self.temperature >= LEAST_TEMPERATURE,
            f"temperature {self.temperature} is out of range: use 0 (greedy) or >= "
            f"{LEAST_TEMPERATURE}",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """Conditions that end an answer."""

    max_new_tokens: int = option(512, "Longest answer, in tokens.", least=1)
    stop: tuple[str, ...] = option((), "End the answer before this text (repeatable).", kind="text")

    def __post_init__(self) -> None:
        check(self)
        ok = isinstance(self.stop, list | tuple) and all(isinstance(s, str) for s in self.stop)
        require(ok, f"stop {shown(self.stop)} is no text and no list of texts")
        require(all(self.stop), "a stop string is empty: leave it out")
        object.__setattr__(self, "stop", tuple(self.stop))


@dataclasses.dataclass(frozen=True)
class GrammarSpec:
    """Form that an answer must have: any JSON object, a schema, a regex, a Lark grammar.

    `text` is the schema (JSON), the regular expression or the grammar, in llguidance's dialects.
    """

    kind: str = option(kind=("json_object", "json_schema", "regex", "grammar"))
    text: str = ""

    def __post_init__(self) -> None:
        check(self)
        require(self.kind == "json_object" or bool(self.text), f"{self.kind} is empty")
        if self.kind == "json_schema":
            try:
                is_schema = isinstance(parse_shallow_json(self.text), dict | bool)
            except ValueError as error:
                raise FasteagleError(f"json_schema is not JSON: {error}") from error
            require(is_schema, "json_schema must be a JSON object")


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Settings of answers from the command line; a person or a request may change them."""

    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    answer: AnswerOptions = dataclasses.field(default_factory=AnswerOptions)
    seed_is_fixed: bool = False  # else it was drawn, and every answer of a server draws one
    form: GrammarSpec | None = None
    system: str | None = option(None, "System prompt.  [default: the model's own]", kind="text")
    think: bool | None = option(
        None,
        "Think before answering, or not (Qwen3).  [default: as the model's template does]",
        flag="--think/--no-think",
    )


KV = ("auto", "int8")
LM_HEAD_BITS = {"int8": 8, "int4": 4, "keep": 16}
# Parts after the scheme in the name of a precision, for example int4-g64-lm4-fp32-aten.
PRECISION_PARTS = {
    **{dtype: ("dtype", dtype) for dtype in DTYPES},
    **{"lm8": ("lm_head", "int8"), "lm4": ("lm_head", "int4"), "lm16": ("lm_head", "keep")},
    **{name: ("cpu_kernels", name) for name in ("native", "aten")},
    "torchao": ("backend", "torchao"),
}


@dataclasses.dataclass(frozen=True)
class RuntimeOptions:
    """Options of running the target: device, precision, context length, kernels."""

    DEFAULT_MAX_SEQ_LEN: ClassVar[int] = 4096

    device: str = option("auto", "Device: auto, cpu or cuda[:N].")
    dtype: str = option("auto", kind=("auto", *DTYPES))
    max_seq_len: int | None = option(
        None,
        "Longest context in tokens, and size of the KV cache.  [default: the model's, "
        f"at most {DEFAULT_MAX_SEQ_LEN}]",
        least=16,
        most=2**31,
    )
    threads: int | None = option(None, "CPU threads.  [default: all cores]", least=1, most=1024)
    kv: str = option("auto", "Format of keys and values; auto: as the model computes.", kind=KV)
    # "int4", "int8" or the name of a scheme; None: as the checkpoint is
    quant: str | None = option(None, "Weight format: int4-g64, int4-g128-hqq ...")
    lm_head: str = option("int8", "LM head, if quantized; keep: 16 bits.", kind=tuple(LM_HEAD_BITS))
    cpu_kernels: str = option(
        "auto",
        "Kernels of quantized weights on a CPU: native (ours) or aten (torch's).",
        kind=("auto", "native", "aten"),
    )
    strict: bool = option(False, "Exit with an error if a kernel is wrong on this device.")
    backend: str = option(
        "fasteagle",
        "torchao: its own formats and kernels.",
        flag="--quant-backend",
        kind=("fasteagle", "torchao"),
    )

    def __post_init__(self) -> None:
        check(self)
        require(
            bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device))),
            f"device {shown(self.device)} is not supported: use auto, cpu, cuda or cuda:N",
        )
        cores = os.cpu_count() or 1
        require(  # threads that wait for each other's cores take a hundred times as long
            self.threads is None or self.threads <= cores,
            f"threads {self.threads} is more than this machine's {cores} CPUs: use at most {cores}",
        )
        require(
            self.backend == "fasteagle" or self.quant is not None,
            "quant-backend torchao does nothing by itself: add --int4 or --int8",
        )

    @property
    def head_bits(self) -> int:
        return LM_HEAD_BITS[self.lm_head]

    def at(self, precision: str) -> RuntimeOptions:
        """Return these options at a precision by name: auto, a dtype, or a scheme and its parts.

        auto is the precision of the model's files. Raises `FasteagleError` for invalid parts.
        """
        if precision in ("auto", *DTYPES):
            return dataclasses.replace(self, quant=None, dtype=precision, backend="fasteagle")
        name, parts = precision, {}  # type: tuple[str, dict[str, str]]
        while "-" in name and (part := name.rpartition("-")[2]) in PRECISION_PARTS:
            field, value = PRECISION_PARTS[part]
            require(field not in parts, f"precision {precision!r} names {field} twice: choose one")
            parts[field] = value
            name = name.rpartition("-")[0]
        require(
            bool(name) and name not in DTYPES,
            f"precision {precision!r} is unknown: use auto, {', '.join(DTYPES)}, int4, int8, or a "
            "scheme and its parts, as int4-g64-hqq-fp32 or int8-torchao",
        )
        require(
            name != "auto" or "backend" not in parts,
            f"precision {precision!r} names no scheme for torchao: use int4-torchao, for example",
        )
        quant = None if name == "auto" else name
        return dataclasses.replace(self, quant=quant, **parts)  # type: ignore[arg-type]

    def seq_len_for(self, model_limit: int, name: str) -> int:
        """Return the cache length for a model trained for `model_limit` positions."""
        if self.max_seq_len is None:
            return min(model_limit, self.DEFAULT_MAX_SEQ_LEN)
        require(
            self.max_seq_len <= model_limit,
            f"max-seq-len {self.max_seq_len:,} is beyond what {name} was trained for "
            f"({model_limit:,}): use at most {model_limit:,}",
        )
        return self.max_seq_len


# From sweeps: docs/records/trees.md.
DEFAULT_TREE = TreeShape()
QUANTIZED_TREE = TreeShape(depth=2, topk=3, nodes=3)

TAP_LAYERS_TEXT = (
    "Blocks whose input an EAGLE-3 head reads: 2,15,27.  [default: what its files say]"
)
DRAFTERS = ("auto", "eagle", "fused", "eagle-static", "eagle-chain", "model", "ngram", "none")
LOOKUP_DEPTH = 8


@dataclasses.dataclass(frozen=True)
class DraftOptions:
    """Options of drafting.

    `drafter` auto is n-gram lookup; with a draft head an EAGLE tree, or both where our kernels run.
    """

    drafter: str = option("auto", "Source of drafted tokens.", kind=DRAFTERS)
    head: str | None = option(
        None,
        "Draft head: folder, .gguf file, Hugging Face id or a model's name.  "
        "[default: chosen for the model]",
    )
    tap_layers: tuple[int, ...] | None = option(None, TAP_LAYERS_TEXT, kind="numbers")
    tree_file: str | None = option(
        None,
        "auto: sizes chosen while decoding, by measured costs and acceptance (before they are "
        f"measured {DEFAULT_TREE}, or {QUANTIZED_TREE} for a quantized model on a CPU); or a JSON "
        "file of child-rank paths. Any of the three sizes below fixes the tree.",
        flag="--tree",
        unset="auto",
    )
    # None: those of DEFAULT_TREE, or of QUANTIZED_TREE where a row of the target costs more.
    tree_depth: int | None = option(None, "Levels (SGLang: num-steps).", least=1, most=MAX_DEPTH)
    tree_topk: int | None = option(
        None, "Nodes expanded at each level (SGLang: eagle-topk).", least=1, most=1024
    )
    tree_nodes: int | None = option(
        None, "Nodes of the tree (SGLang: num-draft-tokens less one).", least=1, most=MOST_NODES
    )
    draft_model: str | None = option(
        None, "Smaller model with the same tokenizer that drafts (--drafter model)."
    )
    draft_precision: str = option("auto", "Precision of --draft-model, named as for --precision.")
    lookup: tuple[Path, ...] = option(
        (),
        "Text or code that answers may quote (repeatable), for ngram and fused; auto then uses "
        "one of them.",
        kind="file",
    )
    lookup_depth: int | None = option(
        None,
        "Longest chain of tokens that fused and ngram copy; auto then uses one of them.  "
        f"[default: {LOOKUP_DEPTH}, ngram 7; chains on CPUs: 16, and 31 at most]",
        least=1,
        most=MAX_DEPTH,
    )
    noise: str = option(
        "shared",
        "shared: at temperature > 0, rank candidates with the target's noise.",
        flag="--draft-noise",
        kind=("shared", "none"),
    )
    verify: str = option(
        "match",
        "multi-round: the EAGLE paper's sampling, for eagle-static and eagle-chain.",
        kind=("match", "multi-round"),
    )

    @property
    def auto_tree(self) -> bool:
        """Return whether the tuner may choose the tree."""
        return self.auto_chain and self.lookup_depth is None

    @property
    def auto_chain(self) -> bool:
        """Return whether chains may be confidence-gated, where our CPU kernels draft them."""
        sizes = (self.tree_depth, self.tree_topk, self.tree_nodes, self.tree_file)
        is_fixed = self.drafts_with_model or any(size is not None for size in sizes)
        return not is_fixed and self.drafter in ("auto", "eagle", "fused", "ngram")

    @property
    def drafts_with_model(self) -> bool:
        """Return whether a smaller model drafts."""
        return self.draft_model is not None

    @property
    def may_have_head(self) -> bool:
        """Return whether to look for a draft head."""
        return self.drafter not in ("none", "ngram") and not self.drafts_with_model

    @property
    def names_lookup(self) -> bool:
        """Return whether options of the lookup are set."""
        return bool(self.lookup) or self.lookup_depth is not None

    @property
    def fuses(self) -> bool:
        """Return whether a draft head's tree and looked-up chains are merged into one tree."""
        return self.drafter == "fused" or (self.drafter == "auto" and self.names_lookup)

    def tree_shape(self, quantized_on_cpu: bool) -> TreeShape | FusedShape:
        """Return the dynamic tree's or chain's shape; raise `FasteagleError` for invalid sizes."""
        default = QUANTIZED_TREE if quantized_on_cpu else DEFAULT_TREE
        depth = default.depth if self.tree_depth is None else self.tree_depth
        if self.drafter == "eagle-chain":
            return TreeShape(depth, topk=1, nodes=depth)
        usual = 1 if self.drafts_with_model else default.topk
        topk = usual if self.tree_topk is None else self.tree_topk
        nodes = self.tree_nodes
        if nodes is None:  # as many as depth and top-k allow
            nodes = max(depth, min(default.nodes, head_pool(topk, depth)))
            nodes = max(nodes, self.lookup_depth or 0)
        if self.fuses:
            reach = LOOKUP_DEPTH if self.lookup_depth is None else self.lookup_depth
            return FusedShape(depth, topk, nodes, reach)
        return TreeShape(depth, topk, nodes)

    def __post_init__(self) -> None:
        check(self)
        require(self.tree_file != "", "tree '' is empty: give auto or a file")
        require(
            self.verify == "match" or self.drafter in ("eagle-static", "eagle-chain"),
            "verify multi-round needs sampled children: add --drafter eagle-static or eagle-chain",
        )
        require(
            self.drafter != "model" or self.drafts_with_model,
            "drafter model needs a smaller model: add --draft-model NAME",
        )
        require(
            not self.drafts_with_model or self.drafter in ("auto", "model"),
            f"--draft-model drafts by itself: drop --drafter {self.drafter}",
        )
        searching = "--lookup" if self.lookup else f"lookup-depth {self.lookup_depth}"
        may_search = self.drafter in ("auto", "fused", "ngram") and not self.tree_file
        require(
            may_search or not self.names_lookup,
            f"{searching} is for drafters that look up: add --drafter fused or ngram"
            + (", drop --tree" if self.tree_file else ""),
        )
        require(
            self.tree_file is None or self.drafter in ("auto", "eagle-static"),
            f"--tree FILE is a static tree: drop --drafter {self.drafter}",
        )


MOST_AT_ONCE = 8  # answers of one model


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Options of the server: who may reach it, and its limits."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0: any free one.", least=0, below=2**16)
    allow_anyone: bool = option(
        False, "Serve other machines without an API key.  [default: refused]"
    )
    allow_host: tuple[str, ...] = option(
        (), "Name by which browsers may call this server (repeatable)."
    )
    allow_origin: tuple[str, ...] = option(
        (), "Web page that may use the server, as https://example.org (repeatable)."
    )
    parallel: int = option(
        4, "Requests answered at once, each with a KV cache of its own.", least=1, most=MOST_AT_ONCE
    )
    queue: int = option(64, "Requests that may wait; further ones get 429.", least=0)
    timeout: float = option(
        600.0, "Longest time of a request in seconds, waiting included.", above=0, below=math.inf
    )
    max_body: float = option(8.0, "Largest body of a request, MiB.", above=0, most=2**20)
    access_log: bool = option(False, "Write a line about each request to stderr.")
    prefix_cache: float = option(
        1.0, "Memory for earlier conversations' keys and values, GiB.", least=0, most=2**20
    )
    prefix_cache_on: str = option("host", "Place of the prefix cache.", kind=("host", "device"))

    def __post_init__(self) -> None:
        check(self)
        require(self.host != "", "host '' is empty: give an address, as 127.0.0.1")
        check_host_names("allow-host", self.allow_host)
        for origin in self.allow_origin:
            plain = bool(re.fullmatch(ORIGIN, str(origin), re.ASCII))
            require(plain, f"allow-origin {origin!r}: use scheme and host, as https://example.org")


EXPORT_FORMATS = ("eagle", "specforge", "speculators", "gguf")


def fresh_seed() -> int:
    """Return a random seed for a user who gave none, short enough to retype."""
    return random.SystemRandom().randrange(2**31)

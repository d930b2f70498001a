"""Options of the commands: frozen dataclasses that check themselves and need no torch.

The command line is generated from them (`cli.options`): `option` gives a field its help text, and
a flag and a default of the command line where those differ from the field's own.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import random
import re
from pathlib import Path
from typing import Any, ClassVar

from fasteagle.config_fields import parse_shallow_json
from fasteagle.errors import FasteagleError
from fasteagle.shapes import MAX_REACH, FusedShape, TreeShape

DEFAULT_MODEL = "smollm2-135m"
DTYPES = ("bf16", "fp16", "fp32")


# Beyond these limits, fp32 logits overflow, and a sound model looks broken.
LEAST_TEMPERATURE = 1e-5
MOST_PENALTY = 100

UNSAID = object()


def option(
    default: Any = dataclasses.MISSING,
    text: str | None = None,
    *,
    flag: str | None = None,
    unset: Any = UNSAID,
    kind: str | tuple[str, ...] | None = None,
) -> Any:
    """Return a dataclass field that is an option of the command line.

    `text` is its help. `unset` is the command line's default where it is not the field's; `kind` is
    "file", "folder", "existing folder", "comma list", "numbers" or the words to choose from.
    """
    metadata = {"text": text, "flag": flag, "unset": unset, "kind": kind}
    return dataclasses.field(default=default, metadata=metadata)


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise FasteagleError(message)


def _require_numbers(options: Any, *names: str, kind: type = numbers.Real) -> None:
    """Raise `FasteagleError` for a field that is not a number of this `kind`."""
    what = "a whole number" if kind is numbers.Integral else "a number"
    for name in names:
        value = getattr(options, name)
        ok = isinstance(value, kind) and not isinstance(value, bool)
        _require(ok, f"{name.replace('_', '-')} {value!r} is not {what}")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Parameters of sampling from the target's logits; temperature 0 is greedy."""

    temperature: float = option(0.0, "0 is greedy.")
    top_k: int = option(0, "0 is off.")
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = option(0, "Same seed, same text.  [default: drawn and printed]", unset=None)

    def __post_init__(self) -> None:
        _require_numbers(self, "temperature", "top_p", "min_p", "repetition_penalty")
        _require_numbers(self, "top_k", "seed", kind=numbers.Integral)
        t = self.temperature
        _require(
            t == 0 or LEAST_TEMPERATURE <= t <= 100,
            f"temperature {t} is out of range: use 0 (greedy) or {LEAST_TEMPERATURE} .. 100",
        )
        _require(
            0 <= self.top_k <= 2**31, f"top-k {self.top_k} is out of range: use 0 (off) .. 2^31"
        )
        _require(0 < self.top_p <= 1, f"top-p {self.top_p} is out of range: use 0 < top-p <= 1")
        _require(0 <= self.min_p < 1, f"min-p {self.min_p} is out of range: use 0 <= min-p < 1")
        penalty = self.repetition_penalty
        _require(
            1 / MOST_PENALTY <= penalty <= MOST_PENALTY,
            f"repetition-penalty {penalty} is out of range: use {1 / MOST_PENALTY} .. "
            f"{MOST_PENALTY} (1 is off)",
        )
        _require(0 <= self.seed < 2**63, f"seed {self.seed} is out of range: use 0 .. 2^63 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """Conditions that end an answer."""

    max_new_tokens: int = 512
    stop: tuple[str, ...] = option((), "End the answer before this text (repeatable).")

    def __post_init__(self) -> None:
        _require_numbers(self, "max_new_tokens", kind=numbers.Integral)
        n = self.max_new_tokens
        _require(n >= 1, f"max-new-tokens {n} is out of range: use 1 or more")
        ok = isinstance(self.stop, list | tuple) and all(isinstance(s, str) for s in self.stop)
        _require(ok, f"stop {self.stop!r} is no text and no list of texts")
        _require(all(self.stop), "a stop string is empty: leave it out")
        object.__setattr__(self, "stop", tuple(self.stop))


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """Options of chat: one question or a conversation, and what is shown."""

    prompt: str | None = None  # "-": standard input; None: a conversation, if that is a terminal
    system: str | None = None
    think: bool | None = None  # None: the default of the model's template
    compile_blocks: bool | None = None  # None: in the background, for a conversation
    announce_seed: bool = False
    show_accepted: bool = False
    plain: bool = False
    quiet: bool = False


GRAMMARS = ("json_object", "json_schema", "regex", "grammar")


@dataclasses.dataclass(frozen=True)
class GrammarSpec:
    """Form that an answer must have: any JSON object, a schema, a regex, a Lark grammar.

    `text` is the schema (JSON), the regular expression or the grammar, in llguidance's dialects.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        _require(self.kind in GRAMMARS, f"grammar kind {self.kind!r}: use {', '.join(GRAMMARS)}")
        _require(self.kind == "json_object" or bool(self.text), f"{self.kind} is empty")
        if self.kind == "json_schema":
            try:
                is_schema = isinstance(parse_shallow_json(self.text), dict | bool)
            except ValueError as error:
                raise FasteagleError(f"json_schema is not JSON: {error}") from error
            _require(is_schema, "json_schema must be a JSON object")


KV = ("auto", "int8")
MOST_THREADS = 1024
CPU_KERNELS = ("auto", "native", "aten")
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

    device: str = option("auto", "auto, cpu or cuda[:N].")
    dtype: str = option("auto", f"auto, {', '.join(DTYPES)}.")
    max_seq_len: int | None = option(
        None,
        "Context in tokens; fixes the KV cache.  [default: the model's, "
        f"at most {DEFAULT_MAX_SEQ_LEN}]",
    )
    threads: int | None = option(None, "CPU threads.  [default: all cores]")
    kv: str = option("auto", "Keys and values: auto, as the model computes, or int8.", kind=KV)
    # "int4", "int8" or the name of a scheme; None: as the checkpoint is
    quant: str | None = option(None, "A scheme by name: int4-g64, int4-g128-hqq ...")
    lm_head: str = option("int8", "Of a quantized model: int8, int4 or keep.")  # keep: 16 bits
    cpu_kernels: str = option(
        "auto", "Of quantized weights on a CPU: auto, native (our own) or aten (torch's)."
    )
    strict: bool = option(False, "Fail where a kernel computes wrong on this device.")
    backend: str = option(
        "fasteagle", "fasteagle, or torchao's own formats and kernels.", flag="--quant-backend"
    )

    def __post_init__(self) -> None:
        _require(
            self.dtype in ("auto", *DTYPES),
            f"dtype {self.dtype!r} is unknown: use auto, {', '.join(DTYPES)}",
        )
        _require(
            bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", str(self.device))),
            f"device {self.device!r} is not supported: use auto, cpu, cuda or cuda:N",
        )
        _require(self.kv in KV, f"kv {self.kv!r} is unknown: use {' or '.join(KV)}")
        _require(
            self.lm_head in LM_HEAD_BITS,
            f"lm-head {self.lm_head!r} is unknown: use {', '.join(LM_HEAD_BITS)}",
        )
        _require(
            self.backend in ("fasteagle", "torchao"),
            f"quant-backend {self.backend!r} is unknown: use fasteagle or torchao",
        )
        _require(
            self.cpu_kernels in CPU_KERNELS,
            f"cpu-kernels {self.cpu_kernels!r} is unknown: use {', '.join(CPU_KERNELS)}",
        )
        _require(
            self.backend == "fasteagle" or self.quant is not None,
            "quant-backend torchao does nothing by itself: add --int4, --int8 or --quant",
        )
        for name, least, most in (("max_seq_len", 16, 2**31), ("threads", 1, MOST_THREADS)):
            n = getattr(self, name)
            if n is not None:
                _require_numbers(self, name, kind=numbers.Integral)
                text = f"{name.replace('_', '-')} {n} is out of range: use {least} .. {most:,}"
                _require(least <= n <= most, text)

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
            _require(field not in parts, f"precision {precision!r} names {field} twice: choose one")
            parts[field] = value
            name = name.rpartition("-")[0]
        _require(
            bool(name) and name not in DTYPES,
            f"precision {precision!r} is unknown: use auto, {', '.join(DTYPES)}, int4, int8, or a "
            "scheme and its parts, as int4-g64-hqq-fp32 or int8-torchao",
        )
        _require(
            name != "auto" or "backend" not in parts,
            f"precision {precision!r} names no scheme for torchao: use int4-torchao, for example",
        )
        quant = None if name == "auto" else name
        return dataclasses.replace(self, quant=quant, **parts)  # type: ignore[arg-type]

    def seq_len_for(self, model_limit: int, name: str) -> int:
        """Return the cache length for a model trained for `model_limit` positions."""
        if self.max_seq_len is None:
            return min(model_limit, self.DEFAULT_MAX_SEQ_LEN)
        _require(
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

    `drafter` auto is n-gram lookup; with a draft head an EAGLE tree, or both where our CPU kernels
    run.
    """

    drafter: str = option("auto", f"{', '.join(DRAFTERS)}.")
    head: str | None = option(
        None,
        "Draft head: folder, .gguf file, Hugging Face id or a model's name.  "
        "[default: found by itself]",
    )
    tap_layers: tuple[int, ...] | None = option(None, TAP_LAYERS_TEXT, kind="numbers")
    tree_file: str | None = option(
        None,
        "auto: what pays here, chosen from measured costs and what was accepted lately; until it "
        f"was measured {DEFAULT_TREE}, or {QUANTIZED_TREE} for a quantized model on the CPU; or a "
        "JSON file of child-rank paths. Any of the three sizes below fixes the tree.",
        flag="--tree",
        unset="auto",
    )
    # None: those of DEFAULT_TREE, or of QUANTIZED_TREE where a row of the target costs more.
    tree_depth: int | None = option(None, "Levels (SGLang: num-steps).")
    tree_topk: int | None = option(None, "Nodes expanded a level (SGLang: eagle-topk).")
    tree_nodes: int | None = option(
        None, "Nodes verified a pass (SGLang: num-draft-tokens less the root)."
    )
    draft_model: str | None = option(
        None, "A smaller model with the same tokenizer, which then drafts (--drafter model)."
    )
    draft_precision: str = option("auto", "Of --draft-model, as --precision.")
    lookup: tuple[Path, ...] = option(
        (),
        "Text or code that answers may quote, searched with the context (repeatable); for ngram "
        "and fused, which auto then takes.",
        kind="file",
    )
    lookup_depth: int | None = option(
        None,
        "Tokens that fused and ngram copy in a row, at most; auto then looks up.  "
        f"[default: {LOOKUP_DEPTH}; chains on CPUs: 16]",
    )
    noise: str = option(
        "shared",
        "shared or none: at temperature > 0, rank guesses with the target's own noise.",
        flag="--draft-noise",
    )
    verify: str = option(
        "match", "match, or multi-round: the paper's sampling, for eagle-static and eagle-chain."
    )

    @property
    def auto_tree(self) -> bool:
        """Return whether the tuner may choose the tree."""
        return self.auto_chain and self.lookup_depth is None

    @property
    def auto_chain(self) -> bool:
        """Return whether chains may be confidence-gated, where our CPU kernels draft them."""
        asked = (self.tree_depth, self.tree_topk, self.tree_nodes, self.tree_file)
        fixed = any(size is not None for size in (*asked, self.draft_model))
        return not fixed and self.drafter in ("auto", "eagle", "fused", "ngram")

    @property
    def drafts_with_model(self) -> bool:
        """Return whether a smaller model drafts."""
        return self.draft_model is not None

    @property
    def may_have_head(self) -> bool:
        """Return whether to look for a draft head."""
        return self.drafter not in ("none", "ngram") and not self.drafts_with_model

    @property
    def fuses(self) -> bool:
        """Return whether a draft head's tree and looked-up chains are merged into one tree."""
        looks_up = bool(self.lookup) or self.lookup_depth is not None
        return self.drafter == "fused" or (self.drafter == "auto" and looks_up)

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
            nodes = max(depth, min(default.nodes, topk + (depth - 1) * topk**2))
            nodes = max(nodes, self.lookup_depth or 0)
        if self.fuses:
            reach = LOOKUP_DEPTH if self.lookup_depth is None else self.lookup_depth
            return FusedShape(depth, topk, nodes, reach)
        return TreeShape(depth, topk, nodes)

    def __post_init__(self) -> None:
        _require(
            self.verify in ("match", "multi-round"),
            f"verify {self.verify!r}: use match or multi-round",
        )
        _require(
            self.verify == "match" or self.drafter in ("eagle-static", "eagle-chain"),
            "verify multi-round needs sampled children: add --drafter eagle-static or eagle-chain",
        )
        _require(
            self.drafter in DRAFTERS,
            f"drafter {self.drafter!r} is unknown: use {', '.join(DRAFTERS)}",
        )
        _require(
            self.lookup_depth is None or 1 <= self.lookup_depth <= MAX_REACH,
            f"lookup-depth {self.lookup_depth} is out of range: use 1 .. {MAX_REACH}",
        )
        _require(self.head != "", "head '' is empty: give a folder, a .gguf file or an id")
        _require(
            self.noise in ("shared", "none"), f"draft-noise {self.noise!r}: use shared or none"
        )
        _require(
            (self.drafter == "model") <= self.drafts_with_model,
            "drafter model needs a smaller model: add --draft-model NAME",
        )
        _require(
            not self.drafts_with_model or self.drafter in ("auto", "model"),
            f"--draft-model drafts by itself: drop --drafter {self.drafter}",
        )
        _require(
            not self.lookup or (self.drafter in ("auto", "fused", "ngram") and not self.tree_file),
            "--lookup is for drafters that look up: add --drafter fused or ngram"
            + (", drop --tree" if self.tree_file else ""),
        )
        _require(
            self.lookup_depth is None
            or (self.drafter in ("auto", "fused", "ngram") and not self.tree_file),
            f"lookup-depth {self.lookup_depth} is for drafters that look up: add --drafter fused "
            "or ngram" + (", drop --tree" if self.tree_file else ""),
        )
        _require(
            self.tree_file is None or self.drafter in ("auto", "eagle-static"),
            f"--tree FILE is a static tree: drop --drafter {self.drafter}",
        )


PREFIX_CACHE_PLACES = ("host", "device")


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Options of the server: who may reach it, and its limits."""

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "0: any free one.")
    allow_anyone: bool = option(
        False, "Serve other machines without an API key.  [default: refused]"
    )
    allow_host: tuple[str, ...] = option(
        (), "A name by which browsers may call this server (repeatable)."
    )
    allow_origin: tuple[str, ...] = option(
        (), "A web page that may use it, as https://example.org (repeatable)."
    )
    queue: int = option(64, "Requests that may wait; more are told to come back (429).")
    timeout: float = option(600.0, "Seconds for a request, waiting included.")
    max_body: float = option(8.0, "MiB of a request.")
    access_log: bool = option(False, "Write a line about each request to stderr.")
    prefix_cache: float = option(1.0, "GiB for the keys and values of earlier conversations.")
    prefix_cache_on: str = option("host", "Memory of the prefix cache.", kind=PREFIX_CACHE_PLACES)

    def __post_init__(self) -> None:
        _require(0 <= self.port < 2**16, f"port {self.port} is out of range: use 0 .. 65535")
        _require(self.queue >= 0, f"queue {self.queue} is out of range: use 0 or more")
        for name in ("timeout", "max_body"):
            value = getattr(self, name)
            text = f"{name.replace('_', '-')} {value} is out of range: use a number > 0"
            _require(math.isfinite(value) and value > 0, text)
        _require_numbers(self, "prefix_cache")
        gb = self.prefix_cache
        _require(math.isfinite(gb) and gb >= 0, f"prefix-cache {gb} is out of range: use >= 0")
        for origin in self.allow_origin:
            plain = origin.count("/") == 2 and origin.startswith(("http://", "https://"))
            _require(plain, f"allow-origin {origin!r}: use scheme and host, as https://example.org")


EXPORT_FORMATS = ("eagle", "specforge", "speculators", "gguf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of exporting a draft head: the layout of its file, and the target it needs."""

    to: str = option(
        text="eagle: official; specforge: SGLang; speculators: vLLM; gguf: llama.cpp.",
        kind=EXPORT_FORMATS,
    )
    model: str | None = option(
        None, "Its target, where the layout wants tensors or the depth of it."
    )
    tokenizer_from: Path | None = option(
        None, "GGUF file of the target, for gguf.  [default: --model]", kind="file"
    )
    tap_layers: tuple[int, ...] | None = option(None, TAP_LAYERS_TEXT, kind="numbers")


def fresh_seed() -> int:
    """Return a random seed for a user who gave none, short enough to retype."""
    return random.SystemRandom().randrange(2**31)

"""Options of training and calibrating a draft head; needs no torch."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from fasteagle.config import checked_aux_layers, default_aux_layers
from fasteagle.errors import FasteagleError
from fasteagle.option_fields import check, option, require_unset
from fasteagle.options import TAP_LAYERS_TEXT, SamplingParams

ALGORITHMS = ("eagle1", "eagle3", "eagle3.1")
LEAST_WINDOW = 32  # keys of a draft head; it sees those of a whole drafted chain
LOSSES = ("paper", "lk", "mixed")
PROMPTS_TEXT = 'JSONL with {"turns": [...]} lines; the model answers each turn.'
RESUME_TEXT = "Continue the run that was cut off."
# Values of the EAGLE-1 and of the EAGLE-3 paper.
_DEFAULTS = {
    "eagle1": {"noise": 0.1, "ce_weight": 0.1, "feature_weight": 1.0, "self_fed_steps": 0},
    "eagle3": {"noise": 0.0, "ce_weight": 1.0, "feature_weight": 0.0, "self_fed_steps": 6},
}
_DEFAULTS["eagle3.1"] = _DEFAULTS["eagle3"]
_ALONE = {"ce_weight": 1.0, "feature_weight": 0.0}


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Hyper-parameters; the defaults are the papers' where they name one.

    None stands for the default of the algorithm.
    """

    algorithm: str = option(
        "eagle1",
        "Kind of head; eagle3.1 norms each auxiliary state and the next feature.",
        kind=ALGORITHMS,
    )
    tap_layers: tuple[int, ...] | None = option(
        None, "Blocks whose input an EAGLE-3 head reads.  [default: 2,L/2,L-3]", kind="numbers"
    )
    borrow_lm_head: bool = option(
        False, "Use the model's LM head rows in an EAGLE-3 head: a smaller file."
    )
    window: int | None = option(
        None,
        "Keys that the head sees, for long texts.  [default: as --init, or all]",
        least=LEAST_WINDOW,
        most=2**31 - 1,
    )
    loss: str = option(
        "paper",
        "paper: cross-entropy of tokens; lk: the acceptance rate; mixed: from the first to the "
        "second as acceptance grows.",
        kind=LOSSES,
    )
    lr: float = option(3e-5, "Highest learning rate.", above=0, most=1)
    beta1: float = option(0.9, least=0, below=1)
    beta2: float = option(0.95, least=0, below=1)
    weight_decay: float = option(0.0, least=0, most=1)
    clip: float = option(0.5, "Largest norm of the gradient.", above=0)
    noise: float | None = option(
        None, "Uniform noise on the features.  [default: 0.1; EAGLE-3: 0]", least=0, most=100
    )
    ce_weight: float | None = option(
        None, "Weight of the token loss.  [default: 0.1; EAGLE-3, LK: 1]", least=0, below=math.inf
    )
    feature_weight: float | None = option(
        None, "Weight of the feature loss.  [default: 1; EAGLE-3, LK: 0]", least=0, below=math.inf
    )
    self_fed_steps: int | None = option(
        None,
        "Further steps on the head's own features.  [default: 0; EAGLE-3: 6]",
        least=0,
        most=64,
    )
    self_fed_decay: float = option(0.8, "Weight of each further step.", least=0, most=1)
    batch_tokens: int = option(4096, "Tokens per training step.", least=1)
    steps: int = option(2000, "Training steps.", least=1)
    warmup: int = option(100, "Warm-up steps, until --lr is reached.", least=0, most=2**31)
    draft_vocab_size: int | None = option(
        None,
        "Size of the draft vocabulary: the most frequent tokens.  [default: as --init, or 16384]",
        least=1,
    )
    loss_vocab_size: int = option(
        8192, "Number of the most frequent draft tokens in the loss.", least=1
    )
    init_scale: float = option(0.02, "Standard deviation of new weights.", above=0, most=1)
    seed: int = option(0, least=0, below=2**63)

    def __post_init__(self) -> None:
        check(self)
        defaults = _DEFAULTS[self.algorithm] | (_ALONE if self.loss == "lk" else {})
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.algorithm == "eagle1" and (self.tap_layers or self.borrow_lm_head):
            raise FasteagleError(
                "--tap-layers and --borrow-lm-head are for EAGLE-3 heads: give --algorithm eagle3"
            )
        if not self.ce_weight and not self.feature_weight:
            raise FasteagleError("ce-weight 0 and feature-weight 0 train nothing: give one of them")

    @property
    def recipe(self) -> str:
        """Options that shape what a head learns, as the command line takes them."""
        named = ("loss", "self_fed_steps", "noise", "ce_weight", "feature_weight", "window")
        values = {name: getattr(self, name) for name in (*named, "lr", "batch_tokens", "seed")}
        flags = {name.replace("_", "-"): v for name, v in values.items() if v is not None}
        return " ".join(f"--{flag} {value}" for flag, value in flags.items())

    @property
    def n_steps_ahead(self) -> int:
        """Steps of drafting that each row is trained for."""
        return 1 + (self.self_fed_steps or 0)

    def aux_layers_of(self, n_layer: int) -> tuple[int, ...]:
        """Return the blocks, of `n_layer`, whose input the draft head reads; empty for EAGLE-1."""
        if self.algorithm == "eagle1":
            return ()
        return checked_aux_layers(self.tap_layers or default_aux_layers(n_layer), n_layer)

    def lr_at(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRun:
    """Text of a run, and the place of its draft head."""

    data: tuple[Path, ...] = option(
        (), "JSONL of token ids that the model wrote (repeatable).", kind="file"
    )
    prompts: Path | None = option(None, PROMPTS_TEXT, kind="file")
    answer_tokens: int = option(256, "Longest answer to --prompts, in tokens.", least=1)
    out: Path = option(text="Folder to write.", kind="folder")
    resume: bool = option(False, RESUME_TEXT)
    held_out: int = option(100, "Conversations to measure on, not trained on.", least=1)
    max_len: int = option(640, "Longest conversation, in tokens; others are cut.", least=1)
    every: int = option(200, "Steps between evaluations.", least=1)
    init: Path | None = option(None, "Draft head to begin from.", kind="existing folder")
    features: str = option(
        "cached",
        "Keep the target's features on disk, or compute them for every batch.",
        kind=("cached", "live"),
    )
    patience: int | None = option(
        None, "Stop after so many evaluations without gain, and keep the last head.", least=1
    )

    def __post_init__(self) -> None:
        check(self)
        if self.prompts is None:
            require_unset(self, ["answer_tokens"], "without --prompts")


@dataclasses.dataclass(frozen=True)
class CalibrateOptions:
    """Draft head to start from, text, time limit and output of a calibration."""

    head: str | None = option(None, "Draft head to begin from.  [default: the one that chat uses]")
    tap_layers: tuple[int, ...] | None = option(None, TAP_LAYERS_TEXT, kind="numbers")
    data: Path | None = option(
        None,
        "JSONL of token ids that the quantized model wrote.  [default: it writes them now]",
        kind="file",
    )
    draft_vocab: int | None = option(
        None,
        "Size of a new draft vocabulary, the most frequent tokens of the text.  "
        "[default: the head's]",
        least=1,
    )
    tokens: int = option(50_000, "Tokens to write.", least=1)
    minutes: float = option(30.0, "Minutes for text and training together.", above=0, below=10_000)
    steps: int | None = option(
        None, "Training steps.  [default: as many as fit into --minutes]", least=1
    )
    out: Path | None = option(
        None, "Folder to write.  [default: the user cache, where chat finds it]", kind="folder"
    )
    resume: bool = option(False, RESUME_TEXT)

    def __post_init__(self) -> None:
        check(self)
        if self.data is not None:
            require_unset(self, ["tokens"], "with --data")
            if self.steps is not None:
                require_unset(self, ["minutes"], "with --data and --steps")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Questions of `generate-data`, how they are answered, and which answers stay."""

    prompts: Path | None = option(None, PROMPTS_TEXT, kind="file")
    self_written: bool = option(False, "Let the model write the questions.", flag="--self")
    seeds: Path | None = option(
        None,
        'JSONL with {"instruction": "..."} lines, after which the model writes new ones.',
        kind="file",
    )
    out: Path = option(text="JSONL to write; a run that was cut off continues it.", kind="result")
    count: int | None = option(
        None, "Conversations, those dropped included.  [default: every prompt]", least=1
    )
    tokens: int | None = option(None, "Stop after so many tokens of answers.", least=1)
    batch: int = option(8, "Conversations generated at once.", least=1)
    temperature: tuple[str, ...] = option(
        ("0", "0.7"), "Temperatures of the conversations, in turn.", kind="comma list"
    )
    top_p: float = 0.95
    max_new_tokens: int = option(512, "Longest answer, in tokens.", least=1)
    seed: int = option(0, "The same seed gives the same text.")
    exclude: tuple[Path, ...] = option(
        (),
        "JSONL of prompts; text that shares 8 words in a row with one of them is dropped "
        "(repeatable).",
        kind="file",
    )
    drop_cut: bool = option(False, "Drop answers cut at --max-new-tokens.")
    base_url: str | None = option(
        None, "OpenAI-compatible server that answers, as http://HOST:PORT/v1."
    )
    served_model: str | None = option(None, "Name of the model on the server.  [default: --model]")

    def __post_init__(self) -> None:
        check(self)
        sources = (self.prompts, self.self_written or None, self.seeds)
        n_sources = sum(source is not None for source in sources)
        if n_sources != 1:
            what = "contradict each other" if n_sources else "are missing"
            raise FasteagleError(f"--prompts, --self, --seeds {what}: give one of them")
        if self.prompts is None and self.count is None and self.tokens is None:
            raise FasteagleError("the model would write without end: give --count or --tokens")
        if not self.temperatures:
            raise FasteagleError("temperature is empty: give one, or several as 0,0.7")
        for temperature in self.temperatures:
            SamplingParams(temperature, top_p=self.top_p, seed=self.seed)
        if self.base_url is None and self.served_model is not None:
            raise FasteagleError(
                f"served-model {self.served_model!r} has no server: add --base-url"
            )
        if self.base_url is not None and not self.base_url.startswith(("http://", "https://")):
            raise FasteagleError(
                f"base-url {self.base_url!r} is not a URL: use http://HOST:PORT/v1"
            )
        if self.base_url is not None and self.self_written:
            raise FasteagleError(
                "--self continues the chat template, which a chat server does not let one do: "
                "use --seeds or --prompts, or leave out --base-url"
            )

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures, taken by the conversations in turn."""
        try:
            return tuple(float(text) for text in self.temperature)
        except ValueError:
            text = ",".join(self.temperature)
            raise FasteagleError(
                f"temperature {text!r} is not a list of numbers: use one, or 0,0.7"
            ) from None

"""Stage `head`: the default model writes text, a draft head is trained on it and measured.

By the commands a person would use, which share what time is left: a third to write, the rest to
train. The head lands in `head` beside the record.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fasteagle.bench.gpu_check.stage import Context, require
from fasteagle.options import DEFAULT_MODEL

WRITING_SHARE = 0.35  # of the time
TRAINING_SHARE = 0.75  # of what is left then; loading and measuring take the rest
LEAST_CONVERSATIONS = 200
MOST_STEPS = 20_000
BATCH_TOKENS = 8192
LEARNING = ("--lr", "3e-4", "--batch-tokens", str(BATCH_TOKENS))


def run(context: Context) -> None:
    with tempfile.TemporaryDirectory(prefix="head-") as temporary:
        folder = Path(temporary)
        model = tiny_model(folder / "model") if context.dry_run else context.model or DEFAULT_MODEL
        common = ["--model", str(model), "--device", str(context.device)]
        text = folder / "text.jsonl"
        write_text(context, common, text)
        n_lines = len(text.read_text("utf-8").splitlines()) if text.exists() else 0
        least = 4 if context.dry_run else LEAST_CONVERSATIONS
        require(n_lines >= least, f"{n_lines} conversations were written, {least} are needed")
        context.say(f"{n_lines:,} conversations written, {context.seconds_left:.0f} s left")
        steps = 4 if context.dry_run else affordable_steps(context, common, text, folder)
        train(context, common, text, context.out / "head", steps, every=max(2, steps // 8))
    record = json.loads((context.out / "head" / "training.json").read_text("utf-8"))
    tell(context, record)


def write_text(context: Context, common: list[str], text: Path) -> None:
    """Let the model answer in batches until the time for it is over; what is written counts."""
    arguments = [*common, "--out", str(text)]
    if context.dry_run:
        prompts = text.with_name("prompts.jsonl")
        prompts.write_text("".join(json.dumps({"turns": [f"q {i}"]}) + "\n" for i in range(8)))
        arguments += ["--prompts", str(prompts), "--max-new-tokens", "12", "--batch", "4"]
    else:
        arguments += ["--self", "--tokens", "2000000", "--batch", "64", "--max-new-tokens", "384"]
    seconds = WRITING_SHARE * context.seconds_left
    fasteagle(context, "generate-data", arguments, seconds, may_be_cut=True)


def affordable_steps(context: Context, common: list[str], text: Path, folder: Path) -> int:
    """As many steps as fit, by the speed of some; these also leave the features in the cache."""
    train(context, common, text, folder / "trial", 30, every=30)
    trial = json.loads((folder / "trial" / "training.json").read_text("utf-8"))
    rate = trial["history"][-1]["tok_s"]
    steps = int(TRAINING_SHARE * context.seconds_left * rate / BATCH_TOKENS)
    context.say(f"training runs at {rate:,} tok/s: {steps:,} steps")
    return max(30, min(MOST_STEPS, steps))


def train(
    context: Context, common: list[str], text: Path, out: Path, steps: int, every: int
) -> None:
    held_out, warmup = ("2", "1") if context.dry_run else ("64", str(min(100, steps // 4)))
    sizes = ["--steps", str(steps), "--every", str(every), "--warmup", warmup]
    arguments = [*common, "--data", str(text), "--out", str(out), "--held-out", held_out]
    fasteagle(context, "train-head", [*arguments, *sizes, *LEARNING], context.seconds_left - 5)


def fasteagle(
    context: Context, command: str, arguments: list[str], seconds: float, may_be_cut: bool = False
) -> None:
    """Run a command of ours. Raises `FasteagleError` where it fails, or is cut and must not be."""
    # Compiling for a CPU would take most of a dry run's time.
    without_compiler = {"CXX": "/nonexistent"} if context.dry_run else {}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fasteagle", command, *arguments],
            timeout=max(1.0, seconds),
            env={**os.environ, **without_compiler},
        )
    except subprocess.TimeoutExpired:
        require(may_be_cut, f"{command} was not done after {seconds:.0f} s")
        return
    require(done.returncode == 0, f"{command} left with exit code {done.returncode}")


def tell(context: Context, record: dict[str, Any]) -> None:
    """The quality of the head, and its course."""
    header = record["header"]
    alphas = " ".join(f"{alpha:.3f}" for alpha in header["alphas"])
    context.save(header=header)
    context.say(
        f"{header['steps']:,} steps on {header['training_tokens']:,} tokens: held-out chain tau "
        f"{header['tau']:.2f}, n-alpha {alphas}"
    )
    rows = [
        [f"{e['step']:,}", f"{e['loss']:.4f}", f"{e['alphas'][0]:.3f}", f"{e['tau']:.3f}"]
        for e in record["history"]
    ]
    context.table("Training", ["step", "loss", "0-alpha", "tau"], rows)


def tiny_model(folder: Path) -> Path:
    """A complete folder of a tiny random model, for dry runs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # seconds
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|user|>", "<|end|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}"
    fast.save_pretrained(folder)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=len(alphabet) + 2,
        max_position_embeddings=256,
        eos_token_id=len(alphabet) + 1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder

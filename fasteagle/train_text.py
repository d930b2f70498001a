"""Text to train on, written by the target itself: its answers to a file of prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from fasteagle.bench import read_questions
from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.options import SamplingParams
from fasteagle.paths import write_atomic
from fasteagle.tokenizer import ChatTokenizer

TEMPERATURES = (0.0, 0.7, 1.0)  # taken in turn: greedy text is what most answers are


def write_answers(
    engine: Engine, tokenizer: ChatTokenizer, prompts: Path, out: Path, max_new_tokens: int,
    identity: str, progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:  # fmt: skip
    """Answer the first turn of every question in `prompts` (JSONL with `turns`) into `out`.

    Lines that `out` holds already are kept and not written again, so that a call that was cut off
    goes on where it stopped; a last line that was cut is dropped. `identity` names the model:
    raises `FasteagleError` if `out` holds answers of another one, or to other prompts.
    """
    questions = read_questions(prompts, None)
    key = hashlib.sha256(
        json.dumps([identity, max_new_tokens, [q.turns[0] for q in questions]]).encode()
    ).hexdigest()
    key_file = out.with_suffix(".key")
    if out.exists() and (not key_file.exists() or key_file.read_text() != key):
        raise FasteagleError(
            f"{out} holds answers of another model or to other prompts: give another --out"
        )
    write_atomic(key_file, key.encode())
    done = _whole_lines(out)
    with out.open("a", encoding="utf-8") as file:
        for number, question in enumerate(questions):
            if number < done:
                continue
            messages = [{"role": "user", "content": question.turns[0]}]
            prompt = tokenizer.encode(tokenizer.render(messages))
            temperature = TEMPERATURES[number % len(TEMPERATURES)]
            params = SamplingParams(temperature, seed=number)
            cycles = engine.generate(prompt, params, max_new_tokens, tokenizer.eos_ids)
            ids = prompt + [token for new in cycles for token in new]
            line = {"T": temperature, "prompt_len": len(prompt), "ids": ids}
            file.write(json.dumps(line) + "\n")
            file.flush()
            progress(number + 1, len(questions))
    return out


def _whole_lines(path: Path) -> int:
    """Number of complete lines; cuts off an incomplete last one."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return whole.count(b"\n")

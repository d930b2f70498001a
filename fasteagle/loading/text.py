"""Text to train on, written by the target itself: its answers to a file of prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from fasteagle.errors import FasteagleError
from fasteagle.generate import Engine
from fasteagle.loading.tokenizer import ChatTokenizer
from fasteagle.options import SamplingParams
from fasteagle.paths import write_atomic
from fasteagle.prompts import read_questions

TEMPERATURES = (0.0, 0.7, 1.0)  # used in turn; most answers in practice are greedy

QUESTION_TOKENS = 64


def write_answers(
    engine: Engine,
    tokenizer: ChatTokenizer,
    prompts: Path,
    out: Path,
    max_new_tokens: int,
    identity: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Answer the first turn of every question in `prompts` (JSONL with `turns`) into `out`.

    Complete lines of `out` are kept, so that an interrupted call continues where it stopped; an
    incomplete last line is dropped. `identity` names the model:
    raises `FasteagleError` if `out` holds answers of another one, or to other prompts, and for a
    prompt without room for an answer, before the first is written.
    """
    questions = read_questions(prompts, None)
    asked = [_prompt(tokenizer, question.turns[0]) for question in questions]
    for number, prompt in enumerate(asked, 1):
        try:
            engine.check_prompt(prompt)
        except FasteagleError as error:
            raise FasteagleError(f"{prompts}, question {number:,}: {error}") from error
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
        for number, prompt in enumerate(asked):
            if number < done:
                continue
            _write_answer(file, engine, tokenizer, prompt, number, max_new_tokens)
            progress(number + 1, len(questions))
    return out


def write_conversations(
    engine: Engine,
    tokenizer: ChatTokenizer,
    out: Path,
    n_tokens: int,
    max_new_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    enough: Callable[[int], bool] = lambda n: False,
    fewest: int = 0,
) -> Path:
    """Append conversations written entirely by the model to `out`, up to `n_tokens` tokens.

    At least `fewest` conversations are written. Ends sooner once `enough(number of conversations)`.

    The model continues its own chat template from where the user's text would begin: it writes a
    question, and then answers it. Needs no data. Lines already there count, as in `write_answers`;
    the n-th conversation of a model is the same each time.
    """
    number = _whole_lines(out)
    done = _tokens_of(out) if number else 0
    before_question = user_prefix(tokenizer)
    with out.open("a", encoding="utf-8") as file:
        while (done < n_tokens or number < fewest) and not enough(number):
            params = SamplingParams(1.0, top_p=0.95, seed=number)
            ids = _generated(engine, before_question, params, QUESTION_TOKENS, tokenizer)
            question = tokenizer.decode([i for i in ids if i not in tokenizer.eos_ids]).strip()
            question = question or f"Tell me about {number}."
            prompt = _prompt(tokenizer, question)
            done += _write_answer(file, engine, tokenizer, prompt, number, max_new_tokens)
            number += 1
            progress(min(done, n_tokens), n_tokens)
    return out


def _write_answer(
    file: TextIO,
    engine: Engine,
    tokenizer: ChatTokenizer,
    prompt: list[int],
    number: int,
    max_new_tokens: int,
) -> int:
    """Write the answer to `prompt` as line `number` of `file`; returns the line's token count."""
    temperature = TEMPERATURES[number % len(TEMPERATURES)]
    params = SamplingParams(temperature, seed=number)
    ids = prompt + _generated(engine, prompt, params, max_new_tokens, tokenizer)
    line = {"T": temperature, "prompt_len": len(prompt), "ids": ids}
    file.write(json.dumps(line) + "\n")
    file.flush()
    return len(ids)


def _prompt(tokenizer: ChatTokenizer, question: str) -> list[int]:
    return tokenizer.encode(tokenizer.render([{"role": "user", "content": question}]))


def user_prefix(tokenizer: ChatTokenizer) -> list[int]:
    """The template up to where the first question begins.

    Raises `FasteagleError` where there is nothing before it.
    """
    mark = "QUESTION-GOES-HERE"
    text = tokenizer.render([{"role": "user", "content": mark}])
    before, found, _ = text.partition(mark)
    if not found or not before:
        raise FasteagleError(
            "the model's chat template has no beginning of a question, so that the model cannot "
            "write one: give questions"
        )
    return tokenizer.encode(before)


def _generated(
    engine: Engine, prompt: list[int], params: SamplingParams, limit: int, tokenizer: ChatTokenizer
) -> list[int]:
    cycles = engine.generate(prompt, params, limit, tokenizer.eos_ids)
    return [token for new in cycles for token in new]


def _tokens_of(path: Path) -> int:
    """Token ids in the lines that are there. Raises `FasteagleError` where one is damaged."""
    try:
        lines = path.read_text("utf-8").splitlines()
        return sum(len(json.loads(line)["ids"]) for line in lines)
    except (ValueError, TypeError, KeyError) as error:
        raise FasteagleError(f"{path} is damaged ({error!r}): delete it, to begin anew") from error


def _whole_lines(path: Path) -> int:
    """Number of complete lines; cuts off an incomplete last one."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return whole.count(b"\n")

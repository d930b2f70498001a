"""`fasteagle generate-data`: every source, the same text in any batch, resuming, bad input."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import resource
import shutil
from types import SimpleNamespace

import pytest

from fasteagle.errors import FasteagleError
from fasteagle.loading.tokenizer import load_tokenizer
from fasteagle.options import SamplingParams
from fasteagle.prompts import read_conversations
from fasteagle.training import generate_data
from fasteagle.training.data_file import DataFile
from fasteagle.training.dialogues import Conversations, Dialogue, Reply
from fasteagle.training.options import DataOptions
from helpers import TINY_VOCAB, edit_json, invoke, save_tiny, write_questions

FEW = ("--max-new-tokens", 24, "--precision", "fp32", "--max-seq-len", 400)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model that ends its texts often: every tenth token is an end."""
    folder = save_tiny(tmp_path_factory.mktemp("model"))
    edit_json(folder / "generation_config.json", eos_token_id=[*range(0, 256, 10), TINY_VOCAB - 1])
    return folder


@pytest.fixture
def prompts(tmp_path):
    questions = [[f"question {i}", "and", "then?"][: 1 + i % 3] for i in range(14)]
    return write_questions(tmp_path / "prompts.jsonl", *questions)


@pytest.fixture
def seeds(tmp_path):
    path = tmp_path / "seeds.jsonl"
    rows = [{"instruction": f"Do {i}.", "input": "this" if i % 2 else ""} for i in range(9)]
    rows.append({"instruction": "long " * 99})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def generated(model, out, *arguments):
    done = invoke("generate-data", "--model", model, "--out", out, *FEW, *arguments)
    assert done.exit_code == 0, done.output
    return done.stderr


def lines(out):
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_turn_is_answered(model, prompts, tmp_path):
    out = tmp_path / "text.jsonl"
    stderr = generated(model, out, "--prompts", prompts, "--temperature", "0,0.7,1.0")
    answers, tokenizer = lines(out), load_tokenizer(model)
    assert [line["id"] for line in answers] == sorted(line["id"] for line in answers)
    assert all(line["T"] == (0.0, 0.7, 1.0)[line["id"] % 3] for line in answers)
    several = [line for line in answers if line["turns"] > 1]
    assert several, "a conversation goes on after its first answer"
    for first, second in itertools.pairwise(several):
        if first["id"] == second["id"]:
            assert second["turn"] == first["turn"] + 1
            history = tokenizer.raw(first["ids"]).removesuffix("<|end|>")
            assert tokenizer.raw(second["ids"]).startswith(history[:30])
    conversations = read_conversations(out, TINY_VOCAB, 400)
    assert [c.ids for c in conversations] == [line["ids"] for line in answers]
    tokens = sum(len(c.ids) - c.prompt_len for c in conversations)
    n = len({line["id"] for line in answers})
    assert f"{n:,} conversations | {tokens:,} tokens of answers |" in stderr


@pytest.mark.parametrize("source", ["--prompts", "--self", "--seeds"])
def test_the_text_does_not_depend_on_the_batch(source, model, prompts, seeds, tmp_path):
    more = {"--prompts": (prompts,), "--self": ("--count", 8), "--seeds": (seeds, "--count", 8)}
    texts = []
    for name, *options in ((1, "--batch", 1), (3, "--batch", 3), ("seed", "--seed", 1)):
        out = tmp_path / f"{name}.jsonl"
        generated(model, out, source, *more[source], *options)
        texts.append(out.read_bytes())
    assert texts[0] == texts[1] != texts[2] and len(texts[0].splitlines()) > 2


def test_seeds_are_shown_and_instructions_are_new(model, seeds, tmp_path, monkeypatch):
    shown = []
    render = load_tokenizer(model).__class__.render
    monkeypatch.setattr(
        "fasteagle.loading.tokenizer.ChatTokenizer.render",
        lambda self, messages, *more: shown.append(messages) or render(self, messages, *more),
    )
    out = tmp_path / "text.jsonl"
    generated(model, out, "--seeds", seeds, "--count", 10)
    few_shot = [messages for messages in shown if len(messages) > 1]
    assert len(few_shot) == 10 and len({str(messages) for messages in few_shot}) == 10
    texts = {m["content"] for messages in few_shot for m in messages if m["role"] == "assistant"}
    assert texts == {f"Do {i}." + "\nthis" * (i % 2) for i in range(9)}  # the long one is left out
    prompts = [tuple(line["ids"][: line["prompt_len"]]) for line in lines(out)]
    assert len(set(prompts)) == len(prompts)


def test_a_run_that_was_cut_off_goes_on(model, prompts, tmp_path):
    """After a whole line, in one, and between the turns of a conversation."""
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    generated(model, whole, "--prompts", prompts)
    inside = next(i for i, line in enumerate(lines(whole)) if 1 < line["turn"] < line["turns"])
    begun = b"".join(whole.read_bytes().splitlines(keepends=True)[: inside + 1])
    for torn in (5, 1, 0):
        part.write_bytes(begun[: -torn or None])
        shutil.copy(f"{whole}.settings.json", f"{part}.settings.json")
        stderr = generated(model, part, "--prompts", prompts, "--batch", 2)
        assert part.read_bytes() == whole.read_bytes(), torn
        assert "at conversation" in stderr or inside == 0
    assert "nothing to do" in generated(model, part, "--prompts", prompts)
    assert part.read_bytes() == whole.read_bytes()


def test_a_disk_that_takes_no_more_costs_one_line_and_the_run_goes_on(tmp_path):
    answer = Dialogue([(Reply([1], [2] * 500, "", False), SamplingParams())])
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    data = DataFile(tmp_path / "text.jsonl", {})
    data.append(6, answer)  # those before were dropped
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, usual[1]))
    try:
        for write in (lambda: data.append(7, answer), data.close):
            with pytest.raises(
                FasteagleError, match=r"cannot write .*jsonl \(File too large\): free"
            ):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    with contextlib.closing(DataFile(tmp_path / "text.jsonl", {})) as data:
        assert data.next_number == 7


def test_more_of_the_same_is_appended(model, tmp_path):
    out, once = tmp_path / "text.jsonl", tmp_path / "once.jsonl"
    generated(model, out, "--self", "--tokens", 30)
    few = sum(len(line["ids"]) - line["prompt_len"] for line in lines(out))
    last = lines(out)[-1]
    assert few >= 30 and few - (len(last["ids"]) - last["prompt_len"]) < 30
    generated(model, out, "--self", "--tokens", 120, "--batch", 3)
    generated(model, once, "--self", "--tokens", 120)
    assert out.read_bytes() == once.read_bytes()


def test_other_settings_are_refused(model, prompts, tmp_path):
    out = tmp_path / "text.jsonl"
    generated(model, out, "--prompts", prompts)
    before = out.read_bytes()
    write_questions(tmp_path / "others.jsonl", ["another"])
    for arguments, message in (
        (("--prompts", prompts, "--top-p", 0.5), "top_p 0.95 -> 0.5"),
        (("--prompts", tmp_path / "others.jsonl"), "source prompts"),
        (("--self", "--count", 3), "-> self"),
        (("--prompts", prompts, "--exclude", prompts), "exclude"),
        (("--prompts", prompts, "--int8"), "precision dense fp32 -> int8"),
        (("--prompts", prompts, "--precision", "int8-lm16"), "lm_head int8 -> keep"),
        (("--prompts", prompts, "--kv", "int8"), "kv auto -> int8"),
        (("--prompts", prompts, "--drop-cut"), "drop_cut False -> True"),
        (
            ("--prompts", prompts, "--temperature", 1, "--max-new-tokens", 8, "--seed", 3),
            "temperature [0.0, 0.7] -> [1.0], max_new_tokens 24 -> 8, seed 0 -> 3",
        ),
    ):
        few = FEW[:2] if {"--int8", "--precision"} & {*arguments} else FEW
        done = invoke("generate-data", "--model", model, "--out", out, *few, *arguments)
        assert done.exit_code == 2 and message in done.stderr, done.stderr
        assert done.stderr.count("Error: ") == 1 and "another --out" in done.stderr
    assert out.read_bytes() == before
    begun = tmp_path / "other.jsonl"
    generated(model, begun, "--prompts", prompts, "--kv", "int8")
    done = invoke("generate-data", "--model", model, "--out", begun, *FEW, "--prompts", prompts)
    assert done.exit_code == 2 and "kv int8 -> auto" in done.stderr


def test_what_is_dropped_is_counted(model, tmp_path):
    benchmark = write_questions(tmp_path / "bench.jsonl", ["question 4"])
    tokenizer = load_tokenizer(model)
    size = len(tokenizer.encode(tokenizer.render([{"role": "user", "content": "x" * 500}])))
    full = "x" * (900 - size)  # a prompt as long as the context
    questions = [[f"question {i}"] for i in range(12)] + [["x" * 500], [full]]
    prompts = write_questions(tmp_path / "prompts.jsonl", *questions)
    out = tmp_path / "text.jsonl"
    arguments = ("--prompts", prompts, "--exclude", benchmark, "--drop-cut")
    stderr = generated(model, out, *arguments, "--max-new-tokens", 8)
    assert "1 like an excluded prompt" in stderr and "2 longer than the context" in stderr
    assert "cut answer" in stderr and "empty answer" in stderr
    answers = lines(out)
    assert 4 not in [line["id"] for line in answers] and answers
    assert all(3 <= len(line["ids"]) - line["prompt_len"] <= 8 for line in answers)
    assert int(stderr.rsplit("dropped ", 1)[1].split()[0]) == 14 - len(answers)


@pytest.mark.parametrize(("repeated_from", "n_answers"), [(2, 0), (3, 12)])
def test_an_answer_ends_where_it_repeats_itself(
    model, prompts, tmp_path, monkeypatch, repeated_from, n_answers
):
    local = "fasteagle.training.local_model.ends_in_repetition"
    monkeypatch.setattr(local, lambda new: len(new) >= 6)
    monkeypatch.setattr("fasteagle.training.dialogues.repetition", lambda ids: repeated_from)
    out = tmp_path / "text.jsonl"
    stderr = generated(model, out, "--prompts", prompts)
    assert "12 repetition, 2 empty answer" in stderr
    answers = lines(out)
    assert len(answers) == n_answers and all(line["turn"] == 1 for line in answers)
    assert all(3 <= len(line["ids"]) - line["prompt_len"] <= repeated_from for line in answers)


@pytest.mark.parametrize("given", [True, False])
def test_an_instruction_is_written_once_and_answers_end_a_row_of_drops(
    prompts, tmp_path, monkeypatch, given
):
    """The same question in --prompts is meant; each answer is on the disk at once."""
    monkeypatch.setattr(generate_data, "HOPELESS", 3)
    out, source = tmp_path / "t.jsonl", {"prompts": prompts} if given else {"self_written": True}
    options = DataOptions(**source, out=out, count=2)
    conversations = Conversations(options)
    assert conversations.count == 2
    dialogue = Dialogue([(Reply([1], [2, 3, 4], "text", False), SamplingParams())])
    with contextlib.closing(DataFile(out, {})) as data:
        run = generate_data._Run(options, conversations, data)
        for number, each in enumerate([Dialogue([])] * 2 + [dialogue] + [Dialogue([])] * 2):
            run._write(number, each)
        assert len(lines(out)) == 1 and data.next_number == 5
        if given:
            run._write(5, dialogue)
            assert len(lines(out)) == 2
        else:
            with pytest.raises(FasteagleError, match=r"all dropped \(1 asked before\)"):
                run._write(5, dialogue)


def test_the_rate_is_that_of_this_run(tmp_path, monkeypatch, capsys):
    """Not of the tokens that an earlier one has written."""
    out, clock = tmp_path / "t.jsonl", iter((0.0, 2.0))
    monkeypatch.setattr(generate_data, "time", SimpleNamespace(perf_counter=clock.__next__))
    options = DataOptions(self_written=True, out=out, count=9)
    with contextlib.closing(DataFile(out, {})) as data:
        data.append(0, Dialogue([(Reply([1], [2] * 8, "text", False), SamplingParams())]))
        run = generate_data._Run(options, Conversations(options), data)
        run._write(1, Dialogue([(Reply([3], [2] * 8, "text", False), SamplingParams())]))
        run._report()
    assert "2 conversations | 16 tokens of answers | 4 tok/s | " in capsys.readouterr().err


def test_a_model_that_writes_nothing_usable_is_not_asked_for_ever(tiny_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(generate_data, "HOPELESS", 5)
    monkeypatch.setattr("fasteagle.training.dialogues.INSTRUCTION_TOKENS", 2)
    arguments = ("--model", tiny_dir, "--out", tmp_path / "t.jsonl", *FEW)
    done = invoke("generate-data", *arguments, "--self", "--tokens", 9)
    assert done.exit_code == 2
    assert "5 conversations were all dropped (5 instruction without an end)" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "are missing: give one"),
        (("--self", "--prompts", "p.jsonl"), "contradict each other"),
        (("--self",), "without end: give --count or --tokens"),
        (("--self", "--count", 0), "count 0 is out of range"),
        (("--self", "--count", 1, "--batch", 0), "batch 0 is out of range"),
        (("--self", "--count", 1, "--temperature", ""), "temperature is empty"),
        (("--self", "--count", 1, "--temperature", "0,hot"), "'0,hot' is not a list of numbers"),
        (("--self", "--count", 1, "--temperature", "0,-1"), "temperature -1.0 is out of range"),
        (("--self", "--count", 1, "--top-p", 0), "top-p 0.0 is out of range"),
        (("--self", "--count", 1, "--served-model", "x"), "has no server: add --base-url"),
        (("--self", "--count", 1, "--base-url", "http://x"), "chat server does not"),
        (("--prompts", "p.jsonl", "--base-url", "localhost:1"), "is not a URL"),
        (("--prompts", "p.jsonl", "--base-url", "http://x", "--int4"), "the server runs the model"),
        (("--prompts", "absent.jsonl"), "cannot read absent.jsonl"),
        (("--prompts", "s.jsonl"), 's.jsonl, line 1: expected {"turns"'),
        (("--seeds", "p.jsonl", "--count", 1), 'p.jsonl, line 1: expected {"instruction"'),
        (("--seeds", "empty.jsonl", "--count", 1), "no seed task of at most 300 characters"),
        (("--prompts", "p.jsonl", "--exclude", "empty.jsonl"), "no questions in it: give"),
        (("--prompts", "p.jsonl", "--out", "folder"), "is a directory"),
        (("--prompts", "p.jsonl", "--out", "p.jsonl/x"), "cannot write p.jsonl/x"),
    ],
)
def test_what_is_refused_before_a_model_is_opened(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate_data, "open_model", None)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "s.jsonl").write_text('{"instruction": "Sing."}\n')
    write_questions(tmp_path / "p.jsonl", ["one"])
    done = invoke("generate-data", "--out", "text.jsonl", *arguments)
    assert done.exit_code == 2 and message in done.stderr, done.output
    assert "Traceback" not in done.stderr and done.exception.__class__ is SystemExit


def test_files_of_others_are_not_written_to(model, prompts, tmp_path):
    out = tmp_path / "notes.txt"
    out.write_text("mine\n")
    for settings in (None, "[]"):
        if settings is not None:
            (tmp_path / "notes.txt.settings.json").write_text(settings)
        done = invoke("generate-data", "--model", model, "--out", out, "--prompts", prompts)
        assert done.exit_code == 2 and "not begun by generate-data" in done.stderr
        assert out.read_text() == "mine\n"
    text = tmp_path / "text.jsonl"
    generated(model, text, "--prompts", prompts)
    text.write_text('{"ids": [1, 2], "prompt_len": 1}\n')
    done = invoke("generate-data", "--model", model, "--out", text, "--prompts", prompts, *FEW)
    assert done.exit_code == 2 and "line 1: not a line that generate-data wrote" in done.stderr
    for ids, n in (([[1], 2], 1), ([1, 2], 3), ([1, 2], 0)):
        line = {"id": 0, "turn": 1, "turns": 1, "prompt_len": n, "ids": ids}
        text.write_text(json.dumps(line) + "\n")
        done = invoke("generate-data", "--model", model, "--out", text, "--prompts", prompts, *FEW)
        assert done.exit_code == 2 and "line 1: not a line that" in done.stderr
    with text.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        done = invoke("generate-data", "--model", model, "--out", text, "--prompts", prompts, *FEW)
        assert done.exit_code == 2 and "is being written by another process" in done.stderr


BARE = "{{ messages[0]['content'] }}"


def test_a_template_without_a_question(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path / "model")
    for name, template in (("none", None), ("fixed", "<|assistant|>"), ("bare", BARE)):
        tokenizer = load_tokenizer(folder)
        tokenizer._template = template
        monkeypatch.setattr("fasteagle.loading.open.load_tokenizer", lambda *a, t=tokenizer: t)
        monkeypatch.setattr(generate_data, "LocalModel", None)
        out = tmp_path / f"{name}.jsonl"
        done = invoke("generate-data", "--model", folder, "--out", out, "--self", "--count", 1)
        assert done.exit_code == 2 and "has no beginning of a question" in done.stderr

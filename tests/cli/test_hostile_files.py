"""Files, prompts and lines of JSONL that are damaged or cannot be right: one line each."""

from __future__ import annotations

import shutil

import pytest

from helpers import change_tensors, edit_json, invoke

END, WEIGHTS = "generation_config.json", "model.safetensors"
NORM = "model.norm.weight"


def empty_weights(folder):
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


# What is done to a copy of the tiny model, and the line.
FILES = [
    (lambda f: edit_json(f / END, eos_token_id=[1, 260]), "260 is beyond the vocabulary of 260: "),
    (
        lambda f: change_tensors(f, lambda tensors: tensors[NORM].fill_(float("nan"))),
        "not finite in bfloat16",
    ),
    (empty_weights, "pytorch_model.bin is empty: use a safetensors version of it"),
    (
        lambda f: (f / "chat_template.jinja").write_text("a\n{% if %}"),
        "/model: no usable chat template (line 2: Expected an expression, got 'end of statement "
        "block'): use other files of it",
    ),
]


@pytest.mark.parametrize(("damage", "message"), FILES)
def test_files_that_cannot_be_right_are_refused_by_name(tiny_dir, tmp_path, damage, message):
    folder = shutil.copytree(tiny_dir, tmp_path / "model")
    damage(folder)
    done = invoke("chat", "--model", folder, "--precision", "bf16", "-p", "hi")
    assert done.exit_code == 2 and message in done.stderr.splitlines()[-1], done.stderr


# Prompts on standard input, and the line.
PROMPTS = [
    (b"caf\xe9", "standard input is not UTF-8: byte 0xe9 at offset 3"),
    (b" \n", "the prompt is empty"),
    (b"x" * 600, "max-seq-len 512 leaves room for 511: shorten it"),
]


@pytest.mark.parametrize(("prompt", "message"), PROMPTS)
def test_prompts_that_cannot_be_answered(tiny_dir, prompt, message):
    done = invoke("chat", "--model", tiny_dir, "--quiet", input=prompt)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert message in done.stderr

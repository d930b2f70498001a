"""Inputs that are wrong, absurd or contradict each other: one line, before anything is loaded."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
from safetensors.torch import save_file

from fasteagle.loading import hub
from fasteagle.loading.open import OpenedModel
from helpers import invoke

CHAT, TUNE, QUALITY, QUANTIZE = "chat -p hi", "tune", "eval --precision fp32", "quantize --int8"
EVAL = "eval --text DIR/text --tokens 64 --window 16"
TRAIN, CALIBRATE = "train-head --out DIR/out", "calibrate-head --precision int4-g32"
BENCH = "bench --no-compile --precision fp32"

# The command, its options, what the one line says. DIR is a folder, DIR/text a file of words, HEAD
# the head of another model, TINY the model, LONG a text of 5,000 characters, NINES a number of as
# many digits; the other files say what they are.
REFUSED = [
    (CHAT, "--precision int3", "3 bits have no kernel"),
    (CHAT, "--precision int4-g128", "groups of 128 do not divide"),
    (CHAT, "--precision int4-aten-native", "names cpu_kernels twice"),
    (CHAT, "--precision auto-torchao", "use int4-torchao"),
    (CHAT, "--dtype fp32", "--dtype is gone: use --precision fp32\n"),
    (CHAT, "--lm-head int4", "--lm-head is gone: use --precision int4-lm4\n"),
    (CHAT, "--lm-head keep", "--lm-head is gone: use --precision int4-lm16\n"),
    (CHAT, "--cpu-kernels auto", "--cpu-kernels is gone: use --precision int4\n"),
    (CHAT, "--cpu-kernels aten", "--cpu-kernels is gone: use --precision int4-aten\n"),
    (CHAT, "--quant-backend torchao", "--quant-backend is gone: use --precision int4-torchao\n"),
    (CHAT, "--precision auto-lm4", "-lm4 and -lm16 are parts of a quantized precision"),
    (CHAT, "--draft-model x --draft-precision int3", "3 bits have no kernel"),
    (CHAT, "--draft-model TINY --draft-precision auto-lm4", "-lm4 and -lm16 are parts of"),
    (TRAIN, "--data DIR/talk --precision auto-lm4", "-lm4 and -lm16 are parts of"),
    ("generate-data --self --tokens 9", "--out DIR/g --precision auto-lm4", "-lm4 and -lm16 are p"),
    ("eval --text DIR/text", "--precision fp32,auto-lm4", "-lm4 and -lm16 are parts of"),
    ("inspect-head HEAD", "--precision auto-lm4", "-lm4 and -lm16 are parts of"),
    (EVAL, "--tokens 600 --window 513", "window 513 is more than the context of"),
    (CHAT, "--regex '('", "regex: "),
    (CHAT, "--think", "has no thinking switch"),
    (CHAT, "--drafter eagle", "no draft head for"),
    (CHAT, "--head ''", "head '' is empty"),
    (CHAT, "--tree-nodes 99", "tree-nodes 99 is more than the"),
    (CHAT, "--lookup-depth 0", "lookup-depth 0 is out of range: use >= 1 and <= 63"),
    (CHAT, "--max-seq-len 10000000000000000000", "is out of range: use >= 16 and"),
    (CHAT, "--no-spec --drafter ngram", "--no-spec and --drafter ngram contradict each other"),
    (CHAT, "--no-spec --tree-depth 3", "--tree-depth has no meaning with --drafter none"),
    (CHAT, "--drafter ngram --tree-nodes 3", "--tree-nodes has no meaning with --drafter ngram"),
    (CHAT, "--tap-layers 1,2,3", "--tap-layers is for EAGLE-3 heads"),
    (CHAT, "--temperature -1", "temperature -1.0 is out of range: use >= 0 and <= 100"),
    (CHAT, "--top-p 0", "top-p 0.0 is out of range: use > 0 and <= 1"),
    (CHAT, "--top-k -2", "top-k -2"),
    (CHAT, "--min-p 1", "min-p 1"),
    (CHAT, "--repetition-penalty 0", "repetition-penalty 0"),
    (CHAT, "--max-new-tokens 0", "max-new-tokens 0 is out of range: use >= 1"),
    (CHAT, "--stop ''", "stop string is empty"),
    (CHAT, "-p ''", "prompt is empty"),
    (CHAT, "-p ' '", "prompt is empty: give text after -p"),
    (CHAT, "--device tpu", "device 'tpu' is not supported: use auto, cpu, cuda or cuda:N"),
    (CHAT, "--max-seq-len 100000", "trained for (512): use at most 512"),
    (CHAT, "--threads 1000000", "threads 1000000 is out of range: use >= 1 and <= 1,024"),
    (CHAT, "--threads 1024", "threads 1024 is more than this machine's"),
    (CHAT, "--model ''", "model '' is no name"),
    (CHAT, "--model LONG", " ...: `fasteagle models` lists the names"),
    (CHAT, "--model llama2-7", "did you mean 'llama2-7b' or 'llama2-70b'"),
    (CHAT, "--head HEAD", "the head is for a width of 32, the model has 64"),
    (BENCH, "--head HEAD", "the head is for a width of 32, the model has 64"),
    (CHAT, "--tree DIR/none.json", "tree file DIR/none.json"),
    (BENCH, "--json /proc/none.json", "cannot write /proc/none.json"),
    (BENCH, "--rows egale", "unknown row 'egale'"),
    (BENCH, "--batch 1,9", "'--batch': 9 is out of range: use 1 .. 8"),
    (BENCH, "--batch two", "'two' is no list of numbers"),
    (BENCH, "--batch 1 --rows plain", "--rows has no meaning with --batch: drop one"),
    (BENCH, "--batch 1 --load-format dummy --model llama2-7b", "--load-format has no meaning"),
    (BENCH, "--batch 1 --plot DIR/x.svg", "--plot has no meaning with --batch"),
    (BENCH, "--rows plain,medusa", "add --medusa FILE"),
    (BENCH, "--precision int3", "quantization 'int3': 3 bits have no kernel"),
    (BENCH, "--int4 --precision bf16", "name all of them in --precision"),
    (BENCH, "--max-new-tokens 1", "max-new-tokens 1"),
    (BENCH, "--simulate-tau 3 --model llama2-7b", "add --load-format dummy"),
    (BENCH, "--simulate-tau 9 --load-format dummy --model llama2-7b", "1 .. 4 tokens"),
    (QUALITY, "--text DIR/none.txt", "cannot read DIR/none.txt"),
    (QUALITY, "--text /dev/zero", "cannot read /dev/zero: it has more than 64 MiB"),
    (QUANTIZE, "-o /proc/none", "cannot write /proc/none"),
    (QUANTIZE, "-o DIR/out --data DIR/text", "--data is gone: leave it out"),
    (TRAIN, "", "nothing to train on: give --data"),
    (TRAIN, "--data DIR/text", "DIR/text, line 1: expected"),
    (TRAIN, "--prompts DIR/text", "DIR/text, line 1: expected"),
    (TRAIN, "--data /dev/zero", "cannot read /dev/zero: line 1 has more than 64 MiB"),
    (TRAIN, "--algorithm foo", "algorithm 'foo' is unknown: use eagle1, eagle3 or eagle3.1"),
    (TRAIN, "--tap-layers 1,2,3", "--tap-layers and --borrow-lm-head are for EAGLE-3 heads"),
    (TRAIN, "--borrow-lm-head", "--tap-layers and --borrow-lm-head are for EAGLE-3 heads"),
    (TRAIN, "--lr nan", "lr nan is out of range"),
    (TRAIN, "--self-fed-decay nan", "self-fed-decay nan is out of range: use >= 0 and <= 1"),
    (TRAIN, "--init-scale -1", "init-scale -1.0 is out of range"),
    (TRAIN, "--algorithm eagle3 --loss-vocab-size 9", "no meaning with an LM head of the head's"),
    (TRAIN, "--init HEAD --init-scale 0.1", "--init-scale has no meaning with --init: drop one"),
    (TRAIN, "--answer-tokens 9", "--answer-tokens has no meaning without --prompts: drop one"),
    (TRAIN, "--data DIR/talk --draft-vocab-size 261", "draft-vocab-size 261 is more than the"),
    (TRAIN, "--data DIR/digits", "DIR/digits, line 1: token id 9999999999"),
    (TRAIN, "--inputs token", "--inputs is gone: an EAGLE-1 head reads"),
    (TRAIN, "--data DIR/text --init HEAD", "the head is for a width of 32, the model"),
    (TRAIN, "--data DIR/text --algorithm eagle3", "auxiliary layers 2, 1, 0 must ascend"),
    (TRAIN, "--data DIR/text --out /proc/none", "cannot write /proc/none/state.pt"),
    ("calibrate-head", "--precision bf16", "precision bf16 is not quantized, and heads are"),
    (CALIBRATE, "--tokens 6143", "tokens 6,143 are too few for 24 conversations: use 6,144"),
    (CALIBRATE, "--data DIR/talk", "1 conversation, too few to calibrate on: give 24"),
    (CALIBRATE, "--data DIR/talk --tokens 7000", "--tokens has no meaning with --data: drop one"),
    (CALIBRATE, "--data DIR/talk --steps 2 --minutes 3", "--minutes has no meaning with --data an"),
    (CALIBRATE, "--draft-vocab 10000", "draft-vocab 10,000 is more than the model's"),
    (CALIBRATE, "--precision int4-g32-torchao", "leave -torchao out"),
    (CALIBRATE, "--out /proc/none", "cannot write /proc/none/config.json"),
    (CHAT, "--temprature 1", "No such option '--temprature'"),
    (CHAT, "--quantise", "No such option '--quantise'. Did you mean '--quiet'"),
    (CHAT, "more", "unexpected extra argument (more): see `"),
    (CHAT, "--kv foo", "kv 'foo' is unknown: use auto or int8"),
    (CHAT, "--drafter foo", "drafter 'foo' is unknown: use auto, eagle"),
    (CHAT, "--top-k abc", "'abc' is not a valid integer: see `"),
    (CHAT, "--top-k NINES", "9999 ... is not a valid integer: see `"),
    (CHAT, "--NINES", "No such option '--999"),
    (CHAT, "--device NINES", "9999 ... is not supported: use auto, cpu, cuda or cuda:N"),
    (CHAT, "--precision NINES", "9999 ... is unknown: use for example"),
    (CHAT, "--temperature 1e-7", "use 0 (greedy) or >= 1e-05"),
    (CHAT, "--seed 9223372036854775808", "seed 9223372036854775808 is out of range"),
    (CHAT, "--int4 --int8", "int4 and int8 contradict each other"),
    (CHAT, "--verify multi-round", "add --drafter eagle-static or eagle-chain"),
    (CHAT, "--tree ''", "tree '' is empty"),
    (CHAT, "--tree DIR", "tree file DIR: expected a list of paths (Is a directory)"),
    (CHAT, "--tree /dev/zero", "/dev/zero: expected a list of paths (it has more than 64 MiB)"),
    (CHAT, "--json-schema /dev/zero", "cannot read /dev/zero: it has more than 64 MiB"),
    (CHAT, "--tree DIR/tall.json", "expected a list of paths (at most 4,096 paths of 63 ranks"),
    (CHAT, "--tree DIR/wide.json", "expected a list of paths (at most 4,096 paths of 63 ranks"),
    (CHAT, "--tree DIR/bytes", "expected a list of paths (it is not UTF-8)"),
    (CHAT, "--tree x.json --tree-depth 2", "--tree-depth has no meaning with --tree FILE"),
    (CHAT, "--tree x.json --drafter eagle", "--tree FILE is a static tree: drop --drafter eagle"),
    (CHAT, "--tree x.json --lookup-depth 2", "lookup-depth 2 is for drafters that look up"),
    (CHAT, "--lookup-depth 5 --drafter eagle", "add --drafter fused"),
    (CHAT, "--tree-depth 64", "tree-depth 64 is out of range: use >= 1 and <= 63"),
    (CHAT, "--tree-depth 3 --tree-nodes 2", "path of --tree-depth 3: raise"),
    (CHAT, "--drafter eagle-chain --tree-topk 3", "--tree-topk has no meaning with --drafter e"),
    (CHAT, "--draft-precision int4", "--draft-precision needs --draft-model: give both"),
    (CHAT, "--lookup DIR/bytes", "cannot read DIR/bytes: it is not UTF-8"),
    (CHAT, "--lookup DIR/text --drafter eagle", "--lookup is for drafters that look up"),
    (CHAT, "--lookup DIR/text --no-spec", "add --drafter fused or ngram"),
    (CHAT, "--lookup DIR/empty", "DIR/empty is empty: leave it out"),
    (CHAT, "--tap-layers x", "'x' is no list of numbers like 2,15,27: see `"),
    (CHAT, "--head ../x", "head '../x': no such folder or .gguf file"),
    (CHAT, "--json-schema DIR/bytes", "cannot read DIR/bytes: it is not UTF-8"),
    (CHAT, "--json-schema DIR/text", "json_schema is not JSON"),
    (CHAT, "--grammar DIR/text", "grammar: 1(6): Expected token ':'"),
    (CHAT, "--regex a --grammar DIR/text", "--regex and --grammar contradict each other"),
    (CHAT, "--regex ''", "regex is empty"),
    (CHAT, "--regex '[^\\s\\S]'", "regex: no text has this form"),
    (CHAT, "--regex 'a{9999999}'", "regex: lexer error: too many expressions constructed"),
    (CHAT, "--grammar DIR/deep", "grammar: too complex to compile: use a simpler one"),
    (CHAT, "--grammar DIR/endless", "grammar: no text has this form"),
    (CHAT, "--json-schema DIR/numbers.json", "minimum (5) is greater than maximum (3)"),
    (CHAT, "--model DIR/bytes", "not a GGUF file"),
    ("caht", "", "No such command 'caht'. Did you mean 'chat': see `"),
    (TUNE, "--no-spec", "nothing to tune"),
    ("eval", "", "Missing option '--text': see `"),
    ("eval --text DIR/text", "--precision ''", "precision '' is empty"),
    ("eval --text DIR/text", "--window 100000", "do not fill one window of 100000"),
    ("eval --text DIR/text", "--window 15", "window 15 is too short: use 16 tokens or more"),
    ("quantize other -o DIR/out --int8", "", "contradict each other: give one"),
    ("quantize -o DIR/out", "", "quantize needs a precision: give --int4"),
    ("quantize -o DIR/out --int4", "--max-seq-len 64", "No such option '--max-seq-len'"),
    ("quantize -o DIR/out", "--precision int8-torchao", "own formats: leave -torchao out"),
    ("quantize -o DIR/out", "--precision int4-native", "weights only: leave -native out"),
    ("quantize -o DIR/out --int4", "--strict", "No such option '--strict'"),
    ("quantize -o DIR --int4", "", "DIR is there already and not empty"),
    ("inspect-head", "''", "head '' is empty"),
    ("export-head x -o DIR/e", "", "Missing option '--to'. Choose from: eagle, specforge"),
    ("export-head smollm2-135m --to eagle -o DIR/e", "--tokenizer-from x", "is for --to gguf"),
    ("export-head smollm2-135m --to eagle", "-o /proc/none", "cannot write /proc/none"),
    ("export-head smollm2-135m --to eagle", "-o /dev/null", "/dev/null is there already"),
    ("generate-data --out DIR/g --count 3", "--seeds DIR/one", "'instruction' is missing"),
    ("serve", "--allow-host ''", "allow-host '' is empty: give a name"),
    ("serve", "--allow-host box.lan:8000", "allow-host 'box.lan:8000': use the name"),
    ("serve", "--allow-host 'a.lan b.lan'", "allow-host 'a.lan b.lan' has spaces: repeat it"),
    ("serve", "--port 99999", "port 99999 is out of range: use >= 0 and < 65,536"),
    ("serve", "--max-body 1e305", "max-body 1e+305 is out of range: use > 0 and <= 1,048,576"),
    ("serve", "--allow-host '*'", "allow-host '*': use letters, digits, dots and hyphens: no pat"),
    ("serve", "--allow-origin 'https://*.lan'", "'https://*.lan': use scheme and host, as http"),
    ("serve", "--allow-origin https://a@b.lan", "'https://a@b.lan': use scheme and host, as http"),
    ("serve", "--allow-origin foo", "allow-origin 'foo': use scheme and host"),
    ("serve", "--api-key ''", "the API key is empty"),
    ("serve --allow-anyone", "--api-key k", "--allow-anyone and --api-key (FASTEAGLE_API_KEY) con"),
    (CHAT, "--model owner/name", "cannot fetch owner/name (timed out): check the network"),
    ("inspect-head", "owner/name", "cannot fetch owner/name (timed out)"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Texts for the names in the table: a folder, and a head whose config is for another model."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "text").write_text("word " * 10_000)
    (folder / "bytes").write_bytes(bytes(range(256)))
    rules = "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(3000))
    (folder / "deep").write_text(f'start: r0\n{rules}r3000: "a"')
    (folder / "one").write_text("{}")
    (folder / "talk").write_text('{"ids": [1, 2, 3, 4], "prompt_len": 1}')
    (folder / "digits").write_text(f'{{"ids": [{"9" * 4000}], "prompt_len": 1}}')
    (folder / "empty").touch()
    (folder / "wide.json").write_text(json.dumps([[n] for n in range(4097)]))
    (folder / "tall.json").write_text(json.dumps([[0] * n for n in range(1, 65)]))
    (folder / "endless").write_text("start: start")
    (folder / "numbers.json").write_text('{"type": "integer", "minimum": 5, "maximum": 3}')
    (folder / "head").mkdir()
    shape = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    (folder / "head" / "config.json").write_text(json.dumps({**shape, "vocab_size": 260}))
    save_file({}, folder / "head" / "model.safetensors")
    texts = {"LONG": "x" * 5000, "NINES": "9" * 5000}
    return {"DIR": str(folder), "HEAD": str(folder / "head"), **texts}


@pytest.mark.parametrize(("command", "options", "message"), REFUSED)
def test_refused_before_anything_is_loaded(
    tiny_dir, places, silent_hub, monkeypatch, script, command, options, message
):
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(OpenedModel, "prepared", lambda *a: pytest.fail("the model was loaded"))
    arguments = shlex.split(f"{command} {options}")
    for name, text in {**places, "TINY": str(tiny_dir)}.items():
        arguments = [argument.replace(name, text) for argument in arguments]
        message = message.replace(name, text)
    if "--model" not in arguments:
        arguments += ["--model", str(tiny_dir)]
    done = script(*arguments[1:]) if arguments[0] == "bench" else invoke(*arguments)
    assert done.exit_code == 2, (done.output, done.exception)
    assert done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("Error: ") and message in done.stderr and len(done.stderr) < 400


def test_a_form_without_its_library(tiny_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    done = invoke("chat", "--model", tiny_dir, "-p", "x", "--regex", "a")
    assert done.exit_code == 2 and "pip install 'fasteagle[serve]'" in done.stderr

"""Every number that a file can carry, drawn at random: one error that a person can use, or it runs.

No traceback, no hang, and no memory beyond what the file's size justifies.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import signal
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fasteagle.config_fields import Fields
from fasteagle.config_gguf import from_gguf
from fasteagle.drafting.ladder import expected_of_head, ranks_of
from fasteagle.errors import FasteagleError
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.heads.read import HEADER_KEY
from fasteagle.loading.heads.write import save_head
from fasteagle.loading.imported import QuantizedFolder
from fasteagle.loading.layouts import declared_kinds
from fasteagle.loading.quantize import write_folder
from fasteagle.loading.tokenizer import load_tokenizer
from fasteagle.quant.scheme import Scheme
from fasteagle.shapes import TreeShape
from gguf_files import write_gguf
from head_files import load_head
from helpers import logits_of, make_hf_model, random_head, save_tiny

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:invalid value")]

MORE_BYTES = 1 << 30  # of address space, over what the process has: torch's own arenas and threads
SECONDS = 10  # for one example


def fuzz(max_examples):
    """The same examples each time, so that CI fails for a change and not for a draw."""
    return settings(
        max_examples=max_examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@contextlib.contextmanager
def bounded():
    """Within MORE_BYTES and SECONDS; lifted before an error is reported, which takes memory too."""

    def hangs(*_):
        raise AssertionError(f"hangs: not done after {SECONDS} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MORE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


INTEGERS = st.one_of(
    st.integers(-3, 300), st.sampled_from([2**16, 2**31, 2**40, 2**63, 2**64 - 1, 10**30])
)
SCALARS = st.one_of(INTEGERS, st.floats(), st.booleans(), st.none(), st.text(max_size=5))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def changes(*keys):
    """Some of `keys` with values of any kind, often integers."""
    values = INTEGERS | SCALARS | VALUES
    return st.dictionaries(st.sampled_from(keys), values, min_size=1, max_size=3)


def outcome(run):
    """Return the result of `run`, or None where it refuses its input, its only valid error."""
    try:
        with bounded():
            return run()
    except FasteagleError as error:
        assert "\n" not in str(error)
        return None


def rewrite(path: Path, data: bytes) -> Path:
    """A new file: an old one may still be mapped."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def runs(checkpoint) -> bool:
    """A checkpoint that is not refused loads and computes."""
    model = load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=16)
    return logits_of(model, torch.arange(3)).shape == (3, model.config.vocab_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model."""
    return save_tiny(tmp_path_factory.mktemp("fuzz") / "model", "mistral", num_hidden_layers=1)


@pytest.fixture
def copy(folder, tmp_path):
    """A copy of the model, for the examples of one test."""
    return shutil.copytree(folder, tmp_path / "m")


@pytest.fixture
def head(folder, tmp_path):
    """A draft head for the model, and once more its config."""
    target = load_model(open_checkpoint(folder), dtype=torch.float32, device="cpu", max_seq_len=16)
    head = tmp_path / "head"
    save_head(head, random_head(target, rope_base=10000.0), {"ranks": [[0.5]]}, torch.float32)
    shutil.copy(head / "config.json", head / "good.json")
    return head


ROPE = st.fixed_dictionaries(
    {
        "rope_type": st.sampled_from(["linear", "llama3", "default"]) | SCALARS,
        "factor": SCALARS,
        "low_freq_factor": SCALARS,
        "high_freq_factor": SCALARS,
        "original_max_position_embeddings": SCALARS,
        "rope_theta": SCALARS,
    }
)
CONFIG = changes(
    *("architectures", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size", "vocab_size"),
    *("max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling"),
    *("sliding_window", "tie_word_embeddings", "hidden_act", "attention_bias"),
    *("quantization_config", "eos_token_id", "bos_token_id", "initializer_range"),
) | st.builds(lambda rope: {"rope_parameters": rope}, ROPE | VALUES)


@fuzz(400)
@given(changed=CONFIG)
def test_config_of_a_model(folder, copy, changed):
    raw = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**raw, **changed}))
    checkpoint = outcome(lambda: open_checkpoint(copy))
    if checkpoint is not None:
        assert outcome(lambda: runs(checkpoint)), "what is opened runs"
        outcome(lambda: load_tokenizer(copy))


@fuzz(400)
@given(changed=CONFIG)
def test_config_of_a_head(folder, head, changed):
    raw = json.loads((head / "good.json").read_text())
    (head / "config.json").write_text(json.dumps({**raw, **changed}))
    outcome(lambda: load_head(head, open_checkpoint(folder).config))


HEADERS = VALUES | changes("ranks", "target_fingerprint", "scheme")
RANKS = st.lists(st.lists(st.floats(0, 1) | SCALARS, max_size=3), max_size=3)


@fuzz(400)
@given(header=HEADERS | st.builds(lambda ranks: {"ranks": ranks}, RANKS))
def test_header_of_a_head(folder, head, header):
    _, parts, data = header_of(head / "model.safetensors")
    parts["__metadata__"] = {HEADER_KEY: json.dumps(header)}
    rewrite(head / "model.safetensors", with_header(parts, data))
    loaded = outcome(lambda: load_head(head, open_checkpoint(folder).config))
    if loaded is not None:
        tokens = expected_of_head(TreeShape(), ranks_of(loaded[1]), 1.0)
        assert 0 <= tokens <= TreeShape().nodes


def header_of(path: Path):
    """(length, entries, what follows) of a safetensors file."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    return size, json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(parts, data: bytes, size: int | None = None) -> bytes:
    text = json.dumps(parts).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F16", "I32", "U8", "BOOL", "F8_E4M3", "F4", "C64"]) | SCALARS,
        "shape": st.lists(INTEGERS, max_size=3) | VALUES,
        "data_offsets": st.lists(INTEGERS, max_size=3) | VALUES,
    },
)


@fuzz(400)
@given(
    changed=st.dictionaries(st.integers(0, 11), ENTRY | VALUES, max_size=2),
    size=st.none() | INTEGERS.filter(lambda n: 0 <= n < 2**64),
)
def test_header_of_safetensors(folder, copy, changed, size):
    _, parts, data = header_of(folder / "model.safetensors")
    names = [name for name in parts if name != "__metadata__"]
    for number, entry in changed.items():
        name = names[number % len(names)]
        parts[name] = {**parts[name], **entry} if isinstance(entry, dict) else entry
    rewrite(copy / "model.safetensors", with_header(parts, data, size))
    checkpoint = outcome(lambda: open_checkpoint(copy))
    if checkpoint is not None:
        outcome(lambda: runs(checkpoint))


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(
        path, make_hf_model("llama2", num_hidden_layers=1), "Q8_0", extra={"a": ["x", "y"] * 4}
    )
    return path


NUMBERS = st.one_of(
    st.binary(min_size=1, max_size=1),
    INTEGERS.map(lambda n: struct.pack("<I", n % 2**32)),
    INTEGERS.map(lambda n: struct.pack("<Q", n % 2**64)),
    st.floats(width=32).map(lambda x: struct.pack("<f", x)),
)


@fuzz(1500)
@given(written=st.dictionaries(st.integers(4, 10_000), NUMBERS, min_size=1, max_size=3))
def test_index_of_gguf(gguf, tmp_path, written):
    data = bytearray(gguf.read_bytes())
    end = data.rindex(b".weight") + 40  # of the index
    for place, number in written.items():
        at = place % end
        data[at : at + len(number)] = number
    path = rewrite(tmp_path / "m.gguf", bytes(data))
    checkpoint = outcome(lambda: open_checkpoint(path))
    if checkpoint is not None:
        assert outcome(lambda: runs(checkpoint)), "what is opened runs"


GGUF_KEYS = (
    *("embedding_length", "block_count", "context_length", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.freq_base"),
    *("rope.scaling.type", "rope.scaling.factor", "expert_count"),
)
GGUF_GOOD = {"general.architecture": "llama", "llama.embedding_length": 64, "llama.block_count": 1}
GGUF_GOOD |= {"llama.context_length": 512, "llama.feed_forward_length": 96}
GGUF_GOOD |= {"llama.attention.head_count": 4, "llama.attention.layer_norm_rms_epsilon": 1e-5}


@fuzz(500)
@given(changed=changes("general.architecture", *(f"llama.{key}" for key in GGUF_KEYS)))
def test_metadata_of_gguf(changed):
    fields = Fields({**GGUF_GOOD, **changed}, "m.gguf")
    outcome(lambda: from_gguf(fields, vocab_size=60, tied=True, rope_freq_factors=None))


SCHEME = {"bits": 4, "group_size": 32, "method": "minmax", "head_bits": 16}


@fuzz(500)
@given(
    part=st.sampled_from(["model", "scheme", "quantization_config", "packed"]),
    changed=changes("dim", "n_layer", "n_head", "rope_scaling", "norm_eps", *SCHEME, "format")
    | VALUES,
)
def test_config_of_our_own_folder(folder, tmp_path, part, changed):
    out = tmp_path / "out"
    if not out.exists():
        write_folder(out, open_checkpoint(folder), Scheme(**SCHEME))
        shutil.copy(out / "config.json", out / "good.json")
    raw = json.loads((out / "good.json").read_text())
    place = raw if part in ("model", "quantization_config") else raw["quantization_config"]
    if part == "packed" and isinstance(changed, dict):
        changed = {name: {**entry, **changed} for name, entry in place["packed"].items()}
    place[part] = {**place[part], **changed} if isinstance(changed, dict) else changed
    (out / "config.json").write_text(json.dumps(raw))
    outcome(lambda: open_checkpoint(out))


SETTINGS = changes(
    *("bits", "group_size", "sym", "desc_act", "format", "dynamic", "config_groups", "w_bit"),
    "version",
)
GROUPS = st.builds(
    lambda weights, group: {"config_groups": {"g": {"weights": weights, **group}}},
    VALUES | changes("num_bits", "group_size", "strategy", "symmetric", "type", "actorder"),
    changes("format", "input_activations", "targets"),
)


@fuzz(500)
@given(
    method=st.sampled_from(["gptq", "awq", "compressed-tensors"]),
    changed=SETTINGS | GROUPS,
    beside=st.sampled_from([{}, {"bits": 4}]),
)
def test_settings_of_other_tools(folder, method, changed, beside):
    declared = {"quant_method": method, "format": "pack-quantized", **beside, **changed}
    outcome(lambda: declared_kinds(method, declared))
    raw = json.loads((folder / "config.json").read_text())
    outcome(lambda: QuantizedFolder(folder, {**raw, "quantization_config": declared}))

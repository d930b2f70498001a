"""Tiny random models in every layout we read, and a home of its own for each test."""

from __future__ import annotations

import dataclasses
import functools
import os
import runpy
import socket
from pathlib import Path

# The test processes share the cores: a thread that waits must not spin. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

import fasteagle
from fasteagle import errors
from fasteagle.bench import measure
from fasteagle.compile import blocks, measurement, precompile
from fasteagle.loading import registry
from fasteagle.loading.checkpoint import load_model, open_checkpoint
from fasteagle.loading.heads.write import save_head
from fasteagle.loading.tokenizer import load_tokenizer
from fasteagle.options import DEFAULT_MODEL
from helpers import (
    eagle3_of,
    invoke,
    random_head,
    random_target,
    save_tiny,
    tiny_config,
    write_questions,
)
from hub_cache import forbid


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden", metavar="DIR", help="More recorded cases of draft heads to match.")
    parser.addoption("--no-bf16", action="store_true", help="As on a CPU that multiplies no bf16.")


def pytest_configure(config: pytest.Config) -> None:
    # Compiled once for all tests and processes, and kept for the next run; `--cache-clear` clears
    # it. The names of its files say from what they were made, but for this limit of instructions.
    limit = os.environ.get("ATEN_CPU_CAPABILITY", "")
    folder = Path(config.rootpath, ".pytest_cache", "d", f"compiled{limit}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    # Each test process would start as many compilers as the machine has cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    precompile.MOST_WORKERS = 2
    if config.getoption("--no-bf16"):
        folder = Path(__file__).parent / "no_bf16"
        runpy.run_path(str(folder / "sitecustomize.py"))["without_bf16"](torch.cpu)
        others = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *([others] if others else [])])


@pytest.hookimpl(tryfirst=True)  # before its fixtures are set up
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def own_home(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing a test does touches the caches of the person who runs it, nor reads them.

    Tests of the real model keep the user cache: the model in it is 94 MiB to download.
    """
    if "real_model" in request.keywords:
        return
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))


@pytest.fixture
def card(request, monkeypatch):
    """A card that is not there: its kernels are interpreted, on tensors of a CPU."""
    from ptx.card import Card

    card = Card(getattr(request, "param", 86))
    card.install(monkeypatch)
    return card


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make messages independent of how fast this machine opens a model."""
    monkeypatch.setattr(errors, "PATIENCE", 3600.0)


@pytest.fixture(autouse=True)
def brief_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every report of the benchmark measures this machine's memory, and many a chat its passes."""
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    monkeypatch.setattr(measurement, "MOST_ROUNDS", 1)


@pytest.fixture(autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hugging Face folder of a tiny Llama; do not write into it."""
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def checkpoint(tiny_dir: Path):
    return open_checkpoint(tiny_dir)


@pytest.fixture(scope="module")
def model(checkpoint):
    """The tiny model in fp32, for texts of up to 512 tokens; do not write into it."""
    return load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=512)


@pytest.fixture(scope="session")
def head_dirs(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draft heads `eagle1` and `eagle3` of the tiny model; do not write into them."""
    target = load_model(checkpoint, dtype=torch.float32, device="cpu", max_seq_len=64)
    folder, identity = tmp_path_factory.mktemp("heads"), checkpoint.fingerprint
    for kind in ("eagle1", "eagle3"):
        eagle3 = eagle3_of(kind, target.config)
        head = random_head(target, rope_scaling=None, rope_base=10000.0, eagle3=eagle3)
        save_head(folder / kind, head, {"target_fingerprint": identity}, torch.float32)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tiny_dir: Path):
    return load_tokenizer(tiny_dir)


@pytest.fixture(scope="module")
def llm(tiny_dir: Path):
    """The tiny model as the Python API loads it."""
    with fasteagle.load(str(tiny_dir), precision="fp32", drafter="ngram") as made:
        yield made


@pytest.fixture(scope="module")
def target():
    """A tiny random target without files; do not write into it."""
    return random_target(tiny_config())


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The embedded default model, downloaded if this machine does not have it yet."""
    return registry.resolve(DEFAULT_MODEL)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty hub cache, and a hub that must not be asked."""
    import huggingface_hub._snapshot_download
    import huggingface_hub.constants

    path = tmp_path / "hub"
    path.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(path))
    monkeypatch.setattr(huggingface_hub._snapshot_download.constants, "HF_HUB_CACHE", str(path))

    forbid(monkeypatch, AssertionError("a request to the network"))
    return path


@pytest.fixture
def silent_hub(tmp_path, monkeypatch):
    """A hub that takes connections and never answers; the folder of models from it is empty."""
    import huggingface_hub.constants

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield url


@pytest.fixture
def questions(tmp_path):
    """Three questions for the benchmark, four turns."""
    return write_questions(tmp_path / "q.jsonl", ["one", "and then?"], ["two"], ["three"])


@pytest.fixture
def script():
    """Runs scripts/tokens_per_sec.py in this process."""
    import tokens_per_sec  # most tests do without it

    return functools.partial(invoke, main=tokens_per_sec.main)


@pytest.fixture
def no_compiler(monkeypatch):
    """Models run eagerly, as on a machine without a C++ compiler: compiling takes longest."""
    monkeypatch.setattr(blocks, "missing_compiler", lambda: "not in this test")


@pytest.fixture
def no_recompiles():
    """A test may set the stance that fails on a recompilation."""
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


COMPILED = pytest.param(True, marks=pytest.mark.slow)


@pytest.fixture(params=[False, COMPILED], ids=["eager", "compiled"])
def compiled(request):
    """Run the test with compiled models and with eager ones."""
    if not request.param:
        request.getfixturevalue("no_compiler")
    return request.param


@pytest.fixture
def tiny_preset(monkeypatch):
    """The registry knows a tiny shape under the name it returns: int4 groups and all."""
    shape = dict(dim=64, n_layer=2, n_head=4, n_kv_head=4, head_dim=16, ffn_dim=96, vocab_size=100)
    small = dataclasses.replace(registry.preset("llama2-7b"), **shape)
    monkeypatch.setitem(registry.REGISTRY, "llama2-70b", registry.Entry(small, "none"))
    return "llama2-70b"

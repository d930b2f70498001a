"""`CudaGraphs` on a stand-in for `torch.cuda`: its memory pool and its stream."""

from __future__ import annotations

import pytest
import torch

from fake_cuda import FakeCuda
from fasteagle.compile.graphs import CudaGraphs


@pytest.fixture
def cuda(monkeypatch):
    return FakeCuda(monkeypatch)


def nothing():
    pass


def test_captures_go_on_when_all_graphs_are_gone(cuda):
    graphs = CudaGraphs(torch.device("cuda"))
    for _ in range(3):
        replay = graphs.capture(nothing, nothing)
        del replay
    assert list(cuda.users.values()) == [1], "one pool, and a graph that keeps it"


def test_all_captures_share_a_stream(cuda):
    graphs = CudaGraphs(torch.device("cuda"))
    for _ in range(40):
        graphs.capture(nothing, nothing)
    assert cuda.streams == 1


@pytest.mark.parametrize("place", ["begin", "step"])
def test_a_capture_that_fails_leaves_a_new_pool_behind(cuda, place):
    graphs = CudaGraphs(torch.device("cuda"))
    kept = graphs.capture(nothing, nothing)

    def reads_on_the_host():
        if cuda.allocating:
            raise RuntimeError("operation not permitted when stream is capturing")

    cuda.refusing = place == "begin"
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture(nothing if place == "begin" else reads_on_the_host, nothing)
    assert not cuda.allocating and kept is not None
    graphs.capture(nothing, nothing)
    assert len(cuda.users) == 2 and not cuda.allocating


def test_a_pool_that_cannot_be_opened_is_opened_the_next_time(cuda):
    graphs = CudaGraphs(torch.device("cuda"))
    cuda.refusing = True
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture(nothing, nothing)
    graphs.capture(nothing, nothing)
    assert not cuda.allocating

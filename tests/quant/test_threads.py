"""Threads of the CPU kernels, compiled without these: who is spared, and failures."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
import torch

from fasteagle.quant import cpu_build

SOURCE = """
#include "%s"

#include <stdexcept>
#include <thread>

// Number of threads spared after a call with `size` threads that stood at barriers for some ms.
extern "C" int learn(bool restart, int size, double waited_ms, double whole_ms) {
  static Spared spared;
  static Clock::time_point now;
  if (restart) spared = Spared(), now = Clock::time_point(std::chrono::hours(1));
  const auto time = [](double ms) {
    return Clock::duration(std::chrono::nanoseconds(int64_t(ms * 1e6)));
  };
  now += time(whole_ms);
  spared.learn(size, time(waited_ms), time(whole_ms), now);
  return spared.threads();
}

// Sum of the ids of all threads; thread `thrower` fails before the barrier where the others wait.
extern "C" int sum_of_ids(int thrower) {
  std::atomic<int> sum{0};
  try {
    in_parallel([&](const Worker& me) {
      if (me.id == thrower) throw std::runtime_error("no room");
      sum += me.id;
      me.team.barrier();
    });
  } catch (const std::runtime_error&) {
    return -1;
  }
  return sum;
}

// Adds to each of `n` counts once in each round; thread `slow` sleeps at each part that it takes.
// Returns how many parts of the last round the threads with other ids have taken.
extern "C" int64_t count(int64_t n, int rounds, int slow, int32_t* counts) {
  std::atomic<int64_t> others{0};
  in_parallel([&](const Worker& me) {
    for (int round = 0; round < rounds; round++) {
      if (me.id == 0) others = 0;
      me.team.barrier();
      me.each(n, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) counts[i]++;
        if (me.id == slow) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (me.id != slow) others += end - begin;
      });
      me.team.barrier();
    }
  });
  return others;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The threads of the kernels, without the kernels."""
    folder = tmp_path_factory.mktemp("threads")
    source = folder / "threads.cpp"
    source.write_text(SOURCE % cpu_build.SOURCE.with_name("threads.h"))
    command = cpu_build.command(cpu_build.ISAS[-1], "unused", folder / "threads.so", source)
    subprocess.run(command, check=True)
    return ctypes.CDLL(folder / "threads.so")


@pytest.fixture(scope="module")
def spared(library):
    """Threads spared after each of some calls (threads, ms at barriers, ms in all)."""
    library.learn.argtypes = [ctypes.c_bool, ctypes.c_int, ctypes.c_double, ctypes.c_double]

    def run(calls: list[tuple[int, float, float]]) -> list[int]:
        return [library.learn(i == 0, *call) for i, call in enumerate(calls)]

    return run


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_failure_in_one_thread_reaches_the_caller(library, n):
    """An exception that left a parallel region would end the process, and others would wait."""
    threads = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        for thrower in range(n):
            assert library.sum_of_ids(thrower) == -1
        assert library.sum_of_ids(n) in {sum(range(size)) for size in range(1, n + 1)}
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("n", "n_threads"), [(0, 2), (1, 3), (2, 1), (2, 3), (7, 2), (48, 3), (1000, 2)]
)
def test_every_part_of_the_work_is_taken_once(library, n, n_threads):
    library.count.restype = ctypes.c_int64
    counts = (ctypes.c_int32 * max(1, n))()
    threads = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        library.count(ctypes.c_int64(n), 50, -1, counts)
    finally:
        torch.set_num_threads(threads)
    assert list(counts)[:n] == [50] * n


def test_a_slow_threads_work_is_taken_by_others(library):
    library.count.restype = ctypes.c_int64
    counts = (ctypes.c_int32 * 64)()
    assert library.count(ctypes.c_int64(64), 2, 1, counts) > 40
    assert list(counts) == [2] * 64


def test_a_thread_that_waits_its_turn_is_spared_and_tried_again(spared):
    calls = [(2, 0, 10)] * 10 + [(2, 8, 15)] * 2 + [(1, 0, 20)] * 200
    threads = spared(calls)
    assert threads[:11] == [0] * 11 and threads[11] == 1, "the second long wait"
    last = len(threads) - threads[::-1].index(1)  # calls until the thread is tried again
    assert 1000 < (last - 12) * 20 < 2000, "after a second or two"
    assert threads[-1] == 0


def test_waits_that_cost_less_than_a_thread_spare_none(spared):
    """A prompt's rows take 100 ms a call: each meets a wait of some ms."""
    assert set(spared([(2, 4, 100)] * 100)) == {0}
    assert set(spared([(2, 4, 10)] * 100)) == {0}, "two of three ms are still won"
    assert spared([(8, 4, 10)] * 2) == [0, 1], "one of eight threads is worth less than these"


def test_a_wait_in_a_short_call_says_nothing(spared):
    """Drafting is a tenth of a cycle: to be interrupted there is no reason to do it alone."""
    assert set(spared([(2, 0, 6), (2, 3, 3.5)] * 100)) == {0}
    assert spared([(2, 4, 6), (2, 4, 6)]) == [0, 1]


def test_more_than_one_thread_is_spared_where_waits_go_on(spared):
    assert spared([(8, 5, 10), (8, 5, 10), (7, 5, 10), (7, 5, 10)]) == [0, 1, 1, 2]

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

// Number of threads of a call by a thread for which two calls with long waits ended `seconds` ago.
extern "C" int threads_after_waits(double seconds) {
  using namespace std::chrono;
  int size = 0;
  std::thread([&] {
    const auto before = Clock::now() - milliseconds(int64_t(1000 * seconds));
    for (int i = 0; i < 2; i++)
      Spared::of_this_thread().learn(2, milliseconds(8), milliseconds(10), before);
    for (int i = 0; i < 2; i++)  // the first call learns that the waits are over
      in_parallel([&](const Worker& me) {
        if (me.id == 0) size = me.size;
      });
  }).join();
  return size;
}

// Returns after how many calls, in each of which one thread is late, a thread is spared; or `most`.
extern "C" int calls_until_spared(int most) {
  int calls = 0;
  std::thread([&] {
    while (calls < most && !Spared::of_this_thread().threads()) {
      calls++;
      in_parallel([&](const Worker& me) {
        if (me.id == 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        me.team.barrier();
      });
    }
  }).join();
  return calls;
}

// Milliseconds that count as waiting, where one of two threads is `late_us` behind the other.
extern "C" double waited_ms(int late_us) {
  Team team(2);
  std::atomic<bool> waits{false};
  std::thread other([&] {
    waits = true;
    team.barrier();
  });
  while (!waits) sched_yield();
  const auto end = Clock::now() + std::chrono::microseconds(late_us);
  while (Clock::now() < end) {
  }
  team.barrier();
  other.join();
  return std::chrono::duration<double, std::milli>(team.waited()).count();
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
    torch.set_num_threads(n)
    for thrower in range(n):
        assert library.sum_of_ids(thrower) == -1
    assert library.sum_of_ids(n) in {sum(range(size)) for size in range(1, n + 1)}


@pytest.mark.parametrize(
    ("n", "n_threads"), [(0, 2), (1, 3), (2, 1), (2, 3), (7, 2), (48, 3), (1000, 2)]
)
def test_every_part_of_the_work_is_taken_once(library, n, n_threads):
    check_parts(library, n, n_threads, rounds=50)


@pytest.mark.parametrize("n_threads", [64, 65, 80])
def test_every_part_is_taken_once_by_more_threads_than_share_work(library, n_threads):
    """From 65 threads on each takes what is its own."""
    check_parts(library, 200, n_threads, rounds=3)


def check_parts(library, n: int, n_threads: int, rounds: int) -> None:
    library.count.restype = ctypes.c_int64
    counts = (ctypes.c_int32 * max(1, n))()
    torch.set_num_threads(n_threads)
    library.count(ctypes.c_int64(n), rounds, -1, counts)
    assert list(counts)[:n] == [rounds] * n


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
    assert set(spared([(2, 5, 10)] * 100)) == {0}, "alone it would take as long"
    assert spared([(8, 4, 10)] * 2) == [0, 1], "one of eight threads is worth less than these"


def test_a_wait_in_a_short_call_says_nothing(spared):
    """Drafting is a tenth of a cycle: to be interrupted there is no reason to do it alone."""
    assert set(spared([(2, 0, 6), (2, 3, 3.5)] * 100)) == {0}
    assert spared([(2, 3, 3.5), (2, 4, 6)]) == [0, 0]
    assert spared([(2, 4, 6), (2, 4, 6)]) == [0, 1]


def test_more_than_one_thread_is_spared_where_waits_go_on(spared):
    assert spared([(8, 5, 10), (8, 5, 10), (7, 5, 10), (7, 5, 10)]) == [0, 1, 1, 2]


WAIT, CALM = (2, 8, 15), (2, 0, 100)


def test_waits_for_which_calm_calls_make_up_are_chance(spared):
    """Two thirds of a second with one thread instead of two cost more than both waits."""
    assert spared([WAIT, (2, 0, 0.9), WAIT])[-1] == 1, "1 ms more than one thread alone takes"
    assert set(spared([WAIT, (2, 0, 0.6), (2, 0, 0.6), WAIT])) == {0}
    assert spared([(2, 60, 80), *[(2, 0, 3)] * 13, WAIT])[-1] == 1
    assert set(spared([(2, 60, 80), *[(2, 0, 3)] * 14, WAIT])) == {0}


def test_a_single_wait_delays_the_next_try(spared):
    """A thread is tried again 1.2 s after the last wait."""
    threads = spared([WAIT, WAIT, *[CALM] * 10, WAIT, *[CALM] * 12])
    assert threads == [0] + [1] * 23 + [0]


def test_spared_threads_are_tried_again_one_by_one(spared):
    threads = spared([(8, 5, 10)] * 2 + [(7, 5, 10)] * 2 + [CALM] * 48)
    assert threads == [0, 1, 1, 2] + [2] * 23 + [1] * 24 + [0]


def test_the_time_until_a_thread_is_tried_again_has_a_limit_and_an_end(spared):
    """It doubles with each thread that is spared, up to 10 s, and is short after calm times."""
    many = [(64, 5, 10)] * 10
    threads = spared(many + [CALM] * 100)
    assert threads[9:] == [5] * 100 + [4]
    threads = spared([WAIT, WAIT] + [CALM] * 12 + [CALM] * 12 + [WAIT, WAIT] + [CALM] * 12)
    assert threads[-14:] == [0] + [1] * 12 + [0]


def test_a_call_leaves_spared_threads_out_until_they_are_tried_again(library):
    library.threads_after_waits.argtypes = [ctypes.c_double]
    assert library.threads_after_waits(0) == 1
    assert library.threads_after_waits(2) == 2


def test_calls_in_which_a_thread_is_late_spare_one(library):
    """Two suffice, unless the threads start at different times."""
    assert library.calls_until_spared(10) < 10


def test_only_long_waits_count_and_count_for_those_who_wait(library):
    """The best of some tries: another program may delay a thread."""
    library.waited_ms.restype = ctypes.c_double
    assert not all(library.waited_ms(500) for _ in range(100))
    waits = (library.waited_ms(30_000) for _ in range(20))
    assert any(24 < waited < 36 for waited in waits)

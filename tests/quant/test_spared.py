"""The rule by which the CPU kernels do without a thread, on its own: cut out of the source."""

from __future__ import annotations

import re
import subprocess

import pytest

from fasteagle.quant import cpu_build

PROGRAM = """
#include <algorithm>
#include <chrono>
#include <cstdio>
%s
// Reads calls "size waited_ms whole_ms" and prints the threads spared after each.
int main() {
  Spared spared;
  Clock::time_point now = Clock::time_point(std::chrono::hours(1));
  int size;
  double waited, whole;
  const auto time = [](double ms) {
    return Clock::duration(std::chrono::nanoseconds(int64_t(ms * 1e6)));
  };
  while (std::scanf("%%d %%lf %%lf", &size, &waited, &whole) == 3) {
    now += time(whole);
    spared.learn(size, time(waited), time(whole), now);
    std::printf("%%d\\n", spared.threads());
  }
}
"""


@pytest.fixture(scope="module")
def spared(tmp_path_factory):
    """Threads spared after each of some calls (threads, ms at barriers, ms in all)."""
    source = cpu_build.SOURCE.with_name("threads.h").read_text()
    rule = re.search(r"using Clock = .*?\n};\n", source, re.DOTALL)
    assert rule, "the class has moved"
    folder = tmp_path_factory.mktemp("spared")
    (folder / "rule.cpp").write_text(PROGRAM % rule[0])
    command = [cpu_build.compiler(), "-std=c++20", folder / "rule.cpp", "-o", folder / "rule"]
    subprocess.run(command, check=True)

    def run(calls: list[tuple[int, float, float]]) -> list[int]:
        text = "\n".join(" ".join(str(number) for number in call) for call in calls)
        done = subprocess.run([folder / "rule"], input=text, capture_output=True, text=True)
        return [int(line) for line in done.stdout.split()]

    return run


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

// Threads of one call: a team with a spinning barrier, and the scheduler that chooses the number of
// threads.
//
// There is no reference: results depend neither on the number of threads nor on their timing.

#pragma once

#include <ATen/Parallel.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>

#include "vec.h"

namespace {

using Clock = std::chrono::steady_clock;

// Number of threads to leave unused. If other programs run on the same cores, a thread that is not
// scheduled keeps all others waiting, for many times the length of a pass: one thread less is then
// faster.
class Spared {
 public:
  static constexpr auto LONG = std::chrono::microseconds(1500);  // at a barrier

  static Spared& of_this_thread() {
    thread_local Spared spared;
    return spared;
  }

  int threads() const { return spared_; }

  // Learns from a call with `size` threads that ended at `now`: in the time `whole` they waited at
  // barriers for `waited`, counting waits longer than `LONG`. One thread less takes a `size`th
  // longer, so waits must be longer than that: a prompt's rows take so long that each call has some
  // wait. They must also come again before calls without waits have made up for them, and not in a
  // short call, such as drafting, which becomes a long one by chance.
  void learn(int size, Clock::duration waited, Clock::duration whole, Clock::time_point now) {
    const bool late = waited * size > whole, again = lost_ > Clock::duration::zero();
    if (late && whole < SHORT) return;
    lost_ = std::max(Clock::duration::zero(), lost_ + waited * size - whole);
    if (late) {
      since_ = now;
      if (!again) return;
      lost_ = Clock::duration::zero();
      if (size > 1) spared_++;
      patience_ = std::min(2 * patience_, LONGEST);
      return;
    }
    const Clock::duration calm = now - since_;
    if (calm < patience_) return;
    since_ = now;
    if (spared_ == 0) {
      patience_ = PERIOD;
    } else {
      spared_--;
    }
  }

 private:
  static constexpr Clock::duration SHORT = std::chrono::milliseconds(5);
  static constexpr Clock::duration PERIOD = std::chrono::milliseconds(600);
  static constexpr Clock::duration LONGEST = std::chrono::seconds(10);
  int spared_ = 0;
  Clock::duration lost_{};   // by waits, beyond what one thread less would have cost
  Clock::time_point since_;  // the last call that waited, or the last change
  Clock::duration patience_ = PERIOD;
};

// Exception at a barrier that another thread will never reach.
struct Abandoned {};

// The threads of one call. All of them come to every barrier, unless one fails.
class Team {
 public:
  static constexpr int MAX_SHARES = 64;  // threads whose work others may take

  explicit Team(int size) : size_(size) {}

  // Returns the first of the next `step` items of thread `id`, counted from 0 after each barrier.
  int64_t take(int id, int64_t step) {
    return taken_[id].count.fetch_add(step, std::memory_order_relaxed);
  }

  // Returns the mean total time at barriers of the threads that waited there.
  Clock::duration waited() const {
    return Clock::duration(waited_.load(std::memory_order_relaxed)) / std::max(1, size_ - 1);
  }

  void barrier() {
    if (size_ == 1) return;
    const int turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      for (int id = 0; id < std::min(size_, MAX_SHARES); id++)
        taken_[id].count.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    // Longer than any phase of another thread, unless that thread is not scheduled.
    const auto is_over = [&] { return turn_.load(std::memory_order_acquire) != turn; };
    for (int spins = 0; spins < 4000; spins++) {
      if (is_over()) return;
      relax();
    }
    const auto begin = Clock::now();
    while (!is_over()) {
      if (failed_.load(std::memory_order_acquire)) throw Abandoned();
      sched_yield();
    }
    const Clock::duration waited = Clock::now() - begin;
    if (waited > Spared::LONG) waited_.fetch_add(waited.count(), std::memory_order_relaxed);
  }

  // Runs `work`, and stores the first exception of any thread for `rethrow`: an exception that left
  // a parallel region would end the process.
  template <class F>
  void run(F work) noexcept {
    try {
      work();
    } catch (const Abandoned&) {
    } catch (...) {
      if (!claimed_.exchange(true, std::memory_order_acq_rel)) failure_ = std::current_exception();
      failed_.store(true, std::memory_order_release);
    }
  }

  // Rethrows the exception of a thread; called when all threads are done.
  void rethrow() const {
    if (failure_) std::rethrow_exception(failure_);
  }

 private:
  static void relax() {
#if FASTEAGLE_ISA > 0
    _mm_pause();
#endif
  }

  struct alignas(128) Taken {  // CPUs fetch lines in pairs
    std::atomic<int64_t> count{0};
  };

  const int size_;
  std::exception_ptr failure_;
  Taken taken_[MAX_SHARES];
  std::atomic<bool> claimed_{false}, failed_{false};
  std::atomic<Clock::rep> waited_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> turn_{0};
};

// Parts of a pass, which the first thread times in a library built with -DFASTEAGLE_PHASES.
enum class Phase {
  norms, qkv, rope, attention, combine, out, router, gate_up, down, lm_head, waiting
};
constexpr const char* PHASES =
    "norms qkv rope attention combine out router gate_up down lm_head waiting";

struct PhaseTimes {
  Clock::duration of[int(Phase::waiting) + 1] = {};
  Clock::time_point last;

  static PhaseTimes& of_process() {
    static PhaseTimes times;
    return times;
  }
  void end(Phase phase) {
    const Clock::time_point now = Clock::now();
    of[int(phase)] += now - last;
    last = now;
  }
};

struct Worker {
  Team& team;
  int id, size;

  void begin() const {
#ifdef FASTEAGLE_PHASES
    if (id == 0) PhaseTimes::of_process().last = Clock::now();
#endif
  }

  // Ends a part of the work, and waits until all threads have ended it.
  void end(Phase phase) const {
#ifdef FASTEAGLE_PHASES
    if (id == 0) PhaseTimes::of_process().end(phase);
    team.barrier();
    if (id == 0) PhaseTimes::of_process().end(Phase::waiting);
#else
    team.barrier();
#endif
  }

  struct Range {
    int64_t begin, end;
  };
  Range share(int64_t n) const { return share_of(id, n); }

  // Calls `f(begin, end)` for parts of 0 .. n - 1, each of which one thread takes: first those of
  // its own share, in order, then what others have left of theirs, since threads are not equally
  // fast. Between two barriers this is called once.
  template <class F>
  void each(int64_t n, F f) const {
    if (size == 1 || size > Team::MAX_SHARES) return f(share(n).begin, share(n).end);
    const int64_t step = std::max<int64_t>(1, n / (PARTS * size));
    for (int turn = 0; turn < size; turn++) {
      const int from = (id + turn) % size;
      const auto [begin, end] = share_of(from, n);
      for (int64_t at; (at = begin + team.take(from, step)) < end;)
        f(at, std::min(at + step, end));
    }
  }

 private:
  static constexpr int64_t PARTS = 16;  // of a share: taking one costs a few nanoseconds

  Range share_of(int which, int64_t n) const {
    return {n * which / size, n * (which + 1) / size};
  }
};

// Runs `work` on all threads but the spared ones, and rethrows an exception of them. Results do not
// depend on the number of threads, which is torch's: OpenMP's own number is that of all cores in
// each new thread of a process.
template <class F>
void in_parallel(F work) {
  Spared& spared = Spared::of_this_thread();
  const int all = omp_in_parallel() ? 1 : at::get_num_threads();
  const int wanted = std::max(1, all - spared.threads());
  if (wanted == 1) {
    Team team(1);
    work(Worker{team, 0, 1});
    if (all > 1) spared.learn(1, {}, {}, Clock::now());
    return;
  }
  std::optional<Team> team;
  const auto begin = Clock::now();
#pragma omp parallel num_threads(wanted)
  {
#pragma omp single
    team.emplace(omp_get_num_threads());
    team->run([&] { work(Worker{*team, omp_get_thread_num(), omp_get_num_threads()}); });
  }
  const auto end = Clock::now();
  team->rethrow();
  spared.learn(wanted, team->waited(), end - begin, end);
}

}  // namespace

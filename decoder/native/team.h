// A team of threads that executes a task together, in place of OpenMP's. A task is a few consecutive loops, each
// divided into pieces that any thread may execute: a row's result does not depend on the thread.
//
// The calling thread never waits for a thread, only for a piece that another thread has begun. Helpers take pieces
// while they run; pieces that a helper has not begun, because another program uses its core, are executed by the
// others. OpenMP's threads, as in most programs, meet at a barrier after every loop: two programs with two threads each
// on two cores then slow each other twenty times, since a running thread waits for one without a core.
//
// Every calling thread has a separate team, which ends with it. The number of threads is OpenMP's setting for the
// calling thread, so that PyTorch's functions and variables for it apply.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <pthread.h>
#include <sched.h>
#include <thread>
#include <vector>

extern "C" int omp_get_max_threads();

namespace paceline [[gnu::visibility("hidden")]] {

// A short pause of a thread that polls a number.
inline void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// body(begin, end, first) for pieces that cover the numbers below `count` once, of `unit` numbers or a multiple of it.
// first: it is this thread's first piece of the loop.
template <class Body>
struct Loop {
  int64_t count;
  Body body;
  int64_t unit = 1;
};
template <class Body>
Loop(int64_t, Body) -> Loop<Body>;
template <class Body>
Loop(int64_t, Body, int64_t) -> Loop<Body>;

class Team {
 public:
  // Runs loops one after the other, on every available thread of the team if the work is large enough; otherwise on
  // this thread only.
  template <class... Bodies>
  static void run(bool worth, const Loop<Bodies>&... loops) {
    static_assert(sizeof...(loops) <= LOOPS);
    const int threads = worth ? most() : 1;
    if (threads == 1) return (all(loops), ...);
    const Part parts[] = {part(loops, threads)...};
    own().together(threads, parts, sizeof...(loops));
  }

  // Number of threads that this one may use.
  static int most() { return std::min(omp_get_max_threads(), MOST); }
  static constexpr int MOST = 256;

  ~Team() {
    announce(LAST);
    resting_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

 private:
  Team() = default;

  typedef std::chrono::steady_clock Clock;
  static constexpr int LOOPS = 5;  // maximum per task
  static constexpr int PIECES = 4;  // for each thread: fine enough to help out, coarse enough to read weights in a stream
  static constexpr uint64_t LAST = 0;  // no more work
  static constexpr std::chrono::microseconds SPIN{50};  // between two loops of threads that all run is less
  static constexpr std::chrono::microseconds LATE{200};  // running threads end a loop within less
  static constexpr std::chrono::milliseconds AWAKE{5};  // the host needs less between two graphs
  static constexpr std::chrono::milliseconds WAKING{1};  // minimum time between two wake-ups of sleeping threads
  static constexpr std::chrono::milliseconds REST{10}, LONGEST_REST{160};  // of a helper that delayed a loop

  // A loop, with a type-erased body.
  struct Part {
    void (*run)(const void* loop, int64_t piece, int64_t pieces, bool first);
    const void* loop;
    int64_t pieces;
  };
  template <class Body>
  static void all(const Loop<Body>& loop) {
    if (loop.count > 0) loop.body(0, loop.count, true);
  }
  template <class Body>
  static Part part(const Loop<Body>& loop, int threads) {
    const auto run = [](const void* one, int64_t piece, int64_t pieces, bool first) {
      const Loop<Body>& loop = *(const Loop<Body>*)one;
      const int64_t units = (loop.count + loop.unit - 1) / loop.unit;
      const int64_t begin = units * piece / pieces * loop.unit, end = units * (piece + 1) / pieces * loop.unit;
      loop.body(begin, std::min(end, loop.count), first);
    };
    return {run, &loop, std::min<int64_t>((loop.count + loop.unit - 1) / loop.unit, threads * PIECES)};
  }

  // The team of a thread. A forked process has none of its parent's threads: it makes a new team, and never destroys
  // the old one, which would wait for them.
  struct Owner {
    Team* team = nullptr;
    int born = 0;
    ~Owner() {
      if (born == forks()) delete team;
    }
  };
  static std::atomic<int>& forks() {
    static std::atomic<int> count{0};
    static const int watched = pthread_atfork(nullptr, nullptr, [] { count++; });
    (void)watched;
    return count;
  }
  static Team& own() {
    static thread_local Owner owner;
    if (!owner.team || owner.born != forks()) owner.born = forks(), owner.team = new Team;
    return *owner.team;
  }

  // Polls until done(), but no longer than `most`. -> whether it is done
  template <class Done>
  static bool spin(Done done, Clock::duration most) {
    if (done()) return true;
    const Clock::time_point begin = Clock::now();
    do {
      for (int look = 0; look < 16; look++, rest())
        if (done()) return true;
    } while (Clock::now() - begin < most);
    return false;
  }

  // The same for a thread that yields its core between two polls, and stops when another thread takes it.
  template <class Done>
  static bool look(Done done, Clock::duration most) {
    if (spin(done, SPIN)) return true;
    const Clock::time_point begin = Clock::now();
    for (Clock::time_point before = begin, now; before - begin < most; before = now) {
      sched_yield();
      if (spin(done, Clock::duration{})) return true;
      now = Clock::now();
      if (now - before > LATE) return false;
    }
    return false;
  }

  // ------------------------------------------------------------------------------------------------- who does what --

  // Numbers that every task sets again carry its name, so that a late helper, which arrives during another task, finds
  // nothing to take and has changed nothing.
  static constexpr int NAMED = 24;  // bits below the name
  static constexpr int HALF = NAMED / 2;
  static_assert(MOST * PIECES < 1 << HALF);
  static uint64_t name(uint64_t word) { return word >> NAMED; }
  static bool over(uint64_t left, uint64_t work) { return name(left) != work || !(left & ((1 << NAMED) - 1)); }

  // Pieces of a loop that are reserved for a thread, which takes its own before it helps others, so that it has the
  // same ones every time: from `next` up to `end`.
  struct alignas(64) Kept {
    std::atomic<uint64_t> range[LOOPS];  // name, end, next
  };

  // Executes pieces of loop l until all are taken. -> their number
  int take(int l, int number, int threads, uint64_t work) {
    int did = 0;
    for (int i = 0; i < threads; i++) {
      std::atomic<uint64_t>& range = kept_[(number + i) % threads].range[l];
      uint64_t now = range.load(std::memory_order_acquire);
      while (name(now) == work) {
        const int64_t next = now & ((1 << HALF) - 1), end = now >> HALF & ((1 << HALF) - 1);
        if (next == end) break;
        if (!range.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) continue;
        // From now until `left_` is updated, the calling thread waits for this one.
        const Part& part = parts_[l];
        part.run(part.loop, next, part.pieces, did++ == 0);
        now = range.load(std::memory_order_acquire);
      }
    }
    return did;
  }

  void together(int threads, const Part* parts, int loops) {
    const uint64_t before = call_.load(std::memory_order_relaxed), work = name(before) + 1;
    while ((int)workers_.size() < threads - 1)
      workers_.emplace_back(&Team::serve, this, (int)workers_.size() + 1, before);
    for (int l = 0; l < loops; l++) {
      parts_[l] = parts[l];
      const int64_t pieces = parts[l].pieces;
      for (int64_t i = 0; i < threads; i++)
        kept_[i].range[l].store(
            work << NAMED | (uint64_t)(pieces * (i + 1) / threads) << HALF | (uint64_t)(pieces * i / threads),
            std::memory_order_relaxed);
      left_[l].store(work << NAMED | (uint64_t)pieces, std::memory_order_relaxed);
    }
    announce(work << NAMED | (uint64_t)loops << HALF | (uint64_t)threads);
    for (int l = 0; l < loops; l++) {
      const Clock::time_point begin = Clock::now();
      const int did = take(l, 0, threads, work);
      if (left_[l].fetch_sub(did) - did != work << NAMED) wait(l, work, Clock::now() - begin);
    }
  }

  // Waits until a loop is done after this thread has executed pieces of it.
  void wait(int l, uint64_t work, Clock::duration time) {
    const auto done = [&] { return over(left_[l].load(), work); };
    const Clock::time_point late = Clock::now() + LATE + 2 * time;
    if (spin(done, LATE)) return;
    std::unique_lock<std::mutex> guard(mutex_);
    waits_ = true;
    if (!done_.wait_until(guard, late, done)) {
      late_ = work << NAMED | (uint64_t)l;
      done_.wait(guard, done);
    }
    waits_ = false;
  }

  // -> whether the wait was too long
  bool help(int number, uint64_t call) {
    const int loops = call >> HALF & ((1 << HALF) - 1), threads = call & ((1 << HALF) - 1);
    const uint64_t work = name(call);
    if (number >= threads) return false;
    for (int l = 0; l < loops; l++) {
      if (const int did = take(l, number, threads, work)) {
        if (left_[l].fetch_sub(did) - did == work << NAMED && waits_) {
          const std::lock_guard<std::mutex> guard(mutex_);
          done_.notify_one();
        }
        if (late_ == (work << NAMED | (uint64_t)l)) return true;
      }
      if (l + 1 == loops || !look([&] { return over(left_[l].load(std::memory_order_acquire), work); }, AWAKE)) break;
      if (call_.load(std::memory_order_relaxed) != call) break;
    }
    return false;
  }

  // ------------------------------------------------------------------------------------------------------- helpers --

  // Announces work to the threads, and at intervals also to sleeping ones: they count themselves before they check a
  // last time. A woken thread starts on an idle core that Linux finds.
  void announce(uint64_t call) {
    call_.store(call);
    if (!asleep_.load()) return;
    const Clock::time_point now = Clock::now();
    if (call != LAST && now - woke_ < WAKING) return;
    woke_ = now;
    const std::lock_guard<std::mutex> guard(mutex_);
    called_.notify_all();
  }

  // Loop of thread `number` until the team ends; `seen` is the call before its first.
  void serve(int number, uint64_t seen) {
    Clock::duration pause = REST;
    Clock::time_point rested{};
    const auto called = [&] { return call_.load() != seen; };
    while (true) {
      if (!look(called, AWAKE)) {
        std::unique_lock<std::mutex> guard(mutex_);
        asleep_++;
        called_.wait(guard, called);
        asleep_--;
      }
      seen = call_.load();
      if (seen == LAST) return;
      if (!help(number, seen)) continue;
      // Another program uses its core, so it would delay every loop.
      pause = Clock::now() - rested < 4 * pause ? std::min<Clock::duration>(2 * pause, LONGEST_REST) : REST;
      std::unique_lock<std::mutex> guard(mutex_);
      resting_.wait_for(guard, pause, [&] { return call_.load() == LAST; });
      rested = Clock::now();
    }
  }

  // The name of the task, its number of loops, and its number of threads.
  alignas(64) std::atomic<uint64_t> call_{1ull << NAMED};
  Part parts_[LOOPS] = {};
  Clock::time_point woke_{};
  alignas(64) std::atomic<uint64_t> left_[LOOPS] = {};  // name, pieces of a loop that are not done
  Kept kept_[MOST] = {};
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<bool> waits_{false};    // the calling thread sleeps
  std::atomic<uint64_t> late_{LAST};  // task and loop of the last wait that was too long
  std::mutex mutex_;
  std::condition_variable called_, done_, resting_;
  std::vector<std::thread> workers_;
};

// body(row) for all rows.
template <class Body>
void each_row(bool worth, int64_t rows, const Body& body) {
  Team::run(worth, Loop{rows, [&](int64_t begin, int64_t end, bool) {
    for (int64_t row = begin; row < end; row++) body(row);
  }});
}

}  // namespace paceline

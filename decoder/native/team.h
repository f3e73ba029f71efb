// A team of threads that does a piece of work together, in place of OpenMP's. GNU's library waits at a barrier by spinning
// for milliseconds, also while the thread that it waits for is not running because another program has its core; two
// programs with two threads each on two cores so slow each other twenty times. Here a thread that has waited for longer
// than threads need that all run lets others have its core between two looks. Where nobody wants the core that costs
// nothing, and no thread has to be woken when there is work again, which takes longer than many a piece of work.
//
// Threads that never sleep look busy to Linux wherever they are, and two of them that came to share a core may share it
// for long beside an idle one. So a thread that waits for one that was seen on its own core goes to another core.
//
// Every thread that asks for work has a team of its own, which ends with it. How many threads take part is OpenMP's
// setting for the thread that asks, so that PyTorch's functions and variables for it hold here too.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <thread>
#include <vector>

namespace paceline [[gnu::visibility("hidden")]] {

// A short rest of a thread that looks at the same number again and again.
inline void rest() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  // One thread's part in a piece of work.
  struct Member {
    Team* team;
    int number, threads;

    // All threads that take part wait here for each other.
    void barrier() const {
      if (threads == 1) return;
      team->seen_on(number);
      const uint32_t phase = team->phase_.load(std::memory_order_relaxed);
      if (team->arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < threads) {
        await(
            [&] { return team->phase_.load(std::memory_order_acquire) != phase; },
            [&] { team->part(number, threads); });
      } else {
        team->arrived_.store(0, std::memory_order_relaxed);
        team->phase_.store(phase + 1, std::memory_order_release);
      }
    }
  };

  // Runs body(member) on every thread of the team, if the work is worth that; otherwise on this thread alone.
  template <class Body>
  static void run(bool worth, const Body& body) {
    const int threads = worth ? most() : 1;
    if (threads == 1) return body(Member{nullptr, 0, 1});
    own().together(threads, &body, [](const void* work, const Member& me) { (*(const Body*)work)(me); });
  }

  // How many threads this one may use.
  static int most() { return std::min(omp_get_max_threads(), MOST); }
  static constexpr int MOST = 256;

  ~Team() {
    announce(LAST);
    for (std::thread& worker : workers_) worker.join();
  }

 private:
  Team() = default;

  typedef std::chrono::steady_clock Clock;
  typedef void (*Work)(const void*, const Member&);
  static constexpr uint64_t LAST = 0;  // there is no more work
  static constexpr std::chrono::microseconds SPIN{50};  // a barrier of threads that all run takes less
  static constexpr std::chrono::milliseconds AWAKE{5};  // what the host does between two graphs takes less
  static constexpr std::chrono::milliseconds STAY{10};  // on a core, at least: others may have the one that is left

  // The team of a thread. A process that was forked has none of the threads of the one before: it makes a new team, and
  // leaves the old one as it is, which would wait for them at its end.
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

  // Waits until done(), but no longer than `most`. Whether it is done. `late` is called where threads that all run would
  // have come.
  template <class Done, class Late>
  static bool await(Done done, Late late, Clock::duration most = Clock::duration::max()) {
    if (done()) return true;
    const Clock::time_point begin = Clock::now();
    for (Clock::duration waited{}; waited < most; waited = Clock::now() - begin) {
      if (waited > SPIN) late(), sched_yield();
      for (int look = 0; look < 16; look++, rest())
        if (done()) return true;
    }
    return false;
  }

  void together(int threads, const void* body, Work work) {
    const uint64_t before = call_.load(std::memory_order_relaxed);
    while ((int)workers_.size() < threads - 1)
      workers_.emplace_back(&Team::serve, this, (int)workers_.size() + 1, before);
    body_ = body, work_ = work;
    finished_.store(0, std::memory_order_relaxed);
    announce(((before >> COUNTED) + 1) << COUNTED | threads);
    seen_on(0);
    work(body, Member{this, 0, threads});
    await([&] { return finished_.load(std::memory_order_acquire) == threads - 1; }, [&] { part(0, threads); });
  }

#ifdef __linux__
  // Notes on which core a thread is.
  void seen_on(int number) { cores_[number].store(sched_getcpu(), std::memory_order_relaxed); }

  // Leaves the core of this thread, if another thread of the work was seen there. It may come back.
  void part(int number, int threads) {
    static thread_local Clock::time_point parted{};
    const int here = sched_getcpu();
    bool shared = false;
    for (int other = 0; other < threads; other++)
      shared |= other != number && cores_[other].load(std::memory_order_relaxed) == here;
    if (!shared || Clock::now() - parted < STAY) return;
    parted = Clock::now();
    cpu_set_t may;
    if (sched_getaffinity(0, sizeof may, &may) || CPU_COUNT(&may) < 2 || !CPU_ISSET(here, &may)) return;
    cpu_set_t elsewhere = may;
    CPU_CLR(here, &elsewhere);
    if (sched_setaffinity(0, sizeof elsewhere, &elsewhere)) return;
    if (sched_setaffinity(0, sizeof may, &may)) {  // the process has other cores by now: any of those
      std::memset(&may, 0xff, sizeof may);
      sched_setaffinity(0, sizeof may, &may);
    }
    seen_on(number);
  }
  std::atomic<int> cores_[MOST] = {};
#else
  void seen_on(int) {}
  void part(int, int) {}
#endif

  // Tells the threads what there is to do, also those that sleep: they count themselves before they look a last time.
  void announce(uint64_t call) {
    call_.store(call);
    if (!asleep_.load()) return;
    const std::lock_guard<std::mutex> guard(mutex_);
    called_.notify_all();
  }

  // What thread `number` does until the team ends; `seen` is the call before its first.
  void serve(int number, uint64_t seen) {
    const auto called = [&] { return call_.load() != seen; };
    while (true) {
      if (!await(called, [] {}, AWAKE)) {
        std::unique_lock<std::mutex> guard(mutex_);
        asleep_++;
        called_.wait(guard, called);
        asleep_--;
      }
      seen = call_.load();
      if (seen == LAST) return;
      const int threads = seen & ((1 << COUNTED) - 1);
      if (number >= threads) continue;
      seen_on(number);
      work_(body_, Member{this, number, threads});
      finished_.fetch_add(1, std::memory_order_release);
    }
  }

  // A number that grows and, in the lowest bits, how many threads take part: whoever does not may see a call late, when
  // the next one has changed all else.
  static constexpr int COUNTED = 16;
  alignas(64) std::atomic<uint64_t> call_{1 << COUNTED};
  const void* body_ = nullptr;
  Work work_ = nullptr;
  alignas(64) std::atomic<int> arrived_{0}, finished_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  std::atomic<int> asleep_{0};
  std::mutex mutex_;
  std::condition_variable called_;
  std::vector<std::thread> workers_;
};

}  // namespace paceline

// Every item exactly once, for any number of threads and any grain; exceptions arrive; many short loops in a row.
#include <atomic>
#include <stdexcept>

#include "check.h"

int main() {
  for (int threads : {1, 2, 3, 5}) {
    rocket::ThreadPool pool(threads);
    check::expect(pool.threads() == threads, "thread count");
    for (int round = 0; round < 3000; ++round) {
      const int64_t items = check::uniform_int(0, 200), grain = check::uniform_int(1, 40);
      std::vector<std::atomic<int>> seen(items);
      std::atomic<bool> sane{true};
      pool.loop(items, grain, [&](int64_t begin, int64_t end, int thread) {
        if (thread < 0 || thread >= threads || begin >= end) sane = false;
        for (int64_t i = begin; i < end; ++i) seen[i].fetch_add(1);
      });
      bool once = sane;
      for (auto& count : seen) once = once && count == 1;
      if (!check::expect(
              once, "each item once: " + std::to_string(items) + " items, grain " + std::to_string(grain)))
        break;
    }
    bool thrown = false;
    try {
      pool.loop(100, 1, [&](int64_t, int64_t end, int) {
        if (end > 50) throw std::runtime_error("boom");
      });
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    check::expect(thrown, "an exception of a body is thrown by loop()");
    int64_t sum = 0;
    pool.loop(1, 1, [&](int64_t, int64_t, int) { sum = 7; });
    check::expect(sum == 7, "the pool works after an exception");
  }
  check::expect(rocket::ThreadPool::available_cpus() >= 1, "at least one CPU");
  return check::finish("thread_pool");
}

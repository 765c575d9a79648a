// Threads that share a piece of work, such as one matrix product of the decoder or one kernel of training.

#pragma once
#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace regard {

// Each thread takes the next part of the work, so the one that calls never waits for a helper that does not run, only
// for parts in work. Helpers wait actively for a moment, as the next work is seldom far, and then sleep. Creating a
// thread, or waking one that sleeps, takes longer than many a kernel.
class Team {
 public:
  explicit Team(int size) : size_(size) {}
  ~Team() {
    stop_ = true;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    for (auto& thread : threads_) thread.join();
  }
  int size() const { return size_; }

  // Call task(part) for each part, in this thread and the helpers. Only one thread may call it at a time.
  template <class Task>
  void run(int parts, const Task& task) {
    while ((int)threads_.size() < size_ - 1) threads_.emplace_back([this] { help(); });
    context_ = &task;
    call_ = [](const void* context, int part) { (*(const Task*)context)(part); };
    done_.store(0, std::memory_order_relaxed);
    const uint64_t first = ++generation_ << 32;
    parts_.store(parts, std::memory_order_relaxed);
    next_.store(first);
    if (sleeping_.load()) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    work(first);
    for (int spins = 0; done_.load(std::memory_order_acquire) < parts; ++spins) pause(spins);
  }

 private:
  static constexpr int kPauses = 2000, kYields = 200;

  static void pause(int spins) {
    if (spins < kPauses)
      __builtin_ia32_pause();
    else
      std::this_thread::yield();
  }
  // Take parts of this generation until none is left.
  void work(uint64_t generation) {
    uint64_t next = next_.load(std::memory_order_acquire);
    while (next >> 32 == generation >> 32 && (int)(uint32_t)next < parts_.load(std::memory_order_relaxed)) {
      if (!next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) continue;
      call_(context_, (int)(uint32_t)next);  // valid, because the generation ends only when this part is done
      done_.fetch_add(1, std::memory_order_acq_rel);
      next = next_.load(std::memory_order_acquire);
    }
  }
  void help() {
    uint64_t seen = 0;
    for (int spins = 0; !stop_; ++spins) {
      const uint64_t next = next_.load(std::memory_order_acquire);
      if (next >> 32 != seen) {
        seen = next >> 32;
        work(next);
        spins = 0;
      } else if (spins < kPauses + kYields) {
        pause(spins);
      } else {
        sleep(seen);
        spins = 0;
      }
    }
  }
  // Until there is new work.
  void sleep(uint64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    ++sleeping_;  // before next_ is read: run() stores next_ before it reads sleeping_, so one sees the other
    wake_.wait(lock, [&] { return stop_ || next_.load() >> 32 != seen; });
    --sleeping_;
  }

  const int size_;
  std::vector<std::thread> threads_;
  uint64_t generation_ = 0;
  const void* context_ = nullptr;
  void (*call_)(const void*, int) = nullptr;
  std::atomic<int> parts_{0}, sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  alignas(64) std::atomic<uint64_t> next_{0};
  alignas(64) std::atomic<int> done_{0};
};

}  // namespace regard

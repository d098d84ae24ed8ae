// A persistent pool of threads. A job is a number of chunks, taken one after another by whoever is free; the
// caller works too and returns when all chunks are done. A worker that the system holds back delays nobody
// except by the chunk it has begun. Idle threads spin for some microseconds, then sleep.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace kv {

class Threads {
 public:
  static constexpr int kMostCpus = 1024;  // as many as a cpu_set_t holds
  using Work = void (*)(void* context, int chunk, int worker);

  // `count` threads in all, the caller among them: 1 starts none. Thread i stays on CPU cpus[i % cpus.size()];
  // with no `cpus` the system places them.
  explicit Threads(int count, std::vector<int> cpus = {});
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return static_cast<int>(threads_.size()) + 1; }
  // Brings the calling thread to its CPU, as thread 0.
  void settle_caller();
  // From one thread at a time.
  void run(int chunks, Work work, void* context);

 private:
  void serve(int worker);
  void pin(int worker) const;
  void take_chunks(std::uint32_t job, int worker);
  std::uint32_t await_job(std::uint32_t seen);

  // The job's number in the high half, the next chunk in the low. Odd numbers: a job is being described.
  alignas(64) std::atomic<std::uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> chunks_{0};
  std::atomic<Work> work_{nullptr};
  std::atomic<void*> context_{nullptr};
  alignas(64) std::atomic<std::uint32_t> job_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> ending_{false};
  std::vector<int> cpus_;
  std::thread::id settled_;
  std::vector<std::thread> threads_;
};

}  // namespace kv

#include "threads.h"

#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kv {
namespace {

constexpr int kSpins = 600;  // about 10 to 30 µs: longer than a gap between two products, shorter than a time slice

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

std::uint64_t ticket_of(std::uint32_t job, std::uint32_t chunk) { return std::uint64_t{job} << 32 | chunk; }

}  // namespace

Threads::Threads(int count, std::vector<int> cpus) : cpus_(std::move(cpus)) {
  threads_.reserve(static_cast<std::size_t>(count - 1));
  for (int worker = 1; worker < count; ++worker) threads_.emplace_back(&Threads::serve, this, worker);
}

Threads::~Threads() {
  ending_.store(true);
  job_.fetch_add(2);
  job_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Threads::pin([[maybe_unused]] int worker) const {
#if defined(__linux__)
  if (cpus_.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<unsigned>(cpus_[static_cast<std::size_t>(worker) % cpus_.size()]), &set);
  // A CPU that was taken away since is no reason to stop: the system places the thread then.
  sched_setaffinity(0, sizeof set, &set);
#endif
}

void Threads::settle_caller() {
  if (cpus_.empty() || settled_ == std::this_thread::get_id()) return;
  settled_ = std::this_thread::get_id();
  pin(0);
}

void Threads::run(int chunks, Work work, void* context) {
  // Closed first: a late worker of the last job finds another number and takes nothing.
  const std::uint32_t job = job_.load(std::memory_order_relaxed) + 2;
  ticket_.store(ticket_of(job - 1, 0));
  chunks_.store(chunks, std::memory_order_release);
  work_.store(work, std::memory_order_release);
  context_.store(context, std::memory_order_release);
  done_.store(0, std::memory_order_relaxed);
  ticket_.store(ticket_of(job, 0));
  job_.store(job);
  if (sleepers_.load() > 0) job_.notify_all();

  take_chunks(job, 0);
  for (int spin = 0; done_.load(std::memory_order_acquire) < chunks; ++spin) {
    if (spin < kSpins) {
      pause();
      continue;
    }
    caller_sleeps_.store(true);
    for (int done = done_.load(); done < chunks; done = done_.load()) done_.wait(done);
    caller_sleeps_.store(false);
  }
}

void Threads::take_chunks(std::uint32_t job, int worker) {
  std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
  const int chunks = chunks_.load(std::memory_order_acquire);
  const Work work = work_.load(std::memory_order_acquire);
  void* const context = context_.load(std::memory_order_acquire);
  while (static_cast<std::uint32_t>(ticket >> 32) == job) {
    const auto chunk = static_cast<std::uint32_t>(ticket);
    if (chunk >= static_cast<std::uint32_t>(chunks)) return;
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
    work(context, static_cast<int>(chunk), worker);
    const bool last = done_.fetch_add(1) + 1 == chunks;
    if (last && caller_sleeps_.load()) done_.notify_one();
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

std::uint32_t Threads::await_job(std::uint32_t seen) {
  for (int spin = 0; spin < kSpins; ++spin) {
    const std::uint32_t job = job_.load(std::memory_order_acquire);
    if (job != seen) return job;
    pause();
  }
  sleepers_.fetch_add(1);
  job_.wait(seen);
  sleepers_.fetch_sub(1);
  return job_.load();
}

void Threads::serve(int worker) {
  pin(worker);
  std::uint32_t seen = 0;
  while (true) {
    seen = await_job(seen);
    if (ending_.load()) return;
    take_chunks(seen, worker);
  }
}

}  // namespace kv

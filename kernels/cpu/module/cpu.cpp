#include "cpu.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace kv {
namespace {

// AVX2, FMA and F16C, and a system that saves the wide registers.
bool has_avx2() {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return false;
  constexpr unsigned kFma = 1u << 12, kOsxsave = 1u << 27, kF16c = 1u << 29;
  if ((c & (kFma | kOsxsave | kF16c)) != (kFma | kOsxsave | kF16c)) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 6u) != 6u) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  return (b & (1u << 5)) != 0;
#else
  return false;
#endif
}

// NEON itself belongs to every aarch64; the dot product came with Armv8.2.
bool has_neon_dot() {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kDotProduct = 1ul << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kDotProduct) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  int found = 0;
  std::size_t size = sizeof found;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &found, &size, nullptr, 0) == 0 && found != 0;
#else
  return false;
#endif
}

}  // namespace

const Kernels* choose_kernels(const char* name) {
  const Kernels* wide = has_avx2() ? avx2_kernels() : has_neon_dot() ? neon_kernels() : nullptr;
  const bool any = *name == '\0';
  if (wide != nullptr && (any || std::strcmp(name, wide->name) == 0)) return wide;
  return any || std::strcmp(name, portable_kernels().name) == 0 ? &portable_kernels() : nullptr;
}

}  // namespace kv

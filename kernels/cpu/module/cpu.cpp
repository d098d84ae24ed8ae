#include "cpu.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
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

}  // namespace

const Kernels* choose_kernels(const char* name) {
  const Kernels* wide = has_avx2() ? avx2_kernels() : nullptr;
  const bool any = *name == '\0';
  if (wide != nullptr && (any || std::strcmp(name, wide->name) == 0)) return wide;
  return any || std::strcmp(name, portable_kernels().name) == 0 ? &portable_kernels() : nullptr;
}

}  // namespace kv

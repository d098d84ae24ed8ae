#include "cpu.h"

#include <cstdio>
#include <cstring>

#include "agreement.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace kv {
namespace {

#if defined(__x86_64__)
bool all_of(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
};
#endif

// What the processor and the system (which must save the wide registers) offer: 0 nothing, 1 AVX2 with FMA and F16C,
// 2 also AVX-512 (F, BW, VL) with VNNI.
int level() {
#if defined(__x86_64__)
  Leaf one, seven;
  if (__get_cpuid(1, &one.a, &one.b, &one.c, &one.d) == 0) return 0;
  if (!all_of(one.c, 1u << 12 | 1u << 27 | 1u << 29)) return 0;  // FMA, OSXSAVE, F16C
  unsigned saved = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if (!all_of(saved, 0x06)) return 0;
  if (__get_cpuid_count(7, 0, &seven.a, &seven.b, &seven.c, &seven.d) == 0) return 0;
  if (!all_of(seven.b, 1u << 5)) return 0;
  const bool wide = all_of(saved, 0xe6) && all_of(seven.b, 1u << 16 | 1u << 30 | 1u << 31) && all_of(seven.c, 1u << 11);
  return wide ? 2 : 1;
#else
  return 0;
#endif
}

// Tried once: a set that gives other bits here, by a fault of compiler or processor, is not used.
const Kernels* vnni() {
  static const Kernels* const kernels = [] {
    const Kernels* found = level() >= 2 ? vnni_kernels() : nullptr;
    if (found == nullptr || agrees_with_portable(*found)) return found;
    std::fputs("kvmesh: the vnni kernels give other results than the portable ones here and are not used\n", stderr);
    return static_cast<const Kernels*>(nullptr);
  }();
  return kernels;
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
  const bool any = *name == '\0';
  const auto wanted = [&](const Kernels* kernels) {
    return kernels != nullptr && (any || std::strcmp(name, kernels->name) == 0);
  };
  // Asked for by name only where that is meant: to try them takes a moment.
  if (any || std::strcmp(name, "vnni") == 0) {
    if (wanted(vnni())) return vnni();
  }
  const Kernels* const avx2 = level() >= 1 ? avx2_kernels() : nullptr;
  if (wanted(avx2)) return avx2;
  const Kernels* const neon = has_neon_dot() ? neon_kernels() : nullptr;
  if (wanted(neon)) return neon;
  return wanted(&portable_kernels()) ? &portable_kernels() : nullptr;
}

}  // namespace kv

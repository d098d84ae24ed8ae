#include "peak.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kv {
namespace {

#if defined(__x86_64__)

// Twelve sums in registers: enough to hide the latency, few enough that none is spilled.
constexpr int kSums = 12;

// vpmaddubsw and an addition: the two that an AVX2 product cannot do without. 32 pairs, 64 operations. Spelt out whole:
// left to itself the compiler multiplies once, or keeps the sums in memory, and measures that.
#define KV_PAIR(sum) "vpmaddubsw %1, %0, %%ymm12\n\tvpaddw %%ymm12, %%" sum ", %%" sum "\n\t"
__attribute__((target("avx2"))) double peak_avx2(std::int64_t rounds) {
  const __m256i codes = _mm256_set1_epi8(3), from = _mm256_set1_epi8(-2);
  for (std::int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile(KV_PAIR("ymm0") KV_PAIR("ymm1") KV_PAIR("ymm2") KV_PAIR("ymm3") KV_PAIR("ymm4") KV_PAIR("ymm5")
                     KV_PAIR("ymm6") KV_PAIR("ymm7") KV_PAIR("ymm8") KV_PAIR("ymm9") KV_PAIR("ymm10") KV_PAIR("ymm11")
                     :
                     : "x"(codes), "x"(from)
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
                       "xmm12");
  }
  return 64.0 * kSums * static_cast<double>(rounds);
}
#undef KV_PAIR

// vpdpbusd: 64 pairs, 128 operations.
__attribute__((target("avx512f,avx512bw,avx512vnni"))) double peak_vnni(std::int64_t rounds) {
  __m512i sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = _mm512_set1_epi32(i);
  __m512i codes = _mm512_set1_epi8(3), from = _mm512_set1_epi8(-2);
  for (std::int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : "+v"(codes), "+v"(from));
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], codes, from);
  }
  for (int i = 0; i < kSums; ++i) __asm__ volatile("" : : "v"(sums[i]));
  return 128.0 * kSums * static_cast<double>(rounds);
}

#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)

constexpr int kSums = 12;

// sdot: 16 pairs, 32 operations.
double peak_dotprod(std::int64_t rounds) {
  int32x4_t sums[kSums];
  for (int i = 0; i < kSums; ++i) sums[i] = vdupq_n_s32(i);
  int8x16_t codes = vdupq_n_s8(3), from = vdupq_n_s8(-2);
  for (std::int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : "+w"(codes), "+w"(from));
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sums[i] = vdotq_s32(sums[i], codes, from);
  }
  for (int i = 0; i < kSums; ++i) __asm__ volatile("" : : "w"(sums[i]));
  return 32.0 * kSums * static_cast<double>(rounds);
}

#endif

}  // namespace

double run_peak_int8(const char* isa, std::int64_t rounds) {
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx2") == 0) return peak_avx2(rounds);
  if (std::strstr(isa, "vnni") != nullptr) return peak_vnni(rounds);
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
  if (std::strcmp(isa, "portable") != 0) return peak_dotprod(rounds);
#endif
  static_cast<void>(isa);
  static_cast<void>(rounds);
  return 0.0;
}

std::uint64_t read_all(const std::uint8_t* data, std::size_t bytes) {
  // Vectors (of any instruction set), several sums: memory, not the additions, sets the pace.
  using Words = std::uint64_t __attribute__((vector_size(16)));
  Words sums[8] = {};
  std::size_t at = 0;
  for (; at + 128 <= bytes; at += 128) {
    __builtin_prefetch(data + at + 2048);
    __builtin_prefetch(data + at + 2048 + 64);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      Words words;
      std::memcpy(&words, data + at + 16 * i, sizeof words);
      sums[i] += words;
    }
  }
  std::uint64_t sum = 0;
  for (; at < bytes; ++at) sum += data[at];
  for (const Words& part : sums) sum += part[0] + part[1];
  return sum;
}

}  // namespace kv

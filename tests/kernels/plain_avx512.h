// The few AVX-512 instructions of products_vnni.h, spelt out in plain C++ after Intel's description: to test that
// file on processors without them.
#pragma once

#include <cstdint>
#include <cstring>

namespace plain {

struct Words {
  std::int32_t v[16];
};
struct Floats {
  float v[16];
};

inline Words load(const void* p) {
  Words r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline Words set1_epi32(int x) {
  Words r;
  for (int& lane : r.v) lane = x;
  return r;
}
inline Words set1_epi8(char x) {
  Words r;
  std::memset(&r, x, sizeof r);
  return r;
}
inline Words both(Words a, Words b, bool exclusive) {
  for (int i = 0; i < 16; ++i) a.v[i] = exclusive ? a.v[i] ^ b.v[i] : a.v[i] & b.v[i];
  return a;
}
inline Words srli_epi16(Words a, unsigned n) {
  std::uint16_t lanes[32];
  std::memcpy(lanes, &a, sizeof a);
  for (std::uint16_t& lane : lanes) lane = static_cast<std::uint16_t>(lane >> n);
  std::memcpy(&a, lanes, sizeof a);
  return a;
}
inline Words dpbusd(Words sum, Words a, Words b) {
  std::uint8_t x[64];
  std::int8_t y[64];
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  for (int i = 0; i < 64; ++i) sum.v[i / 4] += int{x[i]} * int{y[i]};
  return sum;
}
inline Words dpwssd(Words sum, Words a, Words b) {
  std::int16_t x[32], y[32];
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  for (int i = 0; i < 32; ++i) sum.v[i / 2] += int{x[i]} * int{y[i]};
  return sum;
}
inline Words mullo(Words a, Words b) {
  for (int i = 0; i < 16; ++i) a.v[i] *= b.v[i];
  return a;
}
inline Words add(Words a, Words b) {
  for (int i = 0; i < 16; ++i) a.v[i] += b.v[i];
  return a;
}
inline Floats to_floats(Words a) {
  Floats r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<float>(a.v[i]);
  return r;
}
inline Floats fmadd(Floats a, Floats b, Floats c) {
  for (int i = 0; i < 16; ++i) c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return c;
}
inline Floats set1_ps(float x) {
  Floats r;
  for (float& lane : r.v) lane = x;
  return r;
}
inline Floats load_ps(const void* p) {
  Floats r;
  std::memcpy(&r, p, sizeof r);
  return r;
}
inline Floats cvtph(__m256i halves) {
  Floats r;
  _mm256_storeu_ps(r.v, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
  _mm256_storeu_ps(r.v + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
  return r;
}

}  // namespace plain

#define __m512i plain::Words
#define __m512 plain::Floats
#define _mm512_loadu_si512(p) plain::load(p)
#define _mm512_set1_epi32(x) plain::set1_epi32(x)
#define _mm512_set1_epi8(x) plain::set1_epi8(static_cast<char>(x))
#define _mm512_setzero_si512() plain::set1_epi32(0)
#define _mm512_and_si512(a, b) plain::both(a, b, false)
#define _mm512_xor_si512(a, b) plain::both(a, b, true)
#define _mm512_srli_epi16(a, n) plain::srli_epi16(a, n)
#define _mm512_dpbusd_epi32(s, a, b) plain::dpbusd(s, a, b)
#define _mm512_dpwssd_epi32(s, a, b) plain::dpwssd(s, a, b)
#define _mm512_mullo_epi32(a, b) plain::mullo(a, b)
#define _mm512_add_epi32(a, b) plain::add(a, b)
#define _mm512_cvtepi32_ps(a) plain::to_floats(a)
#define _mm512_fmadd_ps(a, b, c) plain::fmadd(a, b, c)
#define _mm512_set1_ps(x) plain::set1_ps(x)
#define _mm512_setzero_ps() plain::set1_ps(0.0f)
#define _mm512_loadu_ps(p) plain::load_ps(p)
#define _mm512_storeu_ps(p, a) std::memcpy(p, (a).v, sizeof(a).v)
#define _mm512_cvtph_ps(a) plain::cvtph(a)

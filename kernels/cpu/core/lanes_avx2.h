// Eight floats at a time with AVX2, FMA and F16C; the same functions as lanes_portable.h. Who includes this says in
// kPairedCodes in which order its products read codes.

struct F8 {
  __m256 v;
};

inline F8 load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store8(float* p, F8 a) { _mm256_storeu_ps(p, a.v); }
inline F8 all(float x) { return {_mm256_set1_ps(x)}; }
inline F8 add8(F8 a, F8 b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F8 sub8(F8 a, F8 b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F8 mul8(F8 a, F8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F8 div8(F8 a, F8 b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F8 fma8(F8 a, F8 b, F8 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F8 max8(F8 a, F8 b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F8 abs8(F8 a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F8 neg8(F8 a) { return {_mm256_xor_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F8 where_less(F8 a, F8 b, F8 yes, F8 no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
inline F8 round8(F8 a) {
  const __m256 magic = _mm256_set1_ps(12582912.0f);
  return {_mm256_sub_ps(_mm256_add_ps(a.v, magic), magic)};
}

inline F8 power_of_two(F8 a) {
  const __m256i n = _mm256_add_epi32(_mm256_cvtps_epi32(a.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(n, 23))};
}

// With kPairedCodes two codes of the first half stand beside two of the second, so that one vpmaddwd can scale both.
inline void to_group(const F8* scaled, std::int8_t* codes, std::int32_t* sums) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i words[2];
  for (int h = 0; h < 2; ++h) {
    const __m256i low = _mm256_cvtps_epi32(scaled[2 * h].v), high = _mm256_cvtps_epi32(scaled[2 * h + 1].v);
    words[h] = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    const __m256i pairs = _mm256_madd_epi16(words[h], ones);
    __m128i parts = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    parts = _mm_add_epi32(parts, _mm_shuffle_epi32(parts, 0x4e));
    sums[h] = _mm_cvtsi128_si32(_mm_add_epi32(parts, _mm_shuffle_epi32(parts, 0xb1)));
  }
  const __m256i packed = _mm256_packs_epi16(words[0], words[1]);
  __m256i bytes;
  if constexpr (kPairedCodes) {
    const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,  //
                                           0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    bytes = _mm256_shuffle_epi8(packed, order);
  } else {
    bytes = _mm256_permute4x64_epi64(packed, 0xd8);
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), bytes);
}

inline float sum_of(F8 a) {
  const __m128 quarters = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 halves = _mm_add_ps(quarters, _mm_movehl_ps(quarters, quarters));
  return _mm_cvtss_f32(_mm_add_ss(halves, _mm_movehdup_ps(halves)));
}
inline float max_of(F8 a) {
  const __m128 quarters = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  const __m128 halves = _mm_max_ps(quarters, _mm_movehl_ps(quarters, quarters));
  return _mm_cvtss_f32(_mm_max_ss(halves, _mm_movehdup_ps(halves)));
}

inline F8 load_half(const std::uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline F8 load_codes8(const std::uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline F8 load_bf16(const std::uint8_t* p) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))};
}
inline void store_half(std::uint8_t* p, F8 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline float half_to_float(std::uint16_t h) { return _cvtsh_ss(h); }
inline std::uint16_t float_to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

// Products of codes with AVX2.
//
// u4: vpmaddubsw multiplies unsigned codes (at most 15) by signed activations (at most 128 in size) and adds
// neighbours: at most 3,840. 16 inputs add four of these, which 16 bits hold, so that one widening vpmaddwd is
// enough. i8: |code| as the unsigned side, the sign moved to the activation; a pair is
// at most 2 * 128 * 127 and is widened at once.

struct Panel {
  const std::uint8_t* data;
};

inline Panel open_panel(const Weight& weight, int panel) {
  return {weight.data + weight.panel_bytes() * static_cast<std::size_t>(panel)};
}

inline __m256i load_codes(const std::uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

inline __m256i four_codes(const std::int8_t* p) {
  std::int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

// Keeps a sum in its register: without this GCC regroups the additions and runs out of registers.
inline __m256i held(__m256i sum) {
  __asm__("" : "+x"(sum));
  return sum;
}

constexpr std::size_t kAhead = 4096;  // bytes of weights asked for before one row's product needs them

// The dots of 16 outputs with 16 inputs: steps [kFirst, kFirst + 4) of a group. 32-bit sums.
template <int kRows, Form kForm, int kFirst>
inline void dot_half(const std::uint8_t* codes, const std::int8_t* x, std::ptrdiff_t columns, __m256i (*dots)[2]) {
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) {
    const std::uint8_t* block = codes + 64 * (kForm == Form::u4 ? t : kFirst + t);
    __m256i w0 = load_codes(block), w1 = load_codes(block + 32);
    if constexpr (kForm == Form::u4) {
      const __m256i low = _mm256_set1_epi8(15);
      if constexpr (kFirst != 0) {
        w0 = _mm256_srli_epi16(w0, 4);
        w1 = _mm256_srli_epi16(w1, 4);
      }
      w0 = _mm256_and_si256(w0, low);
      w1 = _mm256_and_si256(w1, low);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256i from = four_codes(x + r * columns + 4 * (kFirst + t));
      __m256i pairs0, pairs1;
      if constexpr (kForm == Form::u4) {
        pairs0 = _mm256_maddubs_epi16(w0, from);
        pairs1 = _mm256_maddubs_epi16(w1, from);
      } else {
        pairs0 = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w0), _mm256_sign_epi8(from, w0)), ones);
        pairs1 = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w1), _mm256_sign_epi8(from, w1)), ones);
      }
      if (t == 0) {
        dots[r][0] = held(pairs0);
        dots[r][1] = held(pairs1);
      } else if constexpr (kForm == Form::u4) {
        dots[r][0] = held(_mm256_add_epi16(dots[r][0], pairs0));
        dots[r][1] = held(_mm256_add_epi16(dots[r][1], pairs1));
      } else {
        dots[r][0] = held(_mm256_add_epi32(dots[r][0], pairs0));
        dots[r][1] = held(_mm256_add_epi32(dots[r][1], pairs1));
      }
    }
  }
  if constexpr (kForm == Form::u4) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      dots[r][0] = _mm256_madd_epi16(dots[r][0], ones);
      dots[r][1] = _mm256_madd_epi16(dots[r][1], ones);
    }
  }
}

template <int kRows, Form kForm, bool kHalf, bool kMinima>
inline void tile_of(const Product& product, const Panel& panel, int row, float (*sums)[kPanel]) {
  const Quantised& quantised = product.quantised;
  const std::ptrdiff_t groups = product.weight.groups(), columns = quantised.columns;
  const std::int8_t* x = quantised.codes + row * columns;
  const float* x_scales = quantised.scales + row * groups * 2;
  const float* x_sums = quantised.sums + row * groups;
  const std::uint8_t* scales = panel.data;
  constexpr std::size_t kTable = kPanel * (kHalf ? 2 : 4), kHeader = kTable * (kMinima ? 2 : 1);
  constexpr std::size_t kBlock = kHeader + (kForm == Form::u4 ? 256 : 512);

  F8 total[kRows][2];
  for (int r = 0; r < kRows; ++r) total[r][0] = total[r][1] = all(0.0f);

  for (std::ptrdiff_t g = 0; g < groups; ++g) {
    const std::uint8_t* codes = scales + kHeader;
    __m256i dots[kRows][2];
    F8 scaled[kRows][2];
    if constexpr (kRows == 1) {
      for (std::size_t ahead = 0; ahead < kBlock; ahead += 64) __builtin_prefetch(scales + kAhead + ahead);
    }
    dot_half<kRows, kForm, 0>(codes, x, columns, dots);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const F8 scale = all(x_scales[(r * groups + g) * 2]);
      scaled[r][0] = mul8({_mm256_cvtepi32_ps(dots[r][0])}, scale);
      scaled[r][1] = mul8({_mm256_cvtepi32_ps(dots[r][1])}, scale);
    }
    dot_half<kRows, kForm, 4>(codes, x, columns, dots);
    const F8 scale0 = load_scales(scales, kHalf, 0), scale1 = load_scales(scales, kHalf, 8);
    F8 least0, least1;
    if constexpr (kMinima) {
      least0 = load_scales(scales + kTable, kHalf, 0);
      least1 = load_scales(scales + kTable, kHalf, 8);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const F8 scale = all(x_scales[(r * groups + g) * 2 + 1]);
      total[r][0] = fma8(fma8({_mm256_cvtepi32_ps(dots[r][0])}, scale, scaled[r][0]), scale0, total[r][0]);
      total[r][1] = fma8(fma8({_mm256_cvtepi32_ps(dots[r][1])}, scale, scaled[r][1]), scale1, total[r][1]);
      if constexpr (kMinima) {
        const F8 sum = all(x_sums[r * groups + g]);
        total[r][0] = fma8(least0, sum, total[r][0]);
        total[r][1] = fma8(least1, sum, total[r][1]);
      }
    }
    x += kGroup;
    scales += kBlock;
  }
  for (int r = 0; r < kRows; ++r) {
    store8(sums[r], total[r][0]);
    store8(sums[r] + 8, total[r][1]);
  }
}

// A scale for each half of a group.
template <int kRows, Form kForm, bool kMinima>
inline void tile_fine(const Product& product, const Panel& panel, int row, float (*sums)[kPanel]) {
  const Quantised& quantised = product.quantised;
  const std::ptrdiff_t halves = product.weight.groups() * 2, columns = quantised.columns;
  const std::int8_t* x = quantised.codes + row * columns;
  const float* x_scales = quantised.scales + row * halves;
  const std::int32_t* x_sums = quantised.code_sums + row * halves;
  const std::uint8_t* block = panel.data;
  constexpr std::size_t kTable = kPanel * 4, kHeader = 2 * kTable * (kMinima ? 2 : 1);
  constexpr std::size_t kBlock = kHeader + (kForm == Form::u4 ? 256 : 512);

  F8 total[kRows][2];
  for (int r = 0; r < kRows; ++r) total[r][0] = total[r][1] = all(0.0f);

  const auto add_half = [&](std::ptrdiff_t half, const __m256i(*dots)[2], const std::uint8_t* scales) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const F8 scale = load_scales(scales, false, 8 * v);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const F8 dot = mul8({_mm256_cvtepi32_ps(dots[r][v])}, all(x_scales[r * halves + half]));
        total[r][v] = fma8(dot, scale, total[r][v]);
        if constexpr (kMinima) {
          const F8 least = load_scales(scales + 2 * kTable, false, 8 * v);
          const float sum = x_scales[r * halves + half] * static_cast<float>(x_sums[r * halves + half]);
          total[r][v] = fma8(least, all(sum), total[r][v]);
        }
      }
    }
  };
  for (std::ptrdiff_t half = 0; half < halves; half += 2, x += kGroup, block += kBlock) {
    __m256i dots[kRows][2];
    if constexpr (kRows == 1) {
      for (std::size_t ahead = 0; ahead < kBlock; ahead += 64) __builtin_prefetch(block + kAhead + ahead);
    }
    dot_half<kRows, kForm, 0>(block + kHeader, x, columns, dots);
    add_half(half, dots, block);
    dot_half<kRows, kForm, 4>(block + kHeader, x, columns, dots);
    add_half(half + 1, dots, block + kTable);
  }
  for (int r = 0; r < kRows; ++r) {
    store8(sums[r], total[r][0]);
    store8(sums[r] + 8, total[r][1]);
  }
}

template <int kRows, Form kForm>
inline void tile_scaled(const Product& product, const Panel& panel, int row, float (*sums)[kPanel]) {
  const Weight& weight = product.weight;
  if (weight.fine) {
    if (weight.minima) return tile_fine<kRows, kForm, true>(product, panel, row, sums);
    return tile_fine<kRows, kForm, false>(product, panel, row, sums);
  }
  if (weight.half_scales) {
    if (weight.minima) return tile_of<kRows, kForm, true, true>(product, panel, row, sums);
    return tile_of<kRows, kForm, true, false>(product, panel, row, sums);
  }
  if (weight.minima) return tile_of<kRows, kForm, false, true>(product, panel, row, sums);
  return tile_of<kRows, kForm, false, false>(product, panel, row, sums);
}

template <int kRows>
inline void tile_codes(const Product& product, const Panel& panel, int row, float (*sums)[kPanel]) {
  if (product.weight.form == Form::u4) return tile_scaled<kRows, Form::u4>(product, panel, row, sums);
  return tile_scaled<kRows, Form::i8>(product, panel, row, sums);
}

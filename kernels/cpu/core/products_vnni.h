// Products of codes with AVX-512 and VNNI: the 16 outputs of a panel are one register.
//
// vpdpbusd multiplies unsigned weights by signed activations and adds four neighbours to a 32-bit sum, all of one half
// of a group. u4: a half's sum is at most 30,480 in size, so vpdpwssd scales it by its multiple (whose upper 16 bits
// are 0). i8: codes become unsigned by adding 128, which `below` takes back; sums of a half need 32 bits to be scaled.
// Eight rows take 24 of the 32 registers for their sums; weights are unpacked on the way, once for all of them.

constexpr int panels_at_once(int) { return 1; }

constexpr std::size_t kAhead = 4096;  // bytes of weights asked for before they are needed

// What a packed weight is like; decides which code runs.
struct Shape {
  Form form;
  bool half, minima, fine;

  constexpr int parts() const { return fine ? 2 : 1; }  // stretches of a group with a scale of their own
  constexpr std::size_t table() const { return static_cast<std::size_t>(parts()) * kPanel * (half ? 2 : 4); }
  constexpr std::size_t header() const { return table() * (minima ? 2 : 1); }
  constexpr std::size_t block() const { return header() + (form == Form::u4 ? 256 : 512); }
};

inline __m512i load_codes(const std::uint8_t* p) { return _mm512_loadu_si512(p); }

inline __m512i four_codes(const std::int8_t* p) {
  std::int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm512_set1_epi32(four);
}

template <bool kHalf>
inline __m512 load_table(const std::uint8_t* p) {
  if constexpr (kHalf) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_loadu_ps(p);
}

// The sum of a half, times its multiple.
template <Form kForm>
inline __m512i times_multiple(__m512i dot, std::int32_t multiple) {
  const __m512i all = _mm512_set1_epi32(multiple);
  return kForm == Form::u4 ? _mm512_dpwssd_epi32(_mm512_setzero_si512(), dot, all) : _mm512_mullo_epi32(dot, all);
}

template <int kRows, Shape kShape>
inline void tile(const CodedGroup* x, std::ptrdiff_t groups, const std::uint8_t* block, bool ahead, float (*sums)[kPanel]) {
  const __m512i low = _mm512_set1_epi8(15), sign = _mm512_set1_epi8(-128);
  __m512 total[kRows];
  for (int r = 0; r < kRows; ++r) total[r] = _mm512_setzero_ps();
  for (std::ptrdiff_t g = 0; g < groups; ++g, ++x, block += kShape.block()) {
    if (ahead) {
      for (std::size_t at = 0; at < kShape.block(); at += 64) __builtin_prefetch(block + kAhead + at);
    }
    const std::uint8_t* const codes = block + kShape.header();
    __m512i dots[2][kRows];
    for (int h = 0; h < 2; ++h) {
      for (int r = 0; r < kRows; ++r) {
        dots[h][r] = kShape.form == Form::u4 ? _mm512_setzero_si512() : _mm512_set1_epi32(x[r * groups].below[h]);
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      __m512i w[2];
      if constexpr (kShape.form == Form::u4) {
        const __m512i both = load_codes(codes + 64 * t);
        w[0] = _mm512_and_si512(both, low);
        w[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      } else {
        w[0] = _mm512_xor_si512(load_codes(codes + 64 * t), sign);
        w[1] = _mm512_xor_si512(load_codes(codes + 64 * (4 + t)), sign);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        dots[0][r] = _mm512_dpbusd_epi32(dots[0][r], w[0], four_codes(x[r * groups].codes + 4 * t));
        dots[1][r] = _mm512_dpbusd_epi32(dots[1][r], w[1], four_codes(x[r * groups].codes + kFine + 4 * t));
      }
    }
    __m512 scales[kShape.parts()], minima[kShape.parts()];
    for (int part = 0; part < kShape.parts(); ++part) {
      const std::size_t at = static_cast<std::size_t>(part) * kPanel * (kShape.half ? 2 : 4);
      scales[part] = load_table<kShape.half>(block + at);
      if constexpr (kShape.minima) minima[part] = load_table<kShape.half>(block + kShape.table() + at);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const CodedGroup& from = x[r * groups];
      __m512i parts[2] = {times_multiple<kShape.form>(dots[0][r], from.single[0]), dots[1][r]};
      if constexpr (!kShape.fine && kShape.form == Form::u4) {
        parts[0] = _mm512_dpwssd_epi32(parts[0], dots[1][r], _mm512_set1_epi32(from.single[1]));
      } else {
        parts[1] = times_multiple<kShape.form>(dots[1][r], from.single[1]);
        if constexpr (!kShape.fine) parts[0] = _mm512_add_epi32(parts[0], parts[1]);
      }
      for (int part = 0; part < kShape.parts(); ++part) {
        total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(parts[part]), scales[part], total[r]);
        if constexpr (kShape.minima) {
          const float sum = kShape.fine ? from.half_sums[part] : from.sum;
          total[r] = _mm512_fmadd_ps(minima[part], _mm512_set1_ps(sum), total[r]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) _mm512_storeu_ps(sums[r], total[r]);
}

template <Shape kShape>
inline void panel_of(const Product& product, int first, int rows, int panel, float (*sums)[kPanel]) {
  const std::uint8_t* block = product.weight.data + product.weight.panel_bytes() * static_cast<std::size_t>(panel);
  const std::ptrdiff_t groups = product.weight.groups();
  for (int row = 0; row < rows;) {
    const CodedGroup* const x = product.quantised.row(first + row);
    const int rest = rows - row, taken = rest >= 8 ? 8 : rest >= 4 ? 4 : rest >= 2 ? 2 : 1;
    // The first tile brings the weights.
    const bool ahead = row == 0;
    if (taken == 8) tile<8, kShape>(x, groups, block, ahead, sums + row);
    if (taken == 4) tile<4, kShape>(x, groups, block, ahead, sums + row);
    if (taken == 2) tile<2, kShape>(x, groups, block, ahead, sums + row);
    if (taken == 1) tile<1, kShape>(x, groups, block, ahead, sums + row);
    row += taken;
  }
}

template <Form kForm, bool kMinima>
inline void panel_scaled(const Product& product, int first, int rows, int panel, float (*sums)[kPanel]) {
  if (product.weight.fine) return panel_of<Shape{kForm, false, kMinima, true}>(product, first, rows, panel, sums);
  if (product.weight.half_scales) return panel_of<Shape{kForm, true, kMinima, false}>(product, first, rows, panel, sums);
  panel_of<Shape{kForm, false, kMinima, false}>(product, first, rows, panel, sums);
}

inline void code_panels(const Product& product, int first, int count, int panel, int, float (*sums)[kPanel]) {
  const Weight& weight = product.weight;
  if (weight.form == Form::u4) {
    if (weight.minima) return panel_scaled<Form::u4, true>(product, first, count, panel, sums);
    return panel_scaled<Form::u4, false>(product, first, count, panel, sums);
  }
  if (weight.minima) return panel_scaled<Form::i8, true>(product, first, count, panel, sums);
  panel_scaled<Form::i8, false>(product, first, count, panel, sums);
}

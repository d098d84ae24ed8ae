// Products of codes with AVX2.
//
// vpmaddubsw multiplies unsigned weights by signed activations and adds neighbours in 16 bits. Weights and
// activations stand in steps of two inputs of a group's first half and two of its second, so that even 16-bit lanes
// belong to the one and odd lanes to the other, and one vpmaddwd scales both halves by their multiples.
// u4: a lane adds 16 products of at most 15 * 127: it holds. i8: |code| is the unsigned side, its sign moves to the
// activation; a pair is at most 2 * 128 * 127 and is widened at once.
//
// Many rows: a part of the panel is opened (unpacked into the first cache, floats as f32) and tiles of rows pass over
// it. Few rows read the packed panel itself, which memory bounds.

// Panels that are taken together by so many rows.
constexpr int panels_at_once(int rows) { return rows == 1 ? 2 : 1; }

constexpr int kOpenGroups = 24;
constexpr int kStreamed = 3;           // rows up to which the panel is not opened
constexpr std::ptrdiff_t kAhead = 12;  // groups of weights that few rows ask for before they need them

// What a tile asks for while it works, so that memory does not wait for the processor: `lines` cache lines for each
// group of weights.
struct Next {
  const std::uint8_t* at;
  int lines;
};

// What a packed weight is like; decides which code runs.
struct Shape {
  Form form;
  bool half, minima, fine;

  constexpr int parts() const { return fine ? 2 : 1; }  // stretches of a group with a scale of their own
  constexpr std::size_t table() const { return static_cast<std::size_t>(parts()) * kPanel * (half ? 2 : 4); }
  constexpr std::size_t header() const { return table() * (minima ? 2 : 1); }
  constexpr std::size_t block() const { return header() + (form == Form::u4 ? 256 : 512); }
};

template <int kParts>
struct alignas(64) OpenGroup {
  std::uint8_t codes[512];  // 8 steps x 16 outputs x 4 inputs
  float scales[kParts * kPanel];
  float minima[kParts * kPanel];
};

inline __m256i load_codes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_codes(void* p, __m256i codes) { _mm256_storeu_si256(static_cast<__m256i*>(p), codes); }

inline __m256i four_bytes(const void* p) {
  std::int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

// Keeps a sum in its register: without this GCC regroups the additions and runs out of registers.
inline __m256i held(__m256i sum) {
  __asm__("" : "+x"(sum));
  return sum;
}

// Codes of 8 outputs: four inputs of each half become two steps.
inline void open_codes(__m256i first, __m256i second, std::uint8_t* out) {
  store_codes(out, _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xaa));
  store_codes(out + 64, _mm256_blend_epi16(_mm256_srli_epi32(first, 16), second, 0xaa));
}

template <Shape kShape>
inline void open_groups(const std::uint8_t* block, int count, OpenGroup<kShape.parts()>* out) {
  for (; count > 0; --count, ++out, block += kShape.block()) {
    for (int i = 0; i < kShape.parts() * kPanel; i += 8) {
      store8(out->scales + i, load_scales(block, kShape.half, i));
      if constexpr (kShape.minima) store8(out->minima + i, load_scales(block + kShape.table(), kShape.half, i));
    }
    const std::uint8_t* codes = block + kShape.header();
    for (int t = 0; t < 4; ++t) {
      for (int half = 0; half < 64; half += 32) {
        if constexpr (kShape.form == Form::u4) {
          const __m256i low = _mm256_set1_epi8(15), both = load_codes(codes + 64 * t + half);
          open_codes(_mm256_and_si256(both, low), _mm256_and_si256(_mm256_srli_epi16(both, 4), low),
                     out->codes + 128 * t + half);
        } else {
          open_codes(load_codes(codes + 64 * t + half), load_codes(codes + 64 * (4 + t) + half),
                     out->codes + 128 * t + half);
        }
      }
    }
  }
}

// One row's whole numbers join its sums.
template <Shape kShape>
inline F8 add_dots(F8 total, const __m256i* dots, const CodedGroup& x, const float* scales, const float* minima) {
  for (int part = 0; part < kShape.parts(); ++part) {
    total = fma8({_mm256_cvtepi32_ps(dots[part])}, load(scales + part * kPanel), total);
    if constexpr (kShape.minima) {
      total = fma8(load(minima + part * kPanel), all(kShape.fine ? x.half_sums[part] : x.sum), total);
    }
  }
  return total;
}

template <int kRows, Shape kShape>
inline void open_tile(const CodedGroup* x, std::ptrdiff_t stride, const OpenGroup<kShape.parts()>* weights, int count,
                      float (*sums)[kPanel], Next next) {
  constexpr bool kNarrow = kShape.form == Form::u4;
  // Sums in 32 bits of each part; in 16 bits both halves of a group share lanes.
  constexpr int kSums = kNarrow ? 1 : kShape.parts();
  const auto multiples = [](const CodedGroup& group, int part) {
    return kShape.fine ? _mm256_set1_epi32(part == 0 ? group.single[0] : group.single[1] << 16) : four_bytes(group.pair);
  };
  F8 total[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    total[r][0] = load(sums[r]);
    total[r][1] = load(sums[r] + 8);
  }
  for (; count > 0; --count, ++weights, ++x) {
    __m256i dots[kRows][2][kSums];
    for (int line = 0; line < next.lines; ++line, next.at += 64) __builtin_prefetch(next.at, 0, 2);
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step) {
      const __m256i w[2] = {load_codes(weights->codes + 64 * step), load_codes(weights->codes + 64 * step + 32)};
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) {
        const __m256i from = four_bytes(x[r * stride].codes + 4 * step);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          if constexpr (kNarrow) {
            const __m256i pairs = _mm256_maddubs_epi16(w[v], from);
            dots[r][v][0] = held(step == 0 ? pairs : _mm256_add_epi16(dots[r][v][0], pairs));
          } else {
            const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[v]), _mm256_sign_epi8(from, w[v]));
#pragma GCC unroll 2
            for (int part = 0; part < kSums; ++part) {
              const __m256i scaled = _mm256_madd_epi16(pairs, multiples(x[r * stride], part));
              dots[r][v][part] = held(step == 0 ? scaled : _mm256_add_epi32(dots[r][v][part], scaled));
            }
          }
        }
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        __m256i parts[kShape.parts()];
        for (int part = 0; part < kShape.parts(); ++part) {
          parts[part] = kNarrow ? _mm256_madd_epi16(dots[r][v][0], multiples(x[r * stride], part))
                                : dots[r][v][kNarrow ? 0 : part];
        }
        total[r][v] = add_dots<kShape>(total[r][v], parts, x[r * stride], weights->scales + 8 * v, weights->minima + 8 * v);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    store8(sums[r], total[r][0]);
    store8(sums[r] + 8, total[r][1]);
  }
}

template <Shape kShape>
inline void open_panel(const Product& product, int first, int rows, const std::uint8_t* block, float (*sums)[kPanel]) {
  OpenGroup<kShape.parts()> open[kOpenGroups];
  const int groups = product.weight.groups();
  for (int r = 0; r < rows; ++r) {
    store8(sums[r], all(0.0f));
    store8(sums[r] + 8, all(0.0f));
  }
  for (int group = 0; group < groups; group += kOpenGroups) {
    const int count = groups - group < kOpenGroups ? groups - group : kOpenGroups;
    open_groups<kShape>(block, count, open);
    block += kShape.block() * static_cast<std::size_t>(count);
    const CodedGroup* x = product.quantised.row(first) + group;
    const int lines = static_cast<int>((kShape.block() + 63) / 64), tiles = (rows + 2) / 3;
    const std::uint8_t* const end = block + kShape.block() * static_cast<std::size_t>(count);
    Next next{block, (lines + tiles - 1) / tiles};
    for (int row = 0; row < rows;) {
      const CodedGroup* const from = x + std::ptrdiff_t{row} * groups;
      // Threes, but no row stays alone.
      const int rest = rows - row, taken = rest == 3 || rest >= 5 ? 3 : rest >= 2 ? 2 : 1;
      if (taken == 3) open_tile<3, kShape>(from, groups, open, count, sums + row, next);
      if (taken == 2) open_tile<2, kShape>(from, groups, open, count, sums + row, next);
      if (taken == 1) open_tile<1, kShape>(from, groups, open, count, sums + row, next);
      row += taken;
      next.at += std::ptrdiff_t{64} * next.lines * count;
      if (next.at >= end) next.lines = 0;
    }
  }
}

// Codes of a row's group in their natural order.
inline void natural_codes(const CodedGroup& group, std::int8_t* out) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,  //
                                         0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  store_codes(out, _mm256_permute4x64_epi64(_mm256_shuffle_epi8(load_codes(group.codes), order), 0xd8));
  __asm__("" : "+m"(*reinterpret_cast<std::int8_t(*)[kGroup]>(out)));  // else GCC shifts them out of a register
}

// One half of a group: the dots of 16 inputs times the half's multiple.
template <int kRows, Form kForm, int kHalf>
inline void stream_half(const std::uint8_t* codes, const std::int8_t (*x)[kGroup], const __m256i* multiples,
                        __m256i (*dots)[2]) {
  const __m256i low = _mm256_set1_epi8(15);
  __m256i half[kRows][2];
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) {
    const std::uint8_t* block = codes + 64 * (kForm == Form::u4 ? t : 4 * kHalf + t);
    __m256i w[2] = {load_codes(block), load_codes(block + 32)};
    for (int v = 0; v < 2; ++v) {
      if constexpr (kForm == Form::u4) w[v] = _mm256_and_si256(kHalf != 0 ? _mm256_srli_epi16(w[v], 4) : w[v], low);
#pragma GCC unroll 3
      for (int r = 0; r < kRows; ++r) {
        const __m256i from = four_bytes(x[r] + 16 * kHalf + 4 * t);
        if constexpr (kForm == Form::u4) {
          const __m256i pairs = _mm256_maddubs_epi16(w[v], from);
          half[r][v] = t == 0 ? pairs : _mm256_add_epi16(half[r][v], pairs);
        } else {
          const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[v]), _mm256_sign_epi8(from, w[v]));
          const __m256i scaled = _mm256_madd_epi16(pairs, multiples[r]);
          half[r][v] = t == 0 ? scaled : _mm256_add_epi32(half[r][v], scaled);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < 2; ++v) {
      dots[r][v] = kForm == Form::u4 ? _mm256_madd_epi16(half[r][v], multiples[r]) : half[r][v];
    }
  }
}

// kPanels neighbours at once: the activations are prepared once for all of them.
template <int kRows, int kPanels, Shape kShape>
inline void stream_panels(const Product& product, int first, const std::uint8_t* block, float (*sums)[kPanel]) {
  const std::ptrdiff_t groups = product.weight.groups();
  const std::size_t apart = product.weight.panel_bytes();
  const CodedGroup* x = product.quantised.row(first);
  F8 total[kPanels][kRows][2];
  for (int p = 0; p < kPanels; ++p) {
    for (int r = 0; r < kRows; ++r) total[p][r][0] = total[p][r][1] = all(0.0f);
  }
  for (std::ptrdiff_t g = 0; g < groups; ++g, ++x, block += kShape.block()) {
    alignas(32) std::int8_t natural[kRows][kGroup];
    __m256i multiples[2][kRows];
    for (int r = 0; r < kRows; ++r) {
      natural_codes(x[r * groups], natural[r]);
      multiples[0][r] = _mm256_set1_epi16(x[r * groups].pair[0]);
      multiples[1][r] = _mm256_set1_epi16(x[r * groups].pair[1]);
    }
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
      const std::uint8_t* const at = block + apart * static_cast<std::size_t>(p);
      // After a panel's last group come the panels behind its neighbours.
      const std::uint8_t* const next = at + kShape.block() * kAhead + (g + kAhead < groups ? 0 : apart * (kPanels - 1));
      for (std::size_t ahead = 0; ahead < kShape.block(); ahead += 64) __builtin_prefetch(next + ahead);
      __m256i dots[2][kRows][2];
      stream_half<kRows, kShape.form, 0>(at + kShape.header(), natural, multiples[0], dots[0]);
      stream_half<kRows, kShape.form, 1>(at + kShape.header(), natural, multiples[1], dots[1]);
      for (int v = 0; v < 2; ++v) {
        F8 scales[kShape.parts()], minima[kShape.parts()];
        for (int part = 0; part < kShape.parts(); ++part) {
          scales[part] = load_scales(at, kShape.half, part * kPanel + 8 * v);
          if constexpr (kShape.minima) minima[part] = load_scales(at + kShape.table(), kShape.half, part * kPanel + 8 * v);
        }
        for (int r = 0; r < kRows; ++r) {
          for (int part = 0; part < kShape.parts(); ++part) {
            const __m256i dot = kShape.fine ? dots[part][r][v] : _mm256_add_epi32(dots[0][r][v], dots[1][r][v]);
            const CodedGroup& from = x[r * groups];
            total[p][r][v] = fma8({_mm256_cvtepi32_ps(dot)}, scales[part], total[p][r][v]);
            if constexpr (kShape.minima) {
              total[p][r][v] = fma8(minima[part], all(kShape.fine ? from.half_sums[part] : from.sum), total[p][r][v]);
            }
          }
        }
      }
    }
  }
  for (int p = 0; p < kPanels; ++p) {
    for (int r = 0; r < kRows; ++r) {
      store8(sums[p * kRows + r], total[p][r][0]);
      store8(sums[p * kRows + r] + 8, total[p][r][1]);
    }
  }
}

template <Shape kShape>
inline void panel_of(const Product& product, int first, int rows, int panel, int panels, float (*sums)[kPanel]) {
  const std::uint8_t* block = product.weight.data + product.weight.panel_bytes() * static_cast<std::size_t>(panel);
  if (rows == 1 && panels == 2) return stream_panels<1, 2, kShape>(product, first, block, sums);
  for (; panels > 0; --panels, block += product.weight.panel_bytes(), sums += rows) {
    if (rows == 1) stream_panels<1, 1, kShape>(product, first, block, sums);
    if (rows == 2) stream_panels<2, 1, kShape>(product, first, block, sums);
    if (rows == kStreamed) stream_panels<kStreamed, 1, kShape>(product, first, block, sums);
    if (rows > kStreamed) open_panel<kShape>(product, first, rows, block, sums);
  }
}

template <Form kForm, bool kMinima>
inline void panel_scaled(const Product& product, int first, int rows, int panel, int panels, float (*sums)[kPanel]) {
  if (product.weight.fine) return panel_of<Shape{kForm, false, kMinima, true}>(product, first, rows, panel, panels, sums);
  if (product.weight.half_scales) return panel_of<Shape{kForm, true, kMinima, false}>(product, first, rows, panel, panels, sums);
  panel_of<Shape{kForm, false, kMinima, false}>(product, first, rows, panel, panels, sums);
}

inline void code_panels(const Product& product, int first, int count, int panel, int panels, float (*sums)[kPanel]) {
  const Weight& weight = product.weight;
  if (weight.form == Form::u4) {
    if (weight.minima) return panel_scaled<Form::u4, true>(product, first, count, panel, panels, sums);
    return panel_scaled<Form::u4, false>(product, first, count, panel, panels, sums);
  }
  if (weight.minima) return panel_scaled<Form::i8, true>(product, first, count, panel, panels, sums);
  panel_scaled<Form::i8, false>(product, first, count, panel, panels, sums);
}

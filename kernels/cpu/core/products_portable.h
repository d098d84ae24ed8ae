// Products of codes in plain C++.

struct Panel {
  const std::uint8_t* data;
};

inline Panel open_panel(const Weight& weight, int panel) {
  return {weight.data + weight.panel_bytes() * static_cast<std::size_t>(panel)};
}

// The dots of inputs [first, first + 16) of a group.
inline void dot_half(const Weight& weight, const std::uint8_t* codes, const std::int8_t* x, int first,
                     std::int32_t* dots) {
  for (int i = 0; i < kPanel; ++i) dots[i] = 0;
  for (int k = first; k < first + kFine; ++k) {
    const std::int32_t from = x[k];
    if (weight.form == Form::u4) {
      const std::uint8_t* line = codes + k % 16 / 4 * 64 + k % 4;
      const int shift = k < 16 ? 0 : 4;
      for (int i = 0; i < kPanel; ++i) dots[i] += from * ((line[4 * i] >> shift) & 15);
    } else {
      const std::uint8_t* line = codes + k / 4 * 64 + k % 4;
      for (int i = 0; i < kPanel; ++i) dots[i] += from * static_cast<std::int8_t>(line[4 * i]);
    }
  }
}

template <int kRows>
inline void tile_codes(const Product& product, const Panel& panel, int row, float (*sums)[kPanel]) {
  const Weight& weight = product.weight;
  const Quantised& x = product.quantised;
  const std::ptrdiff_t groups = weight.groups();
  for (int r = 0; r < kRows; ++r) {
    const std::uint8_t* block = panel.data;
    F8 halves[2] = {all(0.0f), all(0.0f)};
    for (std::ptrdiff_t g = 0; g < groups; ++g, block += weight.group_bytes()) {
      std::int32_t dots[2][kPanel];
      const std::int8_t* codes = x.codes + (row + r) * std::ptrdiff_t{x.columns} + g * kGroup;
      for (int h = 0; h < 2; ++h) dot_half(weight, block + weight.header_bytes(), codes, h * kFine, dots[h]);
      const float* scales = x.scales + ((row + r) * groups + g) * 2;
      const F8 sum = all(x.sums[(row + r) * groups + g]);
      const std::int32_t* code_sums = x.code_sums + ((row + r) * groups + g) * 2;
      for (int h = 0; h < 2; ++h) {
        F8 first, second;
        for (int i = 0; i < 8; ++i) {
          first.v[i] = static_cast<float>(dots[0][8 * h + i]);
          second.v[i] = static_cast<float>(dots[1][8 * h + i]);
        }
        if (weight.fine) {
          const F8 parts[2] = {first, second};
          for (int part = 0; part < 2; ++part) {
            const int at = part * kPanel + 8 * h;
            halves[h] = fma8(mul8(parts[part], all(scales[part])), load_scales(block, false, at), halves[h]);
            if (!weight.minima) continue;
            const F8 least = load_scales(block + weight.header_bytes() / 2, false, at);
            halves[h] = fma8(least, all(scales[part] * static_cast<float>(code_sums[part])), halves[h]);
          }
          continue;
        }
        const F8 dot = fma8(second, all(scales[1]), mul8(first, all(scales[0])));
        halves[h] = fma8(dot, load_scales(block, weight.half_scales, 8 * h), halves[h]);
        if (weight.minima) {
          const F8 least = load_scales(block + weight.header_bytes() / 2, weight.half_scales, 8 * h);
          halves[h] = fma8(least, sum, halves[h]);
        }
      }
    }
    store8(sums[r], halves[0]);
    store8(sums[r] + 8, halves[1]);
  }
}

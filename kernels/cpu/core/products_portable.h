// Products of codes in plain C++.

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

constexpr int panels_at_once(int) { return 1; }

inline void code_panels(const Product& product, int first, int count, int panel, int, float (*sums)[kPanel]) {
  const Weight& weight = product.weight;
  for (int r = 0; r < count; ++r) {
    const CodedGroup* group = product.quantised.row(first + r);
    const std::uint8_t* block = weight.data + weight.panel_bytes() * static_cast<std::size_t>(panel);
    F8 halves[2] = {all(0.0f), all(0.0f)};
    for (int g = 0; g < weight.groups(); ++g, ++group, block += weight.group_bytes()) {
      std::int32_t dots[2][kPanel];
      for (int h = 0; h < 2; ++h) dot_half(weight, block + weight.header_bytes(), group->codes, h * kFine, dots[h]);
      for (int h = 0; h < 2; ++h) {
        F8 parts[2], dot;
        for (int i = 8 * h; i < 8 * h + 8; ++i) {
          const std::int32_t first_part = group->single[0] * dots[0][i], second_part = group->single[1] * dots[1][i];
          parts[0].v[i % 8] = static_cast<float>(first_part);
          parts[1].v[i % 8] = static_cast<float>(second_part);
          dot.v[i % 8] = static_cast<float>(first_part + second_part);
        }
        for (int part = 0; part < (weight.fine ? 2 : 1); ++part) {
          const int at = part * kPanel + 8 * h;
          halves[h] = fma8(weight.fine ? parts[part] : dot, load_scales(block, weight.half_scales, at), halves[h]);
          if (!weight.minima) continue;
          const F8 least = load_scales(block + weight.header_bytes() / 2, weight.half_scales, at);
          halves[h] = fma8(least, all(weight.fine ? group->half_sums[part] : group->sum), halves[h]);
        }
      }
    }
    store8(sums[r], halves[0]);
    store8(sums[r] + 8, halves[1]);
  }
}

// Products of codes with NEON's dot product: sdot adds four products of bytes to each of four 32-bit sums, and
// takes its second side from one lane, so that 16 activations serve four blocks of weights.

// Outputs 4 * i .. 4 * i + 3 of a panel.
struct Dots {
  int32x4_t of[4];

  F8 floats(int half) const { return {vcvtq_f32_s32(of[2 * half]), vcvtq_f32_s32(of[2 * half + 1])}; }
};

template <int kLane>
inline void dot_block(const int8x16_t* weights, int8x16_t x, Dots& dots) {
  for (int i = 0; i < 4; ++i) dots.of[i] = vdotq_laneq_s32(dots.of[i], weights[i], x, kLane);
}

// 64 bytes: 16 outputs x 4 inputs.
inline void load_block(Form form, const std::uint8_t* codes, int half, int block, int8x16_t* weights) {
  const std::uint8_t* p = codes + 64 * (form == Form::u4 ? block : 4 * half + block);
  for (int i = 0; i < 4; ++i) {
    uint8x16_t bytes = vld1q_u8(p + 16 * i);
    if (form == Form::u4) bytes = half == 0 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4);
    weights[i] = vreinterpretq_s8_u8(bytes);
  }
}

// The dots of 16 outputs with 16 inputs: half 0 or 1 of a group.
template <int kRows>
inline void dot_half(Form form, const std::uint8_t* codes, int half, const CodedGroup* x, std::ptrdiff_t stride,
                     Dots* dots) {
  int8x16_t from[kRows], weights[4];
  for (int r = 0; r < kRows; ++r) {
    from[r] = vld1q_s8(x[r * stride].codes + kFine * half);
    for (int i = 0; i < 4; ++i) dots[r].of[i] = vdupq_n_s32(0);
  }
  load_block(form, codes, half, 0, weights);
  for (int r = 0; r < kRows; ++r) dot_block<0>(weights, from[r], dots[r]);
  load_block(form, codes, half, 1, weights);
  for (int r = 0; r < kRows; ++r) dot_block<1>(weights, from[r], dots[r]);
  load_block(form, codes, half, 2, weights);
  for (int r = 0; r < kRows; ++r) dot_block<2>(weights, from[r], dots[r]);
  load_block(form, codes, half, 3, weights);
  for (int r = 0; r < kRows; ++r) {
    dot_block<3>(weights, from[r], dots[r]);
    for (int i = 0; i < 4; ++i) dots[r].of[i] = vmulq_n_s32(dots[r].of[i], x[r * stride].single[half]);
  }
}

template <int kRows>
inline void code_rows(const Product& product, int row, const std::uint8_t* block, float (*sums)[kPanel]) {
  const Weight& weight = product.weight;
  const std::ptrdiff_t groups = weight.groups();
  const CodedGroup* x = product.quantised.row(row);
  const std::size_t header = weight.header_bytes();
  F8 total[kRows][2];
  for (int r = 0; r < kRows; ++r) total[r][0] = total[r][1] = all(0.0f);
  for (std::ptrdiff_t g = 0; g < groups; ++g, ++x, block += weight.group_bytes()) {
    Dots dots[2][kRows];
    for (int h = 0; h < 2; ++h) dot_half<kRows>(weight.form, block + header, h, x, groups, dots[h]);
    if (!weight.fine) {
      for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < 4; ++i) dots[0][r].of[i] = vaddq_s32(dots[0][r].of[i], dots[1][r].of[i]);
      }
    }
    for (int part = 0; part < (weight.fine ? 2 : 1); ++part) {
      for (int v = 0; v < 2; ++v) {
        const int at = part * kPanel + 8 * v;
        const F8 scale = load_scales(block, weight.half_scales, at);
        for (int r = 0; r < kRows; ++r) total[r][v] = fma8(dots[part][r].floats(v), scale, total[r][v]);
        if (!weight.minima) continue;
        const F8 least = load_scales(block + header / 2, weight.half_scales, at);
        for (int r = 0; r < kRows; ++r) {
          const CodedGroup& group = x[r * groups];
          total[r][v] = fma8(least, all(weight.fine ? group.half_sums[part] : group.sum), total[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    store8(sums[r], total[r][0]);
    store8(sums[r] + 8, total[r][1]);
  }
}

constexpr int panels_at_once(int) { return 1; }

inline void code_panels(const Product& product, int first, int count, int panel, int, float (*sums)[kPanel]) {
  const std::uint8_t* block = product.weight.data + product.weight.panel_bytes() * static_cast<std::size_t>(panel);
  for (; count >= 4; count -= 4, first += 4, sums += 4) code_rows<4>(product, first, block, sums);
  if (count == 3) code_rows<3>(product, first, block, sums);
  if (count == 2) code_rows<2>(product, first, block, sums);
  if (count == 1) code_rows<1>(product, first, block, sums);
}

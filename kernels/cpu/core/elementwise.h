// What works on one row: norm, quantisation, rope, gate, addition, storing; and exp. Written over eight lanes
// with every rounding spelt out, so that all instruction sets give the same bits.
// Included inside a namespace of its own by each isa_*.cpp, after its lanes.

// The first `count` of eight floats at p, zeros after them.
inline F8 load_some(const float* p, int count) {
  float part[8] = {};
  for (int i = 0; i < count; ++i) part[i] = p[i];
  return load(part);
}
inline void store_some(float* p, F8 a, int count) {
  float part[8];
  store8(part, a);
  for (int i = 0; i < count; ++i) p[i] = part[i];
}

// e^x for x from -87.3 to 88.3, to about 1 ulp. Cody-Waite reduction, polynomial of degree 6.
inline F8 exp_within(F8 x) {
  const F8 n = round8(mul8(x, all(1.44269504f)));
  F8 f = fma8(n, all(-0.693359375f), x);
  f = fma8(n, all(2.12194440e-4f), f);
  F8 p = fma8(all(1.3888889e-3f), f, all(8.3333333e-3f));
  p = fma8(p, f, all(4.16666667e-2f));
  p = fma8(p, f, all(1.66666667e-1f));
  p = fma8(p, f, all(0.5f));
  p = fma8(p, f, all(1.0f));
  p = fma8(p, f, all(1.0f));
  return mul8(p, power_of_two(n));
}
// 0 below -87.3; for x not above 0.
inline F8 exp_negative(F8 x) {
  const F8 least = all(-87.3f);
  return where_less(x, least, all(0.0f), exp_within(max8(least, x)));
}
// 0 below -87.3, infinity above 88.3.
inline F8 exp8(F8 x) {
  const F8 most = all(88.3f);
  return where_less(most, x, all(__builtin_inff()), exp_negative(where_less(most, x, most, x)));
}
inline float exp1(float x) {
  float p[8];
  store8(p, exp8(all(x)));
  return p[0];
}

inline void exponentials(const float* x, int count, float* out) {
  for (int i = 0; i < count; i += 8) {
    const int some = count - i < 8 ? count - i : 8;
    store_some(out + i, exp8(load_some(x + i, some)), some);
  }
}

inline void norm(const float* x, const float* weight, float epsilon, int width, float* out) {
  const int whole = width / 8 * 8;
  F8 squares = all(0.0f);
  for (int i = 0; i < whole; i += 8) squares = fma8(load(x + i), load(x + i), squares);
  if (whole < width) {
    const F8 rest = load_some(x + whole, width - whole);
    squares = fma8(rest, rest, squares);
  }
  const float mean = sum_of(squares) / static_cast<float>(width);
  const F8 root = all(__builtin_sqrtf(mean + epsilon));
  for (int i = 0; i < whole; i += 8) store8(out + i, mul8(div8(load(x + i), root), load(weight + i)));
  if (whole < width) {
    const int count = width - whole;
    const F8 scaled = div8(load_some(x + whole, count), root);
    store_some(out + whole, mul8(scaled, load_some(weight + whole, count)), count);
  }
}

// Symmetric 8-bit codes with a scale per 16. The step is no number where any of the row is none, so that it shows
// in all results of the row, and only there; rows of next to nothing become zeros.
inline void quantise(const float* x, int columns, CodedGroup* groups, float* step_out) {
  F8 most = all(0.0f), not_finite = all(0.0f);
  for (int i = 0; i < columns; i += 8) {
    const F8 part = load(x + i);
    most = max8(most, abs8(part));
    not_finite = fma8(part, all(0.0f), not_finite);
  }
  float largest = max_of(most);
  if (!(largest >= 1e-30f && largest <= 3.4e38f)) largest = 0.0f;
  const float step = largest / (127.0f * kFineSteps);
  const float steps = largest > 0.0f ? kFineSteps / largest : 0.0f, inverse = largest > 0.0f ? 1.0f / step : 0.0f;
  *step_out = step + sum_of(not_finite);
  for (int g = 0; g < columns / kGroup; ++g, x += kGroup) {
    CodedGroup& group = groups[g];
    F8 scaled[4];
    std::int32_t multiples[2], sums[2];
    for (int h = 0; h < 2; ++h) {
      const F8 low = load(x + kFine * h), high = load(x + kFine * h + 8);
      const float peak = max_of(max8(abs8(low), abs8(high))) * steps;
      // Rounded up, but for a trifle: the largest code may come to 127.25 before it is rounded.
      multiples[h] = peak >= 1.0f && peak <= kFineSteps + 1.0f ? static_cast<std::int32_t>(peak + 0.998f) : 1;
      const F8 scale = all(inverse / static_cast<float>(multiples[h]));
      scaled[2 * h] = mul8(low, scale);
      scaled[2 * h + 1] = mul8(high, scale);
    }
    to_group(scaled, group.codes, sums);
    for (int h = 0; h < 2; ++h) {
      group.pair[h] = static_cast<std::int16_t>(multiples[h]);
      group.single[h] = multiples[h];
      group.below[h] = -128 * sums[h];
      group.half_sums[h] = static_cast<float>(multiples[h] * sums[h]);
    }
    group.sum = static_cast<float>(multiples[0] * sums[0] + multiples[1] * sums[1]);
  }
}

// Turns the pairs of each head in place; cosines and sines are of the row's position, dim / 2 each.
inline void rope(float* x, int heads, int dim, const float* cosines, const float* sines, bool interleaved) {
  const int pairs = dim / 2;
  for (int head = 0; head < heads; ++head, x += dim) {
    if (interleaved) {
      for (int i = 0; i < pairs; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = __builtin_fmaf(a, cosines[i], -(b * sines[i]));
        x[2 * i + 1] = __builtin_fmaf(a, sines[i], b * cosines[i]);
      }
    } else {
      for (int i = 0; i < pairs; ++i) {
        const float a = x[i], b = x[i + pairs];
        x[i] = __builtin_fmaf(a, cosines[i], -(b * sines[i]));
        x[i + pairs] = __builtin_fmaf(a, sines[i], b * cosines[i]);
      }
    }
  }
}

inline F8 silu_gate8(F8 gate, F8 up) {
  return mul8(div8(gate, add8(exp8(neg8(gate)), all(1.0f))), up);
}

// 0.5 x (1 + tanh(u)), u = sqrt(2 / pi) (x + 0.044715 x^3), as x / (1 + exp(-2u)).
inline F8 gelu_gate8(F8 gate, F8 up) {
  const F8 cubed = fma8(mul8(mul8(gate, gate), all(0.044715f)), gate, gate);
  return mul8(div8(gate, add8(exp8(mul8(cubed, all(-1.59576912f))), all(1.0f))), up);
}

template <F8 (*kGate)(F8, F8)>
inline void gate_lines(const float* gate, const float* up, int width, float* out) {
  const int whole = width / 8 * 8;
  for (int i = 0; i < whole; i += 8) store8(out + i, kGate(load(gate + i), load(up + i)));
  if (whole < width) {
    const int count = width - whole;
    store_some(out + whole, kGate(load_some(gate + whole, count), load_some(up + whole, count)), count);
  }
}

inline void silu_gate(const float* gate, const float* up, int width, float* out) {
  gate_lines<silu_gate8>(gate, up, width, out);
}

inline void gelu_gate(const float* gate, const float* up, int width, float* out) {
  gate_lines<gelu_gate8>(gate, up, width, out);
}

inline void add(const float* x, const float* y, int width, float* out) {
  for (int i = 0; i < width; ++i) out[i] = x[i] + y[i];
}

inline std::uint16_t float_to_bf16(float x) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Symmetric 8-bit codes with one scale, which is no number where one of x is none.
inline void store_codes_of(const float* x, int count, std::uint8_t* out, int stride, void* scale_out) {
  F8 most = all(0.0f), not_finite = all(0.0f);
  for (int i = 0; i < count; i += 8) {
    const F8 part = count - i < 8 ? load_some(x + i, count - i) : load(x + i);
    most = max8(most, abs8(part));
    not_finite = fma8(part, all(0.0f), not_finite);
  }
  const float largest = max_of(most);
  const bool tiny = !(largest >= 1e-35f);
  const float inverse = tiny ? 0.0f : 127.0f / largest;
  const float scale = (tiny ? 0.0f : largest / 127.0f) + sum_of(not_finite);
  for (int i = 0; i < count; ++i, out += stride) {
    const float rounded = (x[i] * inverse + 12582912.0f) - 12582912.0f;
    const int code = rounded >= -127.0f && rounded <= 127.0f ? static_cast<int>(rounded) : 0;
    *out = static_cast<std::uint8_t>(code);
  }
  __builtin_memcpy(scale_out, &scale, sizeof scale);
}

inline void store_halves_of(const float* x, int count, std::uint8_t* out, int stride) {
  const std::ptrdiff_t apart = 2 * std::ptrdiff_t{stride};
  for (int i = 0; i < count; i += 8) {
    const int some = count - i < 8 ? count - i : 8;
    std::uint8_t halves[16];
    store_half(halves, some < 8 ? load_some(x + i, some) : load(x + i));
    if (stride == 1) {
      __builtin_memcpy(out, halves, 2 * static_cast<std::size_t>(some));
      out += 2 * some;
      continue;
    }
    for (int j = 0; j < some; ++j, out += apart) __builtin_memcpy(out, halves + 2 * j, 2);
  }
}

inline void store(const float* x, int count, Dtype dtype, void* out, int stride, void* scale) {
  auto* bytes = static_cast<std::uint8_t*>(out);
  switch (dtype) {
    case Dtype::f32:
      for (int i = 0; i < count; ++i) __builtin_memcpy(bytes + 4 * std::ptrdiff_t{stride} * i, x + i, 4);
      return;
    case Dtype::f16:
      return store_halves_of(x, count, bytes, stride);
    case Dtype::bf16:
      for (int i = 0; i < count; ++i) {
        const std::uint16_t h = float_to_bf16(x[i]);
        __builtin_memcpy(bytes + 2 * std::ptrdiff_t{stride} * i, &h, 2);
      }
      return;
    case Dtype::i8:
      return store_codes_of(x, count, bytes, stride, scale);
  }
}

// Eight stored numbers (or codes) as floats; `count` of them exist, the others become 0.
inline F8 load_stored(const std::uint8_t* p, Dtype dtype, int count) {
  std::uint8_t part[32] = {};
  if (count < 8) {
    __builtin_memcpy(part, p, static_cast<std::size_t>(count) * static_cast<std::size_t>(item_bytes(dtype)));
    p = part;
  }
  switch (dtype) {
    case Dtype::f32: {
      float lanes[8];
      __builtin_memcpy(lanes, p, sizeof lanes);
      return load(lanes);
    }
    case Dtype::f16:
      return load_half(p);
    case Dtype::i8:
      return load_codes8(p);
    case Dtype::bf16:
      break;
  }
  return load_bf16(p);
}

// Eight scales or minima of a group, beginning with number `first` of them.
inline F8 load_scales(const std::uint8_t* p, bool half, int first) {
  if (half) return load_half(p + 2 * first);
  return load(reinterpret_cast<const float*>(p) + first);  // a copy first would go through memory
}

inline float number_at(const std::uint8_t* p, Form form, std::ptrdiff_t index) {
  p += index * number_bytes(form);
  std::uint16_t half = 0;
  if (form != Form::f32) __builtin_memcpy(&half, p, 2);
  if (form == Form::f16) return half_to_float(half);
  const std::uint32_t wide = static_cast<std::uint32_t>(half) << 16;
  float x;
  __builtin_memcpy(&x, form == Form::f32 ? static_cast<const void*>(p) : &wide, 4);
  return x;
}

inline float scale_at(const std::uint8_t* p, bool half, int index) {
  if (half) {
    std::uint16_t h;
    __builtin_memcpy(&h, p + 2 * index, 2);
    return half_to_float(h);
  }
  float x;
  __builtin_memcpy(&x, p + 4 * index, 4);
  return x;
}

inline void expand(const Weight& weight, int row, float scale, float* out) {
  const int lane = row % kPanel;
  const std::uint8_t* panel = weight.data + weight.panel_bytes() * static_cast<std::size_t>(row / kPanel);
  if (!coded(weight.form)) {
    for (int i = 0; i < weight.columns; ++i) out[i] = number_at(panel, weight.form, i * kPanel + lane) * scale;
    return;
  }
  for (int g = 0; g < weight.groups(); ++g, panel += weight.group_bytes(), out += kGroup) {
    // Of both halves of the group.
    float steps[2], least[2] = {0.0f, 0.0f};
    for (int h = 0; h < 2; ++h) {
      const int at = lane + (weight.fine ? h * kPanel : 0);
      steps[h] = scale_at(panel, weight.half_scales, at);
      if (weight.minima) least[h] = scale_at(panel + weight.header_bytes() / 2, weight.half_scales, at);
    }
    const std::uint8_t* codes = panel + weight.header_bytes() + 4 * lane;
    for (int i = 0; i < kGroup; ++i) {
      float code;
      if (weight.form == Form::u4) {
        const std::uint8_t both = codes[i % 16 / 4 * 64 + i % 4];
        code = static_cast<float>(i < 16 ? both & 15 : both >> 4);
      } else {
        code = static_cast<float>(static_cast<std::int8_t>(codes[i / 4 * 64 + i % 4]));
      }
      const float value = code * steps[i / kFine];
      out[i] = (weight.minima ? value + least[i / kFine] : value) * scale;
    }
  }
}

// Eight floats at a time, in plain C++: the definition that every instruction set must match bit for bit.
// Included inside a namespace of its own by each isa_*.cpp.

struct F8 {
  float v[8];
};

inline F8 load(const float* p) {
  F8 r;
  __builtin_memcpy(r.v, p, sizeof r.v);
  return r;
}
inline void store8(float* p, F8 a) { __builtin_memcpy(p, a.v, sizeof a.v); }
inline F8 all(float x) {
  F8 r;
  for (int i = 0; i < 8; ++i) r.v[i] = x;
  return r;
}

#define KV_EACH(expression)                          \
  F8 r;                                              \
  for (int i = 0; i < 8; ++i) r.v[i] = (expression); \
  return r

inline F8 add8(F8 a, F8 b) { KV_EACH(a.v[i] + b.v[i]); }
inline F8 sub8(F8 a, F8 b) { KV_EACH(a.v[i] - b.v[i]); }
inline F8 mul8(F8 a, F8 b) { KV_EACH(a.v[i] * b.v[i]); }
inline F8 div8(F8 a, F8 b) { KV_EACH(a.v[i] / b.v[i]); }
inline F8 fma8(F8 a, F8 b, F8 c) { KV_EACH(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
// As SSE has it: the second where either is no number.
inline F8 max8(F8 a, F8 b) { KV_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F8 abs8(F8 a) { KV_EACH(__builtin_fabsf(a.v[i])); }
inline F8 neg8(F8 a) { KV_EACH(-a.v[i]); }
// yes where a < b, otherwise no.
inline F8 where_less(F8 a, F8 b, F8 yes, F8 no) { KV_EACH(a.v[i] < b.v[i] ? yes.v[i] : no.v[i]); }
// Nearest whole number, ties to even; |a| < 2^22.
inline F8 round8(F8 a) { KV_EACH((a.v[i] + 12582912.0f) - 12582912.0f); }

#undef KV_EACH

// 2^a for whole numbers from -126 to 127; anything for other numbers.
inline F8 power_of_two(F8 a) {
  F8 r;
  for (int i = 0; i < 8; ++i) {
    const float x = a.v[i];
    const std::int32_t n = x >= -126.0f && x <= 127.0f ? static_cast<std::int32_t>(x) : 0;
    const std::uint32_t bits = static_cast<std::uint32_t>(n + 127) << 23;
    __builtin_memcpy(&r.v[i], &bits, 4);
  }
  return r;
}

// 32 numbers as 8-bit codes, to the nearest (ties to even), in the order that products read; sums are those of the
// halves. Anything where one is no number.
inline void to_group(const F8* scaled, std::int8_t* codes, std::int32_t* sums) {
  sums[0] = sums[1] = 0;
  for (int i = 0; i < 32; ++i) {
    const float x = (scaled[i / 8].v[i % 8] + 12582912.0f) - 12582912.0f;
    const std::int32_t n = x >= -127.0f && x <= 127.0f ? static_cast<std::int32_t>(x) : 0;
    codes[i] = static_cast<std::int8_t>(n);
    sums[i / 16] += n;
  }
}

// Halves, quarters, eighths: one order of addition everywhere.
inline float sum_of(F8 a) {
  return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
inline float max_of(F8 a) {
  float most = a.v[0];
  for (int i = 1; i < 8; ++i) most = a.v[i] > most ? a.v[i] : most;
  return most;
}

inline float half_to_float(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 31u, fraction = h & 1023u;
  std::uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (fraction << 13) | (fraction != 0 ? 0x400000u : 0u);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (fraction << 13);
  } else {
    const float tiny = static_cast<float>(fraction) * 0x1p-24f;
    __builtin_memcpy(&bits, &tiny, 4);
    bits |= sign;
  }
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

inline std::uint16_t float_to_half(float x) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  bits &= 0x7fffffffu;
  std::uint32_t half;
  if (bits > 0x7f800000u) {
    half = 0x7e00u | ((bits >> 13) & 0x3ffu);
  } else if (bits >= 0x477ff000u) {
    half = 0x7c00u;
  } else if (bits >= 0x38800000u) {
    half = (bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  } else {
    float magnitude;
    __builtin_memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;  // its last bit is 2^-24, the last bit of a subnormal half
    std::uint32_t rounded;
    __builtin_memcpy(&rounded, &magnitude, 4);
    half = rounded - 0x3f000000u;
  }
  return static_cast<std::uint16_t>(sign | half);
}

inline F8 load_half(const std::uint8_t* p) {
  F8 r;
  for (int i = 0; i < 8; ++i) {
    std::uint16_t h;
    __builtin_memcpy(&h, p + 2 * i, 2);
    r.v[i] = half_to_float(h);
  }
  return r;
}

// Eight signed bytes.
inline F8 load_codes8(const std::uint8_t* p) {
  F8 r;
  for (int i = 0; i < 8; ++i) r.v[i] = static_cast<float>(static_cast<std::int8_t>(p[i]));
  return r;
}

inline F8 load_bf16(const std::uint8_t* p) {
  F8 r;
  for (int i = 0; i < 8; ++i) {
    std::uint16_t h;
    __builtin_memcpy(&h, p + 2 * i, 2);
    const std::uint32_t bits = static_cast<std::uint32_t>(h) << 16;
    __builtin_memcpy(&r.v[i], &bits, 4);
  }
  return r;
}

inline void store_half(std::uint8_t* p, F8 a) {
  for (int i = 0; i < 8; ++i) {
    const std::uint16_t h = float_to_half(a.v[i]);
    __builtin_memcpy(p + 2 * i, &h, 2);
  }
}

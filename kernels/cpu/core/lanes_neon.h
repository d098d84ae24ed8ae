// Eight floats at a time with NEON; the same functions as lanes_portable.h.

struct F8 {
  float32x4_t low, high;
};

inline F8 load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
inline void store8(float* p, F8 a) {
  vst1q_f32(p, a.low);
  vst1q_f32(p + 4, a.high);
}
inline F8 all(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
inline F8 add8(F8 a, F8 b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
inline F8 sub8(F8 a, F8 b) { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
inline F8 mul8(F8 a, F8 b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
inline F8 div8(F8 a, F8 b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
inline F8 fma8(F8 a, F8 b, F8 c) { return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)}; }
// vmaxq would hand a NaN on from either side.
inline F8 max8(F8 a, F8 b) {
  return {vbslq_f32(vcgtq_f32(a.low, b.low), a.low, b.low), vbslq_f32(vcgtq_f32(a.high, b.high), a.high, b.high)};
}
inline F8 abs8(F8 a) { return {vabsq_f32(a.low), vabsq_f32(a.high)}; }
inline F8 neg8(F8 a) { return {vnegq_f32(a.low), vnegq_f32(a.high)}; }
inline F8 where_less(F8 a, F8 b, F8 yes, F8 no) {
  return {vbslq_f32(vcltq_f32(a.low, b.low), yes.low, no.low), vbslq_f32(vcltq_f32(a.high, b.high), yes.high, no.high)};
}
inline F8 round8(F8 a) { return sub8(add8(a, all(12582912.0f)), all(12582912.0f)); }

inline float32x4_t power_of_two4(float32x4_t a) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(a), vdupq_n_s32(127)), 23));
}
inline F8 power_of_two(F8 a) { return {power_of_two4(a.low), power_of_two4(a.high)}; }

// In the order of the inputs.
inline void to_group(const F8* scaled, std::int8_t* codes, std::int32_t* sums) {
  sums[0] = sums[1] = 0;
  for (int i = 0; i < 4; ++i) {
    const int16x4_t low = vqmovn_s32(vcvtnq_s32_f32(scaled[i].low)), high = vqmovn_s32(vcvtnq_s32_f32(scaled[i].high));
    const int16x8_t words = vcombine_s16(low, high);
    vst1_s8(codes + 8 * i, vqmovn_s16(words));
    sums[i / 2] += vaddlvq_s16(words);
  }
}

inline float sum_of(F8 a) {
  const float32x4_t quarters = vaddq_f32(a.low, a.high);
  const float32x2_t halves = vadd_f32(vget_low_f32(quarters), vget_high_f32(quarters));
  return vget_lane_f32(halves, 0) + vget_lane_f32(halves, 1);
}
inline float max_of(F8 a) {
  float p[8];
  store8(p, a);
  float most = p[0];
  for (int i = 1; i < 8; ++i) most = p[i] > most ? p[i] : most;
  return most;
}

inline float half_to_float(std::uint16_t h) {
  __fp16 half;
  __builtin_memcpy(&half, &h, 2);
  return static_cast<float>(half);
}
inline std::uint16_t float_to_half(float x) {
  const __fp16 half = static_cast<__fp16>(x);
  std::uint16_t h;
  __builtin_memcpy(&h, &half, 2);
  return h;
}
inline F8 load_half(const std::uint8_t* p) {
  const float16x8_t halves = vreinterpretq_f16_u8(vld1q_u8(p));
  return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
inline void store_half(std::uint8_t* p, F8 a) {
  vst1q_u8(p, vreinterpretq_u8_f16(vcombine_f16(vcvt_f16_f32(a.low), vcvt_f16_f32(a.high))));
}
inline F8 load_bf16(const std::uint8_t* p) {
  const uint16x8_t halves = vreinterpretq_u16_u8(vld1q_u8(p));
  return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
          vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16))};
}
inline F8 load_codes8(const std::uint8_t* p) {
  const int16x8_t words = vmovl_s8(vreinterpret_s8_u8(vld1_u8(p)));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(words))), vcvtq_f32_s32(vmovl_high_s16(words))};
}

// Four lines of four, turned.
inline void turn4(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d, float* out, std::ptrdiff_t stride) {
  const float64x2_t ab0 = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), ab1 = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
  const float64x2_t cd0 = vreinterpretq_f64_f32(vtrn1q_f32(c, d)), cd1 = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
  vst1q_f32(out, vreinterpretq_f32_f64(vtrn1q_f64(ab0, cd0)));
  vst1q_f32(out + stride, vreinterpretq_f32_f64(vtrn1q_f64(ab1, cd1)));
  vst1q_f32(out + 2 * stride, vreinterpretq_f32_f64(vtrn2q_f64(ab0, cd0)));
  vst1q_f32(out + 3 * stride, vreinterpretq_f32_f64(vtrn2q_f64(ab1, cd1)));
}

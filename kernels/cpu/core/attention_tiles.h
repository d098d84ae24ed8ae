// Products of floats in tiles that stay in registers, for attention over many rows.
// Included inside a namespace of its own by each isa_*.cpp, after its lanes.

// c[rows][8 * vectors] (+)= a[rows][depth] · b[depth][..], each sum in the order of depth.
template <int kRows, int kVectors>
inline void multiply_tile(const float* a, std::ptrdiff_t a_stride, const float* b, std::ptrdiff_t b_stride, float* c,
                          std::ptrdiff_t c_stride, int depth, bool onto) {
  F8 sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sums[r][v] = onto ? load(c + r * c_stride + 8 * v) : all(0.0f);
  }
  for (int k = 0; k < depth; ++k, b += b_stride) {
    // What is fewer stays in registers.
    if constexpr (kRows > kVectors) {
      F8 other[kVectors];
      for (int v = 0; v < kVectors; ++v) other[v] = load(b + 8 * v);
      for (int r = 0; r < kRows; ++r) {
        const F8 from = all(a[r * a_stride + k]);
        for (int v = 0; v < kVectors; ++v) sums[r][v] = fma8(from, other[v], sums[r][v]);
      }
    } else {
      F8 from[kRows];
      for (int r = 0; r < kRows; ++r) from[r] = all(a[r * a_stride + k]);
      for (int v = 0; v < kVectors; ++v) {
        const F8 other = load(b + 8 * v);
        for (int r = 0; r < kRows; ++r) sums[r][v] = fma8(from[r], other, sums[r][v]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store8(c + r * c_stride + 8 * v, sums[r][v]);
  }
}

template <int kRows, int kVectors>
inline void multiply_rows(const float* a, std::ptrdiff_t a_stride, const float* b, std::ptrdiff_t b_stride, float* c,
                          std::ptrdiff_t c_stride, int depth, int width, bool onto) {
  int column = 0;
  for (; column + 8 * kVectors <= width; column += 8 * kVectors) {
    multiply_tile<kRows, kVectors>(a, a_stride, b + column, b_stride, c + column, c_stride, depth, onto);
  }
  for (; column < width; column += 8) {
    multiply_tile<kRows, 1>(a, a_stride, b + column, b_stride, c + column, c_stride, depth, onto);
  }
}

// `width` is a multiple of 8. How rows and columns are cut changes no bit.
inline void multiply(const float* a, std::ptrdiff_t a_stride, int rows, const float* b, std::ptrdiff_t b_stride,
                     float* c, std::ptrdiff_t c_stride, int depth, int width, bool onto) {
  for (; rows >= 6; rows -= 6, a += 6 * a_stride, c += 6 * c_stride) {
    multiply_rows<6, 2>(a, a_stride, b, b_stride, c, c_stride, depth, width, onto);
  }
  if (rows >= 4) {
    multiply_rows<4, 3>(a, a_stride, b, b_stride, c, c_stride, depth, width, onto);
    rows -= 4;
    a += 4 * a_stride;
    c += 4 * c_stride;
  }
  if (rows == 3) multiply_rows<3, 4>(a, a_stride, b, b_stride, c, c_stride, depth, width, onto);
  if (rows == 2) multiply_rows<2, 4>(a, a_stride, b, b_stride, c, c_stride, depth, width, onto);
  if (rows == 1) multiply_rows<1, 8>(a, a_stride, b, b_stride, c, c_stride, depth, width, onto);
}

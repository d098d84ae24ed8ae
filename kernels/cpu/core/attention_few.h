// Scores and weighted values of few lines over pages of halves, read where they lie.
// Included inside a namespace of its own by each isa_*.cpp, after attention_blocks.h.

constexpr int kFewLines = 8;

// Scores of kVectors blocks from `block` on. On the way the next chunk's keys are asked for.
template <int kLines, int kVectors>
inline void score_blocks(const float* queries, int padded, const Blocks& blocks, const Blocks& next, int dim, int block,
                         float* scores) {
  F8 sums[kLines][kVectors];
  for (int l = 0; l < kLines; ++l) {
    for (int v = 0; v < kVectors; ++v) sums[l][v] = all(0.0f);
  }
  const std::uint8_t* keys[kVectors];
  for (int v = 0; v < kVectors; ++v) keys[v] = blocks.keys[block + v];
  std::ptrdiff_t at = 0;
  const int part = dim / kVectors;  // of the dimensions, for one run of the next chunk
  for (int run = 0; run < kVectors; ++run) {
    const std::uint8_t* ahead = next.key_runs[block + run];
    const int end = run + 1 < kVectors ? (run + 1) * part : dim;
    for (int d = run * part; d < end; ++d, at += blocks.key_stride, ahead += 16 * kVectors) {
      if constexpr (kVectors > 1) __builtin_prefetch(ahead);
      if constexpr (kVectors == 8) __builtin_prefetch(ahead + 64);
      F8 q[kLines];
      for (int l = 0; l < kLines; ++l) q[l] = all(queries[l * padded + d]);
      for (int v = 0; v < kVectors; ++v) {
        const F8 key = load_half(keys[v] + at);
        for (int l = 0; l < kLines; ++l) sums[l][v] = fma8(q[l], key, sums[l][v]);
      }
    }
  }
  for (int l = 0; l < kLines; ++l) {
    for (int v = 0; v < kVectors; ++v) store8(scores + l * kChunk + (block + v) * kBlockTokens, sums[l][v]);
  }
}

template <int kLines>
inline void score_lines(const float* queries, int padded, const Blocks& blocks, const Blocks& next, int dim, int width,
                        float* scores) {
  constexpr int kVectors = kLines == 1 ? 8 : 4;
  int block = 0;
  for (; (block + kVectors) * kBlockTokens <= width; block += kVectors) {
    score_blocks<kLines, kVectors>(queries, padded, blocks, next, dim, block, scores);
  }
  for (; block * kBlockTokens < width; ++block) {
    score_blocks<kLines, 1>(queries, padded, blocks, next, dim, block, scores);
  }
}

// Adds the weighted values of tokens [low, high), in order. The next chunk's values are asked for.
template <int kLines, int kVectors>
inline void weigh_dimensions(const float* weights, const Blocks& blocks, const Blocks& next, int low, int high, int d,
                             int padded, float* o) {
  F8 sums[kLines][kVectors];
  for (int l = 0; l < kLines; ++l) {
    for (int v = 0; v < kVectors; ++v) sums[l][v] = load(o + l * padded + d + 8 * v);
  }
  const std::ptrdiff_t line = 2 * padded;
  for (int block = low / kBlockTokens; block * kBlockTokens < high; ++block) {
    const int begin = block * kBlockTokens;
    int t = low > begin ? low : begin;
    const int end = high < begin + kBlockTokens ? high : begin + kBlockTokens;
    const std::uint8_t* value = blocks.values[block] + (t - begin) * line + 2 * d;
    const std::uint8_t* ahead = next.values[block] + (t - begin) * line + 2 * d;
    for (; t < end; ++t, value += line, ahead += line) {
      if constexpr (kVectors == 4) __builtin_prefetch(ahead);
      F8 weight[kLines];
      for (int l = 0; l < kLines; ++l) weight[l] = all(weights[l * kChunk + t]);
      for (int v = 0; v < kVectors; ++v) {
        const F8 half = load_half(value + 16 * v);
        for (int l = 0; l < kLines; ++l) sums[l][v] = fma8(weight[l], half, sums[l][v]);
      }
    }
  }
  for (int l = 0; l < kLines; ++l) {
    for (int v = 0; v < kVectors; ++v) store8(o + l * padded + d + 8 * v, sums[l][v]);
  }
}

template <int kLines>
inline void weigh_lines(const float* weights, const Blocks& blocks, const Blocks& next, int low, int high, int padded,
                        float* o) {
  int d = 0;
  for (; d + 32 <= padded; d += 32) weigh_dimensions<kLines, 4>(weights, blocks, next, low, high, d, padded, o);
  for (; d < padded; d += 8) weigh_dimensions<kLines, 1>(weights, blocks, next, low, high, d, padded, o);
}

// Calls work(first line) for threes and a rest, with the number of lines as a constant.
template <typename Work>
inline void by_threes(int line, int count, Work work) {
  for (; count >= 3; count -= 3, line += 3) work.template operator()<3>(line);
  if (count == 2) work.template operator()<2>(line);
  if (count == 1) work.template operator()<1>(line);
}

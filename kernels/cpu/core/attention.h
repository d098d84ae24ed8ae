// Attention of one tile of rows over pages, for one key head and some spans of the context.
//
// The context is cut at multiples of 64 tokens (chunks) and 512 (spans), never by page size, batch or thread.
// A chunk is staged as floats (for few lines over halves: as halves), keys turned so that tokens lie side by side;
// scores and values are sums in the order of dimensions and of tokens. Chunks merge in order into their span, spans in order into the row: who
// computes a span, and beside which other rows, changes no bit.
// Included inside a namespace of its own by each isa_*.cpp, after elementwise.h.

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

// Where the keys and values of a chunk's first `count` tokens lie.
struct ChunkLines {
  const std::uint8_t* keys[kChunk];
  const std::uint8_t* values[kChunk];
  const std::uint8_t* key_scales[kChunk];  // these two for 8-bit pages only
  const std::uint8_t* value_scales[kChunk];
};

inline void find_lines(const Attention& attention, const Range& range, int head, int first, int count, ChunkLines& lines) {
  const Plane& k = attention.k;
  const Plane& v = attention.v;
  const std::size_t k_bytes = k.line_bytes(), v_bytes = v.line_bytes();
  for (int token = 0; token < count;) {
    const int page = range.pages[(first + token) / k.page_tokens];
    const std::uint8_t* key = k.at(page, head, 0);
    const std::uint8_t* value = v.at(page, head, 0);
    const int end = count - token < k.page_tokens ? count : token + k.page_tokens;
    if (k.dtype == Dtype::i8) {
      for (int t = token; t < end; ++t) {
        lines.key_scales[t] = k.scale_at(page, head, t - token);
        lines.value_scales[t] = v.scale_at(page, head, t - token);
      }
    }
    for (; token < end; ++token, key += k_bytes, value += v_bytes) {
      lines.keys[token] = key;
      lines.values[token] = value;
    }
  }
}

// Asks for the lines before they are needed: runs within a page are too short for the processor to foresee.
inline void fetch_lines(const ChunkLines& lines, int first, int count, std::size_t bytes) {
  for (int token = first; token < count; ++token) {
    for (std::size_t at = 0; at < bytes; at += 64) {
      __builtin_prefetch(lines.keys[token] + at);
      __builtin_prefetch(lines.values[token] + at);
    }
  }
}

template <Dtype kDtype>
inline F8 load_as(const std::uint8_t* line, const std::uint8_t* scale, int at, int dim) {
  const F8 stored = load_stored(line + at * item_bytes(kDtype), kDtype, dim - at < 8 ? dim - at : 8);
  if constexpr (kDtype != Dtype::i8) return stored;
  float factor;
  __builtin_memcpy(&factor, scale, sizeof factor);
  return mul8(stored, all(factor));
}

// The chunk as floats: keys turned to [dim][64], values as [64][dim]; tokens from `count` on are 0.
template <Dtype kDtype>
inline void stage_as(const ChunkLines& lines, int dim, int count, const ChunkLines& next, int next_count, float* keys,
                     float* values) {
  const int padded = padded8(dim);
  for (int token = 0; token < kChunk; token += 8) {
    fetch_lines(next, token, token + 8 < next_count ? token + 8 : next_count,
                static_cast<std::size_t>(dim) * static_cast<std::size_t>(item_bytes(kDtype)));
    const int known = count - token < 0 ? 0 : count - token < 8 ? count - token : 8;
    for (int t = 0; t < known; ++t) {
      const std::uint8_t* line = lines.values[token + t];
      const std::uint8_t* scale = kDtype == Dtype::i8 ? lines.value_scales[token + t] : nullptr;
      for (int d = 0; d < padded; d += 8) {
        store8(values + (token + t) * padded + d, load_as<kDtype>(line, scale, d, dim));
      }
    }
    for (int d = 0; d < padded; d += 8) {
      F8 eight[8];
      for (int t = 0; t < 8; ++t) {
        const std::uint8_t* scale = kDtype == Dtype::i8 && t < known ? lines.key_scales[token + t] : nullptr;
        eight[t] = t < known ? load_as<kDtype>(lines.keys[token + t], scale, d, dim) : all(0.0f);
      }
      turn8(eight, keys + d * kChunk + token, kChunk);
    }
  }
}

inline void stage(Dtype dtype, const ChunkLines& lines, int dim, int count, const ChunkLines& next, int next_count,
                  float* keys, float* values) {
  switch (dtype) {
    case Dtype::f32:
      return stage_as<Dtype::f32>(lines, dim, count, next, next_count, keys, values);
    case Dtype::f16:
      return stage_as<Dtype::f16>(lines, dim, count, next, next_count, keys, values);
    case Dtype::bf16:
      return stage_as<Dtype::bf16>(lines, dim, count, next, next_count, keys, values);
    case Dtype::i8:
      return stage_as<Dtype::i8>(lines, dim, count, next, next_count, keys, values);
  }
}

// Few lines over halves: keys are turned as halves and become floats where they are used, values are not staged.

constexpr int kFewLines = 8;

// Memory is asked for evenly: the next chunk's keys here, its values by `weigh_lines`.
inline void stage_halves(const ChunkLines& lines, int dim, int width, const ChunkLines& next, int next_count,
                         std::uint16_t* keys) {
  for (int token = 0; token < kChunk; token += 8) {
    for (int t = token; t < token + 8 && t < next_count; ++t) {
      for (int at = 0; at < 2 * dim; at += 64) __builtin_prefetch(next.keys[t] + at);
    }
    if (token >= width) continue;
    for (int d = 0; d < dim; d += 16) turn_halves(lines.keys + token, 2 * d, keys + d * kChunk + token, kChunk);
  }
}

// Scores of 8 * kVectors tokens from `token` on.
template <int kLines, int kVectors>
inline void score_tokens(const float* queries, int padded, const std::uint16_t* keys, int dim, int token, float* scores) {
  F8 sums[kLines][kVectors];
  for (int l = 0; l < kLines; ++l) {
    for (int v = 0; v < kVectors; ++v) sums[l][v] = all(0.0f);
  }
  const auto* from = reinterpret_cast<const std::uint8_t*>(keys + token);
  for (int d = 0; d < dim; ++d, from += 2 * kChunk) {
    F8 q[kLines];
    for (int l = 0; l < kLines; ++l) q[l] = all(queries[l * padded + d]);
    for (int v = 0; v < kVectors; ++v) {
      const F8 key = load_half(from + 16 * v);
      for (int l = 0; l < kLines; ++l) sums[l][v] = fma8(q[l], key, sums[l][v]);
    }
  }
  for (int l = 0; l < kLines; ++l) {
    for (int v = 0; v < kVectors; ++v) store8(scores + l * kChunk + token + 8 * v, sums[l][v]);
  }
}

template <int kLines>
inline void score_lines(const float* queries, int padded, const std::uint16_t* keys, int dim, int width, float* scores) {
  constexpr int kVectors = kLines == 1 ? 8 : 4;
  int token = 0;
  for (; token + 8 * kVectors <= width; token += 8 * kVectors) {
    score_tokens<kLines, kVectors>(queries, padded, keys, dim, token, scores);
  }
  for (; token < width; token += 8) score_tokens<kLines, 1>(queries, padded, keys, dim, token, scores);
}

template <int kLines, int kVectors>
inline void weigh_dimensions(const float* weights, const ChunkLines& lines, const ChunkLines& next, int next_count,
                             int low, int high, int d, int padded, float* o) {
  F8 sums[kLines][kVectors];
  for (int l = 0; l < kLines; ++l) {
    for (int v = 0; v < kVectors; ++v) sums[l][v] = load(o + l * padded + d + 8 * v);
  }
  for (int t = low; t < high; ++t) {
    if (kVectors == 4 && t < next_count) __builtin_prefetch(next.values[t] + 2 * d);
    F8 weight[kLines];
    for (int l = 0; l < kLines; ++l) weight[l] = all(weights[l * kChunk + t]);
    for (int v = 0; v < kVectors; ++v) {
      const F8 value = load_half(lines.values[t] + 2 * d + 16 * v);
      for (int l = 0; l < kLines; ++l) sums[l][v] = fma8(weight[l], value, sums[l][v]);
    }
  }
  for (int l = 0; l < kLines; ++l) {
    for (int v = 0; v < kVectors; ++v) store8(o + l * padded + d + 8 * v, sums[l][v]);
  }
}

template <int kLines>
inline void weigh_lines(const float* weights, const ChunkLines& lines, const ChunkLines& next, int next_count, int low,
                        int high, int padded, float* o) {
  int d = 0;
  for (; d + 32 <= padded; d += 32) {
    weigh_dimensions<kLines, 4>(weights, lines, next, next_count, low, high, d, padded, o);
  }
  for (; d < padded; d += 8) weigh_dimensions<kLines, 1>(weights, lines, next, next_count, low, high, d, padded, o);
}

// Calls work(first line, number of lines as a constant) for threes and a rest.
template <typename Work>
inline void by_threes(int line, int count, Work work) {
  for (; count >= 3; count -= 3, line += 3) work.template operator()<3>(line);
  if (count == 2) work.template operator()<2>(line);
  if (count == 1) work.template operator()<1>(line);
}

// Scores of one line become weights; tokens outside [low, high) get none.
// cap * tanh(score / cap), as cap - 2 cap / (1 + exp(2 score / cap)).
inline void cap_scores(float* scores, float cap) {
  for (int i = 0; i < kChunk; i += 8) {
    const F8 below = div8(all(2.0f * cap), add8(exp8(mul8(load(scores + i), all(2.0f / cap))), all(1.0f)));
    store8(scores + i, sub8(all(cap), below));
  }
}

inline void soften(float* scores, int low, int high, float cap, float* o, State& state, int padded) {
  if (cap > 0.0f) cap_scores(scores, cap);
  if (low > 0 || high < kChunk) {
    for (int i = 0; i < kChunk; ++i) {
      if (i < low || i >= high) scores[i] = -__builtin_inff();
    }
  }
  F8 most = load(scores);
  for (int i = 8; i < kChunk; i += 8) most = max8(load(scores + i), most);
  const float chunk_peak = max_of(most);
  const float peak = chunk_peak > state.peak ? chunk_peak : state.peak;
  F8 sums = all(0.0f);
  for (int i = 0; i < kChunk; i += 8) {
    const F8 weights = exp_negative(sub8(load(scores + i), all(peak)));
    store8(scores + i, weights);
    sums = add8(sums, weights);
  }
  const float shrink = peak == state.peak ? 1.0f : exp1(state.peak - peak);
  state.total = __builtin_fmaf(state.total, shrink, sum_of(sums));
  state.peak = peak;
  if (shrink != 1.0f) {
    for (int d = 0; d < padded; d += 8) store8(o + d, mul8(load(o + d), all(shrink)));
  }
}

inline void begin(float* o, State* states, int lines, int padded) {
  for (int i = 0; i < lines * padded; ++i) o[i] = 0.0f;
  for (int i = 0; i < lines; ++i) states[i] = {-__builtin_inff(), 0.0f};
}

inline void merge(float* o, State* state, const float* other, const State* other_state, int padded) {
  const float peak = other_state->peak > state->peak ? other_state->peak : state->peak;
  const float mine = exp1(state->peak - peak), theirs = exp1(other_state->peak - peak);
  state->total = __builtin_fmaf(state->total, mine, other_state->total * theirs);
  state->peak = peak;
  for (int d = 0; d < padded; d += 8) {
    // + 0 makes every zero a positive one, so that merging into nothing and then on is merging once.
    store8(o + d, fma8(load(o + d), all(mine), mul8(add8(load(other + d), all(0.0f)), all(theirs))));
  }
}

inline void finish(const float* o, const State* state, int dim, float* out) {
  for (int d = 0; d < dim; ++d) out[d] = o[d] / state->total;
}

inline int least_of(int a, int b) { return a < b ? a : b; }

inline void attend(const Attention& attention, const Range& range, int head, int first, int last, int span,
                   int span_end, float* o, State* states, std::uint8_t* scratch) {
  const int dim = attention.k.dim, padded = padded8(dim), shared = attention.shared;
  const int rows = last - first, lines = rows * shared;
  const int tile_lines = tile_rows(shared) * shared;
  float* keys = reinterpret_cast<float*>(scratch);
  float* values = keys + kChunk * padded;
  float* queries = values + kChunk * padded;
  float* span_o = queries + tile_lines * padded;
  float* scores = span_o + tile_lines * padded;
  State* span_states = reinterpret_cast<State*>(scores + tile_lines * kChunk);

  for (int r = 0; r < rows; ++r) {
    const float* q = attention.q.row(range.row + first + r) + head * shared * dim;
    for (int s = 0; s < shared; ++s) {
      float* line = queries + (r * shared + s) * padded;
      for (int d = 0; d < padded; ++d) line[d] = d < dim ? q[s * dim + d] * attention.scale : 0.0f;
    }
  }
  const int begin_position = range.start + first, end_position = range.start + last;
  const int sequence_end = range.start + range.count;
  const bool halves = attention.k.dtype == Dtype::f16 && dim % 16 == 0;
  auto* const turned = reinterpret_cast<std::uint16_t*>(keys);
  const int least = attention.window > 0 && begin_position >= attention.window ? begin_position - attention.window + 1 : 0;

  ChunkLines lines_of[2];
  int found = -1;  // the chunk whose lines were looked up ahead

  for (; span < span_end; ++span) {
    bool any = false;
    begin(span_o, span_states, lines, padded);
    for (int chunk = span * kSpanChunks; chunk < (span + 1) * kSpanChunks; ++chunk) {
      const int token = chunk * kChunk;
      if (token >= end_position) break;
      if (token + kChunk <= least) continue;
      any = true;
      const int known = sequence_end - token < kChunk ? sequence_end - token : kChunk;
      ChunkLines* const here = &lines_of[chunk % 2];
      if (found != chunk) find_lines(attention, range, head, token, known, *here);
      int more = 0;
      if (token + kChunk < end_position) {
        more = sequence_end - token - kChunk < kChunk ? sequence_end - token - kChunk : kChunk;
        found = chunk + 1;
        find_lines(attention, range, head, token + kChunk, more, lines_of[found % 2]);
      }
      const auto low_of = [&](int r) {
        const int low = attention.window > 0 ? begin_position + r - attention.window + 1 - token : 0;
        return low < 0 ? 0 : low;
      };
      const auto high_of = [&](int r) { return least_of(begin_position + r + 1 - token, kChunk); };
      // Rows [from, to) see some of the chunk: tokens [low_of, high_of), which do not fall from row to row.
      const int from = begin_position < token ? token - begin_position : 0;
      const int to = attention.window > 0 ? least_of(rows, token + kChunk - 1 + attention.window - begin_position) : rows;
      const int width = padded8(high_of(to - 1)), line = from * shared, count = (to - from) * shared;
      const bool few = halves && count <= kFewLines;
      const ChunkLines& next = lines_of[(chunk + 1) % 2];
      if (few) {
        for (int t = known; t < width; ++t) here->keys[t] = here->keys[0];
        stage_halves(*here, dim, width, next, more, turned);
        by_threes(line, count, [&]<int kLines>(int l) {
          score_lines<kLines>(queries + l * padded, padded, turned, dim, width, scores + l * kChunk);
        });
      } else {
        stage(attention.k.dtype, *here, dim, known, next, more, keys, values);
        multiply(queries + line * padded, padded, count, keys, kChunk, scores + line * kChunk, kChunk, dim, width, false);
      }
      for (int r = from; r < to; ++r) {
        for (int l = r * shared; l < (r + 1) * shared; ++l) {
          soften(scores + l * kChunk, low_of(r), high_of(r), attention.cap, span_o + l * padded, span_states[l], padded);
        }
      }
      const auto weigh = [&](int row, int row_end, int low, int high) {
        const int l = row * shared, n = (row_end - row) * shared;
        if (low >= high) return;
        if (few) {
          by_threes(l, n, [&]<int kLines>(int at) {
            weigh_lines<kLines>(scores + at * kChunk, *here, next, more, low, high, padded, span_o + at * padded);
          });
        } else {
          multiply(scores + l * kChunk + low, kChunk, n, values + low * padded, padded, span_o + l * padded, padded,
                   high - low, padded, true);
        }
      };
      // What all rows see they add together; what some see before and after that, each by itself. A token that a row
      // does not see is not even added with a weight of 0: it might be no number.
      const int common_low = low_of(to - 1), common_high = high_of(from);
      if (common_low < common_high) {
        for (int r = from; r < to; ++r) weigh(r, r + 1, low_of(r), common_low);
        weigh(from, to, common_low, common_high);
        for (int r = from; r < to; ++r) weigh(r, r + 1, common_high, high_of(r));
      } else {
        for (int r = from; r < to; ++r) weigh(r, r + 1, low_of(r), high_of(r));
      }
    }
    if (!any) continue;
    for (int i = 0; i < lines; ++i) {
      // A row that sees nothing of this span has no result to merge.
      if (span_states[i].total == 0.0f && span_states[i].peak == -__builtin_inff()) continue;
      merge(o + i * padded, states + i, span_o + i * padded, span_states + i, padded);
    }
  }
}

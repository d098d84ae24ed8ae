// Attention of one tile of rows over pages, for one key head and some spans of the context.
//
// The context is cut at multiples of 64 tokens (chunks) and 512 (spans), never by page size, batch or thread.
// Keys stand in pages with the tokens side by side, so that eight scores are one vector; a chunk is staged as floats, or
// read where it lies (few lines over halves). Scores and values are sums in the order of dimensions and of tokens.
// Chunks merge in order into their span, spans in order into the row: who computes a span, and beside which other rows,
// changes no bit.
// Included inside a namespace of its own by each isa_*.cpp, after attention_tiles.h and attention_few.h.

// cap * tanh(score / cap), as cap - 2 cap / (1 + exp(2 score / cap)).
inline void cap_scores(float* scores, float cap) {
  for (int i = 0; i < kChunk; i += 8) {
    const F8 below = div8(all(2.0f * cap), add8(exp8(mul8(load(scores + i), all(2.0f / cap))), all(1.0f)));
    store8(scores + i, sub8(all(cap), below));
  }
}

// Scores of some lines become weights; tokens outside [low, high) get none. Lines side by side, because each is a chain
// of steps that wait for one another.
template <int kLines>
inline void soften(float* scores, const int* low, const int* high, float cap, float* o, State* states, int padded) {
  F8 most[kLines];
  float peaks[kLines];
  bool moved = false;
  for (int l = 0; l < kLines; ++l) {
    float* const line = scores + l * kChunk;
    if (cap > 0.0f) cap_scores(line, cap);
    for (int i = 0; i < low[l]; ++i) line[i] = -__builtin_inff();
    for (int i = high[l]; i < kChunk; ++i) line[i] = -__builtin_inff();
    most[l] = load(line);
  }
  for (int i = 8; i < kChunk; i += 8) {
    for (int l = 0; l < kLines; ++l) most[l] = max8(load(scores + l * kChunk + i), most[l]);
  }
  for (int l = 0; l < kLines; ++l) {
    const float peak = max_of(most[l]);
    peaks[l] = peak > states[l].peak ? peak : states[l].peak;
    moved = moved || peaks[l] != states[l].peak;
  }
  F8 sums[kLines];
  for (int l = 0; l < kLines; ++l) sums[l] = all(0.0f);
  for (int i = 0; i < kChunk; i += 8) {
    for (int l = 0; l < kLines; ++l) {
      const F8 weights = exp_negative(sub8(load(scores + l * kChunk + i), all(peaks[l])));
      store8(scores + l * kChunk + i, weights);
      sums[l] = add8(sums[l], weights);
    }
  }
  if (!moved) {
    for (int l = 0; l < kLines; ++l) states[l].total += sum_of(sums[l]);
    return;
  }
  float shrinks[8] = {};
  for (int l = 0; l < kLines; ++l) shrinks[l] = states[l].peak - peaks[l];
  store8(shrinks, exp8(load(shrinks)));
  for (int l = 0; l < kLines; ++l) {
    if (peaks[l] == states[l].peak) shrinks[l] = 1.0f;
    states[l].total = __builtin_fmaf(states[l].total, shrinks[l], sum_of(sums[l]));
    states[l].peak = peaks[l];
    const F8 shrink = all(shrinks[l]);
    for (int d = 0; d < padded; d += 8) store8(o + l * padded + d, mul8(load(o + l * padded + d), shrink));
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

// The first token that a window leaves visible from a position on.
inline int least_visible(const Attention& attention, int position) {
  return attention.window > 0 && position >= attention.window ? position - attention.window + 1 : 0;
}

// Where the first chunk of what follows lies. What the work on this chunk's `width` tokens does not ask for on its
// way is asked for at once.
inline void look_ahead(const Attention& attention, const Share& upcoming, int width, Blocks& blocks) {
  const Range& range = *upcoming.range;
  const int token = least_visible(attention, range.start + upcoming.first) / kChunk * kChunk;
  const int known = least_of(range.start + upcoming.last - token, kChunk);
  find_blocks(attention, range, upcoming.head, token, known, blocks);
  const auto bytes = static_cast<std::ptrdiff_t>(attention.v.line_bytes()) * kBlockTokens;
  const int on_the_way = width / kBlockTokens;
  for (int b = on_the_way / 4 * 4; b * kBlockTokens < known; ++b) fetch(blocks.key_runs[b], bytes);
  for (int b = on_the_way; b * kBlockTokens < known; ++b) fetch(blocks.values[b], bytes);
}

inline void attend(const Attention& attention, const Share& share, const Share* upcoming, int span, int span_end, float* o,
                   State* states, std::uint8_t* scratch) {
  const Range& range = *share.range;
  const int head = share.head, first = share.first, last = share.last;
  const int dim = attention.k.dim, padded = padded8(dim), shared = attention.shared;
  const int rows = last - first, lines = rows * shared;
  const int tile_lines = tile_rows(shared) * shared;
  float* keys = reinterpret_cast<float*>(scratch);
  float* values = keys + kChunk * padded;
  float* queries = values + kChunk * padded;
  float* span_o = queries + tile_lines * padded;
  float* scores = span_o + tile_lines * padded;
  State* span_states = reinterpret_cast<State*>(scores + tile_lines * kChunk);
  std::uint8_t* const copy = reinterpret_cast<std::uint8_t*>(span_states + tile_lines);

  for (int r = 0; r < rows; ++r) {
    const float* q = attention.q.row(range.row + first + r) + head * shared * dim;
    for (int s = 0; s < shared; ++s) {
      float* line = queries + (r * shared + s) * padded;
      for (int d = 0; d < padded; ++d) line[d] = d < dim ? q[s * dim + d] * attention.scale : 0.0f;
    }
  }
  const int begin_position = range.start + first, end_position = range.start + last;
  const bool halves = attention.k.dtype == Dtype::f16 && dim == padded;
  const bool small_pages = attention.k.page_tokens < kBlockTokens;
  const int least = least_visible(attention, begin_position);

  Blocks blocks_of[2];
  int found = -1;  // the chunk whose blocks were looked up ahead

  for (; span < span_end; ++span) {
    bool any = false;
    begin(span_o, span_states, lines, padded);
    for (int chunk = span * kSpanChunks; chunk < (span + 1) * kSpanChunks; ++chunk) {
      const int token = chunk * kChunk;
      if (token >= end_position) break;
      if (token + kChunk <= least) continue;
      any = true;
      const auto known = [&](int from) { return least_of(end_position - from, kChunk); };
      Blocks* const here = &blocks_of[chunk % 2];
      const Blocks* next = here;
      if (small_pages) {
        gather_blocks(attention, range, head, token, known(token), copy, *here);
      } else {
        if (found != chunk) find_blocks(attention, range, head, token, known(token), *here);
        if (token + kChunk < end_position) {
          found = chunk + 1;
          find_blocks(attention, range, head, token + kChunk, known(token + kChunk), blocks_of[found % 2]);
          next = &blocks_of[found % 2];
        }
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
      if (few && next == here && upcoming != nullptr && !small_pages) {
        Blocks& other = blocks_of[(chunk + 1) % 2];
        look_ahead(attention, *upcoming, width, other);
        next = &other;
      }
      if (few) {
        by_threes(line, count, [&]<int kLines>(int l) {
          score_lines<kLines>(queries + l * padded, padded, *here, *next, dim, width, scores + l * kChunk);
        });
      } else {
        stage(attention.k.dtype, *here, dim, width, *next, keys, values);
        multiply(queries + line * padded, padded, count, keys, kChunk, scores + line * kChunk, kChunk, dim, width, false);
      }
      by_threes(line, count, [&]<int kLines>(int l) {
        int low[kLines], high[kLines];
        for (int i = 0; i < kLines; ++i) {
          low[i] = low_of((l + i) / shared);
          high[i] = high_of((l + i) / shared);
        }
        soften<kLines>(scores + l * kChunk, low, high, attention.cap, span_o + l * padded, span_states + l, padded);
      });
      const auto weigh = [&](int row, int row_end, int low, int high) {
        const int l = row * shared, n = (row_end - row) * shared;
        if (low >= high) return;
        if (few) {
          by_threes(l, n, [&]<int kLines>(int at) {
            weigh_lines<kLines>(scores + at * kChunk, *here, *next, low, high, padded, span_o + at * padded);
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

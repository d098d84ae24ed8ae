// Where keys and values lie in pages, in blocks of eight tokens; and how a chunk becomes floats.
// Included inside a namespace of its own by each isa_*.cpp, after elementwise.h.

constexpr int kBlockTokens = 8;
constexpr int kBlocks = kChunk / kBlockTokens;
static_assert(kBlockTokens == 8, "a vector holds one number of each token of a block");

// A chunk's blocks. Where pages hold fewer tokens than a block, the chunk is copied together first.
struct Blocks {
  const std::uint8_t* keys[kBlocks];    // the first dimension's eight numbers
  const std::uint8_t* values[kBlocks];  // the first token's line
  const std::uint8_t* scales[kBlocks];  // 8-bit pages only: the key's of the first token
  // An eighth of the bytes of a chunk's keys each: what to ask for ahead. Not where a block lies.
  const std::uint8_t* key_runs[kBlocks];
  std::ptrdiff_t key_stride;  // bytes from one dimension to the next
};

// Copies a chunk out of pages that are smaller than a block.
inline void gather_blocks(const Attention& attention, const Range& range, int head, int first, int count,
                          std::uint8_t* copy, Blocks& blocks) {
  const Plane& k = attention.k;
  const Plane& v = attention.v;
  const auto item = static_cast<std::size_t>(item_bytes(k.dtype)), line = v.line_bytes();
  const auto run = item * static_cast<std::size_t>(k.page_tokens);
  std::uint8_t* const keys = copy;
  std::uint8_t* const values = keys + kChunk * line;
  std::uint8_t* const scales = values + kChunk * line;
  constexpr std::size_t kScale = kScalesPerLine * sizeof(float);
  for (int token = 0; token < count; token += k.page_tokens) {
    const int page = range.pages[(first + token) / k.page_tokens];
    const auto at = static_cast<std::size_t>(token);
    const std::uint8_t* from = k.at(page, head, 0);
    for (int d = 0; d < k.dim; ++d, from += run) {
      __builtin_memcpy(keys + (static_cast<std::size_t>(d) * kChunk + at) * item, from, run);
    }
    __builtin_memcpy(values + at * line, v.at(page, head, 0), line * static_cast<std::size_t>(k.page_tokens));
    if (k.dtype == Dtype::i8) {
      __builtin_memcpy(scales + at * kScale, k.scale_at(page, head, 0), kScale * static_cast<std::size_t>(k.page_tokens));
    }
  }
  blocks.key_stride = static_cast<std::ptrdiff_t>(kChunk * item);
  for (std::size_t b = 0; b < kBlocks; ++b) {
    blocks.keys[b] = keys + b * kBlockTokens * item;
    blocks.values[b] = values + b * kBlockTokens * line;
    blocks.scales[b] = scales + b * kBlockTokens * kScale;
    blocks.key_runs[b] = keys + b * kBlockTokens * line;
  }
}

// Tokens [first, first + count) of a chunk; blocks beyond them lie where the first does.
inline void find_blocks(const Attention& attention, const Range& range, int head, int first, int count, Blocks& blocks) {
  const Plane& k = attention.k;
  const Plane& v = attention.v;
  const std::size_t line = v.line_bytes();
  const auto item = static_cast<std::size_t>(item_bytes(k.dtype));
  const int shift = std::countr_zero(static_cast<unsigned>(k.page_tokens));
  blocks.key_stride = static_cast<std::ptrdiff_t>(item) * k.page_tokens;
  for (int b = 0; b < kBlocks; ++b) {
    const int token = b * kBlockTokens < count ? first + b * kBlockTokens : first;
    const int page = range.pages[token >> shift], slot = token & (k.page_tokens - 1);
    const std::uint8_t* const keys = k.at(page, head, 0);
    blocks.keys[b] = keys + static_cast<std::size_t>(slot) * item;
    blocks.key_runs[b] = keys + static_cast<std::size_t>(slot) * line;
    blocks.values[b] = v.at(page, head, slot);
    if (k.dtype == Dtype::i8) blocks.scales[b] = k.scale_at(page, head, slot);
  }
}

// Memory is asked for before it is needed: runs within a page are too short for the processor to foresee.
inline void fetch(const std::uint8_t* from, std::ptrdiff_t bytes) {
  for (std::ptrdiff_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

// The scales of eight tokens' keys (0) or values (1).
inline F8 load_scales_of(const std::uint8_t* scales, int which) {
  float found[kBlockTokens];
  for (int t = 0; t < kBlockTokens; ++t) {
    __builtin_memcpy(found + t, scales + (t * kScalesPerLine + which) * static_cast<int>(sizeof(float)), sizeof(float));
  }
  return load(found);
}

// The chunk as floats: keys as [dim][64], values as [64][padded dim]; of whole blocks, up to `width` tokens. Tokens
// that nobody has written are anything.
template <Dtype kDtype>
inline void stage_as(const Blocks& blocks, int dim, int width, const Blocks& next, float* keys, float* values) {
  const int padded = padded8(dim);
  const std::ptrdiff_t line = std::ptrdiff_t{dim} * item_bytes(kDtype);
  for (int b = 0; b < width / kBlockTokens; ++b) {
    fetch(next.key_runs[b], line * kBlockTokens);
    fetch(next.values[b], line * kBlockTokens);
    F8 scales[kScalesPerLine];
    if constexpr (kDtype == Dtype::i8) {
      for (int i = 0; i < kScalesPerLine; ++i) scales[i] = load_scales_of(blocks.scales[b], i);
    }
    const std::uint8_t* key = blocks.keys[b];
    float* to = keys + b * kBlockTokens;
    for (int d = 0; d < dim; ++d, key += blocks.key_stride, to += kChunk) {
      const F8 stored = load_stored(key, kDtype, kBlockTokens);
      store8(to, kDtype == Dtype::i8 ? mul8(stored, scales[0]) : stored);
    }
    float of_values[kBlockTokens];
    if constexpr (kDtype == Dtype::i8) store8(of_values, scales[1]);
    const std::uint8_t* value = blocks.values[b];
    to = values + b * kBlockTokens * padded;
    for (int t = 0; t < kBlockTokens; ++t, value += line, to += padded) {
      for (int d = 0; d < padded; d += 8) {
        const F8 stored = load_stored(value + d * item_bytes(kDtype), kDtype, dim - d < 8 ? dim - d : 8);
        store8(to + d, kDtype == Dtype::i8 ? mul8(stored, all(of_values[t])) : stored);
      }
    }
  }
}

inline void stage(Dtype dtype, const Blocks& blocks, int dim, int width, const Blocks& next, float* keys, float* values) {
  switch (dtype) {
    case Dtype::f32:
      return stage_as<Dtype::f32>(blocks, dim, width, next, keys, values);
    case Dtype::f16:
      return stage_as<Dtype::f16>(blocks, dim, width, next, keys, values);
    case Dtype::bf16:
      return stage_as<Dtype::bf16>(blocks, dim, width, next, keys, values);
    case Dtype::i8:
      return stage_as<Dtype::i8>(blocks, dim, width, next, keys, values);
  }
}

// What the core computes on: packed weights, quantised activations, pages. Plain data; owns nothing.
//
// Packed weights stand in panels of 16 outputs. A panel is a run of groups of 32 inputs; a group holds, for
// its 16 outputs, scales, minima (if any) and codes, so that a product reads one stream:
//
//     [16 scales][16 minima][codes]        scales and minima f32, or f16 where that loses nothing
//     [16 scales][16 scales][16 minima][16 minima][codes]        fine: one for each half of the inputs; f32
//     u4: 4 blocks of 64 bytes; block t holds inputs 4t..4t+3 in the low and 16+4t.. in the high nibbles
//     i8: 8 blocks of 64 bytes; block t holds inputs 4t..4t+3
//         within a block 16 outputs x 4 inputs
//     f32, f16, bf16: no groups; for each input 16 numbers
//
// value = scale * code + minimum.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace kv {

constexpr int kGroup = 32;       // inputs of a weight that share a scale
constexpr int kFine = 16;        // activations (and inputs of a fine weight) that share a scale: halves the
                                 // distance from float that 32 have
constexpr int kPanel = 16;       // outputs that are computed together
constexpr int kChunk = 64;       // tokens at whose multiples attention splits the context
constexpr int kSpanChunks = 8;   // chunks in a span, the piece of context that one work item takes
constexpr int kBlockRows = 96;   // activation rows that a product takes at a time, while weights pass by
constexpr int kTileRows = 12;    // what blocks of rows are multiples of: tiles of 2, 3, 4 or 6 rows fit
constexpr int kFineSteps = 4095; // scales of activations are whole multiples, up to this, of their row's step

enum class Form : int { u4 = 0, i8 = 1, f32 = 2, f16 = 3, bf16 = 4 };
enum class Dtype : int { f32 = 0, f16 = 1, bf16 = 2, i8 = 3 };
constexpr int item_bytes(Dtype dtype) { return dtype == Dtype::f32 ? 4 : dtype == Dtype::i8 ? 1 : 2; }
constexpr int kScalesPerLine = 2;  // of a token and head in 8-bit pages: the key's, then the value's, both f32

constexpr bool coded(Form form) { return form == Form::u4 || form == Form::i8; }
// Bytes of one number where the form has no codes.
constexpr int number_bytes(Form form) { return form == Form::f32 ? 4 : 2; }

enum class Epilogue : int { store = 0, add = 1, silu_gate = 2, gelu_gate = 3 };

struct Weight {
  Form form;
  bool half_scales;
  bool minima;
  bool fine;    // a scale (and minimum) per 16 inputs, always f32
  int rows;     // outputs
  int columns;  // inputs
  const std::uint8_t* data;

  int panels() const { return (rows + kPanel - 1) / kPanel; }
  int groups() const { return columns / kGroup; }
  std::size_t header_bytes() const {
    return static_cast<std::size_t>(kPanel) * (half_scales ? 2 : 4) * (minima ? 2 : 1) * (fine ? 2 : 1);
  }
  std::size_t group_bytes() const { return header_bytes() + (form == Form::u4 ? 256 : 512); }
  std::size_t panel_bytes() const {
    if (!coded(form)) return static_cast<std::size_t>(columns) * kPanel * static_cast<std::size_t>(number_bytes(form));
    return group_bytes() * static_cast<std::size_t>(groups());
  }
  std::size_t bytes() const { return panel_bytes() * static_cast<std::size_t>(panels()); }
};

// 32 activations as 8-bit codes, a cache line. Each half of 16 has a scale: a whole multiple of its row's step, so
// that a group's sum of products is one whole number, which 32 bits hold for codes of weights up to 8 bits.
struct alignas(64) CodedGroup {
  std::int8_t codes[kGroup];  // in the order that the set's own products read
  std::int16_t pair[2];       // multiples of the first and the second half: 1 to kFineSteps + 1
  std::int32_t single[2];     // the same
  std::int32_t below[2];      // -128 * sum of the codes of a half
  float sum;                  // of both halves' codes, times their multiples
  float half_sums[2];         // the same of each half
};

struct Quantised {
  CodedGroup* groups;  // [rows][columns / 32]
  float* steps;        // [rows]; value = step * multiple * code; no number where the row is not finite
  int columns;

  CodedGroup* row(std::ptrdiff_t index) const { return groups + index * (columns / kGroup); }
};

// Rows of floats that lie `stride` numbers apart.
struct Lines {
  float* data;
  std::ptrdiff_t stride;

  float* row(std::ptrdiff_t index) const { return data + index * stride; }
};

struct Product {
  Weight weight;
  Quantised quantised;  // for u4 and i8
  Lines x;              // for the others
  Lines out;
  int out_width;
  Epilogue epilogue;
  const float* bias;  // or null; one for each output of the weight
};

// The page pool as one layer's keys or values see it. Of each head values stand as [tokens][dim], keys as [dim][tokens].
struct Plane {
  std::uint8_t* base;  // arena + offset of the plane in a page
  std::size_t page_bytes;
  int page_tokens;
  int heads;
  int dim;
  Dtype dtype;
  std::uint8_t* scales;  // i8 only: the first scale that belongs to `base`; the others 2 floats apart

  std::size_t line_bytes() const { return static_cast<std::size_t>(dim) * static_cast<std::size_t>(item_bytes(dtype)); }
  std::size_t line(int head, int slot) const {
    return static_cast<std::size_t>(head) * static_cast<std::size_t>(page_tokens) + static_cast<std::size_t>(slot);
  }
  // A line of values. Of keys only where `slot` is 0.
  std::uint8_t* at(int page, int head, int slot) const {
    return base + static_cast<std::size_t>(page) * page_bytes + line(head, slot) * line_bytes();
  }
  std::uint8_t* scale_at(int page, int head, int slot) const {
    return scales + static_cast<std::size_t>(page) * page_bytes + line(head, slot) * kScalesPerLine * sizeof(float);
  }
};

// The new rows of one sequence: step rows [row, row + count) at positions from `start`.
struct Range {
  int row;
  int start;
  int count;
  const std::int32_t* pages;
};

// Rows [first, last) of a range with one key head: what attention computes at a time.
struct Share {
  const Range* range;
  int head;
  int first, last;
};

struct Attention {
  Plane k;
  Plane v;
  Lines q;
  Lines out;
  int shared;  // query heads that read one key head
  float scale;
  int window;  // 0: everything before
  float cap;   // 0: scores are not capped
};

// One row's (and head's) softmax state: values are o / total, and peak is the largest score seen.
struct State {
  float peak;
  float total;
};

constexpr int padded8(int n) { return (n + 7) / 8 * 8; }
// Query lines (rows x shared heads) that attention takes at a time.
constexpr int tile_rows(int shared) { return shared >= 96 ? 1 : 96 / shared; }

// Functions of one instruction set. All sets give the same bits.
struct Kernels {
  const char* name;
  void (*exponentials)(const float* x, int count, float* out);
  // out[i] = x[i] / sqrt(mean(x²) + epsilon) * weight[i]
  void (*norm)(const float* x, const float* weight, float epsilon, int width, float* out);
  void (*quantise)(const float* x, int columns, CodedGroup* groups, float* step);
  void (*rope)(float* x, int heads, int dim, const float* cosines, const float* sines, bool interleaved);
  void (*silu_gate)(const float* gate, const float* up, int width, float* out);
  void (*gelu_gate)(const float* gate, const float* up, int width, float* out);  // approximated by tanh
  void (*add)(const float* x, const float* y, int width, float* out);
  // Numbers go `stride` numbers apart. i8: codes, and their scale to `scale`, which is not read for the others.
  void (*store)(const float* x, int count, Dtype dtype, void* out, int stride, void* scale);
  // One row of the weight as floats, times `scale`.
  void (*expand)(const Weight& weight, int row, float scale, float* out);
  // Rows [first, last) x panels [panel, panel_end).
  void (*product)(const Product& product, int first, int last, int panel, int panel_end);
  // Spans [span, span_end) of the context; merged into o and states, each [rows][shared], which begin as `begin`
  // leaves them. `upcoming`, if any, is what probably follows: few rows ask for its pages at their end. Scratch:
  // attend_scratch_bytes(shared, dim).
  void (*attend)(const Attention& attention, const Share& share, const Share* upcoming, int span, int span_end, float* o,
                 State* states, std::uint8_t* scratch);
  void (*begin)(float* o, State* states, int lines, int padded_dim);
  // Merges a later span's result into an earlier one's.
  void (*merge)(float* o, State* state, const float* other, const State* other_state, int padded_dim);
  // out[i] = o[i] / total
  void (*finish)(const float* o, const State* state, int dim, float* out);
};

constexpr std::size_t aligned64(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

// Keys, values, queries, scores of one tile, one span's values and states, and a copy of one chunk.
constexpr std::size_t attend_scratch_bytes(int shared, int dim) {
  const auto padded = static_cast<std::size_t>(padded8(dim));
  const auto lines = static_cast<std::size_t>(tile_rows(shared) * shared);
  const std::size_t floats = 2 * kChunk * padded + 2 * lines * padded + lines * kChunk;
  const std::size_t copy = 2 * kChunk * padded * sizeof(float) + kChunk * kScalesPerLine * sizeof(float);
  return aligned64(floats * sizeof(float)) + aligned64(lines * sizeof(State)) + aligned64(copy);
}

const Kernels& portable_kernels();
// Null where not compiled in; whether the processor has it is not asked here.
const Kernels* avx2_kernels();
const Kernels* vnni_kernels();
const Kernels* neon_kernels();

}  // namespace kv

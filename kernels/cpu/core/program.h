// A fused program and how it is built: buffers, weights, operations; each is checked as it is added.
//
// Errors are values: what is wrong and in which operation. Knows nothing of threads, files or Python.
#pragma once

#include <cstdint>
#include <vector>

#include "forms.h"

namespace kv {

struct Error {
  const char* what = nullptr;  // null: no error
  int operation = -1;

  explicit operator bool() const { return what != nullptr; }
};

// Columns [column, column + width) of a buffer; buffer -1 is the caller's memory for the logits.
struct View {
  int buffer = -1;
  int column = 0;
  int width = 0;
};

enum class Kind : int { embed, norm, quantise, product, rope, write_kv, attend, silu_gate, gelu_gate, add, pick };

// Everything but products and attention works on each row by itself.
constexpr bool row_wise(Kind kind) { return kind != Kind::product && kind != Kind::attend; }

// Operations [first, last) that run without waiting for each other: a product, an attention, or a run of
// row-wise operations that a row passes through before the next row begins.
struct Phase {
  Kind kind;
  int first, last;
  bool picked;
};

struct Operation {
  Kind kind = Kind::add;
  bool picked = false;  // works on the lines that need logits, not on all rows
  View x, y, out;
  int weight = -1;  // embed, product
  int table = -1;   // norm: weight vector; product: bias; rope: table
  Epilogue epilogue = Epilogue::store;
  float number = 0.0f;  // embed: scale; norm: epsilon; attend: scale
  int heads = 0;        // rope: all; write_kv, attend: key heads
  int dim = 0;          // of a head; norm: numbers that are normalised together
  int shared = 0;       // attend: query heads per key head
  int window = 0;
  float cap = 0.0f;     // attend: scores become cap * tanh(score / cap); 0: they stay
  bool interleaved = false;
  // write_kv, attend: of the planes in a page; scales are read in 8-bit pages only
  std::size_t k_offset = 0, v_offset = 0, scale_offset = 0;
};

struct Buffer {
  int width;
  bool picked;
  bool quantised;
  int first_use = -1, last_use = -1;  // phases
  std::size_t offset = 0;
};

struct Vector {
  const float* data;
  int width;
};

struct RopeTable {
  const float* cosines;  // [positions][pairs]
  const float* sines;
  int positions;
  int pairs;
};

class Program {
 public:
  // Each returns the new index.
  int buffer(int width, bool picked, bool quantised);
  Error weight(const Weight& weight, std::size_t bytes, int* index);
  int vector(const Vector& vector);
  int rope_table(const RopeTable& table);
  Error operation(const Operation& operation);

  // Lays buffers out for `rows` rows. No operation may be added afterwards.
  Error plan(int rows, int context);

  std::size_t bytes() const { return bytes_; }
  int rows() const { return rows_; }
  int context() const { return context_; }
  int vocabulary() const { return vocabulary_; }   // tokens that may be embedded
  int result_width() const { return result_width_; }
  std::size_t buffer_row_bytes(const Buffer& buffer) const;

  const std::vector<Operation>& operations() const { return operations_; }
  const std::vector<Phase>& phases() const { return phases_; }
  const std::vector<Buffer>& buffers() const { return buffers_; }
  const std::vector<Weight>& weights() const { return weights_; }
  const std::vector<Vector>& vectors() const { return vectors_; }
  const std::vector<RopeTable>& tables() const { return tables_; }

 private:
  const char* check(const Operation& operation) const;
  bool fits(const View& view, bool picked, bool quantised) const;

  std::vector<Operation> operations_;
  std::vector<Phase> phases_;
  std::vector<Buffer> buffers_;
  std::vector<Weight> weights_;
  std::vector<Vector> vectors_;
  std::vector<RopeTable> tables_;
  std::size_t bytes_ = 0;
  int rows_ = 0, context_ = 0, vocabulary_ = 0, result_width_ = 0;
};

}  // namespace kv

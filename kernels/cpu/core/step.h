// Runs a planned program on one batch. Allocates only in `prepare`; holds no threads and no memory for pages,
// weights or activations of its own: all of that is handed in.
#pragma once

#include <atomic>
#include <vector>

#include "program.h"

namespace kv {

// Runs work(context, chunk, worker) for all chunks on up to `threads` workers, and returns when all are done.
struct Pool {
  void* self = nullptr;
  int threads = 1;
  void (*run)(void* self, int chunks, void (*work)(void* context, int chunk, int worker), void* context) = nullptr;
};

struct Pages {
  std::uint8_t* data = nullptr;
  int count = 0;
  std::size_t page_bytes = 0;
  int page_tokens = 0;
  Dtype dtype = Dtype::f32;
};

// Slices one after another. Everything is checked before it is used.
struct Batch {
  int slices;
  const std::int32_t* tokens;
  int token_count;
  const std::int32_t* starts;
  const std::int32_t* counts;
  const std::int32_t* logits;       // how many of a slice's last rows
  const std::int32_t* page_starts;  // slices + 1; where in `pages` a slice's table begins
  const std::int32_t* pages;
  int page_count;
  float* out;                       // [all logits][result width]
  std::int64_t out_rows;
};

class Runner {
 public:
  Runner(const Program& program, const Kernels& kernels, Pool pool);

  // Memory that `workspace` must have, aligned to 64 bytes.
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  void prepare(std::uint8_t* workspace);
  Error bind(const Pages& pages);
  Error step(const Batch& batch, const std::atomic<bool>& aborted);

 private:
  struct Tile {
    int range, first, last;
  };
  struct Task;

  Error check(const Batch& batch) const;
  Error run(float* out, const std::atomic<bool>& aborted);
  void parallel(int chunks, Task& task);
  void rows(const Phase& phase, int first, int last);
  void row(const Operation& op, int row);
  void product(const Operation& op, int count, float* out);
  void attend(const Operation& op);
  void attend_item(const Attention& attention, int heads, int item, std::uint8_t* scratch);
  void attend_split(const Attention& attention, int heads, int spans);
  // What item `item` of all tiles times heads is.
  Share share(int heads, int item) const;
  void finish(const Attention& attention, const Share& share, const float* o, const State* states);

  Lines lines(const View& view) const;
  Quantised quantised(const View& view) const;
  Plane plane(const Operation& op, std::size_t offset, int scale) const;
  std::uint8_t* scratch(int worker) const { return scratch_ + scratch_bytes_ * static_cast<std::size_t>(worker); }

  const Program& program_;
  const Kernels& kernels_;
  Pool pool_;
  Pages pages_;
  std::vector<std::int32_t> tokens_, positions_, row_range_, picked_;
  std::vector<Range> ranges_;
  std::vector<Tile> tiles_;
  int row_count_ = 0, picked_count_ = 0, range_count_ = 0, tile_count_ = 0;

  std::size_t workspace_bytes_ = 0, scratch_bytes_ = 0, kernel_scratch_bytes_ = 0, partial_bytes_ = 0;
  std::uint8_t* buffers_ = nullptr;
  std::uint8_t* scratch_ = nullptr;
  std::uint8_t* partial_ = nullptr;
};

}  // namespace kv

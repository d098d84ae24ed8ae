#include "step.h"

namespace kv {
namespace {

// Of work that goes row by row. Where there are many rows, as many as a page usually has tokens: two threads that write
// keys of one page would take its cache lines from each other.
constexpr int kRowsPerChunk = 4;
constexpr int kManyRows = 128, kManyRowsPerChunk = 16;
constexpr std::size_t kPartialBytes = std::size_t{4} << 20;

int least(int a, int b) { return a < b ? a : b; }
std::size_t index(int i) { return static_cast<std::size_t>(i); }

std::size_t tile_bytes(int lines, int padded) {
  return aligned64(index(lines) * index(padded) * sizeof(float)) + aligned64(index(lines) * sizeof(State));
}

}  // namespace

struct Runner::Task {
  virtual void operator()(int chunk, int worker) = 0;

 protected:
  ~Task() = default;
};

Runner::Runner(const Program& program, const Kernels& kernels, Pool pool)
    : program_(program), kernels_(kernels), pool_(pool) {
  const auto& operations = program.operations();
  for (const Operation& op : operations) {
    std::size_t needed = 0;
    if (op.kind == Kind::attend) needed = attend_scratch_bytes(op.shared, op.dim);
    if (needed > kernel_scratch_bytes_) kernel_scratch_bytes_ = aligned64(needed);
  }
  std::size_t tile = 0;
  for (const Operation& op : operations) {
    if (op.kind != Kind::attend) continue;
    const std::size_t bytes = tile_bytes(tile_rows(op.shared) * op.shared, padded8(op.dim));
    tile = bytes > tile ? bytes : tile;
  }
  scratch_bytes_ = kernel_scratch_bytes_ + tile;
  partial_bytes_ = pool.threads > 1 ? kPartialBytes : 0;
  workspace_bytes_ = aligned64(program.bytes()) + scratch_bytes_ * index(pool.threads) + partial_bytes_;

  const std::size_t rows = index(program.rows());
  tokens_.resize(rows);
  positions_.resize(rows);
  row_range_.resize(rows);
  picked_.resize(rows);
  ranges_.resize(rows);
  tiles_.resize(rows);
}

void Runner::prepare(std::uint8_t* workspace) {
  buffers_ = workspace;
  scratch_ = buffers_ + aligned64(program_.bytes());
  partial_ = scratch_ + scratch_bytes_ * index(pool_.threads);
}

Error Runner::bind(const Pages& pages) {
  if (pages.data == nullptr || pages.count < 1) return {"there are no pages"};
  if (pages.page_tokens < 1 || kChunk % pages.page_tokens != 0) return {"tokens of a page do not divide 64"};
  const auto& operations = program_.operations();
  for (int i = 0; i < static_cast<int>(operations.size()); ++i) {
    const Operation& op = operations[index(i)];
    if (op.kind != Kind::write_kv && op.kind != Kind::attend) continue;
    const std::size_t lines = index(op.heads) * index(pages.page_tokens);
    const std::size_t bytes = index(item_bytes(pages.dtype)) * index(op.dim) * lines;
    const std::size_t scales = pages.dtype == Dtype::i8 ? kScalesPerLine * sizeof(float) * lines : 0;
    const auto fits = [&](std::size_t offset, std::size_t size) {
      return offset <= pages.page_bytes && size <= pages.page_bytes - offset;
    };
    if (!fits(op.k_offset, bytes) || !fits(op.v_offset, bytes) || !fits(op.scale_offset, scales)) {
      return {"a plane leaves its page", i};
    }
  }
  pages_ = pages;
  return {};
}

Error Runner::check(const Batch& batch) const {
  if (pages_.data == nullptr) return {"a step before the pages are bound"};
  std::int64_t rows = 0, logits = 0;
  if (batch.slices > 0 && (batch.page_starts[0] < 0 || batch.page_starts[batch.slices] > batch.page_count)) {
    return {"page tables leave their memory"};
  }
  for (int i = 0; i < batch.slices; ++i) {
    const std::int64_t start = batch.starts[i], count = batch.counts[i];
    if (start < 0 || count < 1 || start + count > program_.context()) return {"positions leave the context"};
    if (batch.logits[i] < 0 || batch.logits[i] > count) return {"logits are asked for more rows than there are"};
    const std::int64_t known = std::int64_t{batch.page_starts[i + 1]} - batch.page_starts[i];
    const std::int64_t needed = (start + count + pages_.page_tokens - 1) / pages_.page_tokens;
    if (batch.page_starts[i] < 0 || known < needed || batch.page_starts[i + 1] > batch.page_count) {
      return {"fewer pages are given than are needed"};
    }
    for (std::int64_t p = 0; p < needed; ++p) {
      const std::int32_t page = batch.pages[batch.page_starts[i] + p];
      if (page < 0 || page >= pages_.count) return {"a page index is outside the pool"};
    }
    rows += count;
    logits += batch.logits[i];
  }
  if (rows != batch.token_count) return {"slices and tokens differ in number"};
  for (int i = 0; i < batch.token_count; ++i) {
    if (batch.tokens[i] < 0 || batch.tokens[i] >= program_.vocabulary()) return {"a token is outside the vocabulary"};
  }
  if (logits != batch.out_rows) return {"the memory for logits has another number of rows"};
  if (logits > 0 && program_.result_width() == 0) return {"the program has no logits"};
  return {};
}

Error Runner::step(const Batch& batch, const std::atomic<bool>& aborted) {
  if (const Error error = check(batch)) return error;
  float* out = batch.out;
  const std::int32_t* tokens = batch.tokens;
  int slice = 0, done = 0;  // rows of the slice that went into earlier parts
  while (slice < batch.slices) {
    row_count_ = picked_count_ = range_count_ = 0;
    while (slice < batch.slices && row_count_ < program_.rows()) {
      const int count = least(batch.counts[slice] - done, program_.rows() - row_count_);
      const int start = batch.starts[slice] + done;
      const int first_picked = batch.counts[slice] - batch.logits[slice];
      for (int i = 0; i < count; ++i) {
        const std::size_t row = index(row_count_ + i);
        tokens_[row] = *tokens++;
        positions_[row] = start + i;
        row_range_[row] = range_count_;
        if (done + i >= first_picked) picked_[index(picked_count_++)] = row_count_ + i;
      }
      ranges_[index(range_count_++)] = {row_count_, start, count, batch.pages + batch.page_starts[slice]};
      row_count_ += count;
      done += count;
      if (done == batch.counts[slice]) {
        ++slice;
        done = 0;
      }
    }
    if (const Error error = run(out, aborted)) return error;
    out += std::ptrdiff_t{picked_count_} * program_.result_width();
  }
  return {};
}

Error Runner::run(float* out, const std::atomic<bool>& aborted) {
  for (const Phase& phase : program_.phases()) {
    if (aborted.load(std::memory_order_relaxed)) return {"the step was aborted", phase.first};
    const int count = phase.picked ? picked_count_ : row_count_;
    if (count == 0) continue;
    const Operation& op = program_.operations()[index(phase.first)];
    if (op.kind == Kind::product) {
      product(op, count, out);
    } else if (op.kind == Kind::attend) {
      attend(op);
    } else {
      struct Rows final : Task {
        Runner& runner;
        const Phase& phase;
        int count, each;
        Rows(Runner& r, const Phase& p, int c, int e) : runner(r), phase(p), count(c), each(e) {}
        void operator()(int chunk, int) override {
          runner.rows(phase, chunk * each, least((chunk + 1) * each, count));
        }
      } task{*this, phase, count, count < kManyRows ? kRowsPerChunk : kManyRowsPerChunk};
      parallel((count + task.each - 1) / task.each, task);
    }
  }
  return {};
}

void Runner::parallel(int chunks, Task& task) {
  if (pool_.threads == 1 || chunks == 1) {
    for (int chunk = 0; chunk < chunks; ++chunk) task(chunk, 0);
    return;
  }
  pool_.run(
      pool_.self, chunks,
      [](void* context, int chunk, int worker) { (*static_cast<Task*>(context))(chunk, worker); }, &task);
}

Lines Runner::lines(const View& view) const {
  const Buffer& buffer = program_.buffers()[index(view.buffer)];
  return {reinterpret_cast<float*>(buffers_ + buffer.offset) + view.column, buffer.width};
}

Quantised Runner::quantised(const View& view) const {
  const Buffer& buffer = program_.buffers()[index(view.buffer)];
  std::uint8_t* groups = buffers_ + buffer.offset;
  std::uint8_t* steps = groups + index(program_.rows()) * index(buffer.width / kGroup) * sizeof(CodedGroup);
  return {reinterpret_cast<CodedGroup*>(groups), reinterpret_cast<float*>(steps), buffer.width};
}

Plane Runner::plane(const Operation& op, std::size_t offset, int scale) const {
  return {pages_.data + offset, pages_.page_bytes, pages_.page_tokens, op.heads, op.dim, pages_.dtype,
          pages_.data + op.scale_offset + index(scale) * sizeof(float)};
}

void Runner::rows(const Phase& phase, int first, int last) {
  for (int i = phase.first; i < phase.last; ++i) {
    const Operation& op = program_.operations()[index(i)];
    for (int r = first; r < last; ++r) row(op, r);
  }
}

void Runner::row(const Operation& op, int row) {
  switch (op.kind) {
    case Kind::embed:
      kernels_.expand(program_.weights()[index(op.weight)], tokens_[index(row)], op.number, lines(op.out).row(row));
      return;
    case Kind::norm: {
      const float* x = lines(op.x).row(row);
      float* out = lines(op.out).row(row);
      for (int i = 0; i < op.x.width; i += op.dim) {
        kernels_.norm(x + i, program_.vectors()[index(op.table)].data, op.number, op.dim, out + i);
      }
      return;
    }
    case Kind::quantise: {
      const Quantised q = quantised(op.out);
      kernels_.quantise(lines(op.x).row(row), q.columns, q.row(row), q.steps + row);
      return;
    }
    case Kind::rope: {
      const RopeTable& table = program_.tables()[index(op.table)];
      const std::size_t at = index(positions_[index(row)]) * index(table.pairs);
      kernels_.rope(lines(op.x).row(row), op.heads, op.dim, table.cosines + at, table.sines + at, op.interleaved);
      return;
    }
    case Kind::write_kv: {
      const int position = positions_[index(row)];
      const Range& range = ranges_[index(row_range_[index(row)])];
      const int page = range.pages[position / pages_.page_tokens], slot = position % pages_.page_tokens;
      const Plane k = plane(op, op.k_offset, 0), v = plane(op, op.v_offset, 1);
      for (int head = 0; head < op.heads; ++head) {
        std::uint8_t* const key = k.at(page, head, 0) + slot * item_bytes(pages_.dtype);
        kernels_.store(lines(op.x).row(row) + head * op.dim, op.dim, pages_.dtype, key, pages_.page_tokens,
                       k.scale_at(page, head, slot));
        kernels_.store(lines(op.y).row(row) + head * op.dim, op.dim, pages_.dtype, v.at(page, head, slot), 1,
                       v.scale_at(page, head, slot));
      }
      return;
    }
    case Kind::silu_gate:
      kernels_.silu_gate(lines(op.x).row(row), lines(op.y).row(row), op.x.width, lines(op.out).row(row));
      return;
    case Kind::gelu_gate:
      kernels_.gelu_gate(lines(op.x).row(row), lines(op.y).row(row), op.x.width, lines(op.out).row(row));
      return;
    case Kind::add:
      kernels_.add(lines(op.x).row(row), lines(op.y).row(row), op.x.width, lines(op.out).row(row));
      return;
    case Kind::pick:
      __builtin_memcpy(lines(op.out).row(row), lines(op.x).row(picked_[index(row)]),
                       index(op.x.width) * sizeof(float));
      return;
    case Kind::product:
    case Kind::attend:
      return;
  }
}

void Runner::product(const Operation& op, int count, float* out) {
  const Weight& weight = program_.weights()[index(op.weight)];
  const bool floats = !coded(weight.form);
  const Product product{weight,
                        floats ? Quantised{} : quantised(op.x),
                        floats ? lines(op.x) : Lines{},
                        op.out.buffer == -1 ? Lines{out, op.out.width} : lines(op.out),
                        op.out.width,
                        op.epilogue,
                        op.table >= 0 ? program_.vectors()[index(op.table)].data : nullptr};
  const int blocks = (count + kBlockRows - 1) / kBlockRows;
  // In whole tiles of rows, all blocks of about one size.
  const int block = ((count + blocks - 1) / blocks + kTileRows - 1) / kTileRows * kTileRows;
  int panels = weight.panels() * blocks / (pool_.threads * 8);
  panels = panels < 1 ? 1 : panels > 16 ? 16 : panels;

  struct Panels final : Task {
    Runner& runner;
    const Product& product;
    int count, block, panels, all;
    Panels(Runner& r, const Product& p, int c, int b, int n, int a)
        : runner(r), product(p), count(c), block(b), panels(n), all(a) {}
    void operator()(int chunk, int) override {
      const int per_block = (all + panels - 1) / panels;
      const int first = chunk / per_block * block, panel = chunk % per_block * panels;
      if (first >= count) return;
      runner.kernels_.product(product, first, least(first + block, count), panel, least(panel + panels, all));
    }
  } task{*this, product, count, block, panels, weight.panels()};
  parallel(blocks * ((weight.panels() + panels - 1) / panels), task);
}

void Runner::attend(const Operation& op) {
  const Attention attention{plane(op, op.k_offset, 0), plane(op, op.v_offset, 1), lines(op.x), lines(op.out),
                            op.shared,                 op.number,                 op.window, op.cap};
  const int rows = tile_rows(op.shared);
  tile_count_ = 0;
  int spans = 1;
  for (int i = 0; i < range_count_; ++i) {
    const Range& range = ranges_[index(i)];
    for (int first = 0; first < range.count; first += rows) {
      tiles_[index(tile_count_++)] = {i, first, least(first + rows, range.count)};
    }
    const int needed = (range.start + range.count + kChunk * kSpanChunks - 1) / (kChunk * kSpanChunks);
    spans = needed > spans ? needed : spans;
  }
  const int items = tile_count_ * op.heads;
  const std::size_t partial = tile_bytes(rows * op.shared, padded8(op.dim)) * index(items) * index(spans);
  if (pool_.threads > 1 && spans > 1 && items < 4 * pool_.threads && partial <= partial_bytes_) {
    attend_split(attention, op.heads, spans);
    return;
  }
  struct Tiles final : Task {
    Runner& runner;
    const Attention& attention;
    int heads;
    Tiles(Runner& r, const Attention& a, int h) : runner(r), attention(a), heads(h) {}
    void operator()(int chunk, int worker) override { runner.attend_item(attention, heads, chunk, runner.scratch(worker)); }
  } task{*this, attention, op.heads};
  parallel(items, task);
}

Share Runner::share(int heads, int item) const {
  const Tile& tile = tiles_[index(item / heads)];
  return {&ranges_[index(tile.range)], item % heads, tile.first, tile.last};
}

void Runner::attend_item(const Attention& attention, int heads, int item, std::uint8_t* scratch) {
  const Share mine = share(heads, item);
  // The same thread goes on here, more or less.
  const int after = item + pool_.threads;
  const bool more = after < tile_count_ * heads;
  const Share upcoming = more ? share(heads, after) : mine;
  const int padded = padded8(attention.k.dim), count = (mine.last - mine.first) * attention.shared;
  auto* o = reinterpret_cast<float*>(scratch + kernel_scratch_bytes_);
  auto* states = reinterpret_cast<State*>(scratch + kernel_scratch_bytes_ +
                                          aligned64(index(count) * index(padded) * sizeof(float)));
  const int spans = (mine.range->start + mine.last + kChunk * kSpanChunks - 1) / (kChunk * kSpanChunks);
  kernels_.begin(o, states, count, padded);
  kernels_.attend(attention, mine, more ? &upcoming : nullptr, 0, spans, o, states, scratch);
  finish(attention, mine, o, states);
}

// Few rows over a long context: each span of it is work of its own, merged in order afterwards.
void Runner::attend_split(const Attention& attention, int heads, int spans) {
  const int padded = padded8(attention.k.dim), most = tile_rows(attention.shared) * attention.shared;
  const std::size_t values = aligned64(index(most) * index(padded) * sizeof(float)), size = tile_bytes(most, padded);
  struct Spans final : Task {
    Runner& runner;
    const Attention& attention;
    int heads, spans, padded;
    std::size_t values, size;
    Spans(Runner& r, const Attention& a, int h, int s, int p, std::size_t v, std::size_t b)
        : runner(r), attention(a), heads(h), spans(s), padded(p), values(v), size(b) {}
    void operator()(int chunk, int worker) override {
      std::uint8_t* at = runner.partial_ + size * index(chunk);
      auto* o = reinterpret_cast<float*>(at);
      auto* states = reinterpret_cast<State*>(at + values);
      const int span = chunk % spans;
      const Share share = runner.share(heads, chunk / spans);
      runner.kernels_.begin(o, states, (share.last - share.first) * attention.shared, padded);
      runner.kernels_.attend(attention, share, nullptr, span, span + 1, o, states, runner.scratch(worker));
    }
  } task{*this, attention, heads, spans, padded, values, size};
  parallel(tile_count_ * heads * spans, task);

  for (int item = 0; item < tile_count_ * heads; ++item) {
    const Share whole = share(heads, item);
    const int count = (whole.last - whole.first) * attention.shared;
    std::uint8_t* first = partial_ + size * index(item) * index(spans);
    auto* o = reinterpret_cast<float*>(first);
    auto* states = reinterpret_cast<State*>(first + values);
    for (int span = 1; span < spans; ++span) {
      const std::uint8_t* later = first + size * index(span);
      const auto* other = reinterpret_cast<const float*>(later);
      const auto* other_states = reinterpret_cast<const State*>(later + values);
      for (int i = 0; i < count; ++i) {
        if (other_states[i].total == 0.0f && other_states[i].peak == -__builtin_inff()) continue;
        kernels_.merge(o + i * padded, states + i, other + i * padded, other_states + i, padded);
      }
    }
    finish(attention, whole, o, states);
  }
}

void Runner::finish(const Attention& attention, const Share& share, const float* o, const State* states) {
  const int dim = attention.k.dim, padded = padded8(dim), shared = attention.shared;
  for (int r = share.first; r < share.last; ++r) {
    float* out = attention.out.row(share.range->row + r) + share.head * shared * dim;
    for (int s = 0; s < shared; ++s) {
      const int line = (r - share.first) * shared + s;
      kernels_.finish(o + line * padded, states + line, dim, out + s * dim);
    }
  }
}

}  // namespace kv

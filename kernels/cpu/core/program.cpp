#include "program.h"

namespace kv {
namespace {

// Between buffers, whose rows begin at multiples of 64 bytes.
constexpr std::size_t kApart = 64;

}  // namespace

int Program::buffer(int width, bool picked, bool quantised) {
  Buffer made{};
  made.width = width < 0 ? 0 : width;
  made.picked = picked;
  made.quantised = quantised;
  made.first_use = made.last_use = -1;
  buffers_.push_back(made);
  return static_cast<int>(buffers_.size()) - 1;
}

Error Program::weight(const Weight& weight, std::size_t bytes, int* index) {
  if (weight.rows < 1 || weight.columns < 1) return {"a weight without rows or columns"};
  if (coded(weight.form) && weight.columns % kGroup != 0) return {"columns are no whole number of groups"};
  if (weight.fine && weight.half_scales) return {"scales per 16 inputs are always f32"};
  if (weight.bytes() > bytes) return {"the packed weight is longer than its memory"};
  weights_.push_back(weight);
  *index = static_cast<int>(weights_.size()) - 1;
  return {};
}

int Program::vector(const Vector& vector) {
  vectors_.push_back(vector);
  return static_cast<int>(vectors_.size()) - 1;
}

int Program::rope_table(const RopeTable& table) {
  tables_.push_back(table);
  return static_cast<int>(tables_.size()) - 1;
}

bool Program::fits(const View& view, bool picked, bool quantised) const {
  if (view.buffer < 0 || view.buffer >= static_cast<int>(buffers_.size())) return false;
  const Buffer& buffer = buffers_[static_cast<std::size_t>(view.buffer)];
  if (buffer.picked != picked || buffer.quantised != quantised) return false;
  if (quantised && (view.column != 0 || view.width != buffer.width)) return false;
  return view.column >= 0 && view.width >= 1 && view.width <= buffer.width && view.column <= buffer.width - view.width;
}

const char* Program::check(const Operation& op) const {
  const auto known = [](int index, std::size_t count) { return index >= 0 && static_cast<std::size_t>(index) < count; };
  const bool heads_fit = op.heads >= 1 && op.dim >= 1 && op.heads <= (1 << 16) && op.dim <= (1 << 16);
  const std::int64_t across = std::int64_t{op.heads} * op.dim;  // numbers of all key heads
  switch (op.kind) {
    case Kind::embed:
      if (!known(op.weight, weights_.size())) return "no such weight";
      if (op.picked || !fits(op.out, false, false)) return "the output does not fit";
      if (op.out.width != weights_[static_cast<std::size_t>(op.weight)].columns) return "the table has another width";
      return nullptr;
    case Kind::norm:
      if (!known(op.table, vectors_.size())) return "no such vector";
      if (!fits(op.x, op.picked, false) || !fits(op.out, op.picked, false)) return "a view does not fit";
      if (op.dim < 1 || op.x.width % op.dim != 0 || op.out.width != op.x.width) return "widths differ";
      if (vectors_[static_cast<std::size_t>(op.table)].width != op.dim) return "the weight has another width";
      return nullptr;
    case Kind::quantise:
      if (!fits(op.x, op.picked, false) || !fits(op.out, op.picked, true)) return "a view does not fit";
      if (op.x.width != op.out.width || op.x.width % kGroup != 0) return "the width is no whole number of groups";
      return nullptr;
    case Kind::product: {
      if (!known(op.weight, weights_.size())) return "no such weight";
      const Weight& weight = weights_[static_cast<std::size_t>(op.weight)];
      if (!fits(op.x, op.picked, coded(weight.form))) return "the input does not fit";
      if (op.x.width != weight.columns) return "the weight has other columns";
      const bool gate = op.epilogue == Epilogue::silu_gate || op.epilogue == Epilogue::gelu_gate;
      if (gate && weight.rows % kPanel != 0) return "gate and up are no whole number of panels";
      if (op.out.width != (gate ? weight.rows / 2 : weight.rows)) return "the weight has other rows";
      if (op.table >= 0 && (!known(op.table, vectors_.size()) ||
                            vectors_[static_cast<std::size_t>(op.table)].width != weight.rows)) {
        return "the bias has another width";
      }
      if (op.out.buffer == -1) return op.picked && op.epilogue == Epilogue::store ? nullptr : "only logits leave the program";
      if (op.out.buffer == op.x.buffer) return "a product cannot work in place";
      return fits(op.out, op.picked, false) ? nullptr : "the output does not fit";
    }
    case Kind::rope:
      if (!known(op.table, tables_.size())) return "no such table";
      if (op.picked || !fits(op.x, false, false)) return "the input does not fit";
      if (!heads_fit || op.x.width != across) return "the heads do not fit";
      if (op.dim != 2 * tables_[static_cast<std::size_t>(op.table)].pairs) return "the table has other pairs";
      return nullptr;
    case Kind::write_kv:
      if (op.picked || !fits(op.x, false, false) || !fits(op.y, false, false)) return "a view does not fit";
      if (!heads_fit || op.x.width != across || op.y.width != op.x.width) return "the heads do not fit";
      return nullptr;
    case Kind::attend:
      if (op.picked || !fits(op.x, false, false) || !fits(op.out, false, false)) return "a view does not fit";
      if (!heads_fit || op.shared < 1 || op.shared > (1 << 10) || op.window < 0 || !(op.cap >= 0.0f)) return "the heads do not fit";
      if (op.x.width != across * op.shared || op.out.width != op.x.width) return "the heads do not fit";
      return nullptr;
    case Kind::silu_gate:
    case Kind::gelu_gate:
    case Kind::add:
      if (!fits(op.x, op.picked, false) || !fits(op.y, op.picked, false) || !fits(op.out, op.picked, false)) {
        return "a view does not fit";
      }
      return op.x.width == op.y.width && op.x.width == op.out.width ? nullptr : "widths differ";
    case Kind::pick:
      if (!op.picked || !fits(op.x, false, false) || !fits(op.out, true, false)) return "a view does not fit";
      return op.x.width == op.out.width ? nullptr : "widths differ";
  }
  return "no such operation";
}

Error Program::operation(const Operation& op) {
  const int index = static_cast<int>(operations_.size());
  if (rows_ != 0) return {"the program is planned already", index};
  if (const char* what = check(op)) return {what, index};
  const bool joins = row_wise(op.kind) && !phases_.empty() && row_wise(phases_.back().kind) &&
                     phases_.back().picked == op.picked;
  if (joins) {
    phases_.back().last = index + 1;
  } else {
    phases_.push_back({op.kind, index, index + 1, op.picked});
  }
  const int phase = static_cast<int>(phases_.size()) - 1;
  for (const View* view : {&op.x, &op.y, &op.out}) {
    if (view->buffer < 0 || view->width == 0) continue;
    Buffer& buffer = buffers_[static_cast<std::size_t>(view->buffer)];
    if (buffer.first_use < 0) buffer.first_use = phase;
    buffer.last_use = phase;
  }
  if (op.kind == Kind::embed) {
    const int rows = weights_[static_cast<std::size_t>(op.weight)].rows;
    vocabulary_ = vocabulary_ == 0 || rows < vocabulary_ ? rows : vocabulary_;
  }
  if (op.kind == Kind::product && op.out.buffer == -1) {
    if (result_width_ != 0) return {"a second result", index};
    result_width_ = op.out.width;
  }
  operations_.push_back(op);
  return {};
}

std::size_t Program::buffer_row_bytes(const Buffer& buffer) const {
  const auto width = static_cast<std::size_t>(buffer.width);
  if (!buffer.quantised) return width * sizeof(float);
  return width / kGroup * sizeof(CodedGroup) + sizeof(float);
}

Error Program::plan(int rows, int context) {
  if (rows_ != 0) return {"the program is planned already"};
  if (rows < 1 || rows > (1 << 20) || context < 1) return {"a plan for no rows or no context"};
  for (const RopeTable& table : tables_) {
    if (table.positions < context) return {"a rope table is shorter than the context"};
  }
  // First fit: a buffer lies where no buffer lies that lives in the same phase.
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    Buffer& mine = buffers_[i];
    if (mine.first_use < 0) continue;
    const std::size_t size = aligned64(buffer_row_bytes(mine) * static_cast<std::size_t>(rows) + kApart);
    std::size_t at = 0;
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t j = 0; j < i; ++j) {
        const Buffer& other = buffers_[j];
        if (other.first_use < 0 || other.last_use < mine.first_use || mine.last_use < other.first_use) continue;
        const std::size_t end = other.offset + aligned64(buffer_row_bytes(other) * static_cast<std::size_t>(rows) + kApart);
        if (at < end && other.offset < at + size) {
          at = end;
          moved = true;
        }
      }
    }
    mine.offset = at;
    if (at + size > bytes_) bytes_ = at + size;
  }
  rows_ = rows;
  context_ = context;
  return {};
}

}  // namespace kv

// Runs the kernels of one instruction set over fixed numbers and prints a digest of each result, one a line:
//
//     check portable|avx2|vnni|neon
//
// The lines are the same on every target and for every instruction set, or a bit differs somewhere. Where results
// must agree within one run (company, page sizes), that is checked here too: exit status 1. Needs the core and
// nothing else: no Python, no threads, no files.
#include <cstdio>
#include <cstring>

#include "digest.h"
#include "forms.h"
#include "pack.h"
#include "program.h"
#include "step.h"

namespace {

using kv::check::Digest;
using kv::check::Numbers;
using Floats = std::vector<float>;
using Bytes = std::vector<std::uint8_t>;

bool failed = false;

std::size_t size(int n) { return static_cast<std::size_t>(n); }

void fail(const char* what, const char* why) {
  std::printf("FAILED %s: %s\n", what, why);
  failed = true;
}

void print(const char* what, const char* detail, const Digest& digest) {
  std::printf("%s %s %016llx\n", what, detail, static_cast<unsigned long long>(digest.value()));
}

// --- kernels of one row ---

void check_exponentials(const kv::Kernels& kernels) {
  Floats x = Numbers(1).floats(1003);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] *= i % 3 == 0 ? 30.0f : 1.0f;
  x[5] = 1e30f;
  x[6] = -1e30f;
  x[7] = __builtin_inff();
  x[8] = -__builtin_inff();
  Floats out(x.size());
  kernels.exponentials(x.data(), static_cast<int>(x.size()), out.data());
  Digest digest;
  digest.add(out);
  print("exp", "", digest);
}

void check_rows(const kv::Kernels& kernels) {
  Digest digest;
  for (const int width : {1, 7, 8, 9, 64, 100, 576}) {
    Numbers numbers(static_cast<std::uint32_t>(width));
    const Floats x = numbers.floats(width), y = numbers.floats(width);
    Floats out(x.size());
    kernels.norm(x.data(), y.data(), 1e-5f, width, out.data());
    digest.add(out);
    kernels.silu_gate(x.data(), y.data(), width, out.data());
    digest.add(out);
    kernels.add(x.data(), y.data(), width, out.data());
    digest.add(out);
  }
  print("rows", "norm silu_gate add", digest);
  Digest turned;
  for (const bool interleaved : {false, true}) {
    Numbers numbers(3);
    Floats x = numbers.floats(3 * 20);
    const Floats cosines = numbers.floats(10), sines = numbers.floats(10);
    kernels.rope(x.data(), 3, 20, cosines.data(), sines.data(), interleaved);
    turned.add(x);
  }
  print("rows", "rope", turned);
}

void check_store(const kv::Kernels& kernels) {
  Digest digest;
  for (const kv::Dtype dtype : {kv::Dtype::f32, kv::Dtype::f16, kv::Dtype::bf16, kv::Dtype::i8}) {
    for (const int count : {1, 7, 8, 20, 64}) {
      Floats x = Numbers(static_cast<std::uint32_t>(count)).floats(count);
      x[0] *= 1e-6f;  // a subnormal half
      Bytes out(size(count * kv::item_bytes(dtype)));
      float scale = 0.0f;
      kernels.store(x.data(), count, dtype, out.data(), 1, &scale);
      digest.add(out.data(), out.size());
      digest.add(&scale, 1);
    }
  }
  print("rows", "store", digest);
}

// --- programs ---

struct Packed {
  kv::Weight weight;
  Bytes data;
};

Packed packed(const kv::Weight& like, Numbers& numbers) {
  Packed made{like, Bytes(like.bytes())};
  const int rows = like.rows, columns = like.columns;
  if (!kv::coded(like.form)) {
    Bytes values(size(rows * columns * kv::number_bytes(like.form)));
    for (int i = 0; i < rows * columns; ++i) {
      const float x = numbers.number();
      kv::portable_kernels().store(&x, 1, static_cast<kv::Dtype>(like.form == kv::Form::f32   ? kv::Dtype::f32
                                                                 : like.form == kv::Form::f16 ? kv::Dtype::f16
                                                                                              : kv::Dtype::bf16),
                                   values.data() + i * kv::number_bytes(like.form), 1, nullptr);
    }
    kv::pack_numbers(like, values.data(), 0, like.panels(), made.data.data());
  } else {
    Bytes codes(size(rows * columns));
    for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(numbers.below(like.form == kv::Form::u4 ? 16 : 256));
    // Multiples of 2^-12 within 8: halves hold them where they must.
    const int tables = rows * columns / (like.fine ? kv::kFine : kv::kGroup);
    Floats scales = numbers.floats(tables), minima = numbers.floats(tables);
    if (like.half_scales) {
      for (Floats* table : {&scales, &minima}) {
        for (float& x : *table) x = static_cast<float>(static_cast<int>(x * 128.0f)) / 128.0f;
      }
    }
    kv::pack_codes(like, codes.data(), scales.data(), like.minima ? minima.data() : nullptr, 0, like.panels(),
                   made.data.data());
  }
  made.weight.data = made.data.data();
  return made;
}

kv::Weight weight(kv::Form form, bool half, bool minima, bool fine, int rows, int columns) {
  return {form, half, minima, fine, rows, columns, nullptr};
}

Packed identity(int width) {
  Packed made{weight(kv::Form::f32, false, false, false, width, width), {}};
  Floats values(size(width * width));
  for (int i = 0; i < width; ++i) values[size(i * width + i)] = 1.0f;
  made.data.resize(made.weight.bytes());
  kv::pack_numbers(made.weight, reinterpret_cast<const std::uint8_t*>(values.data()), 0, made.weight.panels(),
                   made.data.data());
  made.weight.data = made.data.data();
  return made;
}

// A program under construction, then run; its first buffer holds a row of the table per token.
class Engine {
 public:
  Engine(const kv::Kernels& kernels, const char* what) : kernels_(kernels), what_(what) {}

  void expect(const kv::Error& error) {
    if (error) fail(what_, error.what);
  }
  int weight(const Packed& packed) {
    int index = -1;
    expect(program.weight(packed.weight, packed.data.size(), &index));
    return index;
  }
  void add(const kv::Operation& op) { expect(program.operation(op)); }
  void embed(int weight, const kv::View& out) {
    kv::Operation op{};
    op.kind = kv::Kind::embed;
    op.weight = weight;
    op.number = 1.0f;
    op.out = out;
    add(op);
  }
  void one(kv::Kind kind, const kv::View& x, const kv::View& out, bool picked) {
    kv::Operation op{};
    op.kind = kind;
    op.x = x;
    op.out = out;
    op.picked = picked;
    add(op);
  }
  void product(const kv::View& x, int weight, int width) {
    kv::Operation op{};
    op.kind = kv::Kind::product;
    op.picked = true;
    op.x = x;
    op.weight = weight;
    op.out = {-1, 0, width};
    add(op);
  }

  void begin(int rows, int context, const kv::Pages& pages) {
    expect(program.plan(rows, context));
    runner_ = new kv::Runner(program, kernels_, {});
    workspace_.assign(runner_->workspace_bytes() + 128, 0);
    const auto at = reinterpret_cast<std::uintptr_t>(workspace_.data());
    runner_->prepare(workspace_.data() + ((64 - at % 64) % 64));
    expect(runner_->bind(pages));
  }
  // Rows [start, start + count) of one sequence, all of their results.
  void step(int start, int count, const std::vector<std::int32_t>& pages, float* out) {
    std::vector<std::int32_t> tokens(size(count));
    for (int i = 0; i < count; ++i) tokens[size(i)] = start + i;
    const std::int32_t table[2] = {0, static_cast<std::int32_t>(pages.size())};
    const std::atomic<bool> aborted{false};
    expect(runner_->step({1, tokens.data(), count, &start, &count, &count, table, pages.data(),
                          static_cast<int>(pages.size()), out, count},
                         aborted));
  }
  ~Engine() { delete runner_; }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  kv::Program program;

 private:
  const kv::Kernels& kernels_;
  const char* what_;
  kv::Runner* runner_ = nullptr;
  Bytes workspace_;
};

Floats product_rows(const kv::Kernels& kernels, const char* what, const Packed& table, const Packed& weight, int rows,
                    int at_once) {
  Engine engine(kernels, what);
  const int width = table.weight.columns, outputs = weight.weight.rows;
  const kv::View x{engine.program.buffer(width, false, false), 0, width};
  kv::View from{engine.program.buffer(width, true, false), 0, width};
  engine.embed(engine.weight(table), x);
  engine.one(kv::Kind::pick, x, from, true);
  if (kv::coded(weight.weight.form)) {
    const kv::View quantised{engine.program.buffer(width, true, true), 0, width};
    engine.one(kv::Kind::quantise, from, quantised, true);
    from = quantised;
  }
  engine.product(from, engine.weight(weight), outputs);
  Bytes page(64);
  engine.begin(at_once, 128, {page.data(), 1, 64, 64, kv::Dtype::f32});
  Floats out(size(rows * outputs));
  engine.step(0, rows, {0, 0}, out.data());
  return out;
}

void check_products(const kv::Kernels& kernels) {
  struct Case {
    const char* name;
    kv::Form form;
    bool half, minima, fine;
  };
  const Case cases[] = {
      {"u4", kv::Form::u4, false, false, false},      {"u4-half", kv::Form::u4, true, false, false},
      {"u4-minima", kv::Form::u4, false, true, false}, {"u4-half-minima", kv::Form::u4, true, true, false},
      {"u4-fine", kv::Form::u4, false, false, true},  {"u4-fine-minima", kv::Form::u4, false, true, true},
      {"i8", kv::Form::i8, false, false, false},      {"i8-half", kv::Form::i8, true, false, false},
      {"i8-minima", kv::Form::i8, false, true, false}, {"i8-half-minima", kv::Form::i8, true, true, false},
      {"i8-fine", kv::Form::i8, false, false, true},  {"i8-fine-minima", kv::Form::i8, false, true, true},
      {"f32", kv::Form::f32, false, false, false},    {"f16", kv::Form::f16, false, false, false},
      {"bf16", kv::Form::bf16, false, false, false},
  };
  for (const Case& of : cases) {
    Digest digest;
    for (const int outputs : {1, 16, 37}) {
      for (const int columns : {32, 224}) {
        Numbers numbers(static_cast<std::uint32_t>(outputs * 1000 + columns));
        const int rows = 19;
        const Packed table = packed(weight(kv::Form::f32, false, false, false, rows, columns), numbers);
        const Packed made = packed(weight(of.form, of.half, of.minima, of.fine, outputs, columns), numbers);
        const Floats whole = product_rows(kernels, of.name, table, made, rows, rows);
        digest.add(whole);
        // As the embedding reads it.
        Floats line(size(columns));
        kernels.expand(made.weight, outputs - 1, 0.5f, line.data());
        digest.add(line);
        for (const int at_once : {1, 3, 7}) {
          const Floats parts = product_rows(kernels, of.name, table, made, rows, at_once);
          if (std::memcmp(parts.data(), whole.data(), whole.size() * sizeof(float)) != 0) {
            fail(of.name, "a row depends on its company");
          }
        }
      }
    }
    print("product", of.name, digest);
  }
}

Floats attended(const kv::Kernels& kernels, const char* what, kv::Dtype dtype, int dim, int page_tokens, int window,
                const std::vector<int>& parts) {
  const int heads = 2, shared = 3, rows = 200, q = heads * shared * dim, k = heads * dim, all = q + 2 * k;
  Numbers numbers(7);
  const Packed table = packed(weight(kv::Form::f32, false, false, false, rows, all), numbers), same = identity(q);
  Engine engine(kernels, what);
  const int x = engine.program.buffer(all, false, false);
  const kv::View out{engine.program.buffer(q, false, false), 0, q}, picked{engine.program.buffer(q, true, false), 0, q};
  engine.embed(engine.weight(table), {x, 0, all});
  const std::size_t plane = size(heads * page_tokens * dim * kv::item_bytes(dtype)), scales = size(heads * page_tokens) * 8;
  kv::Operation op{};
  op.kind = kv::Kind::write_kv;
  op.x = {x, q, k};
  op.y = {x, q + k, k};
  op.heads = heads;
  op.dim = dim;
  op.v_offset = plane;
  op.scale_offset = 2 * plane;
  engine.add(op);
  op.kind = kv::Kind::attend;
  op.x = {x, 0, q};
  op.y = {};
  op.out = out;
  op.shared = shared;
  op.number = 0.3f;
  op.window = window;
  engine.add(op);
  engine.one(kv::Kind::pick, out, picked, true);
  engine.product(picked, engine.weight(same), q);
  const int pages = (rows + page_tokens - 1) / page_tokens;
  const std::size_t page_bytes = 2 * plane + scales + 8;
  Bytes arena(page_bytes * size(pages), 255);
  engine.begin(96, rows, {arena.data(), pages, page_bytes, page_tokens, dtype});
  std::vector<std::int32_t> order(size(pages));
  for (int i = 0; i < pages; ++i) order[size(i)] = pages - 1 - i;
  Floats found(size(rows * q));
  int start = 0;
  for (const int count : parts) {
    engine.step(start, count, order, found.data() + start * q);
    start += count;
  }
  return found;
}

void check_attention(const kv::Kernels& kernels) {
  const struct {
    const char* name;
    kv::Dtype dtype;
  } dtypes[] = {{"f32", kv::Dtype::f32}, {"f16", kv::Dtype::f16}, {"bf16", kv::Dtype::bf16}, {"int8", kv::Dtype::i8}};
  for (const auto& of : dtypes) {
    Digest digest;
    for (const int window : {0, 50}) {
      const int dim = window == 0 ? 32 : 20;
      const Floats whole = attended(kernels, of.name, of.dtype, dim, 16, window, {200});
      digest.add(whole);
      for (const int page_tokens : {1, 8, 32, 64}) {
        const Floats other = attended(kernels, of.name, of.dtype, dim, page_tokens, window, {63, 1, 2, 3, 65, 66});
        if (std::memcmp(other.data(), whole.data(), whole.size() * sizeof(float)) != 0) {
          fail(of.name, "attention depends on the size of pages or on chunking");
        }
      }
    }
    print("attention", of.name, digest);
  }
}

}  // namespace

int main(int count, char** words) {
  const char* wanted = count > 1 ? words[1] : "portable";
  for (const kv::Kernels* kernels : {&kv::portable_kernels(), kv::avx2_kernels(), kv::vnni_kernels(), kv::neon_kernels()}) {
    if (kernels == nullptr || std::strcmp(kernels->name, wanted) != 0) continue;
    check_exponentials(*kernels);
    check_rows(*kernels);
    check_store(*kernels);
    check_products(*kernels);
    check_attention(*kernels);
    return failed ? 1 : 0;
  }
  std::printf("FAILED there are no kernels %s in this program\n", wanted);
  return 2;
}

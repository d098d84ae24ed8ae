// The Python face of the core: numpy arrays in, one GIL-free call per step. Knows nothing of models or files.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu.h"
#include "pack.h"
#include "peak.h"
#include "program.h"
#include "step.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T, int kDimensions>
using Array = nb::ndarray<T, nb::ndim<kDimensions>, nb::c_contig, nb::device::cpu>;
using ViewOf = std::tuple<int, int, int>;  // buffer, column, width

kv::View view(const ViewOf& from) { return {std::get<0>(from), std::get<1>(from), std::get<2>(from)}; }

int whole(std::size_t n) {
  if (n > static_cast<std::size_t>(std::numeric_limits<int>::max())) throw std::invalid_argument("an array is too long");
  return static_cast<int>(n);
}

kv::Form form_named(const std::string& name) {
  if (name == "u4") return kv::Form::u4;
  if (name == "i8") return kv::Form::i8;
  if (name == "f32") return kv::Form::f32;
  if (name == "f16") return kv::Form::f16;
  if (name == "bf16") return kv::Form::bf16;
  throw std::invalid_argument("there is no weight form " + name);
}

kv::Dtype dtype_named(const std::string& name) {
  if (name == "f32") return kv::Dtype::f32;
  if (name == "f16") return kv::Dtype::f16;
  if (name == "bf16") return kv::Dtype::bf16;
  if (name == "int8") return kv::Dtype::i8;
  throw std::invalid_argument("pages cannot hold " + name);
}

kv::Weight weight_of(const std::string& form, int rows, int columns, bool half, bool minima, int group,
                     const std::uint8_t* data = nullptr) {
  if (rows < 1 || columns < 1 || rows > (1 << 28) || columns > (1 << 24)) {
    throw std::invalid_argument("a weight of impossible size");
  }
  if (group != kv::kGroup && group != kv::kFine) throw std::invalid_argument("groups are of 16 or of 32 inputs");
  const kv::Weight weight{form_named(form), half, minima, group == kv::kFine, rows, columns, data};
  if (weight.fine && half) throw std::invalid_argument("scales per 16 inputs are always f32");
  if (kv::coded(weight.form) && columns % kv::kGroup != 0) {
    throw std::invalid_argument("columns are no whole number of groups of 32");
  }
  return weight;
}

class Engine {
 public:
  Engine(int threads, const std::string& isa, const std::vector<int>& cpus) : kernels_(kv::choose_kernels(isa.c_str())) {
    if (kernels_ == nullptr) throw std::invalid_argument("this processor cannot run the kernels for " + isa);
    if (threads < 1 || threads > 1024) throw std::invalid_argument("the number of threads is impossible");
    for (const int cpu : cpus) {
      if (cpu < 0 || cpu >= kv::Threads::kMostCpus) throw std::invalid_argument("there is no such CPU");
    }
    threads_ = std::make_unique<kv::Threads>(threads, cpus);
  }

  std::string isa() const { return kernels_->name; }

  int buffer(int width, bool picked, bool quantised) { return program_.buffer(width, picked, quantised); }

  int weight(const std::string& form, int rows, int columns, bool half, bool minima, int group,
             Array<const std::uint8_t, 1> data) {
    const kv::Weight weight = weight_of(form, rows, columns, half, minima, group, data.data());
    int index = -1;
    raise(program_.weight(weight, data.size(), &index));
    keep(data);
    return index;
  }

  int vector(Array<const float, 1> values) {
    keep(values);
    return program_.vector({values.data(), whole(values.size())});
  }

  int rope_table(Array<const float, 2> cosines, Array<const float, 2> sines) {
    if (cosines.shape(0) != sines.shape(0) || cosines.shape(1) != sines.shape(1)) {
      throw std::invalid_argument("cosines and sines differ in shape");
    }
    keep(cosines);
    keep(sines);
    return program_.rope_table(
        {cosines.data(), sines.data(), whole(cosines.shape(0)), whole(cosines.shape(1))});
  }

  void embed(int weight, float scale, const ViewOf& out) {
    kv::Operation op{};
    op.kind = kv::Kind::embed;
    op.weight = weight;
    op.number = scale;
    op.out = view(out);
    add(op);
  }

  void norm(const ViewOf& x, int vector, float epsilon, int size, const ViewOf& out, bool picked) {
    kv::Operation op{};
    op.kind = kv::Kind::norm;
    op.picked = picked;
    op.x = view(x);
    op.table = vector;
    op.number = epsilon;
    op.dim = size;
    op.out = view(out);
    add(op);
  }

  void quantise(const ViewOf& x, const ViewOf& out, bool picked) {
    kv::Operation op{};
    op.kind = kv::Kind::quantise;
    op.picked = picked;
    op.x = view(x);
    op.out = view(out);
    add(op);
  }

  void product(const ViewOf& x, int weight, int bias, const std::string& epilogue, const ViewOf& out, bool picked) {
    kv::Operation op{};
    op.kind = kv::Kind::product;
    op.picked = picked;
    op.x = view(x);
    op.weight = weight;
    op.table = bias;
    op.out = view(out);
    if (epilogue == "add") {
      op.epilogue = kv::Epilogue::add;
    } else if (epilogue == "silu_gate") {
      op.epilogue = kv::Epilogue::silu_gate;
    } else if (epilogue == "gelu_gate") {
      op.epilogue = kv::Epilogue::gelu_gate;
    } else if (epilogue != "store") {
      throw std::invalid_argument("there is no epilogue " + epilogue);
    }
    add(op);
  }

  void rope(const ViewOf& x, int heads, int dim, int table, bool interleaved) {
    kv::Operation op{};
    op.kind = kv::Kind::rope;
    op.x = view(x);
    op.heads = heads;
    op.dim = dim;
    op.table = table;
    op.interleaved = interleaved;
    add(op);
  }

  void write_kv(const ViewOf& k, const ViewOf& v, int heads, int dim, std::size_t k_offset, std::size_t v_offset,
                std::size_t scale_offset) {
    kv::Operation op{};
    op.kind = kv::Kind::write_kv;
    op.x = view(k);
    op.y = view(v);
    op.heads = heads;
    op.dim = dim;
    op.k_offset = k_offset;
    op.v_offset = v_offset;
    op.scale_offset = scale_offset;
    add(op);
  }

  void attend(const ViewOf& q, int heads, int shared, int dim, float scale, int window, float cap, std::size_t k_offset,
              std::size_t v_offset, std::size_t scale_offset, const ViewOf& out) {
    kv::Operation op{};
    op.kind = kv::Kind::attend;
    op.x = view(q);
    op.heads = heads;
    op.shared = shared;
    op.dim = dim;
    op.number = scale;
    op.window = window;
    op.cap = cap;
    op.k_offset = k_offset;
    op.v_offset = v_offset;
    op.scale_offset = scale_offset;
    op.out = view(out);
    add(op);
  }

  void two(kv::Kind kind, const ViewOf& x, const ViewOf& y, const ViewOf& out, bool picked) {
    kv::Operation op{};
    op.kind = kind;
    op.picked = picked;
    op.x = view(x);
    op.y = view(y);
    op.out = view(out);
    add(op);
  }
  void gate(const std::string& kind, const ViewOf& x, const ViewOf& y, const ViewOf& out, bool picked) {
    if (kind != "silu" && kind != "gelu") throw std::invalid_argument("there is no gate " + kind);
    two(kind == "silu" ? kv::Kind::silu_gate : kv::Kind::gelu_gate, x, y, out, picked);
  }
  void add_lines(const ViewOf& x, const ViewOf& y, const ViewOf& out, bool picked) {
    two(kv::Kind::add, x, y, out, picked);
  }

  void pick(const ViewOf& x, const ViewOf& out) {
    kv::Operation op{};
    op.kind = kv::Kind::pick;
    op.picked = true;
    op.x = view(x);
    op.out = view(out);
    add(op);
  }

  std::size_t plan(int rows, int context) {
    raise(program_.plan(rows, context));
    const kv::Pool pool{threads_.get(), threads_->count(),
                        [](void* self, int chunks, kv::Threads::Work work, void* of) {
                          static_cast<kv::Threads*>(self)->run(chunks, work, of);
                        }};
    runner_ = std::make_unique<kv::Runner>(program_, *kernels_, pool);
    // In large pages where there are any: a product writes a column of rows, each of which lies in a page of its own.
    constexpr std::size_t kLargePage = std::size_t{2} << 20;
    const std::size_t bytes = (runner_->workspace_bytes() + kLargePage - 1) / kLargePage * kLargePage;
    workspace_.reset(static_cast<std::uint8_t*>(std::aligned_alloc(kLargePage, bytes)));
    if (workspace_ == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    madvise(workspace_.get(), bytes, MADV_HUGEPAGE);
#endif
    std::memset(workspace_.get(), 0, bytes);
    runner_->prepare(workspace_.get());
    return bytes;
  }

  void bind(Array<std::uint8_t, 1> arena, int pages, std::size_t page_bytes, int page_tokens, const std::string& dtype) {
    planned();
    const kv::Dtype type = dtype_named(dtype);
    if (pages < 1 || page_bytes == 0 || static_cast<std::size_t>(pages) > arena.size() / page_bytes) {
      throw std::invalid_argument("the pages do not fit in the arena");
    }
    raise(runner_->bind({arena.data(), pages, page_bytes, page_tokens, type}));
    arena_ = nb::cast(arena);
  }

  void step(Array<const std::int32_t, 1> tokens, Array<const std::int32_t, 1> starts,
            Array<const std::int32_t, 1> counts, Array<const std::int32_t, 1> logits,
            Array<const std::int32_t, 1> page_starts, Array<const std::int32_t, 1> pages, Array<float, 2> out) {
    planned();
    const std::size_t slices = starts.size();
    if (counts.size() != slices || logits.size() != slices || page_starts.size() != slices + 1) {
      throw std::invalid_argument("the parts of the batch differ in length");
    }
    if (out.shape(0) > 0 && out.shape(1) != static_cast<std::size_t>(program_.result_width())) {
      throw std::invalid_argument("the memory for logits has another width");
    }
    const kv::Batch batch{whole(slices), tokens.data(),      whole(tokens.size()), starts.data(),
                          counts.data(), logits.data(),      page_starts.data(),   pages.data(),
                          whole(pages.size()), out.data(),   static_cast<std::int64_t>(out.shape(0))};
    if (busy_.exchange(true)) throw std::invalid_argument("a step is running already");
    kv::Error error;
    {
      const nb::gil_scoped_release release;
      threads_->settle_caller();
      error = runner_->step(batch, aborted_);
    }
    busy_.store(false);
    aborted_.store(false);
    raise(error);
  }

  void abort() { aborted_.store(true); }

 private:
  void add(const kv::Operation& op) { raise(program_.operation(op)); }

  void planned() const {
    if (runner_ == nullptr) throw std::invalid_argument("the program is not planned yet");
  }

  template <typename A>
  void keep(const A& array) {
    kept_.push_back(nb::cast(array));
  }

  static void raise(const kv::Error& error) {
    if (!error) return;
    std::string text = error.what;
    if (error.operation >= 0) text += " (operation " + std::to_string(error.operation) + ")";
    throw std::invalid_argument(text);
  }

  struct Free {
    void operator()(std::uint8_t* memory) const { std::free(memory); }
  };

  const kv::Kernels* kernels_;
  kv::Program program_;
  std::unique_ptr<kv::Threads> threads_;
  std::unique_ptr<std::uint8_t, Free> workspace_;
  std::unique_ptr<kv::Runner> runner_;
  std::atomic<bool> aborted_{false}, busy_{false};
  std::vector<nb::object> kept_;
  nb::object arena_;
};

std::size_t packed_bytes(const std::string& form, int rows, int columns, bool half, bool minima, int group) {
  return weight_of(form, rows, columns, half, minima, group).bytes();
}

void pack_codes(const std::string& form, bool half, int group, Array<const std::uint8_t, 2> codes,
                Array<const float, 2> scales, nb::object minima, Array<std::uint8_t, 1> out) {
  const int rows = whole(codes.shape(0)), columns = whole(codes.shape(1));
  const bool with = !minima.is_none();
  const kv::Weight weight = weight_of(form, rows, columns, half, with, group);
  if (!kv::coded(weight.form)) throw std::invalid_argument("numbers have no codes");
  const auto right = [&](const Array<const float, 2>& table) {
    return table.shape(0) == codes.shape(0) && table.shape(1) == codes.shape(1) / static_cast<std::size_t>(group);
  };
  Array<const float, 2> least;
  if (with) least = nb::cast<Array<const float, 2>>(minima);
  if (!right(scales) || (with && !right(least)) || out.size() < weight.bytes()) {
    throw std::invalid_argument("scales, minima or memory do not fit the codes");
  }
  const nb::gil_scoped_release release;
  kv::pack_codes(weight, codes.data(), scales.data(), with ? least.data() : nullptr, 0, weight.panels(), out.data());
}

void pack(const kv::Weight& weight, const std::uint8_t* values, const Array<std::uint8_t, 1>& out) {
  if (out.size() < weight.bytes()) throw std::invalid_argument("the memory does not fit the values");
  std::uint8_t* const to = out.data();
  const nb::gil_scoped_release release;
  kv::pack_numbers(weight, values, 0, weight.panels(), to);
}

void pack_floats(Array<const float, 2> values, Array<std::uint8_t, 1> out) {
  const kv::Weight weight = weight_of("f32", whole(values.shape(0)), whole(values.shape(1)), false, false, kv::kGroup);
  pack(weight, reinterpret_cast<const std::uint8_t*>(values.data()), out);
}

// `values` are f16 or bf16 bit for bit.
void pack_halves(const std::string& form, Array<const std::uint16_t, 2> values, Array<std::uint8_t, 1> out) {
  const kv::Weight weight =
      weight_of(form, whole(values.shape(0)), whole(values.shape(1)), false, false, kv::kGroup);
  if (kv::coded(weight.form) || kv::number_bytes(weight.form) != 2) throw std::invalid_argument(form + " is no half");
  pack(weight, reinterpret_cast<const std::uint8_t*>(values.data()), out);
}

bool fits_half(Array<const float, 2> values) {
  const nb::gil_scoped_release release;
  return kv::fits_half(values.data(), values.size());
}

// Single kernels, for tests beside their numpy twins.

void run_exp(const std::string& isa, Array<const float, 1> x, Array<float, 1> out) {
  const kv::Kernels* kernels = kv::choose_kernels(isa.c_str());
  if (kernels == nullptr || x.size() != out.size()) throw std::invalid_argument("no such kernel or size");
  kernels->exponentials(x.data(), whole(x.size()), out.data());
}

void run_store(const std::string& isa, Array<const float, 1> x, const std::string& dtype, Array<std::uint8_t, 1> out) {
  const kv::Kernels* kernels = kv::choose_kernels(isa.c_str());
  const kv::Dtype type = dtype_named(dtype);
  const std::size_t bytes = x.size() * static_cast<std::size_t>(kv::item_bytes(type));
  if (kernels == nullptr || out.size() < bytes + (type == kv::Dtype::i8 ? sizeof(float) : 0)) {
    throw std::invalid_argument("no such kernel or size");
  }
  kernels->store(x.data(), whole(x.size()), type, out.data(), 1, out.data() + bytes);
}

// What benchmarks measure the machine with.

double run_peak_int8(const std::string& isa, std::int64_t rounds) {
  if (kv::choose_kernels(isa.c_str()) == nullptr || rounds < 1) throw std::invalid_argument("no such kernel or size");
  const nb::gil_scoped_release release;
  return kv::run_peak_int8(isa.c_str(), rounds);
}

std::uint64_t read_all(Array<const std::uint8_t, 1> data) {
  const nb::gil_scoped_release release;
  return kv::read_all(data.data(), data.size());
}

}  // namespace

NB_MODULE(_kvmesh_cpu, m) {
  m.def("packed_bytes", &packed_bytes, "form"_a, "rows"_a, "columns"_a, "half"_a, "minima"_a, "group"_a);
  m.def("pack_codes", &pack_codes, "form"_a, "half"_a, "group"_a, "codes"_a, "scales"_a, "minima"_a.none(), "out"_a);
  m.def("pack_floats", &pack_floats, "values"_a, "out"_a);
  m.def("pack_halves", &pack_halves, "form"_a, "values"_a, "out"_a);
  m.def("fits_half", &fits_half, "values"_a);
  m.def("best_isa", [] { return std::string(kv::choose_kernels("")->name); });
  m.def("has_isa", [](const std::string& isa) { return kv::choose_kernels(isa.c_str()) != nullptr; });
  m.def("run_exp", &run_exp, "isa"_a, "x"_a, "out"_a);
  m.def("run_store", &run_store, "isa"_a, "x"_a, "dtype"_a, "out"_a);
  m.def("run_peak_int8", &run_peak_int8, "isa"_a, "rounds"_a);
  m.def("read_all", &read_all, "data"_a);
  nb::class_<Engine>(m, "Engine")
      .def(nb::init<int, const std::string&, const std::vector<int>&>(), "threads"_a, "isa"_a,
           "cpus"_a = std::vector<int>{})
      .def_prop_ro("isa", &Engine::isa)
      .def("buffer", &Engine::buffer, "width"_a, "picked"_a, "quantised"_a)
      .def("weight", &Engine::weight, "form"_a, "rows"_a, "columns"_a, "half"_a, "minima"_a, "group"_a, "data"_a)
      .def("vector", &Engine::vector, "values"_a)
      .def("rope_table", &Engine::rope_table, "cosines"_a, "sines"_a)
      .def("embed", &Engine::embed, "weight"_a, "scale"_a, "out"_a)
      .def("norm", &Engine::norm, "x"_a, "vector"_a, "epsilon"_a, "size"_a, "out"_a, "picked"_a)
      .def("quantise", &Engine::quantise, "x"_a, "out"_a, "picked"_a)
      .def("product", &Engine::product, "x"_a, "weight"_a, "bias"_a, "epilogue"_a, "out"_a, "picked"_a)
      .def("rope", &Engine::rope, "x"_a, "heads"_a, "dim"_a, "table"_a, "interleaved"_a)
      .def("write_kv", &Engine::write_kv, "k"_a, "v"_a, "heads"_a, "dim"_a, "k_offset"_a, "v_offset"_a,
           "scale_offset"_a)
      .def("attend", &Engine::attend, "q"_a, "heads"_a, "shared"_a, "dim"_a, "scale"_a, "window"_a, "cap"_a, "k_offset"_a,
           "v_offset"_a, "scale_offset"_a, "out"_a)
      .def("gate", &Engine::gate, "kind"_a, "x"_a, "y"_a, "out"_a, "picked"_a)
      .def("add", &Engine::add_lines, "x"_a, "y"_a, "out"_a, "picked"_a)
      .def("pick", &Engine::pick, "x"_a, "out"_a)
      .def("plan", &Engine::plan, "rows"_a, "context"_a)
      .def("bind", &Engine::bind, "arena"_a, "pages"_a, "page_bytes"_a, "page_tokens"_a, "dtype"_a)
      .def("step", &Engine::step, "tokens"_a, "starts"_a, "counts"_a, "logits"_a, "page_starts"_a, "pages"_a, "out"_a)
      .def("abort", &Engine::abort);
}

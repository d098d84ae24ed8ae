#include "agreement.h"

#include <vector>

#include "pack.h"

namespace kv {
namespace {

constexpr int kRows = 15, kOutputs = 48, kColumns = 96;  // tiles of every size

class Random {
 public:
  std::uint32_t next() { return state_ = state_ * 1664525u + 1013904223u; }
  float number() { return static_cast<float>(static_cast<int>(next() >> 8) - (1 << 23)) / (1 << 22); }

 private:
  std::uint32_t state_ = 20261130;
};

std::vector<float> product(const Kernels& kernels, const Weight& weight, const std::vector<float>& x, int rows) {
  std::vector<CodedGroup> groups(std::size_t{kRows} * kColumns / kGroup);
  std::vector<float> steps(kRows), out(std::size_t{kRows} * kOutputs);
  const Quantised quantised{groups.data(), steps.data(), kColumns};
  for (int row = 0; row < rows; ++row) {
    kernels.quantise(x.data() + row * kColumns, kColumns, quantised.row(row), steps.data() + row);
  }
  const Product product{weight, quantised, {}, {out.data(), kOutputs}, kOutputs, Epilogue::store, nullptr};
  kernels.product(product, 0, rows, 0, weight.panels());
  return out;
}

}  // namespace

bool agrees_with_portable(const Kernels& kernels) {
  Random random;
  std::vector<float> x(std::size_t{kRows} * kColumns);
  for (float& number : x) number = random.number();
  for (int which = 0; which < 12; ++which) {
    const Form form = which % 2 == 0 ? Form::u4 : Form::i8;
    const bool minima = which / 2 % 2 == 0, half = which / 4 == 1, fine = which / 4 == 2;
    Weight weight{form, half, minima, fine, kOutputs, kColumns, nullptr};
    const std::size_t tables = std::size_t{kOutputs} * kColumns / (fine ? kFine : kGroup);
    std::vector<std::uint8_t> codes(std::size_t{kOutputs} * kColumns), packed(weight.bytes() + 64);
    std::vector<float> scales(tables), least(tables);
    for (std::uint8_t& code : codes) code = static_cast<std::uint8_t>(random.next() >> (form == Form::u4 ? 28 : 24));
    for (std::size_t i = 0; i < tables; ++i) {
      scales[i] = random.number();
      least[i] = random.number();
    }
    const std::size_t past = reinterpret_cast<std::uintptr_t>(packed.data()) % 64;
    std::uint8_t* const to = packed.data() + (past == 0 ? 0 : 64 - past);
    pack_codes(weight, codes.data(), scales.data(), minima ? least.data() : nullptr, 0, weight.panels(), to);
    weight.data = to;
    for (const int rows : {1, 2, 3, kRows}) {
      if (product(kernels, weight, x, rows) != product(portable_kernels(), weight, x, rows)) return false;
    }
  }
  return true;
}

}  // namespace kv

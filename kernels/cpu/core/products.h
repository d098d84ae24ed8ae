// Products: what is the same for all instruction sets. Each set brings `tile_codes`, the sums of 1 to 4 rows
// with one panel of codes; integer sums are exact, and floats follow one order along the inputs:
//
//     for each group: dot = fma(float(second half), its scale, float(first half) * its scale)
//                     sum = fma(dot, weight scale, sum)
//                     sum = fma(weight minimum, activation sum, sum)
//     fine: for each half of a group: sum = fma(float(half) * its scale, weight scale, sum)
//                                     sum = fma(weight minimum, its scale * float(its code sum), sum)
//
// Included inside a namespace of its own by each isa_*.cpp, after attention.h and the set's tile_codes.

// Bias, then what becomes of the 16 sums of a panel for one row.
inline void emit(const Product& product, int row, int panel, float* sums) {
  const int first = panel * kPanel;
  const int outputs = product.weight.rows - first < kPanel ? product.weight.rows - first : kPanel;
  if (product.bias != nullptr) {
    for (int i = 0; i < outputs; ++i) sums[i] += product.bias[first + i];
  }
  float* out = product.out.row(row);
  switch (product.epilogue) {
    case Epilogue::store:
      __builtin_memcpy(out + first, sums, static_cast<std::size_t>(outputs) * sizeof(float));
      return;
    case Epilogue::add:
      for (int i = 0; i < outputs; ++i) out[first + i] += sums[i];
      return;
    case Epilogue::silu_gate: {
      // Eight gates, then the eight ups that belong to them.
      const F8 gated = silu_gate8(load(sums), load(sums + 8));
      const int column = panel * 8;
      store_some(out + column, gated, product.out_width - column < 8 ? product.out_width - column : 8);
      return;
    }
  }
}

template <int kRows>
inline void float_rows(const Product& product, int row, int panel) {
  float sums[kRows][kPanel];
  const auto* weights = reinterpret_cast<const float*>(product.weight.data + product.weight.panel_bytes() *
                                                                               static_cast<std::size_t>(panel));
  multiply_tile<kRows, 2>(product.x.row(row), product.x.stride, weights, kPanel, &sums[0][0], kPanel,
                          product.weight.columns, false);
  for (int r = 0; r < kRows; ++r) emit(product, row + r, panel, sums[r]);
}

template <int kRows>
inline void code_rows(const Product& product, const Panel& weights, int row, int panel) {
  float sums[kRows][kPanel];
  tile_codes<kRows>(product, weights, row, sums);
  for (int r = 0; r < kRows; ++r) emit(product, row + r, panel, sums[r]);
}

inline void product(const Product& product, int first, int last, int panel, int panel_end) {
  for (; panel < panel_end; ++panel) {
    int row = first;
    if (product.weight.form == Form::f32) {
      for (; row + 4 <= last; row += 4) float_rows<4>(product, row, panel);
      if (last - row == 3) float_rows<3>(product, row, panel);
      if (last - row == 2) float_rows<2>(product, row, panel);
      if (last - row == 1) float_rows<1>(product, row, panel);
      continue;
    }
    const Panel weights = open_panel(product.weight, panel);
    for (; row + 4 <= last; row += 4) code_rows<4>(product, weights, row, panel);
    if (last - row == 3) code_rows<3>(product, weights, row, panel);
    if (last - row == 2) code_rows<2>(product, weights, row, panel);
    if (last - row == 1) code_rows<1>(product, weights, row, panel);
  }
}

constexpr Kernels kernels_named(const char* name) {
  return {name, exponentials, norm, quantise, rope, silu_gate, add, store, expand, product, attend, begin, merge, finish};
}

// Products: what is the same for all instruction sets. Each set brings `code_panel`, the sums of some rows with one
// panel of codes, in units of the rows' steps. Within a group all is whole numbers; floats follow one order along
// the inputs:
//
//     for each group: dot = float(multiple of the first half * its dot + multiple of the second half * its dot)
//                     sum = fma(dot, weight scale, sum)
//                     sum = fma(weight minimum, activation sum, sum)
//     fine: for each half of a group: sum = fma(float(its multiple * its dot), weight scale, sum)
//                                     sum = fma(weight minimum, activation sum of the half, sum)
//     at the end:     sum * step of the row
//
// Included inside a namespace of its own by each isa_*.cpp, after attention.h and the set's code_panel.

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
      if (outputs == kPanel) {
        store8(out + first, load(sums));
        store8(out + first + 8, load(sums + 8));
        return;
      }
      __builtin_memcpy(out + first, sums, static_cast<std::size_t>(outputs) * sizeof(float));
      return;
    case Epilogue::add:
      if (outputs == kPanel) {
        store8(out + first, add8(load(out + first), load(sums)));
        store8(out + first + 8, add8(load(out + first + 8), load(sums + 8)));
        return;
      }
      for (int i = 0; i < outputs; ++i) out[first + i] += sums[i];
      return;
    case Epilogue::silu_gate: {
      // Eight gates, then the eight ups that belong to them.
      const F8 gated = silu_gate8(load(sums), load(sums + 8));
      const int column = panel * 8;
      if (product.out_width - column >= 8) {
        store8(out + column, gated);
      } else {
        store_some(out + column, gated, product.out_width - column);
      }
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

inline void code_block(const Product& product, int first, int last, int panel) {
  float sums[kBlockRows][kPanel];
  code_panel(product, first, last - first, panel, sums);
  for (int row = first; row < last; ++row) {
    float* line = sums[row - first];
    const F8 step = all(product.quantised.steps[row]);
    store8(line, mul8(load(line), step));
    store8(line + 8, mul8(load(line + 8), step));
    emit(product, row, panel, line);
  }
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
    for (; row < last; row += kBlockRows) code_block(product, row, row + kBlockRows < last ? row + kBlockRows : last, panel);
  }
}

constexpr Kernels kernels_named(const char* name) {
  return {name, exponentials, norm, quantise, rope, silu_gate, add, store, expand, product, attend, begin, merge, finish};
}

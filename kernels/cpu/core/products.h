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
// Included inside a namespace of its own by each isa_*.cpp, after products_float.h and the set's code_panel.

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
    if (!coded(product.weight.form)) {
      float_panel(product, first, last, panel);
      continue;
    }
    for (; row < last; row += kBlockRows) code_block(product, row, row + kBlockRows < last ? row + kBlockRows : last, panel);
  }
}

constexpr Kernels kernels_named(const char* name) {
  return {name, exponentials, norm, quantise, rope, silu_gate, add, store, expand, product, attend, begin, merge, finish};
}

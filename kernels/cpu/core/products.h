// Products: what is the same for all instruction sets. Each set brings `code_panels`, the sums of some rows with some
// panels of codes, in units of the rows' steps. Within a group all is whole numbers; floats follow one order along
// the inputs:
//
//     for each group: dot = float(multiple of the first half * its dot + multiple of the second half * its dot)
//                     sum = fma(dot, weight scale, sum)
//                     sum = fma(weight minimum, activation sum, sum)
//     fine: for each half of a group: sum = fma(float(its multiple * its dot), weight scale, sum)
//                                     sum = fma(weight minimum, activation sum of the half, sum)
//     at the end:     sum * step of the row
//
// Included inside a namespace of its own by each isa_*.cpp, after products_float.h and the set's code_panels.

// Sums of `panels` neighbours: [panels][rows][16].
inline void code_block(const Product& product, int first, int last, int panel, int panels) {
  float sums[kBlockRows][kPanel];
  code_panels(product, first, last - first, panel, panels, sums);
  for (int p = 0; p < panels; ++p) {
    emit(product, first, last, panel + p, sums + p * (last - first), product.quantised.steps);
  }
}

inline void product(const Product& product, int first, int last, int panel, int panel_end) {
  if (!coded(product.weight.form)) {
    for (; panel < panel_end; ++panel) {
      float_panel(product, first, last, panel);
    }
    return;
  }
  for (; first < last; first += kBlockRows) {
    const int end = first + kBlockRows < last ? first + kBlockRows : last;
    for (int at = panel; at < panel_end;) {
      int panels = panels_at_once(end - first);
      if (at + panels > panel_end) panels = 1;
      code_block(product, first, end, at, panels);
      at += panels;
    }
  }
}

constexpr Kernels kernels_named(const char* name) {
  return {name, exponentials, norm, quantise, rope, silu_gate, gelu_gate, add, store, expand,
          product, attend, begin, merge, finish};
}

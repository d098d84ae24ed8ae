// Products with weights that are floats, f16 or bf16, on activations in f32; and what every product does at its end.
// Halves become floats as they are read. Each sum follows the order of the inputs.
// Included inside a namespace of its own by each isa_*.cpp, after attention.h.

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
    case Epilogue::silu_gate:
    case Epilogue::gelu_gate: {
      // Eight gates, then the eight ups that belong to them.
      const F8 gates = load(sums), ups = load(sums + 8);
      const F8 gated = product.epilogue == Epilogue::silu_gate ? silu_gate8(gates, ups) : gelu_gate8(gates, ups);
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

template <Form kForm>
inline F8 load_numbers(const std::uint8_t* p) {
  if constexpr (kForm == Form::f16) return load_half(p);
  if constexpr (kForm == Form::bf16) return load_bf16(p);
  return load(reinterpret_cast<const float*>(p));  // a copy first would go through memory
}

template <int kRows, Form kForm>
inline void float_tile(const Product& product, int row, int panel) {
  constexpr int kBytes = number_bytes(kForm);
  const std::uint8_t* line = product.weight.data + product.weight.panel_bytes() * static_cast<std::size_t>(panel);
  const float* x = product.x.row(row);
  const std::ptrdiff_t stride = product.x.stride;
  F8 total[kRows][2];
  for (int r = 0; r < kRows; ++r) total[r][0] = total[r][1] = all(0.0f);
  for (int k = 0; k < product.weight.columns; ++k, line += kPanel * kBytes) {
    const F8 low = load_numbers<kForm>(line), high = load_numbers<kForm>(line + 8 * kBytes);
    for (int r = 0; r < kRows; ++r) {
      const F8 from = all(x[r * stride + k]);
      total[r][0] = fma8(from, low, total[r][0]);
      total[r][1] = fma8(from, high, total[r][1]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    float sums[kPanel];
    store8(sums, total[r][0]);
    store8(sums + 8, total[r][1]);
    emit(product, row + r, panel, sums);
  }
}

template <Form kForm>
inline void float_rows(const Product& product, int first, int last, int panel) {
  for (; first + 4 <= last; first += 4) float_tile<4, kForm>(product, first, panel);
  if (last - first == 3) float_tile<3, kForm>(product, first, panel);
  if (last - first == 2) float_tile<2, kForm>(product, first, panel);
  if (last - first == 1) float_tile<1, kForm>(product, first, panel);
}

// Rows [first, last) with one panel of a weight without codes.
inline void float_panel(const Product& product, int first, int last, int panel) {
  if (product.weight.form == Form::f16) return float_rows<Form::f16>(product, first, last, panel);
  if (product.weight.form == Form::bf16) return float_rows<Form::bf16>(product, first, last, panel);
  float_rows<Form::f32>(product, first, last, panel);
}

// Products with weights that are floats, f16 or bf16, on activations in f32; and what every product does at its end.
// Halves become floats as they are read. Each sum follows the order of the inputs.
// Included inside a namespace of its own by each isa_*.cpp, after attention.h.

// What becomes of a whole panel's sums: 16 of each row, times the row's step (where there are steps), and the bias.
template <Epilogue kEpilogue>
inline void emit_whole(const Product& product, int first, int last, int panel, const float (*sums)[kPanel],
                       const float* steps) {
  constexpr bool kGate = kEpilogue == Epilogue::silu_gate || kEpilogue == Epilogue::gelu_gate;
  const int column = panel * (kGate ? kPanel / 2 : kPanel);
  F8 bias[2] = {all(0.0f), all(0.0f)};
  if (product.bias != nullptr) {
    for (int v = 0; v < 2; ++v) bias[v] = load(product.bias + panel * kPanel + 8 * v);
  }
  for (int row = first; row < last; ++row, ++sums) {
    F8 sum[2] = {load(*sums), load(*sums + 8)};
    float* const out = product.out.row(row) + column;
    for (int v = 0; v < 2; ++v) {
      if (steps != nullptr) sum[v] = mul8(sum[v], all(steps[row]));
      if (product.bias != nullptr) sum[v] = add8(sum[v], bias[v]);
      if constexpr (kEpilogue == Epilogue::store) store8(out + 8 * v, sum[v]);
      if constexpr (kEpilogue == Epilogue::add) store8(out + 8 * v, add8(load(out + 8 * v), sum[v]));
    }
    // Eight gates, then the eight ups that belong to them.
    if constexpr (kEpilogue == Epilogue::silu_gate) store8(out, silu_gate8(sum[0], sum[1]));
    if constexpr (kEpilogue == Epilogue::gelu_gate) store8(out, gelu_gate8(sum[0], sum[1]));
  }
}

// The last panel of a weight whose outputs are no whole number of panels; gates are always whole.
inline void emit_some(const Product& product, int first, int last, int panel, const float (*sums)[kPanel],
                      const float* steps) {
  const int column = panel * kPanel, outputs = product.weight.rows - column;
  for (int row = first; row < last; ++row, ++sums) {
    float* const out = product.out.row(row) + column;
    for (int i = 0; i < outputs; ++i) {
      float sum = steps != nullptr ? (*sums)[i] * steps[row] : (*sums)[i];
      if (product.bias != nullptr) sum += product.bias[column + i];
      out[i] = product.epilogue == Epilogue::add ? out[i] + sum : sum;
    }
  }
}

// Sums of rows [first, last) with one panel. `steps` may be null.
inline void emit(const Product& product, int first, int last, int panel, const float (*sums)[kPanel],
                 const float* steps) {
  if (product.weight.rows - panel * kPanel < kPanel) return emit_some(product, first, last, panel, sums, steps);
  switch (product.epilogue) {
    case Epilogue::store:
      return emit_whole<Epilogue::store>(product, first, last, panel, sums, steps);
    case Epilogue::add:
      return emit_whole<Epilogue::add>(product, first, last, panel, sums, steps);
    case Epilogue::silu_gate:
      return emit_whole<Epilogue::silu_gate>(product, first, last, panel, sums, steps);
    case Epilogue::gelu_gate:
      return emit_whole<Epilogue::gelu_gate>(product, first, last, panel, sums, steps);
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
  float sums[kRows][kPanel];
  for (int r = 0; r < kRows; ++r) {
    store8(sums[r], total[r][0]);
    store8(sums[r] + 8, total[r][1]);
  }
  emit(product, row, row + kRows, panel, sums, nullptr);
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

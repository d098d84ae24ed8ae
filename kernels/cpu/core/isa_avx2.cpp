// The kernels for AVX2, FMA and F16C. Compiled with those flags; elsewhere there are none.
#include "forms.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

namespace kv::avx2 {
namespace {
constexpr bool kPairedCodes = true;
#include "lanes_avx2.h"
// in this order
#include "elementwise.h"
// in this order
#include "attention_tiles.h"
// in this order
#include "attention_blocks.h"
// in this order
#include "attention_few.h"
// in this order
#include "attention.h"
// in this order
#include "products_float.h"
// in this order
#include "products_avx2.h"
// in this order
#include "products.h"
}  // namespace
}  // namespace kv::avx2

namespace kv {
const Kernels* avx2_kernels() {
  static constexpr Kernels kernels = avx2::kernels_named("avx2");
  return &kernels;
}
}  // namespace kv
#else
namespace kv {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace kv
#endif

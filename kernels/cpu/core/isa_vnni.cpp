// The kernels for AVX-512 with VNNI: products of codes in 512 bits, all else as with AVX2. Compiled with those flags;
// elsewhere there are none. KV_PLAIN_AVX512 names a header that spells the instructions out in plain C++, for tests on
// processors without them.
#include "forms.h"

#if (defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)) || defined(KV_PLAIN_AVX512)
#if !defined(__clang__)
// GCC's own header leaves what it does not need unset.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(KV_PLAIN_AVX512)
#include KV_PLAIN_AVX512
#endif

namespace kv::vnni {
namespace {
constexpr bool kPairedCodes = false;
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

#include "products_vnni.h"
// in this order
#include "products.h"
}  // namespace
}  // namespace kv::vnni

namespace kv {
const Kernels* vnni_kernels() {
  static constexpr Kernels kernels = vnni::kernels_named("vnni");
  return &kernels;
}
}  // namespace kv
#else
namespace kv {
const Kernels* vnni_kernels() { return nullptr; }
}  // namespace kv
#endif

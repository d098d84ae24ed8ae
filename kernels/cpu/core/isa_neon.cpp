// The kernels for NEON with the dot product (Armv8.2). Compiled with that flag; elsewhere there are none.
#include "forms.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>

namespace kv::neon {
namespace {
#include "lanes_neon.h"
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
#include "products_neon.h"
// in this order
#include "products.h"
}  // namespace
}  // namespace kv::neon

namespace kv {
const Kernels* neon_kernels() {
  static constexpr Kernels kernels = neon::kernels_named("neon");
  return &kernels;
}
}  // namespace kv
#else
namespace kv {
const Kernels* neon_kernels() { return nullptr; }
}  // namespace kv
#endif

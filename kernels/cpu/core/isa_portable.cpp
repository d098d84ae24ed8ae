// The kernels in plain C++.
#include "forms.h"

namespace kv::portable {
namespace {
#include "lanes_portable.h"
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
#include "products_portable.h"
// in this order
#include "products.h"
}  // namespace
}  // namespace kv::portable

namespace kv {
const Kernels& portable_kernels() {
  static constexpr Kernels kernels = portable::kernels_named("portable");
  return kernels;
}
}  // namespace kv

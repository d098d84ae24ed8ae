// Which instruction set this processor runs best.
#pragma once

#include "forms.h"

namespace kv {

// The kernels of that name, or the best for an empty one; null where the processor lacks them.
const Kernels* choose_kernels(const char* name);

}  // namespace kv

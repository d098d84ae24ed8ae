// Whether an instruction set gives the bits of the portable kernels here: asked once before it is used.
#pragma once

#include "forms.h"

namespace kv {

// Quantises random rows and multiplies them with random weights of every form, with both sets.
bool agrees_with_portable(const Kernels& kernels);

}  // namespace kv

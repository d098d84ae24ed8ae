// Codes in the order of the file's rows into panels (see forms.h). Done once, at load.
#pragma once

#include "forms.h"

namespace kv {

// codes [rows][columns], scales and minima [rows][columns / 32], or / 16 where the
// weight is fine (minima null where the form has none).
// u4 takes codes 0..15. Packs panels [panel, panel_end); `out` is the start of the weight.
void pack_codes(const Weight& weight, const std::uint8_t* codes, const float* scales, const float* minima,
                int panel, int panel_end, std::uint8_t* out);

// values [rows][columns], numbers of the weight's form
void pack_numbers(const Weight& weight, const std::uint8_t* values, int panel, int panel_end, std::uint8_t* out);

// Whether every number survives a round trip through f16.
bool fits_half(const float* values, std::size_t count);

}  // namespace kv

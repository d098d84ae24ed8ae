#include "pack.h"

namespace kv {
namespace {
#include "lanes_portable.h"

// The scales of 16 outputs for one of `groups` stretches of inputs.
void put_scales(const float* table, int groups, int group, int first, int outputs, bool half, std::uint8_t* out) {
  for (int i = 0; i < kPanel; ++i) {
    const float x = i < outputs ? table[static_cast<std::size_t>(first + i) * static_cast<std::size_t>(groups) +
                                        static_cast<std::size_t>(group)]
                                : 0.0f;
    if (half) {
      const std::uint16_t h = float_to_half(x);
      __builtin_memcpy(out + 2 * i, &h, 2);
    } else {
      __builtin_memcpy(out + 4 * i, &x, 4);
    }
  }
}

void put_codes(Form form, const std::uint8_t* line, int lane, std::uint8_t* out) {
  for (int k = 0; k < kGroup; ++k) {
    if (form == Form::u4) {
      std::uint8_t& both = out[k % 16 / 4 * 64 + 4 * lane + k % 4];
      const unsigned code = line[k] & 15u;
      both = static_cast<std::uint8_t>(k < 16 ? code : both | (code << 4));
    } else {
      out[k / 4 * 64 + 4 * lane + k % 4] = line[k];
    }
  }
}

}  // namespace

void pack_codes(const Weight& weight, const std::uint8_t* codes, const float* scales, const float* minima,
                int panel, int panel_end, std::uint8_t* out) {
  const int groups = weight.groups(), parts = weight.fine ? 2 : 1;
  for (; panel < panel_end; ++panel) {
    const int first = panel * kPanel;
    const int outputs = weight.rows - first < kPanel ? weight.rows - first : kPanel;
    std::uint8_t* block = out + weight.panel_bytes() * static_cast<std::size_t>(panel);
    for (int g = 0; g < groups; ++g, block += weight.group_bytes()) {
      for (int part = 0; part < parts; ++part) {
        const std::size_t at = static_cast<std::size_t>(part) * kPanel * sizeof(float);
        put_scales(scales, groups * parts, g * parts + part, first, outputs, weight.half_scales, block + at);
        if (weight.minima) {
          put_scales(minima, groups * parts, g * parts + part, first, outputs, weight.half_scales,
                     block + weight.header_bytes() / 2 + at);
        }
      }
      std::uint8_t* target = block + weight.header_bytes();
      __builtin_memset(target, 0, weight.group_bytes() - weight.header_bytes());
      for (int i = 0; i < outputs; ++i) {
        const std::size_t at = static_cast<std::size_t>(first + i) * static_cast<std::size_t>(weight.columns) +
                               static_cast<std::size_t>(g * kGroup);
        put_codes(weight.form, codes + at, i, target);
      }
    }
  }
}

void pack_numbers(const Weight& weight, const std::uint8_t* values, int panel, int panel_end, std::uint8_t* out) {
  const auto size = static_cast<std::size_t>(number_bytes(weight.form));
  const auto columns = static_cast<std::size_t>(weight.columns);
  for (; panel < panel_end; ++panel) {
    std::uint8_t* block = out + weight.panel_bytes() * static_cast<std::size_t>(panel);
    for (int i = 0; i < kPanel; ++i) {
      const int row = panel * kPanel + i;
      for (std::size_t k = 0; k < columns; ++k) {
        std::uint8_t* to = block + (k * kPanel + static_cast<std::size_t>(i)) * size;
        if (row < weight.rows) {
          __builtin_memcpy(to, values + (static_cast<std::size_t>(row) * columns + k) * size, size);
        } else {
          __builtin_memset(to, 0, size);
        }
      }
    }
  }
}

bool fits_half(const float* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const float back = half_to_float(float_to_half(values[i]));
    if (__builtin_memcmp(&back, &values[i], sizeof back) != 0) return false;
  }
  return true;
}

}  // namespace kv

// What this machine could do at most: the yardstick beside every measured speed. Used by benchmarks only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kv {

// Runs `rounds` rounds of the integer dot product that products on this instruction set are made of, in
// registers. Returns how many operations that were (a multiplication and an addition are two), 0 where there
// is no such measurement.
double run_peak_int8(const char* isa, std::int64_t rounds);

// Reads every byte once, in order. The result depends on all of them.
std::uint64_t read_all(const std::uint8_t* data, std::size_t bytes);

}  // namespace kv

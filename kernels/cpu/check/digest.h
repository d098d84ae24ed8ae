// What the checks need: numbers that are the same on every target, and a digest of results. No I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kv::check {

// A linear congruential generator; only whole numbers and exact divisions, so that every target draws the same.
class Numbers {
 public:
  explicit Numbers(std::uint32_t seed) : state_(seed * 2654435761u + 1u) {}

  std::uint32_t next() {
    state_ = state_ * 1664525u + 1013904223u;
    return state_ >> 8;
  }
  int below(int n) { return static_cast<int>(next() % static_cast<std::uint32_t>(n)); }
  // About normal, in steps of 2^-12: the sum of four even draws.
  float number() {
    std::int32_t sum = 0;
    for (int i = 0; i < 4; ++i) sum += static_cast<std::int32_t>(next() & 0x1fffu) - 0x1000;
    return static_cast<float>(sum) / 4096.0f;
  }
  std::vector<float> floats(int count) {
    std::vector<float> made(static_cast<std::size_t>(count));
    for (float& x : made) x = number();
    return made;
  }

 private:
  std::uint32_t state_;
};

// FNV-1a over 64 bits. What is no number counts as one: processors differ in its sign and payload.
class Digest {
 public:
  void add(const void* data, std::size_t bytes) {
    const auto* p = static_cast<const std::uint8_t*>(data);
    for (std::size_t i = 0; i < bytes; ++i) value_ = (value_ ^ p[i]) * 0x100000001b3u;
  }
  void add(const float* x, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      std::uint32_t bits;
      __builtin_memcpy(&bits, x + i, sizeof bits);
      if (x[i] != x[i]) bits = 0x7fc00000u;
      add(&bits, sizeof bits);
    }
  }
  void add(const std::vector<float>& x) { add(x.data(), x.size()); }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf29ce484222325u;
};

}  // namespace kv::check

// The kernels for AVX-512 with VNNI beside the portable ones; exits with 0 where all bits are equal.
#include "agreement.h"

#include <cstdio>

int main() {
  const kv::Kernels* const kernels = kv::vnni_kernels();
  if (kernels == nullptr) {
    std::puts("vnni is not compiled in");
    return 2;
  }
  const bool same = kv::agrees_with_portable(*kernels);
  std::puts(same ? "the same bits" : "other bits");
  return same ? 0 : 1;
}

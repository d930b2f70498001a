// Rows of KV caches: in fp32 or bf16, or packed in 8 bits, E values and the fp32 scale in the SPARE
// bytes after them.
//
// Reference: `quantized_rows` and `dense_rows` in compile/int8_cache.py, whose bits these are.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "quantize.h"
#include "vec.h"

namespace {

constexpr int64_t SPARE = 16;

struct Heads {
  int64_t H, G, E;
  bool packed = false;  // whether caches have rows in 8 bits, see `pack`
  int64_t group() const { return H / G; }
  int64_t together() const { return E % BLOCK ? 2 : 1; }

  // Returns the row of a slot of KV head g in a cache of S slots.
  template <class C>
  C* row(C* cache, int64_t S, int64_t g, int64_t slot) const {
    return (C*)((uint8_t*)cache + (g * S + slot) * (packed ? E + SPARE : E * int64_t(sizeof(C))));
  }
};

// Writes a row [E] in 8 bits. The scale of values that are not finite is NaN.
template <class C>
void pack(const C* row, int64_t E, int8_t* out) {
  VF most = {}, rest = {};  // rest: NaN for what `larger` may lose, else zeros
  for (int64_t e = 0; e < E; e += W) {
    const VF x = load(row + e);
    most = larger(larger(x, -x), most);
    rest = fma(x, VF{}, rest);
  }
  const float scale = largest(most) * (1.0f / 127) + sum(rest), unit = std::max(scale, 1e-30f);
  for (int64_t e = 0; e < E; e += W) store(out + e, (VI)(load(row + e) / unit + MAGIC));
  std::memcpy(out + E, &scale, sizeof scale);
}

// Reads a row [E] that `pack` has written.
template <class C>
void unpack(const int8_t* row, int64_t E, C* out) {
  float scale;
  std::memcpy(&scale, row + E, sizeof scale);
  for (int64_t e = 0; e < E; e += W) store(out + e, to_float(load(row + e)) * scale);
}

}  // namespace

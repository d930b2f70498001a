// Products of a few rows with packed 4- and 8-bit weights.
//
// A weight is unpacked once for up to eight rows, so that a further row costs only its
// multiplications. Sums across blocks run in fp32, in one order that depends neither on the number
// of rows nor on the number of threads: the bits of a row do not depend on the other rows of the
// pass.
//
// Reference: `PackedWeight.dequantize` in quant/packed.py. `pack` in cpu_linear.py writes what
// `Weight` reads.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "dot.h"
#include "quantize.h"
#include "threads.h"
#include "vec.h"

namespace {

using at::Tensor;

constexpr int AHEAD = 4096;  // bytes of weights that are fetched before they are read

struct Header {
  int32_t magic, N, K, bits;
  int32_t group_blocks;  // blocks of 32 inputs in a group
  int32_t wide;          // parameters in fp32 instead of fp16
  int32_t second;        // 0: scales only, 1: offsets, 2: zero points
  int32_t base;          // subtracted from every stored value
  int64_t stride;        // bytes of 16 outputs
  int64_t scales_at, second_at;
};
constexpr int32_t MAGIC = 0x45474c46;
constexpr int HEADER_BYTES = 64;

struct Weight {
  Header h;
  const uint8_t* data = nullptr;
  const float* bias = nullptr;
  int64_t blocks = 0, groups = 0, column_blocks = 0;

  Weight() = default;
  explicit Weight(const Tensor& packed, const Tensor* bias_ = nullptr) {
    TORCH_CHECK(packed.numel() >= HEADER_BYTES && packed.is_contiguous(), "not a packed weight");
    const uint8_t* memory = packed.const_data_ptr<uint8_t>();
    std::memcpy(&h, memory, sizeof h);
    TORCH_CHECK(h.magic == MAGIC && h.N > 0 && h.K > 0 && h.group_blocks > 0 && h.stride > 0 &&
                    (h.bits == 4 || h.bits == 8) && h.second >= 0 && h.second <= 2,
                "not a packed weight");
    data = memory + HEADER_BYTES;
    blocks = (h.K + BLOCK - 1) / BLOCK;
    groups = (blocks + h.group_blocks - 1) / h.group_blocks;
    column_blocks = (h.N + COLUMNS - 1) / COLUMNS;
    TORCH_CHECK(packed.numel() == HEADER_BYTES + column_blocks * h.stride, "not a packed weight");
    const int64_t of_values = blocks * COLUMNS * BLOCK * h.bits / 8;
    const int64_t of_parameters = groups * COLUMNS * (h.wide ? 4 : 2);
    const auto lies_behind = [&](int64_t at) {
      return at >= of_values && at + of_parameters <= h.stride;
    };
    TORCH_CHECK(lies_behind(h.scales_at) && (!h.second || lies_behind(h.second_at)),
                "not a packed weight");
    if (bias_ != nullptr && bias_->numel()) {
      TORCH_CHECK(bias_->numel() == h.N && bias_->is_contiguous(), "bias is [", h.N, "]");
      bias = bias_->const_data_ptr<float>();
    }
  }

  VF parameter(const uint8_t* at, int64_t i) const {
    return h.wide ? load((const float*)at + i) : load_half((const uint16_t*)at + i);
  }
};

// Multiplies R rows, from `row`, by W of 16 outputs at `block`: y [R, 16]. SINGLE: 1-block groups.
template <int R, int BITS, bool SINGLE>
inline void tile(const Weight& w, const uint8_t* block, int part, const Activations& x,
                 const Choice& choice, int64_t row, float* y) {
  constexpr int LINES = BITS == 4 ? 4 : 8;
  constexpr int64_t STEP = LINES * 4 * COLUMNS;
  const int base = w.h.base - (BITS == 8 ? 128 : 0) + Dot<BITS, (R < 4)>::bias;
  const uint8_t* scales = block + w.h.scales_at;
  const uint8_t* seconds = block + w.h.second_at;
  const uint8_t* line = block + part * 4 * W;
  const int width = w.h.wide ? 4 : 2;
  VF acc[R] = {}, in_group[R] = {};
  float moved[R] = {};
  int64_t in_this = 0;  // blocks of the group so far
  for (int64_t b = 0, group = 0; b < w.blocks; b++) {
    const int64_t at = b * x.rows + row, parameters = group * COLUMNS + part * W;
    for (int j = 0; j < LINES; j++) __builtin_prefetch(line + b * STEP + j * 4 * COLUMNS + AHEAD);
    const bool ends = SINGLE || ++in_this == w.h.group_blocks || b + 1 == w.blocks;
    VF scale = {}, offset = {};
    if (ends) {
      // Prefetch the parameters of the next 16 outputs, which follow their values.
      __builtin_prefetch(scales + parameters * width + w.h.stride);
      scale = w.parameter(scales, parameters);
      if (w.h.second) {
        __builtin_prefetch(seconds + parameters * width + w.h.stride);
        offset = w.parameter(seconds, parameters);
        if (w.h.second == 2) offset = -(offset * scale);
      }
    }
    const auto take = [&](int r, VI total) {
      const VF value = to_float(total) * splat(x.scales[at + r]);
      if constexpr (SINGLE) {
        acc[r] = fma(scale, value, acc[r]);
        if (w.h.second) acc[r] = fma(offset, splat(choice.offsets[at + r]), acc[r]);
      } else {
        in_group[r] += value;
      }
    };
    block_products<R, BITS>(line + b * STEP, x.q + at * BLOCK, x.sums + at, base, take);
    if constexpr (!SINGLE) {
      for (int r = 0; r < R; r++) moved[r] += choice.offsets[at + r];
      if (!ends) continue;
      for (int r = 0; r < R; r++) {
        acc[r] = fma(scale, in_group[r], acc[r]);
        if (w.h.second) acc[r] = fma(offset, splat(moved[r]), acc[r]);
        in_group[r] = VF{}, moved[r] = 0;
      }
    }
    group++;
    in_this = 0;
  }
  for (int r = 0; r < R; r++) store(y + r * COLUMNS, acc[r]);
  // Add the products of rounding errors, in few blocks and few of their rows.
  const uint8_t* twice = choice.twice + row / MAX_TILE * x.blocks;
  for (int64_t b = 0; b < w.blocks; b++) {
    if (!twice[b]) continue;
    const VF scale = w.parameter(scales, b / w.h.group_blocks * COLUMNS + part * W);
    for (int64_t at = b * x.rows + row, end = at + R; at < end; at++) {
      const float rest_scale = choice.rest_scales[at];
      if (rest_scale == 0.0f) continue;  // NaN continues
      float* out = y + (at + R - end) * COLUMNS;
      const auto take = [&](int, VI total) {
        store(out, fma(scale, to_float(total) * splat(rest_scale), load(out)));
      };
      block_products<1, BITS>(line + b * STEP, x.rest + at * BLOCK, x.rest_sums + at, base, take);
    }
  }
}

template <int BITS, bool SINGLE>
inline void tiles(const Weight& w, const uint8_t* block, int part, const Activations& x,
                  const Choice& choice, int64_t row, int64_t rows, float* y) {
  with_count<MAX_TILE>(rows, [&](auto count) {
    tile<count, BITS, SINGLE>(w, block, part, x, choice, row, y);
  });
}

// Multiplies rows `row` .. `row + rows - 1` (at most 8) by 16 outputs: y [rows, 16], with bias.
inline void product(const Weight& w, int64_t column_block, const Activations& x,
                    const Choice& choice, int64_t row, int64_t rows, float* y) {
  const uint8_t* block = w.data + column_block * w.h.stride;
  for (int part = 0; part < COLUMNS / W; part++) {
    float* out = y + part * W;
    const bool single = w.h.group_blocks == 1;
    if (w.h.bits == 4) {
      single ? tiles<4, true>(w, block, part, x, choice, row, rows, out)
             : tiles<4, false>(w, block, part, x, choice, row, rows, out);
    } else {
      single ? tiles<8, true>(w, block, part, x, choice, row, rows, out)
             : tiles<8, false>(w, block, part, x, choice, row, rows, out);
    }
  }
  if (w.bias != nullptr) {
    const int64_t first = column_block * COLUMNS;
    const int64_t n = std::min<int64_t>(COLUMNS, w.h.N - first);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t i = 0; i < n; i++) y[r * COLUMNS + i] += w.bias[first + i];
  }
}

// Computes a part of y [T, N] = x @ w.T, or of y += x @ w.T: all threads together compute all of
// it.
void products(const Worker& me, const Weight& w, const Activations& x, uint8_t* scratch, int64_t T,
              float* y, int64_t ldy, bool add) {
  const Choice choice(scratch, x, T);
  alignas(64) float part[MAX_TILE * COLUMNS];
  const auto multiply = [&](int64_t block) {
    const int64_t first = block * COLUMNS, n = std::min<int64_t>(COLUMNS, w.h.N - first);
    for (int64_t row = 0; row < T; row += MAX_TILE) {
      const int64_t rows = std::min<int64_t>(MAX_TILE, T - row);
      product(w, block, x, choice, row, rows, part);
      for (int64_t r = 0; r < rows; r++) {
        float* out = y + (row + r) * ldy + first;
        const float* in = part + r * COLUMNS;
        if (add) {
          for (int64_t i = 0; i < n; i++) out[i] += in[i];
        } else {
          std::memcpy(out, in, n * sizeof(float));
        }
      }
    }
  };
  me.each(w.column_blocks, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) multiply(block);
  });
}

}  // namespace

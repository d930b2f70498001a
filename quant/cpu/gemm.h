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

template <int BITS>
constexpr int64_t STEP = BITS * 4 * COLUMNS;  // bytes of a block of 16 outputs: BITS lines
// Values that are prefetched while others are read, in bytes of values: to the L2 cache, and from
// there to the L1 cache.
constexpr int FAR = 8192, NEAR = 1024;

struct Header {
  int32_t magic, N, K, bits;
  int32_t group_blocks;  // blocks of 32 inputs in a group
  int32_t wide;          // parameters in fp32 instead of fp16
  int32_t second;        // 4 bits have 1: offsets, or 2: zero points; 8 bits 0: scales only
  int32_t base;          // subtracted from every stored value
  int64_t stride;        // bytes of 16 outputs
  int64_t scales_at, second_at;
};
constexpr int32_t PACKED = 0x45474c46;
constexpr int HEADER_BYTES = 64;

struct Weight {
  Header h;
  const uint8_t* data = nullptr;
  const float* bias = nullptr;
  int64_t blocks = 0, groups = 0, column_blocks = 0;
  int base = 0;  // subtracted from the stored values, as `Dot` reads them
  // The values FAR ahead of the first ones of 16 outputs: how many bytes ahead they are, since
  // parameters lie between the values of 16 outputs, and how many blocks follow before parameters.
  int64_t far = 0, far_blocks = 0;
  int64_t ahead = 0;  // bytes of whole 16 outputs, at least FAR

  Weight() = default;
  explicit Weight(const Tensor& packed, const Tensor* bias_ = nullptr) {
    TORCH_CHECK(packed.numel() >= HEADER_BYTES && packed.is_contiguous(), "not a packed weight");
    const uint8_t* memory = packed.const_data_ptr<uint8_t>();
    std::memcpy(&h, memory, sizeof h);
    TORCH_CHECK(h.magic == PACKED && h.N > 0 && h.K > 0 && h.group_blocks > 0 && h.stride > 0 &&
                    (h.bits == 4 ? h.second == 1 || h.second == 2 : h.bits == 8 && h.second == 0),
                "not a packed weight");
    data = memory + HEADER_BYTES;
    blocks = (int64_t(h.K) + BLOCK - 1) / BLOCK;
    groups = (blocks + h.group_blocks - 1) / h.group_blocks;
    column_blocks = (int64_t(h.N) + COLUMNS - 1) / COLUMNS;
    TORCH_CHECK(
        h.stride <= packed.numel() && packed.numel() == HEADER_BYTES + column_blocks * h.stride,
        "not a packed weight");
    const int64_t step = h.bits * 4 * COLUMNS, n_far = FAR / step;
    far = n_far / blocks * h.stride + n_far % blocks * step;
    far_blocks = blocks - n_far % blocks;
    ahead = (FAR + h.stride - 1) / h.stride * h.stride;
    base = h.base + (h.bits == 8 ? Dot<8, false>::bias - 128 : Dot<4, false>::bias);
    const int64_t of_values = blocks * step;
    const int64_t of_parameters = groups * COLUMNS * (h.wide ? 4 : 2);
    const auto lies_behind = [&](int64_t at) {
      return at >= of_values && at <= h.stride - of_parameters;
    };
    TORCH_CHECK(lies_behind(h.scales_at) && (!h.second || lies_behind(h.second_at)),
                "not a packed weight");
    if (bias_ != nullptr && bias_->numel()) {
      TORCH_CHECK(bias_->numel() == h.N && bias_->is_contiguous(), "bias is [", h.N, "]");
      bias = bias_->const_data_ptr<float>();
    }
  }

  template <int BITS>
  struct Parameters {
    VF scale[PARTS<BITS>], offset[PARTS<BITS>];  // offsets of 4-bit weights only
  };

  // Returns W scales of 16 outputs at `block`.
  VF scale(const uint8_t* block, int64_t group, int part) const {
    return parameter(block + h.scales_at, group * COLUMNS + part * W);
  }

  // Returns the parameters of PARTS * W of 16 outputs at `block`, from part `part`, and prefetches
  // those of the next 16 outputs, which follow their values, and to the L2 cache those `ahead`.
  template <int BITS>
  [[gnu::always_inline]] Parameters<BITS> parameters(const uint8_t* block, int64_t group,
                                                     int part) const {
    Parameters<BITS> result;
    const int64_t at = group * COLUMNS + part * W, bytes = at * (h.wide ? 4 : 2);
    const uint8_t* next = block + bytes + h.stride;
    to_l2(next + h.scales_at + ahead);
    __builtin_prefetch(next + h.scales_at);
    if (BITS == 4) {
      to_l2(next + h.second_at + ahead);
      __builtin_prefetch(next + h.second_at);
    }
    for (int p = 0; p < PARTS<BITS>; p++) {
      result.scale[p] = scale(block, group, part + p);
      if constexpr (BITS == 4) {
        result.offset[p] = parameter(block + h.second_at, at + p * W);
        if (h.second == 2) [[unlikely]]
          result.offset[p] = -(result.offset[p] * result.scale[p]);
      }
    }
    return result;
  }

 private:
  VF parameter(const uint8_t* at, int64_t i) const {
    if (h.wide) [[unlikely]]
      return load((const float*)at + i);
    return load_half((const uint16_t*)at + i);
  }
};

// Multiplies R rows, from `row`, by PARTS * W of 16 outputs at `block`, from part `part`: y [R,
// 16]. SINGLE: groups of one block.
template <int R, int BITS, bool SINGLE>
[[gnu::noinline]] void tile(const Weight& w, const uint8_t* block, int part, const Activations& x,
                            const Choice& choice, int64_t row, float* y) {
  constexpr int P = PARTS<BITS>;
  const uint8_t *line = block + part * 4 * W, *far = line + w.far;
  int64_t far_blocks = w.far_blocks;
  const int8_t* q = x.q + row * BLOCK;
  const Term* terms = choice.terms + row;
  VF acc[R][P] = {};
  for (int64_t group = 0, b = 0; group < w.groups; group++) {
    const auto [scale, offset] = w.parameters<BITS>(block, group, part);
    const auto add = [&](int r, int p, VF value, float moved) __attribute__((always_inline)) {
      acc[r][p] = fma(scale[p], value, acc[r][p]);
      if constexpr (BITS == 4) acc[r][p] = fma(offset[p], splat(moved), acc[r][p]);
    };
    VF in_group[SINGLE ? 1 : R][P] = {};
    float moved[SINGLE ? 1 : R] = {};
    const int64_t end = SINGLE ? b + 1 : std::min<int64_t>(b + w.h.group_blocks, w.blocks);
    do {
      for (int j = 0; j < BITS; j++) {
        to_l2(far + j * 4 * COLUMNS);
        __builtin_prefetch(line + j * 4 * COLUMNS + NEAR);
      }
      const auto take = [&](int r, int p, VF value) __attribute__((always_inline)) {
        if constexpr (SINGLE) {
          add(r, p, value, terms[r].offset);
        } else {
          in_group[r][p] += value;
        }
      };
      block_products<R, BITS>(line, q, terms, w.base != 0, take);
      if constexpr (!SINGLE && BITS == 4)
        for (int r = 0; r < R; r++) moved[r] += terms[r].offset;
      line += STEP<BITS>;
      far += STEP<BITS>;
      if (--far_blocks == 0) {
        far += w.h.stride - w.blocks * STEP<BITS>;
        far_blocks = w.blocks;
      }
      q += x.rows * BLOCK;
      terms += x.rows;
    } while (++b < end);
    if constexpr (!SINGLE)
      for (int r = 0; r < R; r++)
        for (int p = 0; p < P; p++) add(r, p, in_group[r][p], moved[r]);
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) store(y + r * COLUMNS + p * W, acc[r][p]);
}

// Adds the products of rounding errors to y, in few blocks of few of the MAX_ROWS rows from `row`.
template <int BITS>
[[gnu::noinline]] void add_rest(const Weight& w, const uint8_t* block, int part,
                                const Choice& choice, int64_t row, float* y) {
  constexpr int TOGETHER = 4;
  for (const auto [b, begin, end] : choice.rests_of(row)) {
    VF scale[PARTS<BITS>];
    for (int p = 0; p < PARTS<BITS>; p++) scale[p] = w.scale(block, b / w.h.group_blocks, part + p);
    for (int64_t i = begin; i < end; i += TOGETHER)
      with_count<TOGETHER>(std::min<int64_t>(TOGETHER, end - i), [&](auto R) {
        const Term* terms = choice.rest_terms + i;
        const auto take = [&](int r, int p, VF value) __attribute__((always_inline)) {
          float* out = y + choice.rest_rows[i + r] * COLUMNS + p * W;
          store(out, fma(scale[p], value, load(out)));
        };
        block_products<R, BITS>(block + part * 4 * W + b * STEP<BITS>, choice.rest + i * BLOCK,
                                terms, w.base != 0, take);
      });
  }
}

template <int BITS>
inline void tiles(const Weight& w, const uint8_t* block, const Activations& x, const Choice& choice,
                  int64_t row, int64_t rows, float* y) {
  const bool single = w.h.group_blocks == 1;
  for (int part = 0; part < COLUMNS / W; part += PARTS<BITS>) {
    for (int64_t r = 0; r < rows; r += MAX_TILE) {
      float* out = y + r * COLUMNS + part * W;
      with_count<MAX_TILE>(std::min<int64_t>(MAX_TILE, rows - r), [&](auto R) {
        single ? tile<R, BITS, true>(w, block, part, x, choice, row + r, out)
               : tile<R, BITS, false>(w, block, part, x, choice, row + r, out);
      });
    }
    add_rest<BITS>(w, block, part, choice, row, y + part * W);
  }
}

// Multiplies rows `row` .. `row + rows - 1`, at most MAX_ROWS from a multiple of it, by 16 outputs:
// y [rows, 16], with bias.
inline void product(const Weight& w, int64_t column_block, const Activations& x,
                    const Choice& choice, int64_t row, int64_t rows, float* y) {
  const uint8_t* block = w.data + column_block * w.h.stride;
  w.h.bits == 4 ? tiles<4>(w, block, x, choice, row, rows, y)
                : tiles<8>(w, block, x, choice, row, rows, y);
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
  const Choice choice(scratch, x, T, w.base);
  alignas(64) float part[MAX_ROWS * COLUMNS];
  const auto multiply = [&](int64_t block) {
    const int64_t first = block * COLUMNS, n = std::min<int64_t>(COLUMNS, w.h.N - first);
    for (int64_t row = 0; row < T; row += MAX_ROWS) {
      const int64_t rows = std::min<int64_t>(MAX_ROWS, T - row);
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

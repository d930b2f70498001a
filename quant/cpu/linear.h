// Products of packed weights with rows of any type.
//
// Reference: `PackedWeight.dequantize` in quant/packed.py.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "block.h"

namespace {

// Returns x [T, K] @ w.T in fp32 [T, N], plus the bias [N] (fp32) if there is one; or, without a
// bias, the outputs `first` .. `first + n - 1`. `n` is N for tracing, which cannot read the weight.
Tensor linear(const Tensor& x_, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n,
              int64_t first) {
  const Weight all(packed, bias.has_value() ? &*bias : nullptr);
  const bool is_part = n != all.h.N;
  TORCH_CHECK(!is_part || (all.bias == nullptr && n > 0 && n % COLUMNS == 0 && first >= 0 &&
                           first % COLUMNS == 0 && first <= all.h.N - n),
              "n is ", all.h.N, ", or whole blocks of outputs");
  const Weight w = is_part ? outputs(all, first, n) : all;
  const Tensor x = x_.contiguous();
  check_rows(x, w.h.K);
  const int64_t T = x.size(0), K = w.h.K, N = w.h.N;
  Tensor y = at::empty({T, N}, x.options().dtype(at::kFloat));
  thread_local Scratch scratch;
  const int threads = at::get_num_threads();
  const int64_t own_size = (std::max<int64_t>(K, Choice::bytes(T, K) / 4 + 1) + 63) / 64 * 64;
  scratch.reserve(Activations::bytes(T, K) + 4 * size_t(threads) * own_size);
  const Activations a = Activations::at(scratch.take<uint8_t>(Activations::bytes(T, K)), T, K);
  float* rows = scratch.take<float>(threads * own_size);
  in_parallel([&](const Worker& me) {
    float* own = rows + me.id * own_size;
    const auto [begin, end] = me.share(T);
    Activations mine = a;
    for (int64_t t = begin; t < end; t++) {
      row_in_fp32(x, t, K, own);
      mine.quantize_row(t, own, K);
    }
    me.team.barrier();
    products(me, w, a, (uint8_t*)own, T, y.mutable_data_ptr<float>(), N, false);
  });
  return y;
}

}  // namespace

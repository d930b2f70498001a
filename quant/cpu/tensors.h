// Structs of tensors with names, filled in order from the lists that operators take.
//
// Python makes the lists as NamedTuples with the same fields: quant/cpu_tensors.py. A test compares
// their order with `FIELDS`. A tensor that is None there is undefined here.

#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "vec.h"

namespace {

using at::Tensor;
using OptionalTensors = c10::List<std::optional<Tensor>>;

// Weights of one block; what it does not have is empty. With a router, `gate_up` and `down` hold
// all experts; `routing` is how many a row takes, whether their weights are renormalized, and a
// factor; `choice_bias` decides with the router's probabilities which experts a row takes.
struct BlockTensors {
  static constexpr std::string_view FIELDS =
      "attention_norm qkv qkv_bias q_norm k_norm out mlp_norm gate_up down "
      "router choice_bias routing shared_gate_up shared_down shared_gate";
  Tensor attention_norm, qkv, qkv_bias, q_norm, k_norm, out, mlp_norm, gate_up, down;
  Tensor router, choice_bias, routing, shared_gate_up, shared_down, shared_gate;
};

// Weights and tables of a target around its blocks.
struct TargetTensors {
  static constexpr std::string_view FIELDS = "embedding cos sin norm lm_head";
  Tensor embedding, cos, sin, norm, lm_head;
};

// Weights and tables of a draft head around its block. EAGLE-1 has `fc`, EAGLE-3 the three norms, a
// layer for multi-token prediction both. `reader` makes EAGLE-3's features of the target's states.
struct HeadTensors {
  static constexpr std::string_view FIELDS =
      "embedding cos sin lm_head fc fc_bias embedding_norm feature_norm norm reader reader_bias";
  Tensor embedding, cos, sin, lm_head, fc, fc_bias, embedding_norm, feature_norm, norm;
  Tensor reader, reader_bias;
};

// State that one cycle leaves for the next: `DecodeState` in state.py.
struct State {
  static constexpr std::string_view FIELDS = "seq_len root count tokens features text result rows";
  Tensor seq_len, root, count, tokens, features, text, result, rows;
};

// Rows of one verify pass: `DraftTree` in tree.py.
struct Tree {
  static constexpr std::string_view FIELDS = "tokens parents valid sources";
  Tensor tokens, parents, valid, sources;
};

// Parameters of the sampling steps that are on: process_logits and gumbel_noise in sampling.py.
struct Sampling {
  static constexpr std::string_view FIELDS = "temperature seed top_k top_p min_p penalty seen";
  Tensor temperature, seed, top_k, top_p, min_p, penalty, seen;
};

// Tensors that draft the chains of some cycles of a text: see `cycles` in ops.cpp.
struct DraftTensors {
  static constexpr std::string_view FIELDS = "table recent keys values temperature seed";
  Tensor table, recent, keys, values, temperature, seed;
};

// Documents for lookup, with their index: `Corpus` in drafting/lookup.py.
struct CorpusIndex {
  static constexpr std::string_view FIELDS = "tokens keys order";
  Tensor tokens, keys, order;
};

template <class Named>
constexpr size_t n_fields = 1 + std::count(Named::FIELDS.begin(), Named::FIELDS.end(), ' ');

inline const Tensor& tensor_at(at::TensorList list, size_t i) { return list[i]; }
inline Tensor tensor_at(const OptionalTensors& list, size_t i) {
  return list.get(i).value_or(Tensor());
}

template <class Named, class List, size_t... i>
Named named(const List& list, size_t first, std::index_sequence<i...>) {
  return {tensor_at(list, first + i)...};
}

// Returns the tensors of `list` under their names; raises unless there is one for each.
template <class Named, class List>
Named named(const List& list) {
  constexpr size_t n = n_fields<Named>;
  static_assert(sizeof(Named) == n * sizeof(Tensor), "a name for each member");
  TORCH_CHECK(list.size() == n, n, " tensors: ", Named::FIELDS);
  return named<Named>(list, 0, std::make_index_sequence<n>());
}

// Returns one struct for each part of a list that holds several, one after the other.
template <class Named, class List>
std::vector<Named> each_named(const List& list) {
  constexpr size_t n = n_fields<Named>;
  TORCH_CHECK(!list.empty() && list.size() % n == 0, n, " tensors of each: ", Named::FIELDS);
  std::vector<Named> all;
  for (size_t i = 0; i < list.size(); i += n)
    all.push_back(named<Named>(list, i, std::make_index_sequence<n>()));
  return all;
}

const float* floats(const Tensor& t) { return t.numel() ? t.const_data_ptr<float>() : nullptr; }

inline void row_in_fp32(const Tensor& x, int64_t row, int64_t n, float* out) {
  if (x.scalar_type() == at::kFloat) {
    std::memcpy(out, x.const_data_ptr<float>() + row * n, n * sizeof(float));
  } else {
    const Bf16* in = (const Bf16*)x.const_data_ptr() + row * n;
    for (int64_t i = 0; i < n; i++) out[i] = to_scalar(in[i]);
  }
}

// Raises unless `x` is [T, K] of a type that `row_in_fp32` reads and `put_row` writes.
void check_rows(const Tensor& x, int64_t K) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) == K && x.is_contiguous(), "x is [T, ", K, "]");
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
              "x in fp32 or bf16");
}

// Returns whether a cache has rows in 8 bits.
inline bool is_packed(const Tensor& cache) { return cache.scalar_type() == at::kChar; }

// Calls `f` with an element of the type in which attention over a cache is computed.
template <class F>
void with_element_of(const Tensor& cache, F f) {
  TORCH_CHECK(
      cache.scalar_type() == at::kFloat || cache.scalar_type() == at::kBFloat16 || is_packed(cache),
      "caches in fp32, bf16 or 8 bits");
  cache.scalar_type() == at::kFloat ? f(0.0f) : f(Bf16{});
}

// Raises unless all caches are like the first one, [G, S, E].
void check_caches(at::TensorList caches) {
  for (const Tensor& cache : caches)
    TORCH_CHECK(cache.dim() == 3 && cache.is_contiguous() && cache.sizes() == caches[0].sizes() &&
                    cache.scalar_type() == caches[0].scalar_type(),
                "contiguous caches of one shape and type");
}

inline void put_row(Tensor& out, int64_t row, const float* x, int64_t n) {
  if (out.scalar_type() == at::kFloat) {
    std::copy(x, x + n, out.mutable_data_ptr<float>() + row * n);
  } else {
    Bf16* to = (Bf16*)out.mutable_data_ptr() + row * n;
    for (int64_t i = 0; i < n; i++) put(to + i, x[i]);
  }
}

}  // namespace

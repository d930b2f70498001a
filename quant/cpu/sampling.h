// Sampling of one token from a row of logits, with hashed Gumbel noise and filters.
//
// Reference: `draw`, `gumbel_noise` and `process_logits` in sampling.py.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "dot.h"
#include "threads.h"
#include "vec.h"

namespace {

using at::Tensor;

// Gumbel noise of `sampling.gumbel_noise`, except for rounding.
struct Noise {
  float temperature = 0.0f;  // 0: none
  uint64_t seed = 0;
  uint32_t first = 0, second = 0;  // of one position

  template <class U>
  static U mix(U x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
  }

  void at(int64_t position) {
    const uint32_t place = uint32_t(position);
    first = mix(place ^ uint32_t(seed));
    second = mix(first ^ mix(place + uint32_t((seed >> 32) + 0x9E3779B9u)));
  }

  // Divides logits `begin` .. `end - 1` of tokens `ids` by the temperature, and adds noise.
  void add(float* x, const int64_t* ids, int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; i += W) {
      const int n = std::min<int64_t>(W, end - i);
      VU tokens = {};
      VF value = {};
      for (int j = 0; j < n; j++) {
        tokens[j] = uint32_t(ids[i + j]);
        value[j] = x[i + j];
      }
      value = noisy(value, tokens);
      for (int j = 0; j < n; j++) x[i + j] = value[j];
    }
  }

  // Writes logits x [n] of tokens from `token` on to `out`, over the temperature, plus noise.
  void add_to(const float* x, int64_t token, int64_t n, float* out) const {
    VU tokens;
    for (int j = 0; j < W; j++) tokens[j] = uint32_t(token + j);
    int64_t i = 0;
    for (; i + W <= n; i += W, tokens += uint32_t(W)) store(out + i, noisy(load(x + i), tokens));
    VF rest = {};
    for (int64_t j = i; j < n; j++) rest[j - i] = x[j];
    rest = noisy(rest, tokens);
    for (int64_t j = i; j < n; j++) out[j] = rest[j - i];
  }

  // Returns the values v in (0, 1) of tokens, whose noise is -log(-log(1 - v)): at most -log(v).
  VF uniform(VU tokens) const {
    const VU hashed = mix(mix(tokens + first) ^ second);
    const VF v = (__builtin_convertvector(hashed, VF) + 0.5f) * 2.3283064e-10f;
    return v > 0.99999994f ? splat(0.99999994f) : v;
  }

  VF noisy(VF value, VU tokens) const {
    const VF v = uniform(tokens);
    VF near = fma(v, splat(0.25f), splat(1.0f / 3.0f));
    near = v * fma(fma(near, v, splat(0.5f)), v, splat(1.0f));
    const VF gap = v < 0.015625f ? near : -log_of(1.0f - v);
    return value / temperature - log_of(gap);
  }
};

// Returns the largest of columns `begin` .. `end - 1` and its first index; NaN if there is one.
inline std::pair<float, int64_t> largest_of(const float* x, int64_t begin, int64_t end) {
  constexpr int64_t STEP = 4 * W;
  VF best[4], bad[4] = {};
  for (VF& b : best) b = splat(-std::numeric_limits<float>::infinity());
  int64_t i = begin;
  for (; i + STEP <= end; i += STEP) {
    for (int j = 0; j < 4; j++) {
      const VF v = load(x + i + j * W);
      best[j] = larger(v, best[j]);
      bad[j] += v * 0.0f;
    }
  }
  float most = largest(larger(larger(best[0], best[1]), larger(best[2], best[3])));
  float wrong = sum(bad[0] + bad[1] + bad[2] + bad[3]);
  for (; i < end; i++) {
    most = x[i] > most ? x[i] : most;
    wrong += x[i] * 0.0f;
  }
  if (wrong != wrong) {  // NaN or infinity: return the result of torch.max
    for (i = begin; i < end; i++)
      if (x[i] != x[i]) return {x[i], i};
  }
  for (i = begin; i + STEP <= end; i += STEP) {
    VI is_most = {};
    for (int j = 0; j < 4; j++) is_most |= load(x + i + j * W) == most;
    if (sum(is_most)) break;  // it is one of these
  }
  for (; i < end; i++)
    if (x[i] == most) return {most, i};
  return {most, begin};
}

// Returns whether a later value replaces the largest so far: NaN does, and stays.
inline bool replaces(float value, float largest) {
  return largest == largest && !(value <= largest);
}

// Returns the largest of each row of fp32 logits [T, V] and its first index, as torch.max(dim=-1).
std::tuple<Tensor, Tensor> maximum(const Tensor& x_) {
  const Tensor x = x_.contiguous();
  TORCH_CHECK(x.dim() == 2 && x.scalar_type() == at::kFloat && x.size(1) > 0, "fp32 [T, V]");
  const int64_t T = x.size(0), V = x.size(1);
  Tensor values = at::empty({T}, x.options());
  Tensor places = at::empty({T}, x.options().dtype(at::kLong));
  const float* rows = x.const_data_ptr<float>();
  const int threads = at::get_num_threads();
  std::vector<std::pair<float, int64_t>> candidates(T * threads);
  int used = 1;
  in_parallel([&](const Worker& me) {
    if (me.id == 0) used = me.size;
    // The columns that this worker has computed, if our LM head was used.
    const auto share = me.share((V + COLUMNS - 1) / COLUMNS);
    const int64_t begin = share.begin * COLUMNS, end = std::min(share.end * COLUMNS, V);
    for (int64_t t = 0; t < T; t++)
      candidates[t * threads + me.id] = largest_of(rows + t * V, begin, end);
  });
  for (int64_t t = 0; t < T; t++) {
    auto best = candidates[t * threads];
    for (int i = 1; i < used; i++) {
      const auto& next = candidates[t * threads + i];
      if (replaces(next.first, best.first)) best = next;
    }
    values.mutable_data_ptr<float>()[t] = best.first;
    places.mutable_data_ptr<int64_t>()[t] = best.second;
  }
  return {values, places};
}

// Sets fp32 logits [T, V] of tokens whose bit in `words` [T, N] is 0 to minus infinity.
void forbid(const Tensor& logits, const Tensor& words_) {
  constexpr int64_t BITS = 32;
  constexpr float NEVER = -std::numeric_limits<float>::infinity();
  const Tensor words = words_.contiguous();
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.is_contiguous(),
              "fp32 logits [T, V]");
  const int64_t T = logits.size(0), V = logits.size(1), N = (V + BITS - 1) / BITS;
  TORCH_CHECK(words.dim() == 2 && words.size(0) == T && words.size(1) == N &&
                  words.scalar_type() == at::kInt,
              "a bit for each logit");
  for (int64_t t = 0; t < T; t++) {
    float* row = logits.mutable_data_ptr<float>() + t * V;
    for (int64_t n = 0; n < N; n++) {
      const uint32_t word = words.const_data_ptr<int32_t>()[t * N + n];
      const int64_t begin = n * BITS, end = std::min(begin + BITS, V);
      if (word == 0) {
        std::fill(row + begin, row + end, NEVER);
      } else if (word != ~0u) {
        for (int64_t i = begin; i < end; i++)
          if (!(word >> (i - begin) & 1)) row[i] = NEVER;
      }
    }
  }
}

// Returns the log-probability of a token by fp32 logits [V], and the `n` likeliest tokens, best
// first, with theirs.
std::tuple<double, Tensor, Tensor> likeliest(const Tensor& row, int64_t token, int64_t n) {
  TORCH_CHECK(row.dim() == 1 && row.scalar_type() == at::kFloat && row.is_contiguous(),
              "fp32 logits [V]");
  const int64_t V = row.numel();
  TORCH_CHECK(token >= 0 && token < V && n >= 0 && n <= V, "a token, and as many as there are");
  const float *x = row.const_data_ptr<float>(), most = largest_of(x, 0, V).first;
  TORCH_CHECK(std::isfinite(most), "finite logits");
  VF total = {}, rest = splat(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + W <= V; i += W) total += exp_of(load(x + i) - most);
  for (int64_t j = i; j < V; j++) rest[j - i] = x[j] - most;
  const double log_sum = most + std::log(double(sum(total + exp_of(rest))));

  std::vector<int64_t> order(V);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + n, order.end(),
                    [&](int64_t a, int64_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); });
  Tensor ids = at::empty({n}, at::dtype(at::kLong));
  Tensor values = at::empty({n}, at::dtype(at::kDouble));
  for (int64_t k = 0; k < n; k++) {
    ids.mutable_data_ptr<int64_t>()[k] = order[k];
    values.mutable_data_ptr<double>()[k] = x[order[k]] - log_sum;
  }
  return {x[token] - log_sum, ids, values};
}

constexpr int64_t PART = 512;  // columns of a row at a time

// Returns the largest of logits x [n], n <= PART, of tokens from `token` on, over the temperature,
// with noise, and its index. Where none exceeds `least`, the result may be any that does not. Most
// tokens have too little noise for it, which is seen before the noise itself is computed.
std::pair<float, int64_t> drawn_of_part(const float* x, int64_t token, int64_t n,
                                        const Noise& noise, float least) {
  constexpr int64_t STEP = 4 * W;
  alignas(64) float scores[PART];
  const float top = largest_of(x, 0, n).first / noise.temperature;
  const float bound = std::exp(top - least) * 1.01f;  // a greater v cannot exceed `least`
  if (n % STEP || !(bound < 0.1f)) {                  // or is not finite
    noise.add_to(x, token, n, scores);
    return largest_of(scores, 0, n);
  }
  std::pair<float, int64_t> best{-std::numeric_limits<float>::infinity(), 0};
  VU tokens;
  for (int j = 0; j < W; j++) tokens[j] = uint32_t(token + j);
  for (int64_t i = 0; i < n; i += STEP) {
    VI may_win = {};
    for (int j = 0; j < 4; j++, tokens += uint32_t(W)) may_win |= noise.uniform(tokens) <= bound;
    if (!sum(may_win)) continue;
    noise.add_to(x + i, token + i, STEP, scores);
    const auto [value, place] = largest_of(scores, 0, STEP);
    if (replaces(value, best.first)) best = {value, i + place};
  }
  return best;
}

// Returns the largest of one row of logits [V] over the temperature, with noise, and its index.
std::pair<float, int64_t> drawn_of(const float* x, int64_t V, const Noise& noise) {
  std::vector<std::pair<float, int64_t>> candidates(at::get_num_threads());
  int used = 1;
  in_parallel([&](const Worker& me) {
    if (me.id == 0) used = me.size;
    const auto [begin, end] = me.share(V);
    auto& best = candidates[me.id] = {-std::numeric_limits<float>::infinity(), begin};
    for (int64_t i = begin; i < end; i += PART) {
      const int64_t n = std::min(PART, end - i);
      const auto [value, place] = drawn_of_part(x + i, i, n, noise, best.first);
      if (replaces(value, best.first)) best = {value, i + place};
    }
  });
  auto best = candidates[0];
  for (int i = 1; i < used; i++)
    if (replaces(candidates[i].first, best.first)) best = candidates[i];
  return best;
}

// Filters of the tokens that may be sampled: `sampling.process_logits`.
struct Filters {
  int64_t top_k = 0;                 // 0: all
  float top_p = 1.0f, min_p = 0.0f;  // 1, 0: all

  bool any() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
};

struct Likely {
  float score, weight;  // the logit over the temperature, and exp(score - best score)
  int64_t token;
};

// Collects the tokens that the filters leave, in any order, of `weights` [V] that add up to
// `total`. Tokens above some weight nearly always decide, and only these are compared.
void keep_likely(const float* x, const float* weights, int64_t V, float temperature, double total,
                 const Filters& filters, std::vector<Likely>& likely) {
  const bool ranked = filters.top_k > 0 || filters.top_p < 1.0f;
  for (const float least : {1e-4f, 1e-7f, std::numeric_limits<float>::min()}) {
    const float cut = ranked ? least : std::max(filters.min_p, std::numeric_limits<float>::min());
    double mass = 0.0;
    likely.clear();
    for (int64_t i = 0; i < V; i += W) {
      if (i + W <= V && !(largest(load(weights + i)) >= cut)) continue;
      for (int64_t j = i; j < std::min(i + W, V); j++)
        if (weights[j] >= cut) {
          likely.push_back({x[j] / temperature, weights[j], j});
          mass += weights[j];
        }
    }
    if (!ranked) return;
    if (filters.top_k > 0 ? (int64_t)likely.size() >= filters.top_k
                          : mass >= double(filters.top_p) * total)
      break;
  }
  const auto drop = [&](auto less_likely) {  // equal ones stay together
    likely.erase(std::remove_if(likely.begin(), likely.end(), less_likely), likely.end());
  };
  const auto likelier = [](const Likely& a, const Likely& b) { return a.score > b.score; };
  if (filters.top_k > 0 && filters.top_k < (int64_t)likely.size()) {
    std::nth_element(likely.begin(), likely.begin() + filters.top_k - 1, likely.end(), likelier);
    const float kth = likely[filters.top_k - 1].score;
    drop([&](const Likely& one) { return one.score < kth; });
  }
  if (filters.top_p < 1.0f && !likely.empty()) {
    std::sort(likely.begin(), likely.end(), likelier);
    if (filters.top_k > 0) {
      total = 0.0;
      for (const Likely& one : likely) total += one.weight;
    }
    double mass = 0.0;
    size_t last = 0;
    while ((mass += likely[last].weight) < double(filters.top_p) * total &&
           last + 1 < likely.size())
      last++;
    const float least = likely[last].weight;
    drop([&](const Likely& one) { return one.weight < least; });
  }
  if (filters.min_p > 0.0f) drop([&](const Likely& one) { return one.weight < filters.min_p; });
}

// Samples like `drawn_of` from the tokens that the filters leave, equally for any thread count.
std::pair<float, int64_t> drawn_among(const float* x, int64_t V, const Noise& noise,
                                      const Filters& filters) {
  const int64_t parts = (V + PART - 1) / PART;
  thread_local std::vector<float> weights_of_row;
  thread_local std::vector<Likely> likely;
  weights_of_row.resize(V);
  float* weights = weights_of_row.data();
  std::vector<double> sums(parts);
  std::vector<float> best(at::get_num_threads());
  float most = 0.0f;
  in_parallel([&](const Worker& me) {
    const auto [begin, end] = me.share(parts);
    best[me.id] = largest_of(x, begin * PART, std::min(end * PART, V)).first;
    me.team.barrier();
    float largest = best[0];
    for (int i = 1; i < me.size; i++)
      if (replaces(best[i], largest)) largest = best[i];
    if (me.id == 0) most = largest;
    const float top = largest / noise.temperature;
    if (!std::isfinite(top)) return;
    for (int64_t part = begin; part < end; part++) {
      const int64_t to = std::min((part + 1) * PART, V);
      VF total = {};
      int64_t i = part * PART;
      for (; i + W <= to; i += W) {
        const VF weight = exp_of(load(x + i) / noise.temperature - top);
        store(weights + i, weight);
        total += weight;
      }
      VF rest = splat(-std::numeric_limits<float>::infinity());
      for (int64_t j = i; j < to; j++) rest[j - i] = x[j];
      rest = exp_of(rest / noise.temperature - top);
      for (int64_t j = i; j < to; j++) weights[j] = rest[j - i];
      sums[part] = sum(total + rest);
    }
  });
  if (!std::isfinite(most / noise.temperature)) return {NAN, 0};
  double total = 0.0;
  for (const double part : sums) total += part;
  keep_likely(x, weights, V, noise.temperature, total, filters, likely);
  if (likely.empty()) return {NAN, 0};
  std::vector<float> scores;
  std::vector<int64_t> tokens;
  for (const Likely& one : likely) {
    scores.push_back(x[one.token]);
    tokens.push_back(one.token);
  }
  noise.add(scores.data(), tokens.data(), 0, tokens.size());
  size_t drawn = 0;
  for (size_t i = 1; i < tokens.size(); i++)
    if (scores[i] > scores[drawn] || (scores[i] == scores[drawn] && tokens[i] < tokens[drawn]))
      drawn = i;
  return {scores[drawn], tokens[drawn]};
}

}  // namespace

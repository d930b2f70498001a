// Mixture of experts: a router chooses experts for each row, and every expert's weights are read
// once for all of its rows.
//
// A row adds up its experts in the order of their ids, then the shared expert: its bits depend
// neither on the other rows nor on the number of threads.
//
// Reference: `MoE` in model.py, except for activations in 8 bits.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "gemm.h"
#include "quantize.h"
#include "tensors.h"
#include "threads.h"
#include "vec.h"

namespace {

// Computes columns `32 * block` .. of silu(gate) * up for `T` rows, at most MAX_ROWS, rounded to the
// next product's input format. The outputs of `w` are those of gate, then those of up.
inline void gated(const Weight& w, int64_t block, const Activations& x, const Choice& choice,
                  int64_t T, Activations hidden) {
  alignas(64) float gate[2][MAX_ROWS * COLUMNS], up[2][MAX_ROWS * COLUMNS], result[BLOCK];
  for (int i = 0; i < 2; i++) {
    product(w, 2 * block + i, x, choice, 0, T, gate[i]);
    product(w, w.column_blocks / 2 + 2 * block + i, x, choice, 0, T, up[i]);
  }
  for (int64_t r = 0; r < T; r++) {
    for (int i = 0; i < BLOCK; i += W) {
      const int at = r * COLUMNS + i % COLUMNS;
      const VF a = load(gate[i / COLUMNS] + at);
      store(result + i, a / (exp_of(-a) + 1.0f) * load(up[i / COLUMNS] + at));
    }
    hidden.quantize(r, block, result);
  }
}

// Router and shared expert of one block, whose `gate_up` and `down` have the outputs of all experts
// one below the other.
struct Experts {
  int64_t n = 0, top_k = 0;            // no experts: a dense block
  bool renormalize = false;            // the weights of a row's experts sum to `scale`
  float scale = 1;                     // factor of the weights
  const float* router = nullptr;       // [n, D]
  const float* choice_bias = nullptr;  // [n], or null: the router alone chooses
  Weight shared_gate_up, shared_down;
  const float* shared_gate = nullptr;  // [D], or null: the shared expert has weight 1

  bool shared() const { return shared_down.data != nullptr; }
};

Experts experts_of(const BlockTensors& t) {
  TORCH_CHECK(t.router.dim() == 2 && t.router.is_contiguous() && t.routing.numel() == 3,
              "a router, and how it weights experts");
  const double* routing = t.routing.const_data_ptr<double>();
  Experts e;
  e.n = t.router.size(0);
  e.router = floats(t.router);
  e.choice_bias = floats(t.choice_bias);
  e.top_k = int64_t(routing[0]);
  e.renormalize = routing[1] != 0;
  e.scale = float(routing[2]);
  if (t.shared_down.numel()) {
    e.shared_gate_up = Weight(t.shared_gate_up);
    e.shared_down = Weight(t.shared_down);
    e.shared_gate = floats(t.shared_gate);
  }
  return e;
}

// Raises unless the router and the shared expert of a block fit its width.
void check_experts(const BlockTensors& t, const Experts& e, int64_t D) {
  TORCH_CHECK(t.router.size(1) == D && e.top_k >= 1 && e.top_k <= e.n, e.top_k, " of ", e.n,
              " experts, router [", e.n, ", ", D, "]");
  TORCH_CHECK(t.choice_bias.is_contiguous() &&
                  (t.choice_bias.numel() == 0 || t.choice_bias.numel() == e.n),
              "bias of ", e.n, " experts");
  if (!e.shared()) return;
  const int64_t F = e.shared_down.h.K;
  TORCH_CHECK(F % BLOCK == 0 && e.shared_down.h.N == D && e.shared_gate_up.h.N == 2 * F &&
                  e.shared_gate_up.h.K == D && t.shared_gate.is_contiguous() &&
                  (t.shared_gate.numel() == 0 || t.shared_gate.numel() == D),
              "shared expert of width ", F);
}

// Returns n outputs of a weight without bias; `first` and n are whole blocks of outputs.
inline Weight outputs(Weight w, int64_t first, int64_t n) {
  w.data += first / COLUMNS * w.h.stride;
  w.h.N = n;
  w.column_blocks = n / COLUMNS;
  return w;
}

inline float dot(const float* a, const float* b, int64_t n) {
  VF total[2] = {};
  for (int64_t i = 0; i < n; i += 2 * W)
    for (int j = 0; j < 2; j++)
      total[j] = fma(load(a + i + j * W), load(b + i + j * W), total[j]);
  return sum(total[0] + total[1]);
}

// One worker's view of a block's experts and of T rows that go through them.
class Mixture {
 public:
  float* const rows;  // [T, D]: input of the router; shared, as `normed` is, its rounded form

  // `memory` of `bytes` is shared by the workers; `own` has `own_bytes`.
  Mixture(const Experts& experts, const Weight& gate_up, const Weight& down, Activations normed,
          int64_t T, uint8_t* memory, uint8_t* own)
      : rows((float*)memory),
        experts_(experts),
        gate_up_(gate_up),
        down_(down),
        normed_(normed),
        T_(T),
        D_(gate_up.h.K),
        F_(down.h.K) {
    taken_ = memory + size<float>(T * D_);
    logits_ = take<float>(T * (experts.n + 1));
    hidden_ = taken_;
    taken_ = own;
    const int64_t chosen = T * experts.top_k;
    best_ = take<int32_t>(chosen);
    next_ = take<int32_t>(experts.n);
    ranks_ = take<float>(experts.n);
    parts_ = take<Part>(experts.n + 1);
    row_ = take<int32_t>(chosen + T);
    weight_ = take<float>(chosen + T);
    gathered_ = take<uint8_t>(Activations::bytes(T, D_));
    choice_ = taken_;
  }

  static size_t bytes(const Experts& experts, const Weight& down, int64_t T, int64_t D) {
    return size<float>(T * D) + size<float>(T * (experts.n + 1)) +
           T * (experts.top_k + 1) * hidden_size(experts, down);
  }
  static size_t own_bytes(const Experts& experts, const Weight& down, int64_t T, int64_t D) {
    const int64_t chosen = T * experts.top_k;
    const int64_t widest = std::max({D, int64_t(down.h.K), shared_dim(experts)});
    return size<int32_t>(chosen) + size<int32_t>(experts.n) + size<float>(experts.n) +
           size<Part>(experts.n + 1) + 2 * size<float>(chosen + T) +
           size<uint8_t>(Activations::bytes(T, D)) + Choice::bytes(T, widest);
  }

  // Computes this worker's share of the router's logits [T, n] and of the shared expert's gate.
  void score(const Worker& me) const {
    const int64_t n = experts_.n;
    const auto [begin, end] = me.share(n + (experts_.shared_gate != nullptr));
    for (int64_t e = begin; e < end; e++) {
      const float* weights = e < n ? experts_.router + e * D_ : experts_.shared_gate;
      for (int64_t t = 0; t < T_; t++) logits_[t * (n + 1) + e] = dot(weights, rows + t * D_, D_);
    }
  }

  // Groups the rows by the experts that they choose. Each worker does all of it, which takes less
  // time than to wait for another.
  void route() {
    const int64_t n = experts_.n, k = experts_.top_k;
    std::fill_n(next_, n, 0);
    for (int64_t t = 0; t < T_; t++) {
      choose(ranks(logits_ + t * (n + 1)), best_ + t * k);
      for (int64_t i = 0; i < k; i++) next_[best_[t * k + i]]++;
    }
    int32_t slot = 0;
    n_parts_ = 0;
    for (int32_t e = 0; e < n; e++) {
      const int32_t count = next_[e];
      next_[e] = slot;
      if (count) parts_[n_parts_++] = {e, slot, count};
      slot += count;
    }
    for (int64_t t = 0; t < T_; t++) {
      const float* logits = logits_ + t * (n + 1);
      float most = logits[best_[t * k]], total = 0;
      if (experts_.renormalize) {
        for (int64_t i = 1; i < k; i++) most = std::max(most, logits[best_[t * k + i]]);
        for (int64_t i = 0; i < k; i++) total += std::exp(logits[best_[t * k + i]] - most);
      } else {
        most = *std::max_element(logits, logits + n);
        for (int64_t e = 0; e < n; e++) total += std::exp(logits[e] - most);
      }
      for (int64_t i = 0; i < k; i++) {
        const int32_t e = best_[t * k + i], at = next_[e]++;
        row_[at] = int32_t(t);
        weight_[at] = std::exp(logits[e] - most) / total * experts_.scale;
      }
      if (!experts_.shared()) continue;
      row_[slot + t] = int32_t(t);
      weight_[slot + t] =
          experts_.shared_gate == nullptr ? 1.0f : 1.0f / (1.0f + std::exp(-logits[n]));
    }
    if (experts_.shared()) parts_[n_parts_++] = {int32_t(n), slot, int32_t(T_)};
  }

  // Computes this worker's share of the hidden columns of all experts.
  void gate(const Worker& me) const {
    int64_t whole = 0, at = 0;
    for (const Part* part = parts_; part < parts_ + n_parts_; part++)
      whole += units(*part) * part->time();
    const auto [begin, end] = me.share(whole);
    for (const Part* part = parts_; part < parts_ + n_parts_; part++) {
      const int64_t each = part->time(), n = units(*part);
      const auto first_from = [&](int64_t time) {
        return std::clamp<int64_t>((time - at + each - 1) / each, 0, n);
      };
      const int64_t from = first_from(begin), to = first_from(end);
      at += n * each;
      if (from == to) continue;
      const Weight w = gate_up(*part);
      const Activations x = gathered(*part), hidden = hidden_of(*part);
      const Choice choice(choice_, x, part->n, w.base);
      for (int64_t block = from; block < to; block++) gated(w, block, x, choice, part->n, hidden);
    }
  }

  // Adds this worker's columns of the experts' results to x [T, D].
  void add(const Worker& me, float* x) const {
    alignas(64) float result[MAX_ROWS * COLUMNS];
    const auto [begin, end] = me.share(D_ / COLUMNS);
    for (const Part* part = parts_; part < parts_ + n_parts_; part++) {
      const Weight w = down(*part);
      const Activations hidden = hidden_of(*part);
      const Choice choice(choice_, hidden, part->n, w.base);
      for (int64_t block = begin; block < end; block++) {
        product(w, block, hidden, choice, 0, part->n, result);
        for (int64_t r = 0; r < part->n; r++) {
          const int64_t slot = part->first + r;
          float* out = x + row_[slot] * D_ + block * COLUMNS;
          for (int i = 0; i < COLUMNS; i++) out[i] += weight_[slot] * result[r * COLUMNS + i];
        }
      }
    }
  }

 private:
  // Rows `row_[first]` .. `row_[first + n - 1]`, which take one expert; the last id is the shared
  // one's.
  struct Part {
    int32_t expert, first, n;

    // Time of a product, relative: reading the weights takes as long as computing four rows.
    int64_t time() const { return std::max(n, 4); }
  };

  const Experts& experts_;
  const Weight &gate_up_, &down_;
  const Activations normed_;
  const int64_t T_, D_, F_;
  float* logits_;  // [T, n + 1], the last of the shared expert's gate
  uint8_t *taken_, *hidden_, *gathered_, *choice_;
  int32_t *best_, *next_, *row_;  // [T, top_k] experts, best first; [n]; [slots]
  float *ranks_, *weight_;        // [n], [slots]
  Part* parts_;
  int64_t n_parts_ = 0;

  template <class E>
  static size_t size(int64_t n) {
    return (n * sizeof(E) + 63) / 64 * 64;
  }
  template <class E>
  E* take(int64_t n) {
    E* p = (E*)taken_;
    taken_ += size<E>(n);
    return p;
  }

  // Returns what the experts of a row are chosen by: its logits, or probabilities plus the bias.
  const float* ranks(const float* logits) const {
    if (experts_.choice_bias == nullptr) return logits;
    const int64_t n = experts_.n;
    const float most = *std::max_element(logits, logits + n);
    float total = 0;
    for (int64_t e = 0; e < n; e++) total += ranks_[e] = std::exp(logits[e] - most);
    for (int64_t e = 0; e < n; e++) ranks_[e] = ranks_[e] / total + experts_.choice_bias[e];
    return ranks_;
  }

  // Writes the `top_k` experts of the highest ranks, the best first, the lower id of equal ones.
  void choose(const float* ranks, int32_t* best) const {
    int64_t n = 0;
    for (int32_t e = 0; e < experts_.n; e++) {
      if (n == experts_.top_k && !(ranks[e] > ranks[best[n - 1]])) continue;
      int64_t at = n < experts_.top_k ? n++ : n - 1;
      for (; at > 0 && ranks[e] > ranks[best[at - 1]]; at--) best[at] = best[at - 1];
      best[at] = e;
    }
  }

  bool is_shared(const Part& part) const { return part.expert == experts_.n; }
  int64_t units(const Part& part) const {
    return (is_shared(part) ? shared_dim(experts_) : F_) / BLOCK;
  }
  Weight gate_up(const Part& part) const {
    if (is_shared(part)) return experts_.shared_gate_up;
    return outputs(gate_up_, part.expert * 2 * F_, 2 * F_);
  }
  Weight down(const Part& part) const {
    if (is_shared(part)) return experts_.shared_down;
    return outputs(down_, part.expert * D_, D_);
  }

  static int64_t shared_dim(const Experts& experts) {
    return experts.shared() ? experts.shared_down.h.K : 0;
  }
  static size_t hidden_size(const Experts& experts, const Weight& down) {
    const int64_t widest = std::max<int64_t>(down.h.K, shared_dim(experts));
    return size<uint8_t>(Activations::bytes(1, widest));
  }
  Activations hidden_of(const Part& part) const {
    uint8_t* memory = hidden_ + part.first * hidden_size(experts_, down_);
    return Activations::at(memory, part.n, units(part) * BLOCK);
  }

  // Returns the rounded rows of one expert, adjacent.
  Activations gathered(const Part& part) const {
    if (part.n == T_) return normed_;
    Activations x = Activations::at(gathered_, part.n, D_);
    for (int64_t b = 0; b < x.blocks; b++)
      for (int64_t i = 0; i < part.n; i++) {
        const int64_t from = b * normed_.rows + row_[part.first + i], to = b * part.n + i;
        std::memcpy(x.q + to * BLOCK, normed_.q + from * BLOCK, BLOCK);
        std::memcpy(x.rest + to * BLOCK, normed_.rest + from * BLOCK, BLOCK);
      }
    for (int64_t i = 0; i < part.n; i++) {
      const int64_t from = row_[part.first + i] * x.blocks, to = i * x.blocks;
      std::copy_n(normed_.scales + from, x.blocks, x.scales + to);
      std::copy_n(normed_.sums + from, x.blocks, x.sums + to);
      std::copy_n(normed_.rest_sums + from, x.blocks, x.rest_sums + to);
    }
    return x;
  }
};

}  // namespace

// Confidence-gated chains of tokens drafted by an EAGLE head, after several texts in one call.
//
// Reference: `EagleDrafter.propose` in drafting/eagle.py, on a chain that `gated_chain` ends.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "block.h"
#include "sampling.h"

namespace {

// Best of some logits, and the sum of exp(logit - best) over them.
struct Best {
  float value = -std::numeric_limits<float>::infinity(), total = 0.0f;
  int64_t index = 0;

  static Best of(const float* x, int64_t begin, int64_t end) {
    Best b;
    b.index = begin;
    for (int64_t i = begin; i < end; i++)
      if (x[i] > b.value) {
        b.value = x[i];
        b.index = i;
      }
    VF sums = {};
    int64_t i = begin;
    for (; i + W <= end; i += W) sums += exp_of(load(x + i) - b.value);
    b.total = sum(sums);
    for (; i < end; i++) b.total += std::exp(x[i] - b.value);
    return b;
  }

  // Returns the best of all parts of some logits.
  static Best of_parts(std::span<const Best> parts) {
    Best b = parts[0];
    for (const Best& part : parts)
      if (part.value > b.value) b = part;
    b.total = 0.0f;
    for (const Best& part : parts) b.total += part.total * std::exp(part.value - b.value);
    return b;
  }
};

// Columns of one sum of a row of logits: fixed, so that the sum does not depend on the number of
// threads.
constexpr int64_t LOGITS_OF_SUM = 512;

inline int64_t sums_of(int64_t columns) { return (columns + LOGITS_OF_SUM - 1) / LOGITS_OF_SUM; }

// Weights of a draft head. EAGLE-1: x = fc(embedding, feature); a layer for multi-token prediction
// norms both. EAGLE-3: x is the feature, and the block's first product reads norm(embedding),
// norm(feature).
struct HeadWeights {
  Tensor embedding;  // [V, D]
  Weight fc;         // not EAGLE-3
  const float *token_norm = nullptr, *feature_norm = nullptr, *last_norm = nullptr;  // not EAGLE-1
  bool eagle3 = false, normed_residual = false, normed_output = false;
  int64_t window = 0;  // 0: none
  Block block;
  Weight lm_head;
};

// Sequence to draft for: its last `n` pairs of token and feature, and what the head drafts after
// them. A slot of its cache equals its RoPE position.
template <class C>
struct Text {
  int64_t n, seq_len, S;
  const int64_t* tokens;  // [n]
  float *features, *last;  // [n, D]; [D]: that of the last row that was run
  C *k, *v;
  Noise noise;
  int64_t* drafted;          // [depth]
  std::vector<float> paths;  // path probabilities
};

// Rows of a step: token, feature and slot of each.
struct Entries {
  int64_t tokens[MAX_ROWS], slots[MAX_ROWS];
  const float* features[MAX_ROWS];

  void set(int64_t row, int64_t token, const float* feature, int64_t slot) {
    tokens[row] = token;
    features[row] = feature;
    slots[row] = slot;
  }
};

// Drafts chains on all threads together; each thread tracks the state by itself.
template <class C>
struct Chains {
  const HeadWeights& head;
  Pass<C> pass;  // of one step
  std::span<Text<C>> texts;
  const float *cos, *sin;  // tables of all positions
  const int64_t* target_ids;
  float *turns, *entry, *logits;  // [2, rows, E], [rows, 2 D], [texts, draft vocabulary]
  Activations joined, said;
  Best* bests;  // [texts, sums]

  float* x(int64_t row) const { return pass.x + row * pass.D; }

  // Writes the rows in the block's input format, and their rotations.
  void enter(const Worker& me, const Entries& rows) {
    const int64_t D = pass.D, E = pass.heads.E;
    float *both = pass.own_scratch(me), *cosines = turns, *sines = turns + MAX_ROWS * E;
    pass.cos = cosines;
    pass.sin = sines;
    pass.slots = rows.slots;
    const auto [begin, end] = me.share(pass.T);
    for (int64_t t = begin; t < end; t++) {
      std::copy_n(cos + rows.slots[t] * E, E, cosines + t * E);
      std::copy_n(sin + rows.slots[t] * E, E, sines + t * E);
      float* out = head.eagle3 ? entry + t * 2 * D : both;
      row_in_fp32(head.embedding, rows.tokens[t], D, out);
      if (head.token_norm != nullptr) rms_norm(out, head.token_norm, D, pass.eps, out);
      rms_norm(rows.features[t], head.feature_norm, D, pass.eps, out + D);  // EAGLE-1 has none
      if (head.eagle3) {
        const float* residual = head.normed_residual ? out + D : rows.features[t];
        std::copy(residual, residual + D, x(t));
      } else {
        joined.quantize_row(t, out, 2 * D);
      }
    }
    me.team.barrier();
    if (head.eagle3) return;
    products(me, head.fc, joined, (uint8_t*)both, pass.T, pass.x, D, false);
    me.team.barrier();
  }

  // Takes row `row` of the pass as the last one of the text in place `place`.
  void take(const Worker& me, int64_t row, int64_t place, float* last) {
    float* own = pass.own_scratch(me);
    rms_norm(x(row), head.last_norm, pass.D, pass.eps, own);  // EAGLE-1 has none
    said.quantize_row(place, own, pass.D);
    std::copy_n(head.normed_output ? own : x(row), pass.D, last);
  }

  // Writes the likeliest token at this level, after the last row of each text that goes on.
  void leave(const Worker& me, const std::vector<int>& going, int64_t level,
             std::vector<Best>& best) {
    const int64_t N = head.lm_head.h.N, n = going.size();
    products(me, head.lm_head, said, (uint8_t*)pass.own_scratch(me), n, logits, N, false);
    me.team.barrier();
    const int64_t sums = sums_of(N);
    const auto [begin, end] = me.share(sums);
    for (int64_t i = 0; i < n; i++) {
      Noise noise = texts[going[i]].noise;
      noise.at(texts[going[i]].seq_len + level + 1);
      for (int64_t part = begin; part < end; part++) {
        const int64_t first = part * LOGITS_OF_SUM, last = std::min(first + LOGITS_OF_SUM, N);
        if (noise.temperature > 0) noise.add(logits + i * N, target_ids, first, last);
        bests[i * sums + part] = Best::of(logits + i * N, first, last);
      }
    }
    me.team.barrier();
    for (int64_t i = 0; i < n; i++)
      best[i] = Best::of_parts({bests + i * sums, size_t(sums)});
  }

  // Runs the block over the rows of `sequences`, whose memory for attention is set here.
  void run(const Worker& me, const Entries& rows, std::vector<Sequence<C>>& sequences) {
    float* parts = pass.parts;
    pass.T = 0;
    for (Sequence<C>& own : sequences) {
      own.parts = parts;
      parts += pass.heads.H * own.key_blocks * own.T * (pass.heads.E + 2);
      pass.T += own.T;
    }
    pass.sequences = sequences;
    enter(me, rows);
    pass.block(me, head.block, head.eagle3);
  }
};

// Returns the bound of a depth; the last bound holds for all greater depths.
inline float at_depth(const std::vector<float>& bounds, int64_t depth) {
  return bounds[std::min<int64_t>(depth, bounds.size() - 1)];
}

// Rows of one text in a step: pairs `first` .. `first + seen.length - 1`, or the token of a level.
struct Share {
  int text;
  int64_t first, rows;
  Visible seen;
};

// Returns the pairs of all texts in steps of at most `MAX_ROWS` rows.
template <class C>
std::vector<std::vector<Share>> steps_of(std::span<const Text<C>> texts, int64_t window) {
  std::vector<std::vector<Share>> steps(1);
  int64_t used = 0;
  for (size_t i = 0; i < texts.size(); i++) {
    const Text<C>& text = texts[i];
    for (int64_t first = 0, rows; first < text.n; first += rows, used += rows) {
      if (used == MAX_ROWS) {
        steps.emplace_back();
        used = 0;
      }
      rows = std::min(text.n - first, MAX_ROWS - used);
      const int64_t slot = text.seq_len - text.n + first;
      steps.back().push_back({int(i), first, rows, Visible::of_text(slot, rows, window)});
    }
  }
  return steps;
}

// Runs the draft head over the pairs of all texts, `MAX_ROWS` at a time, then drafts at most
// `depth` tokens after each. A token with a path probability below `verify` is left out, and none
// is drafted after a token below `expand` (bounds by depth). With a temperature, tokens are ranked
// with the noise that the target will sample with. Writes the path probabilities, that of a token
// left out included.
template <class C>
void draft_chains(const Chains<C>& of_all, int64_t depth, const std::vector<float>& verify,
                  const std::vector<float>& expand) {
  const std::span<Text<C>> texts = of_all.texts;
  const int64_t window = of_all.head.window;
  const auto steps = steps_of<C>(texts, window);
  std::vector<std::vector<Visible>> seen(texts.size());  // by text and level
  for (size_t i = 0; i < texts.size(); i++)
    for (int64_t level = 1; level < depth; level++)
      seen[i].push_back(Visible::of_text(texts[i].seq_len + level - 1, 1, window));
  in_parallel([&](const Worker& me) {
    Chains<C> chains = of_all;
    Entries rows;
    std::vector<Sequence<C>> sequences;
    std::vector<int> going(texts.size());
    std::iota(going.begin(), going.end(), 0);
    std::vector<Best> best(texts.size());
    std::vector<int64_t> own_tokens(texts.size());
    std::vector<float> paths(texts.size(), 1.0f);
    const auto sequence = [&](const Text<C>& text, int64_t first, int64_t n, const Visible& keys) {
      const int64_t key_blocks = (keys.length(n - 1) + KEYS - 1) / KEYS;
      sequences.push_back({first, n, 0, text.S, key_blocks, &keys, nullptr, text.k, text.v});
    };
    for (const std::vector<Share>& step : steps) {
      sequences.clear();
      int64_t used = 0;
      for (const Share& share : step) {
        const Text<C>& text = texts[share.text];
        sequence(text, used, share.rows, share.seen);
        for (int64_t i = share.first; i < share.first + share.rows; i++)
          rows.set(used++, text.tokens[i], text.features + i * chains.pass.D,
                   text.seq_len - text.n + i);
      }
      chains.run(me, rows, sequences);
      for (size_t i = 0; i < step.size(); i++) {
        const Text<C>& text = texts[step[i].text];
        if (step[i].first + step[i].rows == text.n && step[i].text % me.size == me.id)
          chains.take(me, sequences[i].first + sequences[i].T - 1, step[i].text, text.last);
      }
      me.team.barrier();
    }
    for (int64_t level = 0; level < depth && !going.empty(); level++) {
      if (level) {
        sequences.clear();
        for (const int i : going) {
          const int64_t row = sequences.size();
          sequence(texts[i], row, 1, seen[i][level - 1]);
          rows.set(row, own_tokens[i], texts[i].last, texts[i].seq_len + level - 1);
        }
        chains.run(me, rows, sequences);
        for (size_t place = me.id; place < going.size(); place += me.size)
          chains.take(me, place, place, texts[going[place]].last);
        me.team.barrier();
      }
      chains.leave(me, going, level, best);
      size_t left = 0;
      for (size_t place = 0; place < going.size(); place++) {
        const int i = going[place];
        paths[i] *= 1.0f / best[place].total;
        own_tokens[i] = chains.target_ids[best[place].index];
        if (me.id == 0) {
          texts[i].paths.push_back(paths[i]);
          texts[i].drafted[level] = own_tokens[i];
        }
        const bool goes_on =
            paths[i] >= at_depth(verify, level) && paths[i] >= at_depth(expand, level);
        if (goes_on) going[left++] = i;
      }
      going.resize(left);
    }
  });
}

}  // namespace

// Activations in 8 bits per row and block of 32 inputs, and in 16 bits where a block's values are
// large.
//
// Reference: `rounded_activations` in tests/rounding.py, which states the rounding.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>

#include "vec.h"

namespace {

constexpr int BLOCK = 32;     // inputs that share one scale of the activations
constexpr int MAX_TILE = 8;   // rows that share one unpacking
constexpr int MAX_ROWS = 32;  // rows of a pass, or of a part of one, that share reading of weights

// Whether sums of products begin with MAGIC_BITS, so that one operation turns them into sum *
// scale: where VNNI adds the products to the sum itself.
constexpr bool BY_MAGIC = FASTEAGLE_ISA >= 4 || FASTEAGLE_ISA == 2;

// Rounds a scale to 22 bits, so that its product with MAGIC is exact.
inline float in_22_bits(float scale) {
  uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  bits &= ~3u;
  std::memcpy(&scale, &bits, sizeof bits);
  return scale;
}

// Rows of activations in 8 bits, stored by block, so that the rows of a block are adjacent; and
// their rounding errors in 8 bits, at a 254th of the scale. `Choice` selects where the errors
// count.
struct Activations {
  int8_t *q, *rest;           // [blocks, T, 32]
  float* scales;              // [T, blocks]: threads that share the rows write to different lines
  int32_t *sums, *rest_sums;  // [T, blocks]
  int64_t blocks, rows;

  static int64_t blocks_of(int64_t K) { return (K + BLOCK - 1) / BLOCK; }
  static size_t bytes(int64_t rows, int64_t K) {
    return size_t(rows) * blocks_of(K) * (2 * BLOCK + 12) + 64;
  }
  static Activations at(uint8_t* memory, int64_t rows, int64_t K) {
    Activations a;
    a.blocks = blocks_of(K);
    a.rows = rows;
    const int64_t n = rows * a.blocks;
    a.q = (int8_t*)memory;
    a.rest = a.q + n * BLOCK;
    a.scales = (float*)(a.rest + n * BLOCK);
    a.sums = (int32_t*)(a.scales + n);
    a.rest_sums = a.sums + n;
    return a;
  }

  // Rounds 32 values. Any value that is not below 1e33 makes the scale NaN, and all results of it.
  void quantize(int64_t row, int64_t block, const float* x) {
    VI best = {};  // sizes in their bits: those of infinity and NaN are the largest
    VF v[BLOCK / W];
    for (int i = 0; i < BLOCK / W; i++) {
      v[i] = load(x + i * W);
      best = larger((VI)v[i] & 0x7fffffff, best);
    }
    const int32_t bits = largest(best);
    float most;
    std::memcpy(&most, &bits, sizeof most);
    const bool zero = !(most > 1e-30f);
    const float inverse = zero ? 0.0f : 127.0f / most;
    const float scale = zero ? 0.0f : in_22_bits(most / 127.0f);
    const int64_t at = block * rows + row;
    VU totals = {};  // of the values in the lower half of a lane, of their errors in the upper half
    for (int i = 0; i < BLOCK / W; i++) {
      const VI first = rounded(v[i] * inverse);
      const VI second = rounded(fma(-to_float(first), splat(scale), v[i]) * (254.0f * inverse));
      totals += (VU)first + ((VU)second << 16);
      store(q + at * BLOCK + i * W, first);
      store(rest + at * BLOCK + i * W, second);
    }
    const int64_t of_row = row * blocks + block;
    const uint32_t both = sum(totals);
    scales[of_row] = most < 1e33f ? scale : std::numeric_limits<float>::quiet_NaN();
    sums[of_row] = int16_t(both);
    rest_sums[of_row] = int32_t(both - uint32_t(sums[of_row])) >> 16;
  }

  void quantize_row(int64_t row, const float* x, int64_t K) {
    const int64_t whole = K / BLOCK;
    for (int64_t b = 0; b < whole; b++) quantize(row, b, x + b * BLOCK);
    if (whole < blocks) {
      float last[BLOCK] = {};
      std::copy(x + whole * BLOCK, x + K, last);
      quantize(row, whole, last);
    }
  }

 private:
  // Unsigned, because the integer of a NaN may overflow.
  static VI rounded(VF x) { return (VI)((VU)(x + MAGIC) - MAGIC_BITS); }
};

// Parameters of one row and block that a product needs besides the integers.
struct Term {
  float scale;    // of the activations
  float shift;    // -MAGIC * scale
  float offset;   // factor of a weight's offset: the activations' sum
  int32_t start;  // first value of the integer sum: corrects for the base of stored weights

  Term() = default;
  Term(float scale_, float offset_, int32_t start_)
      : scale(scale_), shift(-MAGIC * scale_), offset(offset_), start(start_) {}
};

// Terms of all blocks, and the rounding errors of blocks where a row counts with 16 bits: those
// with much larger values than its other blocks, whose rounding would be most of a product's error.
// They are a tenth of all blocks, fewer than half of a row's, and leave a quarter of the error.
// Each worker has its own instance.
struct Choice {
  Term* terms;  // [blocks, T]

  // The rounding errors of one block: those from `begin` to `end` of the arrays below.
  struct Rests {
    int32_t block, begin, end;
  };
  int8_t* rest;  // [n, 32]
  Term* rest_terms;
  int32_t* rest_rows;  // counted from the first of the MAX_ROWS rows that were asked for

  static size_t bytes(int64_t rows, int64_t K) {
    const int64_t blocks = Activations::blocks_of(K), n = rows * blocks;
    return n * sizeof(Term) + n / 2 * (BLOCK + sizeof(Term) + 4) +
           parts_of(rows) * (blocks * sizeof(Rests) + 4) + 64;
  }

  // `base` is subtracted from the stored values of the weights.
  Choice(uint8_t* memory, const Activations& x, int64_t T, int base) : blocks_(x.blocks) {
    const int64_t n = x.rows * x.blocks;
    terms = (Term*)memory;
    rest_terms = terms + n;
    rest_rows = (int32_t*)(rest_terms + n / 2);
    ends_ = rest_rows + n / 2;
    groups_ = (Rests*)(ends_ + parts_of(T));
    rest = (int8_t*)(groups_ + parts_of(T) * blocks_);
    for (int64_t row = 0; row < T; row += MAX_ROWS)
      choose(x, row, std::min<int64_t>(MAX_ROWS, T - row), base);
  }

  // Returns the blocks with rounding errors of the MAX_ROWS rows from `row`.
  std::span<const Rests> rests_of(int64_t row) const {
    const int64_t part = row / MAX_ROWS, begin = part ? ends_[part - 1] : 0;
    return {groups_ + begin, size_t(ends_[part] - begin)};
  }

 private:
  int64_t blocks_;
  int32_t* ends_;  // [parts]: where the groups of a part of MAX_ROWS rows end
  Rests* groups_;
  int32_t n_groups_ = 0, n_rests_ = 0;

  static int64_t parts_of(int64_t rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS; }
  static float square(float x) { return x * x; }

  // Returns the sum of squares of all blocks, by eight sums on every path.
  float squares_of(const float* scales) const {
    float sums[8] = {};
    int64_t b = 0;
    for (; b + 8 <= blocks_; b += 8)
      for (int i = 0; i < 8; i++) sums[i] += square(scales[b + i]);
    for (; b < blocks_; b++) sums[b % 8] += square(scales[b]);
    for (int half = 4; half > 0; half /= 2)
      for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
  }

  // Chooses for `rows` rows from `row`.
  void choose(const Activations& x, int64_t row, int64_t rows, int base) {
    const auto start = [&](int32_t sum) {
      return int32_t((BY_MAGIC ? MAGIC_BITS : 0) - uint32_t(base) * uint32_t(sum));
    };
    float squares[MAX_ROWS];
    for (int64_t t = 0; t < rows; t++) squares[t] = squares_of(x.scales + (row + t) * blocks_);
    for (int64_t b = 0; b < blocks_; b++) {
      const int32_t begin = n_rests_;
      for (int64_t t = 0; t < rows; t++) {
        const int64_t at = b * x.rows + row + t, of_row = (row + t) * blocks_ + b;
        const float scale = x.scales[of_row];
        terms[at] = {scale, scale * float(x.sums[of_row]), start(x.sums[of_row])};
        if (!(square(scale) * float(blocks_) > 2.0f * squares[t])) continue;
        const float rest_scale = in_22_bits(scale / 254.0f);
        terms[at].offset += rest_scale * float(x.rest_sums[of_row]);
        std::memcpy(rest + int64_t(n_rests_) * BLOCK, x.rest + at * BLOCK, BLOCK);
        rest_terms[n_rests_] = {rest_scale, 0, start(x.rest_sums[of_row])};
        rest_rows[n_rests_++] = int32_t(t);
      }
      if (n_rests_ > begin) groups_[n_groups_++] = {int32_t(b), begin, n_rests_};
    }
    ends_[row / MAX_ROWS] = n_groups_;
  }
};

}  // namespace

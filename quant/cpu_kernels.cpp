// Products of a few rows with 4- and 8-bit weights by integer dot products, decode attention, and
// whole decoder blocks, for CPUs.
//
// Activations are rounded to 8 bits per row and block of 32, once per input; a row's few blocks of
// large values to 16. A weight is unpacked once for up to eight rows, so that a further row costs
// only its multiplications. Sums of a block are exact in int32; across blocks they run in fp32, in one order that depends neither on the
// number of rows nor on the number of threads. Attention meets the keys of a row in logical order,
// in blocks of 64 by rank. So a row of a pass has the same bits whatever other rows are in it.
//
// Weights: see `pack` in cpu_linear.py, which writes what `Weight` reads.
//
// Shapes: T rows, N outputs, K inputs, D model dim, H query heads, G KV heads, E head dim, F FFN
// dim, S cache slots.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <omp.h>
#include <sched.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

// 4: AVX-512 VNNI, 3: AVX-512 BW, 2: AVX-VNNI, 1: AVX2, 0: plain loops. The caller's compiler flags
// allow the instructions that a path needs.
#ifndef FASTEAGLE_ISA
#define FASTEAGLE_ISA 0
#endif
#if FASTEAGLE_ISA > 0
#include <immintrin.h>
#endif

namespace {

using at::Tensor;

constexpr int W = FASTEAGLE_ISA >= 3 ? 16 : 8;  // lanes of a vector
constexpr int BLOCK = 32;                       // inputs that share one scale of the activations
constexpr int COLUMNS = 16;                     // outputs that lie together in a packed weight
constexpr int MAX_TILE = 8;                     // rows that share one unpacking
constexpr int MAX_ROWS = 32;                    // rows that go through the blocks together
constexpr int KEYS = 64;                        // keys of one block of attention
constexpr int MAX_HEAD_DIM = 256;
constexpr int64_t BAD_ROW = -1, PAD = -2;  // as in sampling.py and verify.py
constexpr int AHEAD = 4096;  // bytes of weights that are fetched before they are read

typedef float VF __attribute__((vector_size(4 * W)));
typedef int32_t VI __attribute__((vector_size(4 * W)));
typedef int16_t VS __attribute__((vector_size(4 * W)));
typedef uint16_t VH __attribute__((vector_size(2 * W)));
typedef uint32_t VU __attribute__((vector_size(4 * W)));
typedef int8_t VB __attribute__((vector_size(W)));

inline VF load(const float* p) {
  VF v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, VF v) { std::memcpy(p, &v, sizeof v); }
inline VF splat(float x) { return x - VF{}; }
inline VF to_float(VI v) { return __builtin_convertvector(v, VF); }

// One rounding, on every path: a compiler's choice of what to fuse may differ between two copies.
inline VF fma(VF a, VF b, VF c) {
#if FASTEAGLE_ISA >= 3
  return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif FASTEAGLE_ISA >= 1
  return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// Lane i with lane i ^ d.
template <int d, class V, int... j>
inline V swapped(V v, std::integer_sequence<int, j...>) {
  return __builtin_shuffle(v, (VI){(j ^ d)...});
}

template <int d, class V>
inline V swapped(V v) {
  return swapped<d>(v, std::make_integer_sequence<int, W>());
}

template <class V>
inline auto sum(V v) {
  if constexpr (W == 16) v += swapped<8>(v);
  v += swapped<4>(v);
  v += swapped<2>(v);
  v += swapped<1>(v);
  return v[0];
}

inline VF larger(VF a, VF b) { return a > b ? a : b; }

inline float largest(VF v) {
  if constexpr (W == 16) v = larger(v, swapped<8>(v));
  v = larger(v, swapped<4>(v));
  v = larger(v, swapped<2>(v));
  return larger(v, swapped<1>(v))[0];
}

inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  if (exponent == 0) {
    const float value = std::ldexp(float(mantissa), -24);
    return sign ? -value : value;
  }
  const uint32_t bits =
      sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline VF load_half(const uint16_t* p) {
#if FASTEAGLE_ISA >= 3
  return (VF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif FASTEAGLE_ISA >= 1
  return (VF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  VF v;
  for (int i = 0; i < W; i++) v[i] = half_to_float(p[i]);
  return v;
#endif
}

struct Bf16 {
  uint16_t bits;
};

inline VF load(const Bf16* p) {
  VH h;
  std::memcpy(&h, p, sizeof h);
#if FASTEAGLE_ISA >= 3
  return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif FASTEAGLE_ISA >= 1
  return (VF)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
  return (VF)(__builtin_convertvector(h, VU) << 16);
#endif
}

inline float to_scalar(Bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline void put(float* p, float x) { *p = x; }
inline void put(Bf16* p, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  p->bits = nan ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void store(Bf16* p, VF x) {
  const VU bits = (VU)x;
  const VU rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const VH h = __builtin_convertvector(x != x ? (VI)(VU{} + 0x7fc0) : (VI)rounded, VH);
  std::memcpy(p, &h, sizeof h);
}

// e^x to about 1 unit in the last place; 0 below -87.3; NaN stays NaN.
inline VF exp_of(VF x) {
  const VF magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const VI tiny = x < -87.3f;
  VF y = x < -87.3f ? splat(-87.3f) : x;
  y = y > 88.0f ? splat(88.0f) : y;
  const VF n = fma(y, splat(1.44269504f), magic) - magic;
  VF r = fma(n, splat(-0.693359375f), y);
  r = fma(n, splat(2.12194440e-4f), r);
  VF p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  // NaN converts to some integer; its mantissa is NaN already.
  const VU power = ((VU)__builtin_convertvector(n, VI) + 127u) << 23;
  const VF value = p * (VF)power;
  return tiny ? VF{} : value;
}

// ---------------------------------------------------------------------------------------------
// Threads

using Clock = std::chrono::steady_clock;

// How many threads to do without. Where other programs run on the same cores, a thread that waits its
// turn keeps all others waiting, for many times the length of a pass: one thread less is faster then.
class Spared {
 public:
  static constexpr auto LONG = std::chrono::microseconds(1500);  // at a barrier

  static Spared& of_this_thread() {
    thread_local Spared spared;
    return spared;
  }

  int threads() const { return spared_; }

  // A call with `size` threads is over at `now`: of the time `whole` they stood at barriers for
  // `waited`, counting what was longer than `LONG`. One thread less takes a `size`th longer: so much
  // the waiting must be. A prompt's rows take long enough to meet some wait in each call, and a
  // short call, as of drafting, becomes a long one by chance alone.
  void learn(int size, Clock::duration waited, Clock::duration whole, Clock::time_point now) {
    if (waited * size > whole) {
      if (whole < SHORT) return;
      since_ = now;
      if (++waits_ < 2) return;  // once may be chance
      waits_ = 0;
      if (size > 1) spared_++;
      patience_ = std::min(2 * patience_, LONGEST);
      return;
    }
    const Clock::duration calm = now - since_;
    if (calm >= PERIOD) waits_ = 0;
    if (calm < patience_) return;
    since_ = now;
    if (spared_ == 0) {
      patience_ = PERIOD;
    } else {
      spared_--;
    }
  }

 private:
  static constexpr Clock::duration SHORT = std::chrono::milliseconds(5);
  static constexpr Clock::duration PERIOD = std::chrono::milliseconds(600);
  static constexpr Clock::duration LONGEST = std::chrono::seconds(10);
  int spared_ = 0, waits_ = 0;
  Clock::time_point since_;  // the last call that waited, or the last change
  Clock::duration patience_ = PERIOD;
};

// The threads of one call. All of them come to every barrier.
class Team {
 public:
  explicit Team(int size) : size_(size) {}

  // At all barriers together, of the threads that waited there the mean.
  Clock::duration waited() const {
    return Clock::duration(waited_.load(std::memory_order_relaxed)) / std::max(1, size_ - 1);
  }

  void barrier() {
    if (size_ == 1) return;
    const int turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    // Long enough for a phase of another thread; longer only where that thread does not run.
    const auto is_over = [&] { return turn_.load(std::memory_order_acquire) != turn; };
    for (int spins = 0; spins < 4000; spins++) {
      if (is_over()) return;
      relax();
    }
    const auto begin = Clock::now();
    while (!is_over()) sched_yield();
    const Clock::duration waited = Clock::now() - begin;
    if (waited > Spared::LONG) waited_.fetch_add(waited.count(), std::memory_order_relaxed);
  }

 private:
  static void relax() {
#if FASTEAGLE_ISA > 0
    _mm_pause();
#endif
  }

  const int size_;
  std::atomic<Clock::rep> waited_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> turn_{0};
};

struct Worker {
  Team& team;
  int id, size;

  struct Range {
    int64_t begin, end;
  };
  Range share(int64_t n) const { return {n * id / size, n * (id + 1) / size}; }
};

// Runs `work` on all threads but the spared ones. Results do not depend on how many these are.
// torch says how many: OpenMP's own number is that of all cores in each new thread of a process.
template <class F>
void in_parallel(F work) {
  Spared& spared = Spared::of_this_thread();
  const int all = omp_in_parallel() ? 1 : at::get_num_threads();
  const int wanted = std::max(1, all - spared.threads());
  if (wanted == 1) {
    Team team(1);
    work(Worker{team, 0, 1});
    if (all > 1) spared.learn(1, {}, {}, Clock::now());
    return;
  }
  Team* team = nullptr;
  const auto begin = Clock::now();
#pragma omp parallel num_threads(wanted)
  {
#pragma omp single
    team = new Team(omp_get_num_threads());
    work(Worker{*team, omp_get_thread_num(), omp_get_num_threads()});
  }
  const auto end = Clock::now();
  spared.learn(wanted, team->waited(), end - begin, end);
  delete team;
}

// ---------------------------------------------------------------------------------------------
// Activations in 8 bits

// Blocks of 32 inputs: of block b and row t the values, their scale and their sum, at b * T + t, so
// that the rows of a block lie together; and the same of what rounding left over, whose scale is a
// 254th. See `Choice` for where the latter counts.
struct Activations {
  int8_t *q, *rest;  // [blocks, T, 32]
  float* scales;
  int32_t *sums, *rest_sums;
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

  // Rounds 32 values. What is not finite makes the scale NaN, and so everything that reads it.
  void quantize(int64_t row, int64_t block, const float* x) {
    VF best = {}, bad = {};
    VF v[BLOCK / W];
    for (int i = 0; i < BLOCK / W; i++) {
      v[i] = load(x + i * W);
      const VF size = v[i] < 0.0f ? -v[i] : v[i];
      best = larger(size, best);
      bad += v[i] * 0.0f;
    }
    const float most = largest(best);
    const bool zero = !(most > 1e-30f);
    const float inverse = zero ? 0.0f : 127.0f / most, scale = zero ? 0.0f : most / 127.0f;
    const int64_t at = block * rows + row;
    VU total = {}, rest_total = {};
    for (int i = 0; i < BLOCK / W; i++) {
      const VI first = rounded(v[i] * inverse);
      const VI second = rounded(fma(-to_float(first), splat(scale), v[i]) * (254.0f * inverse));
      total += (VU)first;
      rest_total += (VU)second;
      put_bytes(q + at * BLOCK + i * W, first);
      put_bytes(rest + at * BLOCK + i * W, second);
    }
    scales[at] = scale + sum(bad);
    sums[at] = int32_t(sum(total));
    rest_sums[at] = int32_t(sum(rest_total));
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
  // Unsigned: what NaN becomes may overflow.
  static VI rounded(VF x) { return (VI)((VU)(x + splat(12582912.0f)) - 0x4b400000u); }
  static void put_bytes(int8_t* out, VI v) {
#if FASTEAGLE_ISA >= 3
    _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8((__m512i)v));
#else
    const VB bytes = __builtin_convertvector(v, VB);
    std::memcpy(out, &bytes, W);
#endif
  }
};

// Where a row counts with 16 bits: in the blocks of much larger values than its others, whose
// rounding would be most of a product's error. A tenth of the blocks; it leaves a quarter of the
// error. Each worker makes its own.
struct Choice {
  float *rest_scales, *offsets;  // [blocks, T]: 0 where 8 bits do; of both, scale times sum
  uint8_t* twice;                // [tiles of 8 rows, blocks]: whether a row of the tile has 16

  static size_t bytes(int64_t rows, int64_t K) {
    return size_t(rows + 8) * Activations::blocks_of(K) * 9 + 64;
  }

  Choice(uint8_t* memory, const Activations& x, int64_t T) {
    const int64_t n = x.rows * x.blocks;
    rest_scales = (float*)memory;
    offsets = rest_scales + n;
    twice = (uint8_t*)(offsets + n);
    std::memset(twice, 0, (T + MAX_TILE - 1) / MAX_TILE * x.blocks);
    for (int64_t t = 0; t < T; t++) {
      float squares = 0;
      for (int64_t b = 0; b < x.blocks; b++) squares += square(x.scales[b * x.rows + t]);
      for (int64_t b = 0; b < x.blocks; b++) {
        const int64_t at = b * x.rows + t;
        const bool large = square(x.scales[at]) * float(x.blocks) > 2.0f * squares;
        rest_scales[at] = large ? x.scales[at] / 254.0f : 0.0f;
        offsets[at] = x.scales[at] * float(x.sums[at]) + rest_scales[at] * float(x.rest_sums[at]);
        twice[t / MAX_TILE * x.blocks + b] |= large;
      }
    }
  }

 private:
  static float square(float x) { return x * x; }
};

// ---------------------------------------------------------------------------------------------
// Weights and products

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

inline int32_t four(const int8_t* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// Sums of products of unsigned weights with signed activations, four inputs of W outputs at once.
// `bias` is what was added to the weights to make them unsigned, where the sums contain it.
#if FASTEAGLE_ISA >= 3
typedef __m512i Bytes;
inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline Bytes low(Bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Bytes high(Bytes v) {
  return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
}
inline Bytes spread(const int8_t* quad) { return _mm512_set1_epi32(four(quad)); }
inline VS pairs(Bytes w, Bytes x) { return (VS)_mm512_maddubs_epi16(w, x); }
inline VI quads(VS v) { return (VI)_mm512_madd_epi16((Bytes)v, _mm512_set1_epi16(1)); }
#if FASTEAGLE_ISA == 4
inline Bytes add_quads(Bytes sum, Bytes w, Bytes x) { return _mm512_dpbusd_epi32(sum, w, x); }
#endif
#elif FASTEAGLE_ISA >= 1
typedef __m256i Bytes;
inline Bytes load_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Bytes low(Bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Bytes high(Bytes v) {
  return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
}
inline Bytes spread(const int8_t* quad) { return _mm256_set1_epi32(four(quad)); }
inline VS pairs(Bytes w, Bytes x) { return (VS)_mm256_maddubs_epi16(w, x); }
inline VI quads(VS v) { return (VI)_mm256_madd_epi16((Bytes)v, _mm256_set1_epi16(1)); }
#if FASTEAGLE_ISA == 2
inline Bytes add_quads(Bytes sum, Bytes w, Bytes x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#endif
#else
struct Bytes {
  uint8_t v[4 * W];
};
inline Bytes load_bytes(const uint8_t* p) {
  Bytes b;
  std::memcpy(&b, p, sizeof b);
  return b;
}
inline Bytes low(Bytes b) {
  for (uint8_t& x : b.v) x &= 15;
  return b;
}
inline Bytes high(Bytes b) {
  for (uint8_t& x : b.v) x >>= 4;
  return b;
}
#endif

// With TWO there are two chains, which hides latency where rows are few.
template <int BITS, bool TWO>
struct Dot {
#if FASTEAGLE_ISA == 4 || FASTEAGLE_ISA == 2
  static constexpr int bias = BITS == 8 ? 128 : 0;
  Bytes a = {}, b = {};
  void add(Bytes w, const int8_t* quad) { a = add_quads(a, w, spread(quad)); }
  void add_second(Bytes w, const int8_t* quad) {
    if constexpr (TWO) {
      b = add_quads(b, w, spread(quad));
    } else {
      add(w, quad);
    }
  }
  VI total() const { return TWO ? (VI)a + (VI)b : (VI)a; }
#elif FASTEAGLE_ISA == 3
  // Of 8-bit weights, pairs of products in 16 bits are at most 2 * 128 * 127, if the sign goes to
  // the activation. For 4-bit weights see `short_products`.
  static constexpr int bias = 0;
  __m512i a = {};
  void add(Bytes w, const int8_t* quad) {
    const Bytes value = _mm512_xor_si512(w, _mm512_set1_epi8(-128)), x = spread(quad);
    const Bytes turned =
        _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(value), _mm512_setzero_si512(), x);
    const Bytes pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(value), turned);
    a = _mm512_add_epi32(a, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
  }
  void add_second(Bytes w, const int8_t* quad) { add(w, quad); }
  VI total() const { return (VI)a; }
#elif FASTEAGLE_ISA == 1
  static constexpr int bias = 0;
  __m256i a = {};
  void add(Bytes w, const int8_t* quad) {
    const Bytes value = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    const Bytes turned = _mm256_sign_epi8(spread(quad), value);
    const Bytes pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(value), turned);
    a = _mm256_add_epi32(a, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  void add_second(Bytes w, const int8_t* quad) { add(w, quad); }
  VI total() const { return (VI)a; }
#else
  static constexpr int bias = BITS == 8 ? 128 : 0;
  int32_t a[W] = {};
  void add(const Bytes& w, const int8_t* quad) {
    for (int i = 0; i < W; i++)
      for (int j = 0; j < 4; j++) a[i] += int32_t(w.v[4 * i + j]) * quad[j];
  }
  void add_second(const Bytes& w, const int8_t* quad) { add(w, quad); }
  VI total() const {
    VI v;
    std::memcpy(&v, a, sizeof v);
    return v;
  }
#endif
};

#if FASTEAGLE_ISA == 3 || FASTEAGLE_ISA == 1
// The sums of a row's 32 inputs with 4-bit weights, four inputs of W outputs in each of `w`. Pairs
// are added in 16 bits, where a block's eight are at most 8 * 2 * 15 * 127.
[[gnu::always_inline]] inline VI short_products(const Bytes* w, const int8_t* q) {
  VS sums = pairs(w[0], spread(q));
  for (int j = 1; j < 8; j++) sums += pairs(w[j], spread(q + 4 * j));
  return quads(sums);
}
#endif

// `f(0)`, `f(1)` .. `f(n - 1)`, one after the other: a loop that is always unrolled.
template <class F, int... r>
[[gnu::always_inline]] inline void for_each(F f, std::integer_sequence<int, r...>) {
  (f(r), ...);
}

template <int n, class F>
[[gnu::always_inline]] inline void for_each(F f) {
  for_each(f, std::make_integer_sequence<int, n>());
}

// Whole-number products of R rows of activations, 32 bytes each at `q`, with the W outputs of one
// block at `line`, given to `take` by row: what was added to the weights is taken off by `sums`.
template <int R, int BITS, class F>
[[gnu::always_inline]] inline void block_products(const uint8_t* line, const int8_t* q,
                                                  const int32_t* sums, int base, F take) {
  const auto give = [&](int r, VI total) {
    if (base) [[unlikely]] total = (VI)((VU)total - uint32_t(base) * uint32_t(sums[r]));
    take(r, total);
  };
#if FASTEAGLE_ISA == 3 || FASTEAGLE_ISA == 1
  if constexpr (BITS == 4) {
    // Row by row, with the weights in registers: sums of all rows at once would not fit beside them.
    Bytes w[8];
    for (int j = 0; j < 4; j++) {
      const Bytes values = load_bytes(line + j * 4 * COLUMNS);
      w[j] = low(values), w[j + 4] = high(values);
    }
    for_each<R>([&](int r) __attribute__((always_inline)) {
      give(r, short_products(w, q + r * BLOCK));
    });
    return;
  }
#endif
  using Sums = Dot<BITS, (R < 4)>;
  constexpr int LINES = BITS == 4 ? 4 : 8;
  Sums dots[R];
  for (int j = 0; j < LINES; j++) {
    const Bytes values = load_bytes(line + j * 4 * COLUMNS);
    if constexpr (BITS == 4) {
      const Bytes first = low(values), second = high(values);
      for (int r = 0; r < R; r++) {
        dots[r].add(first, q + r * BLOCK + 4 * j);
        dots[r].add_second(second, q + r * BLOCK + 4 * j + 16);
      }
    } else {
      for (int r = 0; r < R; r++) {
        if (j % 2) {
          dots[r].add_second(values, q + r * BLOCK + 4 * j);
        } else {
          dots[r].add(values, q + r * BLOCK + 4 * j);
        }
      }
    }
  }
  VI totals[R];
  for (int r = 0; r < R; r++) totals[r] = dots[r].total();
  for (int r = 0; r < R; r++) give(r, totals[r]);
}

// R rows, from `row`, times W of the 16 outputs at `block`: y [R, 16]. SINGLE: groups of one block.
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
    for (int j = 0; j < LINES; j++)
      __builtin_prefetch(line + b * STEP + j * 4 * COLUMNS + AHEAD);
    const bool ends = SINGLE || ++in_this == w.h.group_blocks || b + 1 == w.blocks;
    VF scale = {}, offset = {};
    if (ends) {
      // Of the outputs after these: their lines follow, their parameters lie behind those.
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
  // Then what rounding left over, of few blocks, and there of few rows.
  const uint8_t* twice = choice.twice + row / MAX_TILE * x.blocks;
  for (int64_t b = 0; b < w.blocks; b++) {
    if (!twice[b]) continue;
    const VF scale = w.parameter(scales, b / w.h.group_blocks * COLUMNS + part * W);
    for (int64_t at = b * x.rows + row, end = at + R; at < end; at++) {
      const float rest_scale = choice.rest_scales[at];
      if (rest_scale == 0.0f) continue;  // NaN goes on
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
  switch (rows) {
    case 1: return tile<1, BITS, SINGLE>(w, block, part, x, choice, row, y);
    case 2: return tile<2, BITS, SINGLE>(w, block, part, x, choice, row, y);
    case 3: return tile<3, BITS, SINGLE>(w, block, part, x, choice, row, y);
    case 4: return tile<4, BITS, SINGLE>(w, block, part, x, choice, row, y);
    case 5: return tile<5, BITS, SINGLE>(w, block, part, x, choice, row, y);
    case 6: return tile<6, BITS, SINGLE>(w, block, part, x, choice, row, y);
    case 7: return tile<7, BITS, SINGLE>(w, block, part, x, choice, row, y);
    default: return tile<8, BITS, SINGLE>(w, block, part, x, choice, row, y);
  }
}

// Rows `row` .. `row + rows - 1` (at most 8) times 16 outputs: y [rows, 16], bias included.
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

// This worker's share of y [T, N] = x @ w.T, or of y += x @ w.T.
void products(const Worker& me, const Weight& w, const Activations& x, uint8_t* scratch, int64_t T,
              float* y, int64_t ldy, bool add) {
  const Choice choice(scratch, x, T);
  const auto [begin, end] = me.share(w.column_blocks);
  alignas(64) float part[MAX_TILE * COLUMNS];
  for (int64_t block = begin; block < end; block++) {
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
  }
}

// ---------------------------------------------------------------------------------------------
// Attention

// The keys that each row sees: slots 0 .. shared - 1 all of them, then slots of its own.
struct Visible {
  int64_t shared = 0;
  std::vector<int64_t> begin;  // [T + 1] into `own`
  std::vector<int64_t> own;    // ascending within a row

  int64_t length(int64_t t) const { return shared + begin[t + 1] - begin[t]; }

  static Visible of_mask(const bool* mask, int64_t T, int64_t S) {
    Visible v;
    v.shared = S;
    for (int64_t t = 0; t < T; t++) {
      const bool* row = mask + t * S;
      const void* gap = std::memchr(row, 0, v.shared);
      if (gap != nullptr) v.shared = (const bool*)gap - row;
    }
    v.begin.push_back(0);
    for (int64_t t = 0; t < T; t++) {
      const bool* row = mask + t * S;
      for (int64_t s = v.shared; s < S; s++)
        if (row[s]) v.own.push_back(s);
      v.begin.push_back(v.own.size());
    }
    return v;
  }

  static Visible of_tree(int64_t seq_len, const int32_t* paths, int64_t width,
                         const int64_t* depths, int64_t T, int64_t window) {
    Visible v;
    v.shared = seq_len;
    for (int64_t t = 0; t < T; t++)
      if (window > 0 && seq_len + depths[t] >= window) v.shared = 0;
    v.begin.push_back(0);
    for (int64_t t = 0; t < T; t++) {
      const int64_t last = seq_len + depths[t];  // logical positions first .. last
      const int64_t first = window > 0 ? std::max<int64_t>(0, last - window + 1) : 0;
      if (v.shared < seq_len)
        for (int64_t s = first; s < seq_len; s++) v.own.push_back(s);
      for (int64_t d = std::max<int64_t>(0, first - seq_len); d <= depths[t]; d++)
        v.own.push_back(seq_len + paths[t * width + d]);
      v.begin.push_back(v.own.size());
    }
    return v;
  }
};

// The W x W matrix in v, turned: after stage d, lanes and rows have exchanged bit d.
template <int d, int... j>
inline void exchange(VF* v, std::integer_sequence<int, j...>) {
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    if (i & d) continue;
    const VF a = v[i], b = v[i + d];
    v[i] = __builtin_shuffle(a, b, (VI){(j & d ? W + j - d : j)...});
    v[i + d] = __builtin_shuffle(a, b, (VI){(j & d ? W + j : j + d)...});
  }
}

inline void transpose(VF* v) {
  constexpr auto lanes = std::make_integer_sequence<int, W>();
  exchange<1>(v, lanes);
  exchange<2>(v, lanes);
  exchange<4>(v, lanes);
  if constexpr (W == 16) exchange<8>(v, lanes);
}

struct Heads {
  int64_t H, G, E;
  int64_t group() const { return H / G; }
  int64_t together() const { return E % BLOCK ? 2 : 1; }
};

// Attention of some rows over one block's cache, in units that threads share.
template <class C>
struct Attention {
  Heads heads;
  int64_t T, S, key_blocks;
  const float* q;     // [G, T * group, E], scaled
  const C* k;         // [G, S, E]
  const C* v;         // [G, S, E]
  const Visible* seen;
  int64_t row;        // the first of the T rows in `seen`
  float* parts;       // [G, key_blocks, T * group, E + 2]: sums, their weight, the largest score

  int64_t queries() const { return T * heads.group(); }
  float* part(int64_t g, int64_t block, int64_t i) const {
    return parts + ((g * key_blocks + block) * queries() + i) * (heads.E + 2);
  }
  // i = t * group + head within the group
  const float* query(int64_t g, int64_t i) const {
    return q + (g * queries() + i) * heads.E;
  }

  // Keys `first` .. `first + n - 1`, element by element: turned [E, W], what lies behind as zeros.
  void turned_keys(int64_t g, int64_t first, int64_t n, float* turned) const {
    int64_t e = 0;
    if constexpr (std::is_same_v<C, Bf16>) {  // in pairs of elements
      for (; e + 2 * W <= heads.E; e += 2 * W) {
        VF tile[W] = {};
        for (int64_t i = 0; i < n; i++)
          std::memcpy(&tile[i], k + (g * S + first + i) * heads.E + e, sizeof tile[i]);
        transpose(tile);
        for (int i = 0; i < W; i++) {
          store(turned + (e + 2 * i) * W, (VF)((VU)tile[i] << 16));
          store(turned + (e + 2 * i + 1) * W, (VF)((VU)tile[i] & 0xffff0000u));
        }
      }
    }
    for (; e < heads.E; e += W) {
      VF tile[W] = {};
      for (int64_t i = 0; i < n; i++) tile[i] = load(k + (g * S + first + i) * heads.E + e);
      transpose(tile);
      for (int i = 0; i < W; i++) store(turned + (e + i) * W, tile[i]);
    }
  }

  // Products of R queries with W keys, in four chains.
  template <int R>
  void scores(int64_t g, int64_t i, const float* turned, VF* out) const {
    const float* x[R];
    VF chains[R][4] = {};
    for (int r = 0; r < R; r++) x[r] = query(g, i + r);
    for (int64_t e = 0; e < heads.E; e += 4)
      for (int c = 0; c < 4; c++) {
        const VF keys = load(turned + (e + c) * W);
        for (int r = 0; r < R; r++) chains[r][c] = fma(splat(x[r][e + c]), keys, chains[r][c]);
      }
    for (int r = 0; r < R; r++)
      out[r] = (chains[r][0] + chains[r][1]) + (chains[r][2] + chains[r][3]);
  }

  // Those of queries `from` .. `to` - 1.
  template <class F>
  void some_scores(int64_t g, int64_t from, int64_t to, const float* turned, F take) const {
    VF out[4];
    for (int64_t i = from, n; i < to; i += n) {
      n = std::min<int64_t>(4, to - i);
      switch (n) {
        case 1: scores<1>(g, i, turned, out); break;
        case 2: scores<2>(g, i, turned, out); break;
        case 3: scores<3>(g, i, turned, out); break;
        default: scores<4>(g, i, turned, out);
      }
      for (int64_t r = 0; r < n; r++) take(i + r, out[r]);
    }
  }

  // All queries of KV head g over the keys of rank 64 * block .. 64 * block + 63 of their rows.
  void unit(int64_t g, int64_t block, float* scratch) const {
    const int64_t group = heads.group(), E = heads.E, first = block * KEYS;
    const int64_t shared = std::clamp<int64_t>(seen->shared - first, 0, KEYS);
    float* turned = scratch;                      // [E, W]
    float* s = turned + E * W + queries() * W;  // [queries, KEYS]
    const char* values = (const char*)(v + (g * S + first) * E);  // wanted after the scores
    for (int64_t i = 0; i < shared * E * int64_t(sizeof(C)); i += 64) __builtin_prefetch(values + i);
    std::fill(s, s + queries() * KEYS, -std::numeric_limits<float>::infinity());
    for (int64_t at = 0; at < shared; at += W) {
      const int64_t n = std::min<int64_t>(W, shared - at);
      turned_keys(g, first + at, n, turned);
      some_scores(g, 0, queries(), turned, [&](int64_t i, VF found) {
        if (n == W) return store(s + i * KEYS + at, found);
        for (int64_t j = 0; j < n; j++) s[i * KEYS + at + j] = found[j];
      });
    }
    own_scores(g, first, turned, s);

    for (int64_t i = 0; i < queries(); i++) softmax(s + i * KEYS, part(g, block, i));
    const int64_t width = E + 2;
    add_values(s, v + (g * S + first) * E, shared, queries(), part(g, block, 0), width);
    for (int64_t t = 0; t < T; t++) {
      const auto [begin, end] = own_of(t, first);
      for (const int64_t *slot = begin, *next; slot < end; slot = next) {
        for (next = slot + 1; next < end && *next == next[-1] + 1;) next++;
        const int64_t rank = rank_of(t, slot) - first, i = t * group;
        add_values(s + i * KEYS + rank, v + (g * S + *slot) * E, next - slot, group,
                   part(g, block, i), width);
      }
    }
  }

  struct Slots {
    const int64_t *begin, *end;
  };
  int64_t rank_of(int64_t t, const int64_t* slot) const {
    return seen->shared + (slot - (seen->own.data() + seen->begin[row + t]));
  }
  // The own slots of a row whose rank is in the block that begins at rank `first`.
  Slots own_of(int64_t t, int64_t first) const {
    const int64_t* own = seen->own.data() + seen->begin[row + t];
    const int64_t n = seen->begin[row + t + 1] - seen->begin[row + t];
    const int64_t begin = std::clamp<int64_t>(first - seen->shared, 0, n);
    const int64_t end = std::clamp<int64_t>(first + KEYS - seen->shared, 0, n);
    return {own + begin, own + end};
  }

  // Scores of the rows' own keys, W slots at a time, for the rows that see any of these. The keys
  // of a tree's rows lie close together; those of a batch's rows far apart, each row by itself.
  void own_scores(int64_t g, int64_t first, float* turned, float* s) const {
    const int64_t group = heads.group();
    float* all = turned + heads.E * W;  // [queries, W]
    Slots left[MAX_ROWS];
    for (int64_t t = 0; t < T; t++) left[t] = own_of(t, first);
    for (;;) {
      int64_t slot = S;
      for (int64_t t = 0; t < T; t++)
        if (left[t].begin < left[t].end) slot = std::min(slot, *left[t].begin);
      if (slot == S) return;
      const int64_t n = std::min<int64_t>(W, S - slot);
      const auto seen_by = [&](int64_t t) {
        return left[t].begin < left[t].end && *left[t].begin < slot + n;
      };
      turned_keys(g, slot, n, turned);
      for (int64_t t = 0, end; t < T; t = end + 1) {
        for (end = t; end < T && seen_by(end);) end++;
        some_scores(g, t * group, end * group, turned,
                    [&](int64_t i, VF found) { store(all + i * W, found); });
        for (; t < end; t++)
          for (const int64_t*& p = left[t].begin; seen_by(t); p++)
            for (int64_t i = t * group; i < (t + 1) * group; i++)
              s[i * KEYS + rank_of(t, p) - first] = all[i * W + *p - slot];
      }
    }
  }

  // Scores to weights in place; `out` gets zeros, their sum and the largest score.
  void softmax(float* s, float* out) const {
    VF best = load(s);
    for (int j = W; j < KEYS; j += W) {
      best = larger(load(s + j), best);
    }
    const float most = largest(best);
    VF total = {};
    if (most == -std::numeric_limits<float>::infinity()) {
      std::fill(s, s + KEYS, 0.0f);  // no key of this row is in this block
    } else {
      for (int j = 0; j < KEYS; j += W) {
        const VF p = exp_of(load(s + j) - most);
        store(s + j, p);
        total += p;
      }
    }
    std::fill(out, out + heads.E, 0.0f);
    out[heads.E] = sum(total);
    out[heads.E + 1] = most;
  }

  // Adds n values [n, E], weighted by p [queries, KEYS], to rows of `out`, which are `width` apart.
  void add_values(const float* p, const C* values, int64_t n, int64_t n_queries, float* out,
                  int64_t width) const {
    for (int64_t i = 0; i < n_queries; i += 4, p += 4 * KEYS, out += 4 * width) {
      switch (std::min<int64_t>(4, n_queries - i)) {
        case 1: add_values_of<1>(p, values, n, out, width); break;
        case 2: add_values_of<2>(p, values, n, out, width); break;
        case 3: add_values_of<3>(p, values, n, out, width); break;
        default: add_values_of<4>(p, values, n, out, width);
      }
    }
  }

  template <int R>
  void add_values_of(const float* p, const C* values, int64_t n, float* out,
                     int64_t width) const {
    constexpr int WIDE = W == 16 ? 4 : 2;  // vectors of a row at once
    int64_t e = 0;
    for (; e + WIDE * W <= heads.E; e += WIDE * W)
      add_columns<R, WIDE>(p, values + e, n, out + e, width);
    for (; e < heads.E; e += W) add_columns<R, 1>(p, values + e, n, out + e, width);
  }

  template <int R, int N>
  void add_columns(const float* p, const C* values, int64_t n, float* out, int64_t width) const {
    VF acc[R][N];
    for (int r = 0; r < R; r++)
      for (int c = 0; c < N; c++) acc[r][c] = load(out + r * width + c * W);
    for (int64_t j = 0; j < n; j++, values += heads.E)
      for (int c = 0; c < N; c++) {
        const VF value = load(values + c * W);
        for (int r = 0; r < R; r++) acc[r][c] = fma(splat(p[r * KEYS + j]), value, acc[r][c]);
      }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < N; c++) store(out + r * width + c * W, acc[r][c]);
  }

  // The result [E] of one query, its blocks added up in order.
  void combine(int64_t g, int64_t i, float* out) const {
    const int64_t E = heads.E, length = seen->length(row + i / heads.group());
    const int64_t n = (length + KEYS - 1) / KEYS;
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t b = 0; b < n; b++) {
      const float m = part(g, b, i)[E + 1];
      most = m > most ? m : most;
    }
    float total = 0;
    std::fill(out, out + E, 0.0f);
    for (int64_t first = 0; first < n; first += W) {
      const int64_t end = std::min<int64_t>(n, first + W);
      VF factors = splat(most);
      for (int64_t b = first; b < end; b++) factors[b - first] = part(g, b, i)[E + 1];
      factors = exp_of(factors - most);
      for (int64_t b = first; b < end; b++) {
        const float *found = part(g, b, i), factor = factors[b - first];
        total += found[E] * factor;
        for (int64_t e = 0; e < E; e += W)
          store(out + e, fma(splat(factor), load(found + e), load(out + e)));
      }
    }
    const float inverse = 1.0f / total;
    for (int64_t e = 0; e < E; e += W) store(out + e, load(out + e) * inverse);
  }

};

// ---------------------------------------------------------------------------------------------
// Whole blocks

struct Block {
  const float *attention_norm, *q_norm, *k_norm, *mlp_norm;  // null where there is none
  Weight qkv, out, gate_up, down;
};
constexpr int TENSORS = 9;  // of a block, in this order

const float* floats(const Tensor& t) { return t.numel() ? t.const_data_ptr<float>() : nullptr; }

Block block_of(const Tensor* t) {
  Block b;
  b.attention_norm = floats(t[0]);
  b.qkv = Weight(t[1], &t[2]);
  b.q_norm = floats(t[3]);
  b.k_norm = floats(t[4]);
  b.out = Weight(t[5]);
  b.mlp_norm = floats(t[6]);
  b.gate_up = Weight(t[7]);
  b.down = Weight(t[8]);
  return b;
}

// Raises unless the tensors `t` of block `b` fit each other; its QKV product reads `K` inputs.
void check_block(const Tensor* t, const Block& b, const Heads& heads, int64_t D, int64_t K) {
  const int64_t H = heads.H, G = heads.G, E = heads.E, F = b.down.h.K;
  TORCH_CHECK(G > 0 && H > 0 && H % G == 0 && E > 0 && E % 16 == 0 && E <= MAX_HEAD_DIM &&
                  H % heads.together() == 0,
              "head dim");
  TORCH_CHECK(D % BLOCK == 0 && F % BLOCK == 0, "widths in blocks of 32");
  TORCH_CHECK(b.qkv.h.N == (H + 2 * G) * E && b.qkv.h.K == K, "qkv is [", (H + 2 * G) * E, ", ", K,
              "]");
  TORCH_CHECK(b.out.h.N == D && b.out.h.K == H * E, "out is [", D, ", ", H * E, "]");
  TORCH_CHECK(b.gate_up.h.N == 2 * F && b.gate_up.h.K == D, "gate_up is [", 2 * F, ", ", D, "]");
  TORCH_CHECK(b.down.h.N == D, "down is [", D, ", ", F, "]");
  const auto is_scale = [](const Tensor& norm, int64_t n) {
    return norm.is_contiguous() && (norm.numel() == 0 || norm.numel() == n);
  };
  TORCH_CHECK(is_scale(t[0], D) && is_scale(t[3], E) && is_scale(t[4], E) && is_scale(t[6], D),
              "norms are [D] and [E]");
}

// Raises unless all caches are like the first one, [G, S, E].
void check_caches(at::TensorList caches) {
  for (const Tensor& cache : caches)
    TORCH_CHECK(cache.dim() == 3 && cache.is_contiguous() && cache.sizes() == caches[0].sizes() &&
                    cache.scalar_type() == caches[0].scalar_type(),
                "contiguous caches of one shape and type");
}

// x / rms(x) * weight; without a weight, x itself.
inline void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  if (weight == nullptr) {
    std::copy(x, x + n, out);
    return;
  }
  VF total[2] = {};
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    const VF a = load(x + i), b = load(x + i + W);
    total[0] = fma(a, a, total[0]);
    total[1] = fma(b, b, total[1]);
  }
  float squares = sum(total[0] + total[1]);
  for (; i < n; i++) squares += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(squares / float(n) + eps);
  for (i = 0; i + W <= n; i += W) store(out + i, load(x + i) * factor * load(weight + i));
  for (; i < n; i++) out[i] = x[i] * factor * weight[i];
}

struct Scratch {
  std::vector<uint8_t> memory;
  size_t used = 0;

  void reserve(size_t bytes) {
    used = 0;
    if (memory.size() < bytes + 4096) memory.resize(bytes + 4096);
  }
  template <class E>
  E* take(size_t n) {
    used = (used + 63) / 64 * 64;
    uint8_t* start = (uint8_t*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    E* p = (E*)(start + used);
    used += n * sizeof(E);
    TORCH_INTERNAL_ASSERT(used + 64 <= memory.size(), "scratch memory");
    return p;
  }
  Activations activations(int64_t rows, int64_t K) {
    return Activations::at(take<uint8_t>(Activations::bytes(rows, K)), rows, K);
  }
};

// What all blocks of one call share.
template <class C>
struct Pass {
  Heads heads;
  int64_t D, F, S, T, row;  // T rows, from `row` on
  float eps;
  const float *cos, *sin;  // [T, E]
  const int64_t* slots;    // [T]
  float* x;                // [T, D], in place
  const float* entry;      // [T, entry_dim]: what the first product reads instead of norm(x), or null
  int64_t entry_dim;
  const Visible* seen;
  float *qkv, *queries, *parts, *scratch;  // scratch: of each worker
  int64_t scratch_size, key_blocks;
  Activations normed, attended, hidden, entered;

  float* own_scratch(const Worker& me) const { return scratch + me.id * scratch_size; }

  // One head, rotated and scaled, and written in the type of `out`.
  template <class O>
  void rope(const float* in, const float* norm, int64_t t, float scale, O* out) const {
    const int64_t E = heads.E, half = E / 2;
    float own[MAX_HEAD_DIM];
    if (norm != nullptr) {
      rms_norm(in, norm, E, eps, own);
      in = own;
    }
    const float *c = cos + t * E, *s = sin + t * E;
    int64_t e = 0;
    for (; e + W <= half; e += W) {
      const VF a = load(in + e), b = load(in + e + half);
      store(out + e, (a * load(c + e) - b * load(s + e)) * scale);
      store(out + e + half, (b * load(c + e + half) + a * load(s + e + half)) * scale);
    }
    for (; e < half; e++) {
      const float a = in[e], b = in[e + half];
      put(out + e, (a * c[e] - b * s[e]) * scale);
      put(out + e + half, (b * c[e + half] + a * s[e + half]) * scale);
    }
  }

  void rotate(const Worker& me, const Block& w, C* k, C* v) const {
    const int64_t H = heads.H, G = heads.G, E = heads.E, n = H + 2 * G, group = heads.group();
    const float scale = 1.0f / std::sqrt(float(E));
    const auto [begin, end] = me.share(T * n);
    for (int64_t i = begin; i < end; i++) {
      const int64_t t = i / n, h = i % n;
      const float* in = qkv + (t * n + h) * E;
      if (h < H) {
        const int64_t g = h / group, at = (g * T + t) * group + h % group;
        rope(in, w.q_norm, t, scale, queries + at * E);
      } else if (h < H + G) {
        rope(in, w.k_norm, t, 1.0f, k + ((h - H) * S + slots[t]) * E);
      } else {
        C* out = v + ((h - H - G) * S + slots[t]) * E;
        for (int64_t e = 0; e < E; e += W) store(out + e, load(in + e));
      }
    }
  }

  void norm(const Worker& me, const float* weight) {
    float* own = own_scratch(me);
    const auto [begin, end] = me.share(T);
    for (int64_t t = begin; t < end; t++) {
      rms_norm(x + t * D, weight, D, eps, own);
      normed.quantize_row(t, own, D);
    }
  }

  void enter(const Worker& me) {
    const auto [begin, end] = me.share(T);
    for (int64_t t = begin; t < end; t++)
      entered.quantize_row(t, entry + t * entry_dim, entry_dim);
  }

  void attention(const Worker& me, const C* k, const C* v) {
    Attention<C> a{heads, T, S, key_blocks, queries, k, v, seen, row, parts};
    // In turn: the last blocks of keys are those of the longest rows alone.
    for (int64_t i = me.id; i < heads.G * key_blocks; i += me.size)
      a.unit(i % heads.G, i / heads.G, own_scratch(me));
    me.team.barrier();
    // As many heads together as fill blocks of 32.
    const int64_t E = heads.E, group = heads.group(), together = heads.together();
    float result[2 * MAX_HEAD_DIM];
    const auto [from, to] = me.share(T * heads.H / together);
    for (int64_t i = from; i < to; i++) {
      const int64_t t = i * together / heads.H, first = i * together % heads.H;
      for (int64_t h = first; h < first + together; h++)
        a.combine(h / group, t * group + h % group, result + (h - first) * E);
      for (int64_t e = 0; e < together * E; e += BLOCK)
        attended.quantize(t, (first * E + e) / BLOCK, result + e);
    }
  }

  // silu(gate) * up, 32 columns at a time, rounded as the next product reads it.
  void gated(const Worker& me, const Weight& w) {
    alignas(64) float gate[2][MAX_TILE * COLUMNS], up[2][MAX_TILE * COLUMNS], result[BLOCK];
    const auto [begin, end] = me.share(F / BLOCK);
    const Choice choice((uint8_t*)own_scratch(me), normed, T);
    for (int64_t block = begin; block < end; block++) {
      for (int64_t first = 0; first < T; first += MAX_TILE) {
        const int64_t rows = std::min<int64_t>(MAX_TILE, T - first);
        for (int i = 0; i < 2; i++) {
          product(w, 2 * block + i, normed, choice, first, rows, gate[i]);
          product(w, F / COLUMNS + 2 * block + i, normed, choice, first, rows, up[i]);
        }
        for (int64_t r = 0; r < rows; r++) {
          for (int i = 0; i < BLOCK; i += W) {
            const int at = r * COLUMNS + i % COLUMNS;
            const VF a = load(gate[i / COLUMNS] + at);
            store(result + i, a / (exp_of(-a) + 1.0f) * load(up[i / COLUMNS] + at));
          }
          hidden.quantize(first + r, block, result);
        }
      }
    }
  }

  void block(const Worker& me, const Block& w, C* k, C* v, bool by_entry) {
    uint8_t* own = (uint8_t*)own_scratch(me);
    if (by_entry) {
      enter(me);
    } else {
      norm(me, w.attention_norm);
    }
    me.team.barrier();
    products(me, w.qkv, by_entry ? entered : normed, own, T, qkv, w.qkv.h.N, false);
    me.team.barrier();
    rotate(me, w, k, v);
    me.team.barrier();
    attention(me, k, v);
    me.team.barrier();
    products(me, w.out, attended, own, T, x, D, true);
    me.team.barrier();
    norm(me, w.mlp_norm);
    me.team.barrier();
    gated(me, w.gate_up);
    me.team.barrier();
    products(me, w.down, hidden, own, T, x, D, true);
    me.team.barrier();
  }
};

// Memory for passes of at most `most` rows that see at most `longest` keys each, and for `more` bytes.
template <class C>
void arrange(Pass<C>& pass, Scratch& scratch, int64_t most, int64_t longest, size_t more = 0) {
  const Heads& heads = pass.heads;
  const int64_t H = heads.H, E = heads.E;
  const int64_t n_qkv = (H + 2 * heads.G) * E;
  pass.key_blocks = (longest + KEYS - 1) / KEYS;
  const int64_t n_parts = heads.G * pass.key_blocks * most * heads.group() * (E + 2);
  const int64_t own = E * W + most * heads.group() * (W + KEYS);
  const int threads = at::get_num_threads();
  const int64_t widest = std::max({2 * pass.D, pass.F, H * E, pass.entry_dim});
  const int64_t choice = Choice::bytes(most, widest) / 4 + 1;
  pass.scratch_size = (std::max({own, 2 * pass.D, choice}) + 63) / 64 * 64;
  const size_t quantized = Activations::bytes(most, pass.D) + Activations::bytes(most, H * E) +
                           Activations::bytes(most, pass.F) +
                           Activations::bytes(most, pass.entry_dim);
  scratch.reserve(more + quantized + 4 * size_t(most * (n_qkv + H * E) + n_parts +
                                                threads * pass.scratch_size));
  pass.qkv = scratch.take<float>(most * n_qkv);
  pass.queries = scratch.take<float>(most * H * E);
  pass.parts = scratch.take<float>(n_parts);
  pass.scratch = scratch.take<float>(threads * pass.scratch_size);
  pass.normed = scratch.activations(most, pass.D);
  pass.attended = scratch.activations(most, H * E);
  pass.hidden = scratch.activations(most, pass.F);
  if (pass.entry_dim) pass.entered = scratch.activations(most, pass.entry_dim);
}

template <class C>
void run_blocks(const std::vector<Block>& blocks, at::TensorList caches, Pass<C> pass,
                int64_t rows) {
  thread_local Scratch scratch;
  const int64_t E = pass.heads.E;
  int64_t longest = 0;
  for (int64_t t = 0; t < rows; t++) longest = std::max(longest, pass.seen->length(t));
  arrange(pass, scratch, std::min<int64_t>(rows, MAX_ROWS), longest);
  in_parallel([&](const Worker& me) {
    for (int64_t first = 0; first < rows; first += MAX_ROWS) {
      Pass<C> own_pass = pass;
      own_pass.row = first;
      own_pass.T = std::min<int64_t>(MAX_ROWS, rows - first);
      own_pass.x += first * pass.D;
      own_pass.cos += first * E;
      own_pass.sin += first * E;
      own_pass.slots += first;
      if (pass.entry != nullptr) own_pass.entry += first * pass.entry_dim;
      for (size_t i = 0; i < blocks.size(); i++)
        own_pass.block(me, blocks[i], (C*)caches[2 * i].data_ptr(),
                       (C*)caches[2 * i + 1].data_ptr(), i == 0 && pass.entry != nullptr);
    }
  });
}

// Raises unless every depth [T] is a column of paths that are `width` wide.
void check_depths(const Tensor& depths, int64_t width) {
  const int64_t* depth = depths.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < depths.numel(); t++)
    TORCH_CHECK(depth[t] >= 0 && depth[t] < width, "depth ", depth[t], " of ", width);
}

// The residual stream [T, D] (fp32) behind some blocks. `caches` are the keys and values of each,
// [G, S, E]; rows `slots` are written. A row sees what `mask` [T, S] says, or the tree's view.
// Where `entry` [T, K] (fp32) is given, the first block's QKV product reads it instead of norm(x).
Tensor blocks(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& slots,
              const std::optional<Tensor>& mask, const std::optional<Tensor>& seq_len,
              const std::optional<Tensor>& paths, const std::optional<Tensor>& depths,
              int64_t window, at::TensorList caches, at::TensorList tensors, int64_t n_head,
              double eps, const std::optional<Tensor>& entry) {
  TORCH_CHECK(x.dim() == 2 && x.scalar_type() == at::kFloat, "x is fp32 [T, D]");
  const int64_t T = x.size(0), n_blocks = tensors.size() / TENSORS;
  TORCH_CHECK(tensors.size() == size_t(n_blocks * TENSORS) &&
                  caches.size() == size_t(2 * n_blocks) && n_blocks > 0,
              "nine tensors and two caches of each block");
  check_caches(caches);
  const Tensor& keys = caches[0];
  const Heads heads{n_head, keys.size(0), keys.size(2)};
  const int64_t S = keys.size(1);
  Tensor y = x.clone(at::MemoryFormat::Contiguous);
  if (T == 0) return y;

  const Tensor c = cos.contiguous(), s = sin.contiguous(), at_slots = slots.contiguous();
  TORCH_CHECK(c.numel() == T * heads.E && s.numel() == T * heads.E, "cos and sin are [T, E]");
  TORCH_CHECK(at_slots.numel() == T, "one slot for each row");
  for (int64_t t = 0; t < T; t++) {
    const int64_t slot = at_slots.const_data_ptr<int64_t>()[t];
    TORCH_CHECK(slot >= 0 && slot < S, "slot ", slot, " of ", S);
  }
  Visible seen;
  if (mask.has_value()) {
    const Tensor m = mask->contiguous();
    TORCH_CHECK(m.dim() == 2 && m.size(0) == T && m.size(1) == S, "mask is [T, S]");
    seen = Visible::of_mask(m.const_data_ptr<bool>(), T, S);
  } else {
    TORCH_CHECK(seq_len.has_value() && paths.has_value() && depths.has_value(),
                "a mask, or a tree: seq_len, paths and depths");
    const Tensor p = paths->contiguous(), d = depths->contiguous();
    TORCH_CHECK(p.dim() == 2 && p.size(0) == T && d.numel() == T, "one path for each row");
    const int64_t past = seq_len->item<int64_t>();
    TORCH_CHECK(past >= 0 && past <= S, "more keys than slots");
    check_depths(d, p.size(1));
    seen = Visible::of_tree(past, p.const_data_ptr<int32_t>(), p.size(1),
                            d.const_data_ptr<int64_t>(), T, window);
  }
  for (const int64_t slot : seen.own) TORCH_CHECK(slot >= 0 && slot < S, "slot ", slot, " of ", S);
  TORCH_CHECK(seen.shared <= S, "more keys than slots");

  std::vector<Block> all;
  all.reserve(n_blocks);
  for (int64_t i = 0; i < n_blocks; i++) all.push_back(block_of(tensors.data() + i * TENSORS));
  const Tensor e = entry.has_value() ? entry->contiguous() : Tensor();
  if (e.defined())
    TORCH_CHECK(e.dim() == 2 && e.size(0) == T && e.scalar_type() == at::kFloat &&
                    e.size(1) == all[0].qkv.h.K && e.size(1) % BLOCK == 0,
                "entry is fp32 [T, K]");
  const int64_t D = x.size(1), F = all[0].down.h.K;
  for (int64_t i = 0; i < n_blocks; i++) {
    const int64_t K = i == 0 && e.defined() ? e.size(1) : D;
    check_block(tensors.data() + i * TENSORS, all[i], heads, D, K);
    TORCH_CHECK(all[i].down.h.K == F, "blocks of one shape");
  }
  const auto run = [&](auto element) {
    using C = decltype(element);
    Pass<C> pass{};
    pass.heads = heads;
    pass.D = D;
    pass.F = F;
    pass.S = S;
    pass.eps = float(eps);
    pass.cos = c.const_data_ptr<float>();
    pass.sin = s.const_data_ptr<float>();
    pass.slots = at_slots.const_data_ptr<int64_t>();
    pass.x = y.mutable_data_ptr<float>();
    if (e.defined()) {
      pass.entry = e.const_data_ptr<float>();
      pass.entry_dim = e.size(1);
    }
    pass.seen = &seen;
    run_blocks<C>(all, caches, pass, T);
  };
  if (keys.scalar_type() == at::kBFloat16) {
    run(Bf16{});
  } else {
    TORCH_CHECK(keys.scalar_type() == at::kFloat, "caches in bf16 or fp32");
    run(0.0f);
  }
  return y;
}

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

// ---------------------------------------------------------------------------------------------
// A draft head's chain

// Natural logarithm of positive normal numbers, within 2e-7 of it or of its absolute value.
inline VF log_of(VF x) {
  const VU bits = (VU)x;
  VF exponent = to_float((VI)(bits >> 23) - 127);
  VF m = (VF)((bits & 0x7fffffu) | 0x3f800000u);  // 1 .. 2
  const VI upper = m > 1.41421356f;
  m = upper ? m * 0.5f : m;
  exponent = upper ? exponent + 1.0f : exponent;
  // log(m) = 2 atanh((m - 1) / (m + 1)), an odd series in at most 0.172
  const VF z = (m - 1.0f) / (m + 1.0f), s = z * z;
  VF series = fma(s, splat(2.0f / 9.0f), splat(2.0f / 7.0f));
  series = fma(series, s, splat(2.0f / 5.0f));
  series = fma(series, s, splat(2.0f / 3.0f));
  series = fma(series, s, splat(2.0f));
  return fma(exponent, splat(0.69314718f), series * z);
}

// The Gumbel noise of `sampling.gumbel_noise`, but for rounding.
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

  // Logits `begin` .. `end - 1` of tokens `ids`: over the temperature, plus noise.
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

  // The same of the logits x [n] of the tokens from `token` on, into `out`.
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

  VF noisy(VF value, VU tokens) const {
    const VU hashed = mix(mix(tokens + first) ^ second);
    VF v = (__builtin_convertvector(hashed, VF) + 0.5f) * 2.3283064e-10f;
    v = v > 0.99999994f ? splat(0.99999994f) : v;
    VF near = fma(v, splat(0.25f), splat(1.0f / 3.0f));
    near = v * fma(fma(near, v, splat(0.5f)), v, splat(1.0f));
    const VF gap = v < 0.015625f ? near : -log_of(1.0f - v);
    return value / temperature - log_of(gap);
  }
};

// The best of some logits, and the sum of exp(logit - best) over them.
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

  // With the best of logits that lie behind these.
  void add(const Best& o) {
    const bool larger = o.value > value;
    const float most = larger ? o.value : value;
    if (most == -std::numeric_limits<float>::infinity()) return;
    total = total * std::exp(value - most) + o.total * std::exp(o.value - most);
    if (larger) index = o.index;
    value = most;
  }
};

// An EAGLE head. EAGLE-1: x = fc(embedding, feature). EAGLE-3: x is the feature, and the block's
// first product reads norm(embedding), norm(feature).
struct Head {
  const Tensor& embedding;  // [V, D]
  Weight fc;                // EAGLE-1
  const float *token_norm = nullptr, *feature_norm = nullptr, *last_norm = nullptr;  // EAGLE-3
  bool normed_residual = false, normed_output = false;
  Block block;
  Weight lm_head;

  bool eagle3() const { return token_norm != nullptr; }
};

// Drafts a chain on all threads together; each of them keeps the books by itself.
template <class C>
struct Chain {
  const Head& head;
  Pass<C> pass;       // of one level; rows of the text first
  C *k, *v;
  const float *cos, *sin;  // tables of all positions
  const int64_t* target_ids;
  float *features, *entry, *logits;  // [n, D], [rows, 2 D], [draft vocabulary]
  const float* read;                 // the features of this step
  Activations joined, said;
  Best* bests;  // [threads]
  int64_t seq_len;
  Noise noise;

  float* x(int64_t row) const { return pass.x + row * pass.D; }

  // Rows of tokens and features, as the block reads them.
  void enter(const Worker& me, const int64_t* tokens) {
    const int64_t D = pass.D;
    float* both = pass.own_scratch(me);
    const auto [begin, end] = me.share(pass.T);
    for (int64_t t = begin; t < end; t++) {
      float* out = head.eagle3() ? entry + t * 2 * D : both;
      row_in_fp32(head.embedding, tokens[t], D, out);
      if (head.eagle3()) {
        rms_norm(out, head.token_norm, D, pass.eps, out);
        rms_norm(read + t * D, head.feature_norm, D, pass.eps, out + D);
        const float* residual = head.normed_residual ? out + D : read + t * D;
        std::copy(residual, residual + D, x(t));
      } else {
        std::copy(read + t * D, read + (t + 1) * D, out + D);
        joined.quantize_row(t, out, 2 * D);
      }
    }
    me.team.barrier();
    if (head.eagle3()) return;
    products(me, head.fc, joined, (uint8_t*)both, pass.T, pass.x, D, false);
    me.team.barrier();
  }

  // The likeliest token after the last row, whose feature becomes row 0.
  Best leave(const Worker& me) {
    const int64_t D = pass.D, N = head.lm_head.h.N;
    if (me.id == 0) {
      float* row = x(pass.T - 1);
      float* own = pass.own_scratch(me);
      rms_norm(row, head.last_norm, D, pass.eps, own);  // EAGLE-1 has none
      said.quantize_row(0, own, D);
      const float* feature = head.normed_output ? own : row;
      std::copy(feature, feature + D, features);
    }
    me.team.barrier();
    products(me, head.lm_head, said, (uint8_t*)pass.own_scratch(me), 1, logits, N, false);
    const auto [begin, end] = me.share(head.lm_head.column_blocks);
    const int64_t last = std::min(end * COLUMNS, N);
    if (noise.temperature > 0) noise.add(logits, target_ids, begin * COLUMNS, last);
    bests[me.id] = Best::of(logits, begin * COLUMNS, last);
    me.team.barrier();
    Best best = bests[0];
    for (int i = 1; i < me.size; i++) best.add(bests[i]);
    return best;
  }

  // Row `first` of the text and those behind it: slots and RoPE positions are the same.
  void place(int64_t first, const int64_t* slots, const Visible* seen) {
    const int64_t E = pass.heads.E;
    pass.cos = cos + first * E;
    pass.sin = sin + first * E;
    pass.slots = slots;
    pass.seen = seen;
  }
};

// Bounds by depth; those of the last one hold for all deeper ones.
float at_depth(const std::vector<float>& bounds, int64_t depth) {
  return bounds[std::min<int64_t>(depth, bounds.size() - 1)];
}

// Shows the head the last `n` pairs, `MAX_ROWS` at a time, then drafts on: at most `depth` tokens. A token whose whole
// path is less likely than `keep` is left out; after one less likely than `deepen` none is drafted.
// With a temperature, tokens are ranked with the noise that the target will draw with.
// `slots` and `seen` are those of the n pairs, then of each level. Returns the probabilities of the
// paths, of the one left out as well.
template <class C>
std::vector<float> draft(const Chain<C>& of_all, const int64_t* tokens, int64_t n,
                         const std::vector<int64_t>& slots, const std::vector<Visible>& seen,
                         int64_t depth, const std::vector<float>& keep,
                         const std::vector<float>& deepen, int64_t* drafted) {
  std::vector<float> found;
  in_parallel([&](const Worker& me) {
    Chain<C> chain = of_all;
    int64_t own_token = 0;
    float path = 1.0f;
    const auto step = [&](int64_t first, int64_t rows, const int64_t* ids, const Visible* visible) {
      chain.pass.T = rows;
      chain.place(chain.seq_len - n + first, slots.data() + first, visible);
      chain.enter(me, ids);
      chain.pass.block(me, chain.head.block, chain.k, chain.v, chain.head.eagle3());
    };
    const float* features = chain.features;
    int64_t shown = 0;
    for (; n - shown > MAX_ROWS; shown += MAX_ROWS) {
      chain.pass.row = shown;
      chain.read = features + shown * chain.pass.D;
      step(shown, MAX_ROWS, tokens + shown, &seen[0]);
    }
    chain.pass.row = shown;
    chain.read = features + shown * chain.pass.D;
    for (int64_t level = 0; level < depth; level++) {
      chain.noise.at(chain.seq_len + level + 1);
      if (level) {
        chain.pass.row = 0;
        chain.read = features;
        step(n + level - 1, 1, &own_token, &seen[level]);
      } else {
        step(shown, n - shown, tokens + shown, &seen[0]);
      }
      const Best best = chain.leave(me);
      path *= 1.0f / best.total;
      own_token = chain.target_ids[best.index];
      if (me.id == 0) {
        found.push_back(path);
        drafted[level] = own_token;
      }
      if (!(path >= at_depth(keep, level) && path >= at_depth(deepen, level))) break;
    }
  });
  return found;
}

// `tokens` [P], `features` [P, D]: pairs, of which the first `count` are new. `norms`: those of an
// EAGLE-3 head, or none. Returns the tokens that are kept, and the probabilities of their paths and,
// where the last one drafted is left out, of its path.
std::tuple<Tensor, Tensor> draft_chain(
    const Tensor& tokens, const Tensor& features, const Tensor& count, const Tensor& seq_len,
    const Tensor& embedding, const std::optional<Tensor>& fc, const std::optional<Tensor>& fc_bias,
    at::TensorList norms, bool normed_residual, bool normed_output, at::TensorList tensors,
    const Tensor& lm_head, const Tensor& target_ids, const Tensor& cos, const Tensor& sin,
    at::TensorList caches, int64_t n_head, double eps, const std::optional<Tensor>& temperature,
    const std::optional<Tensor>& seed, int64_t depth, at::ArrayRef<double> keep,
    at::ArrayRef<double> deepen) {
  TORCH_CHECK(!keep.empty() && !deepen.empty(), "bounds of the path probabilities");
  const std::vector<float> verify(keep.begin(), keep.end()), expand(deepen.begin(), deepen.end());
  const int64_t n = count.item<int64_t>(), past = seq_len.item<int64_t>();
  TORCH_CHECK(tensors.size() == TENSORS && caches.size() == 2, "one block");
  check_caches(caches);
  const int64_t D = embedding.size(1), E = caches[0].size(2), S = caches[0].size(1);
  TORCH_CHECK(n >= 1 && n <= tokens.numel() && n <= features.size(0) && n <= past, n, " pairs");
  TORCH_CHECK(depth >= 1 && past + depth - 1 <= S && past + depth - 1 <= cos.size(0), "slots");
  TORCH_CHECK(tokens.is_contiguous() && target_ids.is_contiguous(), "contiguous tokens");
  check_rows(embedding, D);
  check_rows(features, D);
  const Heads heads{n_head, caches[0].size(0), E};
  TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.size(1) == E &&
                  sin.sizes() == cos.sizes(),
              "cos and sin");
  TORCH_CHECK(!temperature.has_value() || seed.has_value(), "a seed");
  TORCH_CHECK(norms.empty() == fc.has_value() && (norms.empty() || norms.size() == 3), "norms or fc");

  Head head{embedding};
  head.block = block_of(tensors.data());
  head.lm_head = Weight(lm_head);
  if (fc.has_value()) {
    head.fc = Weight(*fc, fc_bias.has_value() ? &*fc_bias : nullptr);
    TORCH_CHECK(head.fc.h.N == D && head.fc.h.K == 2 * D, "fc");
  } else {
    for (const Tensor& norm : norms)
      TORCH_CHECK(norm.numel() == D && norm.is_contiguous(), "norms are [D]");
    head.token_norm = norms[0].const_data_ptr<float>();
    head.feature_norm = norms[1].const_data_ptr<float>();
    head.last_norm = norms[2].const_data_ptr<float>();
    head.normed_residual = normed_residual;
    head.normed_output = normed_output;
  }
  // The block of an EAGLE-3 head reads embedding and feature.
  check_block(tensors.data(), head.block, heads, D, fc.has_value() ? D : 2 * D);
  const int64_t N = head.lm_head.h.N, F = head.block.down.h.K;
  TORCH_CHECK(head.lm_head.h.K == D && target_ids.numel() == N, "LM head");
  const int64_t* ids = tokens.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < n; i++)
    TORCH_CHECK(ids[i] >= 0 && ids[i] < embedding.size(0), "token ", ids[i]);

  std::vector<int64_t> slots;
  std::vector<Visible> seen(depth);
  for (int64_t slot = past - n; slot < past + depth - 1; slot++) slots.push_back(slot);
  for (int64_t level = 0; level < depth; level++) {
    const int64_t rows = level ? 1 : n;
    seen[level].shared = level ? past + level : past - n;
    seen[level].begin.push_back(0);
    for (int64_t t = 0; t < rows; t++) {
      if (!level)
        for (int64_t slot = past - n; slot <= past - n + t; slot++) seen[level].own.push_back(slot);
      seen[level].begin.push_back(seen[level].own.size());
    }
  }
  Tensor drafted = at::empty({depth}, tokens.options());
  std::vector<float> found;
  const auto run = [&](auto element) {
    using C = decltype(element);
    thread_local Scratch scratch;
    const int threads = at::get_num_threads();
    Chain<C> chain{head};
    Pass<C>& pass = chain.pass;
    pass.heads = heads;
    pass.D = D;
    pass.F = F;
    pass.S = S;
    pass.row = 0;
    pass.eps = float(eps);
    pass.entry_dim = head.eagle3() ? 2 * D : 0;
    const int64_t most = std::min<int64_t>(n, MAX_ROWS);
    const size_t more = Activations::bytes(most, 2 * D) + Activations::bytes(1, D) +
                        4 * size_t((n + 3 * most) * D + N) + sizeof(Best) * threads + 1024;
    arrange(pass, scratch, most, past + depth, more);
    chain.joined = scratch.activations(most, 2 * D);
    chain.said = scratch.activations(1, D);
    pass.x = scratch.take<float>(most * D);
    chain.features = scratch.take<float>(n * D);
    chain.entry = scratch.take<float>(most * 2 * D);
    chain.logits = scratch.take<float>(N);
    chain.bests = scratch.take<Best>(threads);
    pass.entry = head.eagle3() ? chain.entry : nullptr;
    chain.k = (C*)caches[0].data_ptr();
    chain.v = (C*)caches[1].data_ptr();
    chain.cos = cos.const_data_ptr<float>();
    chain.sin = sin.const_data_ptr<float>();
    chain.target_ids = target_ids.const_data_ptr<int64_t>();
    chain.seq_len = past;
    if (temperature.has_value()) {
      chain.noise.temperature = temperature->item<float>();
      chain.noise.seed = uint64_t(seed->item<int64_t>());
    }
    for (int64_t t = 0; t < n; t++) row_in_fp32(features, t, D, chain.features + t * D);
    found = draft(chain, ids, n, slots, seen, depth, verify, expand,
                  drafted.mutable_data_ptr<int64_t>());
  };
  if (caches[0].scalar_type() == at::kBFloat16) {
    run(Bf16{});
  } else {
    TORCH_CHECK(caches[0].scalar_type() == at::kFloat, "caches in bf16 or fp32");
    run(0.0f);
  }
  int64_t kept = found.size();
  if (!(found.back() >= at_depth(verify, kept - 1))) kept--;
  Tensor paths = at::empty({(int64_t)found.size()}, embedding.options().dtype(at::kFloat));
  std::copy(found.begin(), found.end(), paths.mutable_data_ptr<float>());
  return {drafted.slice(0, 0, kept), paths};
}

// ---------------------------------------------------------------------------------------------
// Lookup

constexpr int CLASSES = 8;  // of match sizes and of depths: 1 .. 7, and all above
constexpr float TABLE_MEMORY = 128.0f;

constexpr int64_t KEY_TOKENS = 3, KEY_BITS = 21, WINDOW = 256;  // as in drafting/lookup.py

struct Match {
  int64_t size = 0, end = 0;  // tokens, and where the last one stands
};

// Where the end of the text stands in `corpus` (tokens, sorted keys, their order: `Corpus` in
// drafting/lookup.py), the longest match, among equals the latest. At most WINDOW places are compared.
Match find_in_corpus(at::TensorList corpus, const int64_t* text, int64_t last, int64_t longest) {
  const int64_t* tokens = corpus[0].const_data_ptr<int64_t>();
  const int64_t *keys = corpus[1].const_data_ptr<int64_t>(), *keys_end = keys + corpus[1].numel();
  const int64_t* order = corpus[2].const_data_ptr<int64_t>();
  Match best;
  for (int64_t n = std::min({KEY_TOKENS, longest, last + 1}); n > 0 && !best.size; n--) {
    int64_t low = 0;
    for (int64_t i = 0; i < n; i++) low |= (text[last - i] + 1) << KEY_BITS * (KEY_TOKENS - 1 - i);
    const int64_t high = low + (int64_t(1) << KEY_BITS * (KEY_TOKENS - n)) - 1;
    const int64_t first = std::lower_bound(keys, keys_end, low) - keys;
    const int64_t behind = std::upper_bound(keys + first, keys_end, high) - keys;
    for (int64_t i = behind - 1; i >= std::max(first, behind - WINDOW); i--) {
      const int64_t end = order[i];
      int64_t size = n;
      while (size < longest && size <= std::min(last, end) && tokens[end - size] == text[last - size])
        size++;
      if (size > best.size || (size == best.size && end > best.end)) best = {size, end};
    }
  }
  return best;
}

// The latest of the longest earlier matches of the text's own end, at most `longest` tokens long.
Match find_in_text(const int64_t* text, int64_t last, int64_t longest) {
  Match best;
  for (int64_t i = last - 1; i >= 0 && best.size < longest; i--) {
    if (text[i] != text[last]) continue;
    int64_t n = 1;
    while (n < longest && n <= i && text[i - n] == text[last - n]) n++;
    if (n > best.size) best = {n, i};
  }
  return best;
}

// What followed the longest match in the text, or in `corpus` (empty, or see above) if a longer one is
// there; how likely each path is; and how many tokens more than their cost of `keep` each they promise.
// Tokens whose paths are less likely than `keep` are left out. A table [2, 8, 8] of how many tokens were
// tried and right, by match size and depth, says how likely; it first learns from the `kept` proposal
// [4 + R]: where its root stood, the root, the match size, how many tokens, and these.
std::tuple<Tensor, Tensor, double> look_up(const Tensor& text_, const Tensor& last_,
                                           const Tensor& table_, const Tensor& kept_,
                                           at::TensorList corpus, int64_t longest, int64_t reach,
                                           double keep) {
  const int64_t last = last_.item<int64_t>(), *text = text_.const_data_ptr<int64_t>();
  TORCH_CHECK(last >= 0 && last < text_.numel() && text_.is_contiguous(), "last token at ", last);
  TORCH_CHECK(table_.numel() == 2 * CLASSES * CLASSES && kept_.numel() >= 4 + reach &&
                  table_.is_contiguous() && kept_.is_contiguous() && reach >= 0,
              "a table");
  float *tried = table_.mutable_data_ptr<float>(), *right = tried + CLASSES * CLASSES;
  int64_t* kept = kept_.mutable_data_ptr<int64_t>();
  const auto cell = [](int64_t size, int64_t depth) {
    return std::min<int64_t>(size, CLASSES) * CLASSES - CLASSES + std::min<int64_t>(depth, CLASSES) - 1;
  };
  // One cycle later; more tokens behind its root are a new turn or another text.
  if (kept[0] <= last && last <= kept[0] + reach + 1 && text[kept[0]] == kept[1] &&
      kept[2]) {
    for (int64_t i = 0; i < kept[3] && kept[0] + 1 + i <= last; i++) {
      const int64_t c = cell(kept[2], i + 1);
      const bool is_right = text[kept[0] + 1 + i] == kept[4 + i];
      tried[c] += 1.0f;
      right[c] += is_right;
      if (!is_right) break;
    }
    for (int64_t depth = 1; depth <= CLASSES; depth++) {
      const int64_t c = cell(kept[2], depth);
      const float share = std::min(1.0f, TABLE_MEMORY / tried[c]);
      tried[c] *= share;
      right[c] *= share;
    }
  }
  TORCH_CHECK(corpus.empty() || corpus.size() == 3, "a corpus: tokens, keys, order");
  const Match here = find_in_text(text, last, longest);
  const Match there = corpus.empty() ? Match{} : find_in_corpus(corpus, text, last, longest);
  const int64_t size = std::max(here.size, there.size);
  std::vector<int64_t> found;
  if (there.size > here.size) {
    const int64_t* tokens = corpus[0].const_data_ptr<int64_t>();
    const int64_t end = std::min(there.end + 1 + reach, corpus[0].numel());
    for (int64_t i = there.end + 1; i < end && tokens[i] >= 0; i++) found.push_back(tokens[i]);
  } else if (size) {  // a text that goes round in circles is expected to go on doing so
    for (int64_t i = 0; i < reach; i++) found.push_back(text[here.end + 1 + i % (last - here.end)]);
  }
  const int64_t n = found.size();
  kept[0] = last;
  kept[1] = text[last];
  kept[2] = size;
  kept[3] = n;
  std::copy(found.begin(), found.end(), kept + 4);
  std::vector<float> paths;
  double gain = 0.0;
  for (float path = 1.0f; (int64_t)paths.size() < n;) {
    const int64_t c = cell(size, paths.size() + 1);
    path *= std::min(1.0f, std::max(1e-3f, right[c] / tried[c]));
    if (path < float(keep)) break;
    paths.push_back(path);
    gain += path - keep;
  }
  Tensor tokens = at::empty({(int64_t)paths.size()}, text_.options());
  Tensor likely = at::empty({(int64_t)paths.size()}, table_.options());
  std::copy_n(found.begin(), paths.size(), tokens.mutable_data_ptr<int64_t>());
  std::copy(paths.begin(), paths.end(), likely.mutable_data_ptr<float>());
  return {tokens, likely, gain};
}

// ---------------------------------------------------------------------------------------------
// A whole pass, and what follows it

inline void put_row(Tensor& out, int64_t row, const float* x, int64_t n) {
  if (out.scalar_type() == at::kFloat) {
    std::copy(x, x + n, out.mutable_data_ptr<float>() + row * n);
  } else {
    Bf16* to = (Bf16*)out.mutable_data_ptr() + row * n;
    for (int64_t i = 0; i < n; i++) put(to + i, x[i]);
  }
}

// A target whose weights are all packed: from tokens to logits in one call. Python code between two
// operations would run out of cold caches, through which the weights have just gone.
struct Target : torch::CustomClassHolder {
  std::vector<Tensor> owned;  // keeps the memory of what follows
  std::vector<Block> blocks;
  Weight lm_head;
  const float *norm, *cos, *sin;
  Tensor embedding;
  int64_t n_head, window, D, E, F, kv_heads, positions;
  float eps;

  Target(std::vector<Tensor> tensors, Tensor embedding_, Tensor cos_, Tensor sin_, Tensor norm_,
         Tensor lm_head_, int64_t n_head_, int64_t window_, double eps_)
      : owned(std::move(tensors)), embedding(embedding_), n_head(n_head_), window(window_),
        eps(float(eps_)) {
    TORCH_CHECK(!owned.empty() && owned.size() % TENSORS == 0, "nine tensors of each block");
    for (size_t i = 0; i < owned.size(); i += TENSORS) blocks.push_back(block_of(&owned[i]));
    lm_head = Weight(lm_head_);
    norm = norm_.const_data_ptr<float>();
    cos = cos_.const_data_ptr<float>();
    sin = sin_.const_data_ptr<float>();
    D = embedding.size(1);
    E = cos_.size(1);
    F = blocks[0].down.h.K;
    check_rows(embedding, D);
    TORCH_CHECK(cos_.is_contiguous() && sin_.is_contiguous() && sin_.sizes() == cos_.sizes() &&
                    norm_.numel() == D,
                "tables");
    TORCH_CHECK(lm_head.h.K == D && E > 0, "LM head");
    positions = cos_.size(0);
    kv_heads = (blocks[0].qkv.h.N / E - n_head) / 2;
    for (size_t i = 0; i < blocks.size(); i++) {
      check_block(&owned[i * TENSORS], blocks[i], Heads{n_head, kv_heads, E}, D, D);
      TORCH_CHECK(blocks[i].down.h.K == F, "blocks of one shape");
    }
    owned.insert(owned.end(), {cos_, sin_, norm_, lm_head_});
  }

  // Logits [T, V] in fp32, features [T, D] like `features_like`, and the residual stream entering
  // the blocks `taps` [T, R * D] in fp32. `rows` are the planes of the cache [2 L, G, S, E].
  std::tuple<Tensor, Tensor, Tensor> run(Tensor tokens, Tensor seq_len, Tensor paths, Tensor depths,
                                         Tensor rows, std::vector<int64_t> taps,
                                         Tensor features_like) const {
    const int64_t T = tokens.numel(), past = seq_len.item<int64_t>(), L = blocks.size();
    const int64_t G = rows.size(1), S = rows.size(2), N = lm_head.h.N;
    TORCH_CHECK(T >= 1 && T <= MAX_ROWS && depths.numel() == T, T, " rows");
    TORCH_CHECK(rows.is_contiguous() && rows.size(0) == 2 * L && G == kv_heads && rows.size(3) == E,
                "cache");
    TORCH_CHECK(paths.dim() == 2 && paths.is_contiguous() && paths.size(0) == T &&
                    depths.is_contiguous() && tokens.is_contiguous(),
                "tree");
    TORCH_CHECK(features_like.scalar_type() == at::kFloat ||
                    features_like.scalar_type() == at::kBFloat16,
                "features in fp32 or bf16");
    TORCH_CHECK(past >= 0 && past + T <= S, "slot ", past + T - 1, " of ", S);
    const int64_t *ids = tokens.const_data_ptr<int64_t>(), *depth = depths.const_data_ptr<int64_t>();
    check_depths(depths, paths.size(1));
    for (int64_t t = 0; t < T; t++) {
      TORCH_CHECK(ids[t] >= 0 && ids[t] < embedding.size(0), "token ", ids[t]);
      TORCH_CHECK(past + depth[t] < positions, "position ", past + depth[t], " of ", positions);
    }
    const Visible seen =
        Visible::of_tree(past, paths.const_data_ptr<int32_t>(), paths.size(1), depth, T, window);
    for (const int64_t slot : seen.own) TORCH_CHECK(slot >= 0 && slot < S, "slot ", slot);
    Tensor logits = at::empty({T, N}, rows.options().dtype(at::kFloat));
    Tensor features = at::empty({T, D}, features_like.options());
    Tensor tapped = at::empty({T, (int64_t)taps.size() * D}, rows.options().dtype(at::kFloat));
    if (rows.scalar_type() == at::kBFloat16) {
      pass<Bf16>(ids, depth, past, seen, rows, taps, G, S, logits, features, tapped);
    } else {
      TORCH_CHECK(rows.scalar_type() == at::kFloat, "caches in bf16 or fp32");
      pass<float>(ids, depth, past, seen, rows, taps, G, S, logits, features, tapped);
    }
    return {logits, features, tapped};
  }

 private:
  template <class C>
  void pass(const int64_t* ids, const int64_t* depth, int64_t past, const Visible& seen,
            const Tensor& rows, const std::vector<int64_t>& taps, int64_t G, int64_t S,
            Tensor& logits, Tensor& features, Tensor& tapped) const {
    thread_local Scratch scratch;
    const int64_t T = features.size(0), N = lm_head.h.N, R = taps.size();
    int64_t longest = 0;
    for (int64_t t = 0; t < T; t++) longest = std::max(longest, seen.length(t));
    Pass<C> pass{};
    pass.heads = Heads{n_head, G, E};
    pass.D = D;
    pass.F = F;
    pass.S = S;
    pass.T = T;
    pass.eps = eps;
    arrange(pass, scratch, T, longest, 4 * size_t(T * (D + 2 * E)) + 8 * T + 512);
    float* x = pass.x = scratch.take<float>(T * D);
    float *c = scratch.take<float>(T * E), *s = scratch.take<float>(T * E);
    int64_t* slots = scratch.take<int64_t>(T);
    for (int64_t t = 0; t < T; t++) {
      slots[t] = past + t;
      std::copy_n(cos + (past + depth[t]) * E, E, c + t * E);
      std::copy_n(sin + (past + depth[t]) * E, E, s + t * E);
      row_in_fp32(embedding, ids[t], D, x + t * D);
    }
    pass.cos = c;
    pass.sin = s;
    pass.slots = slots;
    pass.seen = &seen;
    C* cache = (C*)rows.data_ptr();
    float *out = logits.mutable_data_ptr<float>(), *tap_rows = tapped.mutable_data_ptr<float>();
    in_parallel([&](const Worker& me) {
      Pass<C> mine = pass;
      const auto [begin, end] = me.share(T);
      const auto tap = [&](int64_t layer) {
        for (int64_t r = 0; r < R; r++)
          for (int64_t t = begin; t < end && taps[r] == layer; t++)
            std::copy_n(x + t * D, D, tap_rows + (t * R + r) * D);
      };
      for (size_t i = 0; i < blocks.size(); i++) {
        if (R) tap(i);
        mine.block(me, blocks[i], cache + 2 * i * G * S * E, cache + (2 * i + 1) * G * S * E, false);
      }
      if (R) tap(blocks.size());
      float* own = mine.own_scratch(me);
      for (int64_t t = begin; t < end; t++) {
        rms_norm(x + t * D, norm, D, eps, own);
        put_row(features, t, own, D);
        row_in_fp32(features, t, D, own);  // rounded, as every reader of features sees them
        mine.normed.quantize_row(t, own, D);
      }
      me.team.barrier();
      products(me, lm_head, mine.normed, (uint8_t*)own, T, out, N, false);
    });
  }
};

// ---------------------------------------------------------------------------------------------
// Single operations

// x [T, K] @ w.T in fp32 [T, N], plus the bias [N] (fp32) where there is one.
// `n` is N, for those who cannot look into the weight.
Tensor linear(const Tensor& x_, const Tensor& packed, const std::optional<Tensor>& bias,
              int64_t n) {
  const Weight w(packed, bias.has_value() ? &*bias : nullptr);
  TORCH_CHECK(n == w.h.N, "n is ", w.h.N);
  const Tensor x = x_.contiguous();
  check_rows(x, w.h.K);
  const int64_t T = x.size(0), K = w.h.K, N = w.h.N;
  Tensor y = at::empty({T, N}, x.options().dtype(at::kFloat));
  thread_local Scratch scratch;
  const int threads = at::get_num_threads();
  const int64_t own_size = (std::max<int64_t>(K, Choice::bytes(T, K) / 4 + 1) + 63) / 64 * 64;
  scratch.reserve(Activations::bytes(T, K) + 4 * size_t(threads) * own_size);
  const Activations a =
      Activations::at(scratch.take<uint8_t>(Activations::bytes(T, K)), T, K);
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

// The largest of columns `begin` .. `end - 1` and its first place; NaN where there is one.
inline std::pair<float, int64_t> largest_of(const float* x, int64_t begin, int64_t end) {
  VF best[4], bad = {};
  for (VF& b : best) b = splat(-std::numeric_limits<float>::infinity());
  int64_t i = begin;
  for (; i + 4 * W <= end; i += 4 * W) {
    for (int j = 0; j < 4; j++) {
      const VF v = load(x + i + j * W);
      best[j] = larger(v, best[j]);
      bad += v * 0.0f;
    }
  }
  float most = largest(larger(larger(best[0], best[1]), larger(best[2], best[3])));
  float wrong = sum(bad);
  for (; i < end; i++) {
    most = x[i] > most ? x[i] : most;
    wrong += x[i] * 0.0f;
  }
  if (wrong != wrong) {  // NaN or infinite somewhere: what torch.max says
    for (i = begin; i < end; i++)
      if (x[i] != x[i]) return {x[i], i};
  }
  for (i = begin; i < end; i++)
    if (x[i] == most) return {most, i};
  return {most, begin};
}

// Whether a value that comes later replaces the largest so far: NaN does, and stays.
inline bool replaces(float value, float largest) {
  return largest == largest && !(value <= largest);
}

// Of each row of fp32 logits [T, V] the largest and its first place, as torch.max(dim=-1).
std::tuple<Tensor, Tensor> maximum(const Tensor& x_) {
  const Tensor x = x_.contiguous();
  TORCH_CHECK(x.dim() == 2 && x.scalar_type() == at::kFloat && x.size(1) > 0, "fp32 [T, V]");
  const int64_t T = x.size(0), V = x.size(1);
  Tensor values = at::empty({T}, x.options());
  Tensor places = at::empty({T}, x.options().dtype(at::kLong));
  const float* rows = x.const_data_ptr<float>();
  const int threads = at::get_num_threads();
  std::vector<std::pair<float, int64_t>> found(T * threads);
  int used = 1;
  in_parallel([&](const Worker& me) {
    if (me.id == 0) used = me.size;
    // The columns that this worker has computed, where an LM head of ours did.
    const auto share = me.share((V + COLUMNS - 1) / COLUMNS);
    const int64_t begin = share.begin * COLUMNS, end = std::min(share.end * COLUMNS, V);
    for (int64_t t = 0; t < T; t++) found[t * threads + me.id] = largest_of(rows + t * V, begin, end);
  });
  for (int64_t t = 0; t < T; t++) {
    auto best = found[t * threads];
    for (int i = 1; i < used; i++) {
      const auto& next = found[t * threads + i];
      if (replaces(next.first, best.first)) best = next;
    }
    values.mutable_data_ptr<float>()[t] = best.first;
    places.mutable_data_ptr<int64_t>()[t] = best.second;
  }
  return {values, places};
}

// As `maximum`, of one row of logits [V] over the temperature with noise.
std::pair<float, int64_t> drawn_of(const float* x, int64_t V, const Noise& noise) {
  constexpr int64_t PART = 512;  // columns at a time
  std::vector<std::pair<float, int64_t>> found(at::get_num_threads());
  int used = 1;
  in_parallel([&](const Worker& me) {
    if (me.id == 0) used = me.size;
    alignas(64) float scores[PART];
    const auto [begin, end] = me.share(V);
    auto& best = found[me.id] = {-std::numeric_limits<float>::infinity(), begin};
    for (int64_t i = begin; i < end; i += PART) {
      const int64_t n = std::min(PART, end - i);
      noise.add_to(x + i, i, n, scores);
      const auto [value, place] = largest_of(scores, 0, n);
      if (replaces(value, best.first)) best = {value, i + place};
    }
  });
  auto best = found[0];
  for (int i = 1; i < used; i++)
    if (replaces(found[i].first, best.first)) best = found[i];
  return best;
}

// Which tokens may be drawn: `sampling.process_logits`.
struct Filters {
  int64_t top_k = 0;                  // 0: all
  float top_p = 1.0f, min_p = 0.0f;  // 1, 0: all

  bool any() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
};

struct Likely {
  float score, weight;  // the logit over the temperature, and exp(score - best score)
  int64_t token;
};

// The tokens that the filters leave, in any order, of `weights` [V] that add up to `total`. Nearly
// always those of some weight decide; only they are looked at.
void keep_likely(const float* x, const float* weights, int64_t V, float temperature, double total,
                 const Filters& filters, std::vector<Likely>& kept) {
  const bool ranked = filters.top_k > 0 || filters.top_p < 1.0f;
  for (const float least : {1e-4f, 1e-7f, std::numeric_limits<float>::min()}) {
    const float cut = ranked ? least : std::max(filters.min_p, std::numeric_limits<float>::min());
    double mass = 0.0;
    kept.clear();
    for (int64_t i = 0; i < V; i += W) {
      if (i + W <= V && !(largest(load(weights + i)) >= cut)) continue;
      for (int64_t j = i; j < std::min(i + W, V); j++)
        if (weights[j] >= cut) {
          kept.push_back({x[j] / temperature, weights[j], j});
          mass += weights[j];
        }
    }
    if (!ranked) return;
    if (filters.top_k > 0 ? (int64_t)kept.size() >= filters.top_k
                          : mass >= double(filters.top_p) * total)
      break;
  }
  const auto drop = [&](auto less_likely) {  // equal ones stay together
    kept.erase(std::remove_if(kept.begin(), kept.end(), less_likely), kept.end());
  };
  const auto likelier = [](const Likely& a, const Likely& b) { return a.score > b.score; };
  if (filters.top_k > 0 && filters.top_k < (int64_t)kept.size()) {
    std::nth_element(kept.begin(), kept.begin() + filters.top_k - 1, kept.end(), likelier);
    const float kth = kept[filters.top_k - 1].score;
    drop([&](const Likely& one) { return one.score < kth; });
  }
  if (filters.top_p < 1.0f && !kept.empty()) {
    std::sort(kept.begin(), kept.end(), likelier);
    if (filters.top_k > 0) {
      total = 0.0;
      for (const Likely& one : kept) total += one.weight;
    }
    double mass = 0.0;
    size_t last = 0;
    while ((mass += kept[last].weight) < double(filters.top_p) * total && last + 1 < kept.size())
      last++;
    const float least = kept[last].weight;
    drop([&](const Likely& one) { return one.weight < least; });
  }
  if (filters.min_p > 0.0f)
    drop([&](const Likely& one) { return one.weight < filters.min_p; });
}

// As `drawn_of`, of the tokens that the filters leave. The same for any number of threads.
std::pair<float, int64_t> drawn_among(const float* x, int64_t V, const Noise& noise,
                                      const Filters& filters) {
  constexpr int64_t PART = 512;  // columns of one sum
  const int64_t parts = (V + PART - 1) / PART;
  thread_local std::vector<float> weights_of_row;
  thread_local std::vector<Likely> kept;
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
  keep_likely(x, weights, V, noise.temperature, total, filters, kept);
  if (kept.empty()) return {NAN, 0};
  std::vector<float> scores;
  std::vector<int64_t> tokens;
  for (const Likely& one : kept) {
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

// Accept and commit a cycle: `cycle.accept_and_commit`. The path along the target's own tokens, its
// cache rows moved behind the text unless they lie there, and all of the state brought to the next
// cycle. `state`: seq_len, root, count, tokens, features, text, result, cache rows. With a
// temperature or a penalty the rows of the path are drawn from, one after the other, and no others.
void finish_cycle(const Tensor& logits, const Tensor& read, const Tensor& tokens,
                  const Tensor& parents, const Tensor& valid, const std::optional<Tensor>& sources,
                  at::TensorList state, const std::optional<Tensor>& temperature,
                  const std::optional<Tensor>& seed, const std::optional<Tensor>& top_k,
                  const std::optional<Tensor>& top_p, const std::optional<Tensor>& min_p,
                  const std::optional<Tensor>& seen, const std::optional<Tensor>& penalty,
                  int64_t depth, bool in_place, bool extends, bool keeps) {
  const int64_t T = tokens.numel();
  TORCH_CHECK(state.size() == 8 && logits.dim() == 2 && logits.size(0) == T && T > 0 && depth >= 0,
              "a state and a tree");
  TORCH_CHECK(parents.numel() == T && valid.numel() == T && tokens.is_contiguous() &&
                  parents.is_contiguous() && valid.is_contiguous(),
              "a parent and a flag for each row");
  if (sources.has_value())
    TORCH_CHECK(sources->numel() == T && sources->is_contiguous(), "a source for each row");
  for (const int i : {0, 1, 2, 5, 6})
    TORCH_CHECK(state[i].is_contiguous() && state[i].numel() > 0, "contiguous state");
  const int64_t* ids = tokens.const_data_ptr<int64_t>();
  const int64_t* parent = parents.const_data_ptr<int64_t>();
  const bool* is_valid = valid.const_data_ptr<bool>();
  std::vector<int64_t> drawn(T, BAD_ROW), level(T, 0);
  Noise noise;
  Filters filters;
  if (top_k.has_value()) filters.top_k = top_k->item<int64_t>();
  if (top_p.has_value()) filters.top_p = top_p->item<float>();
  if (min_p.has_value()) filters.min_p = min_p->item<float>();
  const bool by_row = temperature.has_value() || penalty.has_value();
  const int64_t V = logits.size(1);
  const Tensor rows_of_logits = by_row ? logits.contiguous() : logits;
  if (by_row) {
    TORCH_CHECK(logits.scalar_type() == at::kFloat && V > 0, "fp32 logits [T, V]");
    TORCH_CHECK(temperature.has_value() == seed.has_value(), "a temperature and a seed");
    if (temperature.has_value()) {
      noise.temperature = temperature->item<float>();
      noise.seed = uint64_t(seed->item<int64_t>());
    }
  } else {
    const auto [values, places] = maximum(logits);
    for (int64_t t = 0; t < T; t++)
      if (std::isfinite(values.const_data_ptr<float>()[t]))
        drawn[t] = places.const_data_ptr<int64_t>()[t];
  }
  TORCH_CHECK(seen.has_value() == penalty.has_value(), "a penalty and the tokens under it");
  bool* was_seen = nullptr;
  float factor = 1.0f;
  if (penalty.has_value()) {
    TORCH_CHECK(seen->numel() == V && seen->scalar_type() == at::kBool && seen->is_contiguous(),
                "a flag for each token");
    was_seen = (bool*)seen->data_ptr();
    factor = penalty->item<float>();
  }
  std::vector<float> penalized;
  std::vector<int64_t> path_tokens;  // of the living rows so far
  const auto draw = [&](int64_t t, int64_t position) {
    const float* row = rows_of_logits.const_data_ptr<float>() + t * V;
    if (was_seen) {
      const auto lowered = [&](float x) { return x < 0 ? x * factor : x / factor; };
      penalized.resize(V);
      for (int64_t i = 0; i < V; i++) penalized[i] = was_seen[i] ? lowered(row[i]) : row[i];
      for (const int64_t token : path_tokens) penalized[token] = lowered(row[token]);
      row = penalized.data();
    }
    if (!temperature.has_value()) return largest_of(row, 0, V);
    noise.at(position);
    return filters.any() ? drawn_among(row, V, noise, filters) : drawn_of(row, V, noise);
  };
  std::vector<bool> alive(T, false);
  int64_t last = 0, n_valid = 0;
  for (int64_t t = 0; t < T; t++) {
    n_valid += is_valid[t];
    if (t == 0) {
      alive[0] = true;
    } else {
      const int64_t p = parent[t];
      TORCH_CHECK(p >= 0 && p < t, "parent ", p, " of row ", t);
      level[t] = level[p] + 1;
      alive[t] = is_valid[t] && alive[p] && ids[t] == drawn[p];
      if (alive[t] && level[t] > level[last]) last = t;
    }
    if (alive[t] && by_row) {
      if (was_seen) {
        TORCH_CHECK(ids[t] >= 0 && ids[t] < V, "token ", ids[t]);
        path_tokens.push_back(ids[t]);
      }
      const auto [best, place] = draw(t, state[0].item<int64_t>() + 1 + level[t]);
      if (std::isfinite(best)) drawn[t] = place;
    }
  }
  const int64_t count = level[last] + 1;
  TORCH_CHECK(count <= depth + 1, "a path of ", count - 1, " levels");
  std::vector<int64_t> path(depth + 1, 0);
  for (int64_t t = last, i = count - 1; i > 0; t = parent[t], i--) path[i] = t;

  int64_t& seq_len = *state[0].mutable_data_ptr<int64_t>();
  int64_t& root = *state[1].mutable_data_ptr<int64_t>();
  int64_t& pending = *state[2].mutable_data_ptr<int64_t>();
  int64_t* text = state[5].mutable_data_ptr<int64_t>();
  int64_t* result = state[6].mutable_data_ptr<int64_t>();
  const int64_t size = state[6].numel();
  TORCH_CHECK(seq_len >= 0 && seq_len + depth + 2 <= state[5].numel() && depth + 4 <= size, "room for the path");
  if (!in_place && depth) {
    const Tensor& rows = state[7];
    TORCH_CHECK(rows.dim() == 4 && rows.is_contiguous() && seq_len + T <= rows.size(2), "cache");
    const int64_t planes = rows.size(0) * rows.size(1), S = rows.size(2);
    const size_t bytes = rows.size(3) * rows.element_size();
    uint8_t* memory = (uint8_t*)rows.data_ptr();
    for (int64_t plane = 0; plane < planes; plane++)
      for (int64_t i = 1; i < count; i++)
        if (path[i] != i)
          std::memcpy(memory + (plane * S + seq_len + i) * bytes,
                      memory + (plane * S + seq_len + path[i]) * bytes, bytes);
  }
  std::fill_n(result, size, PAD);
  const int64_t first = extends ? 0 : pending;
  int64_t by_head = 0, by_lookup = 0;
  if (keeps) {
    TORCH_CHECK(first >= 0 && first + depth + 1 <= state[3].numel() && state[4].dim() == 2 &&
                    first + count <= state[4].size(0) && state[3].is_contiguous(),
                "room for pairs");
    TORCH_CHECK(read.dim() == 2 && read.size(0) == T, "features of each row");
    check_rows(read, state[4].size(1));
    check_rows(state[4], state[4].size(1));
  }
  std::vector<float> row(keeps ? read.size(1) : 0);
  Tensor features = state[4];
  for (int64_t i = 0; i <= depth; i++) {
    const int64_t token = i < count ? drawn[path[i]] : PAD, shown = std::max<int64_t>(token, 0);
    result[i] = token;
    text[seq_len + 1 + i] = shown;
    if (sources.has_value()) {
      const int64_t source = sources->const_data_ptr<int64_t>()[path[i]];
      by_head += (source & 1) != 0;
      by_lookup += (source & 2) != 0;
    }
    if (keeps && i < count) {
      state[3].mutable_data_ptr<int64_t>()[first + i] = shown;
      row_in_fp32(read, path[i], row.size(), row.data());
      put_row(features, first + i, row.data(), row.size());
    }
  }
  if (sources.has_value()) {
    result[size - 3] = by_head;
    result[size - 2] = by_lookup;
  }
  result[size - 1] = n_valid - 1;
  if (keeps) pending = first + count;
  if (was_seen) {
    TORCH_CHECK(root >= 0 && root < V, "token ", root);
    was_seen[root] = true;
    for (int64_t i = 0; i < count; i++) was_seen[std::max<int64_t>(drawn[path[i]], 0)] = true;
  }
  root = std::max<int64_t>(drawn[last], 0);
  seq_len += count;
}

// RMSNorm of fp32 rows [T, D] with weight [D] (fp32), each row on its own.
Tensor norm(const Tensor& x_, const Tensor& weight, double eps) {
  const Tensor x = x_.contiguous();
  TORCH_CHECK(x.scalar_type() == at::kFloat && weight.numel() == x.size(-1), "fp32 rows");
  Tensor y = at::empty(x.sizes(), x.options());
  const int64_t D = x.size(-1);
  for (int64_t t = 0; t < x.numel() / D; t++)
    rms_norm(x.const_data_ptr<float>() + t * D, weight.const_data_ptr<float>(), D, float(eps),
             y.mutable_data_ptr<float>() + t * D);
  return y;
}

// The values of rows `index` [n] of a packed weight, in fp32 [n, K]; `k` is K.
Tensor rows(const Tensor& packed, const Tensor& index_, int64_t k_) {
  const Weight w(packed);
  const Tensor index = index_.contiguous();
  const int64_t n = index.numel(), K = w.h.K;
  TORCH_CHECK(k_ == K, "k is ", K);
  Tensor y = at::empty({n, K}, packed.options().dtype(at::kFloat));
  for (int64_t i = 0; i < n; i++) {
    const int64_t row = index.const_data_ptr<int64_t>()[i], column = row % COLUMNS;
    TORCH_CHECK(row >= 0 && row < w.h.N, "row ", row, " of ", w.h.N);
    const uint8_t* block = w.data + row / COLUMNS * w.h.stride;
    float* out = y.mutable_data_ptr<float>() + i * K;
    const auto parameter = [&](const uint8_t* at, int64_t j) {
      return w.h.wide ? ((const float*)at)[j] : half_to_float(((const uint16_t*)at)[j]);
    };
    for (int64_t k = 0; k < K; k++) {
      const int64_t b = k / BLOCK, g = b / w.h.group_blocks, quad = k % BLOCK / 4;
      const int64_t lines = w.h.bits == 4 ? 4 : 8;
      const uint8_t byte =
          block[(b * lines + quad % lines) * 4 * COLUMNS + column * 4 + k % 4];
      const int value = w.h.bits == 8 ? byte : quad < 4 ? byte & 15 : byte >> 4;
      const float scale = parameter(block + w.h.scales_at, g * COLUMNS + column);
      const float q = float(value - w.h.base);
      float second = w.h.second ? parameter(block + w.h.second_at, g * COLUMNS + column) : 0.0f;
      out[k] = w.h.second == 2 ? (q - second) * scale : q * scale + second;
    }
  }
  return y;
}

int64_t isa() { return FASTEAGLE_ISA; }

}  // namespace

TORCH_LIBRARY(FASTEAGLE_NAMESPACE, m) {
  m.def(
      "blocks(Tensor x, Tensor cos, Tensor sin, Tensor slots, Tensor? mask, Tensor? seq_len, "
      "Tensor? paths, Tensor? depths, int window, Tensor(a!)[] caches, Tensor[] tensors, "
      "int n_head, float eps, Tensor? entry=None) -> Tensor");
  m.def(
      "draft_chain(Tensor tokens, Tensor features, Tensor count, Tensor seq_len, "
      "Tensor embedding, Tensor? fc, Tensor? fc_bias, Tensor[] norms, bool normed_residual, "
      "bool normed_output, Tensor[] tensors, Tensor lm_head, Tensor target_ids, Tensor cos, "
      "Tensor sin, Tensor(a!)[] caches, int n_head, float eps, Tensor? temperature, "
      "Tensor? seed, int depth, float[] keep, float[] deepen) -> (Tensor, Tensor)");
  m.def(
      "finish_cycle(Tensor logits, Tensor read, Tensor tokens, Tensor parents, Tensor valid, "
      "Tensor? sources, Tensor(a!)[] state, Tensor? temperature, Tensor? seed, Tensor? top_k, "
      "Tensor? top_p, Tensor? min_p, Tensor(b!)? seen, Tensor? penalty, int depth, bool in_place, "
      "bool extends, bool keeps) -> ()");
  m.class_<Target>("Target")
      .def(torch::init<std::vector<Tensor>, Tensor, Tensor, Tensor, Tensor, Tensor, int64_t, int64_t,
                       double>())
      .def("run", &Target::run);
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int n) -> Tensor");
  m.def(
      "look_up(Tensor text, Tensor last, Tensor(a!) table, Tensor(b!) kept, Tensor[] corpus, "
      "int longest, int reach, float keep) -> (Tensor, Tensor, float)");
  m.def("maximum(Tensor x) -> (Tensor, Tensor)");
  m.def("norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("rows(Tensor packed, Tensor index, int k) -> Tensor");
  m.def("isa() -> int", &isa);
}

TORCH_LIBRARY_IMPL(FASTEAGLE_NAMESPACE, CPU, m) {
  m.impl("blocks", &blocks);
  m.impl("draft_chain", &draft_chain);
  m.impl("finish_cycle", &finish_cycle);
  m.impl("linear", &linear);
  m.impl("look_up", &look_up);
  m.impl("maximum", &maximum);
  m.impl("norm", &norm);
  m.impl("rows", &rows);
}

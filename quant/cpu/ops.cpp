// Operators and classes that Python calls, with the checks of their arguments.
//
// All headers are compiled into this one file, in unnamed namespaces: libraries for several
// instruction sets may be loaded into one process, and must share no symbol.
//
// Shapes: T rows, N outputs, K inputs, D model dim, H query heads, G KV heads, E head dim, F FFN
// dim, S cache slots, V vocabulary.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "block.h"
#include "cycle.h"
#include "cycles.h"
#include "head.h"
#include "linear.h"
#include "lookup.h"
#include "sampling.h"
#include "target.h"

namespace {

// Returns the residual stream [T, D] (fp32) after some blocks. `caches` are the keys and values of
// each, [G, S, E], or rows in 8 bits; rows `slots` are written. `mask` [T, S] or the tree's view
// defines the keys that a row sees. The first block's QKV product reads `entry` [T, K] (fp32), if
// given, instead of norm(x).
Tensor blocks(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& slots,
              const std::optional<Tensor>& mask, const std::optional<Tensor>& seq_len,
              const std::optional<Tensor>& paths, const std::optional<Tensor>& depths,
              int64_t window, at::TensorList caches, at::TensorList tensors, int64_t n_head,
              double eps, const std::optional<Tensor>& entry) {
  TORCH_CHECK(x.dim() == 2 && x.scalar_type() == at::kFloat, "x is fp32 [T, D]");
  const std::vector<BlockTensors> named_tensors = each_named<BlockTensors>(tensors);
  const int64_t T = x.size(0), n_blocks = named_tensors.size();
  TORCH_CHECK(caches.size() == size_t(2 * n_blocks), "two caches of each block");
  check_caches(caches);
  const Tensor& keys = caches[0];
  const bool packed = is_packed(keys);
  const Heads heads{n_head, keys.size(0), keys.size(2) - (packed ? SPARE : 0), packed};
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
  for (const BlockTensors& block : named_tensors) all.push_back(block_of(block));
  const Tensor e = entry.has_value() ? entry->contiguous() : Tensor();
  if (e.defined())
    TORCH_CHECK(e.dim() == 2 && e.size(0) == T && e.scalar_type() == at::kFloat &&
                    e.size(1) == all[0].qkv.h.K && e.size(1) % BLOCK == 0,
                "entry is fp32 [T, K]");
  const int64_t D = x.size(1);
  for (int64_t i = 0; i < n_blocks; i++) {
    const int64_t K = i == 0 && e.defined() ? e.size(1) : D;
    check_block(named_tensors[i], all[i], heads, D, K);
  }
  check_widths(all);
  with_element_of(keys, [&](auto element) {
    using C = decltype(element);
    Pass<C> pass{};
    pass.heads = heads;
    pass.D = D;
    pass.eps = float(eps);
    pass.cos = c.const_data_ptr<float>();
    pass.sin = s.const_data_ptr<float>();
    pass.slots = at_slots.const_data_ptr<int64_t>();
    pass.x = y.mutable_data_ptr<float>();
    if (e.defined()) {
      pass.entry = e.const_data_ptr<float>();
      pass.entry_dim = e.size(1);
    }
    run_blocks<C>(all, caches, pass, seen, T);
  });
  return y;
}

// See `finish_cycle` in cycle.h; lists hold the fields of its structs.
void finish_by_lists(const Tensor& logits, const Tensor& read, const OptionalTensors& tree,
                     at::TensorList state_, const OptionalTensors& sampling, int64_t depth,
                     bool in_place, bool extends, bool keeps) {
  State state = named<State>(state_);
  finish_cycle(logits, read, named<Tree>(tree), state, named<Sampling>(sampling),
               {depth, in_place, extends, keeps});
}

// See `look_up` in lookup.h. Returns tokens, path probabilities and gain.
std::tuple<Tensor, Tensor, double> look_up_chain(const Tensor& text, const Tensor& last,
                                                 const Tensor& table, const Tensor& recent,
                                                 at::TensorList corpus, int64_t longest,
                                                 int64_t reach, double keep) {
  const Copied copied = look_up(text, last, {table, recent, corpus, longest}, reach, keep);
  const int64_t n = copied.tokens.size();
  Tensor tokens = at::empty({n}, text.options()), paths = at::empty({n}, table.options());
  std::copy_n(copied.tokens.begin(), n, tokens.mutable_data_ptr<int64_t>());
  std::copy_n(copied.paths.begin(), n, paths.mutable_data_ptr<float>());
  return {tokens, paths, copied.gain};
}

// See `run_cycles` in cycles.h. `states`, `samplings` and `drafting` have the tensors of one text
// after those of another, `ends` and `most` an entry of each. `drafting` holds a lookup's table and
// last proposal, the draft head's keys and values, and what its noise is made of; `corpus` a
// lookup's documents; `target_ids` those of the head's tokens. Each is empty or None where there is
// none.
std::vector<std::vector<Cycle>> cycles(
    const c10::intrusive_ptr<Target>& target, const std::optional<c10::intrusive_ptr<Head>>& head,
    std::vector<Tensor> states, const OptionalTensors& samplings, const OptionalTensors& drafting,
    const std::optional<Tensor>& target_ids, std::vector<Tensor> corpus, int64_t longest,
    int64_t depth, int64_t head_depth, int64_t width, double keep, std::optional<double> needed,
    std::vector<double> verify, std::vector<double> expand, std::vector<int64_t> aux_layers,
    const Tensor& features_like, std::vector<std::vector<int64_t>> ends, std::vector<int64_t> most,
    int64_t n) {
  const std::vector<State> each_state = each_named<State>(at::TensorList(states));
  const size_t B = each_state.size();
  const std::vector<Sampling> each_sampling = each_named<Sampling>(samplings);
  const std::vector<DraftTensors> each_drafting = each_named<DraftTensors>(drafting);
  TORCH_CHECK(each_sampling.size() == B && each_drafting.size() == B && ends.size() == B &&
                  most.size() == B && n >= 1,
              "state, sampling, drafting and ends of each text");
  std::vector<Writing> texts;
  for (size_t i = 0; i < B; i++) {
    const DraftTensors& own = each_drafting[i];
    texts.push_back(
        {each_state[i], each_sampling[i], own, std::nullopt, std::move(ends[i]), most[i]});
    if (own.table.defined()) texts[i].lookup.emplace(own.table, own.recent, corpus, longest);
  }
  const How how{*target,
                head ? head->get() : nullptr,
                target_ids.value_or(Tensor()),
                depth,
                head_depth,
                width,
                keep,
                needed,
                std::move(verify),
                std::move(expand),
                std::move(aux_layers),
                features_like};
  return run_cycles(how, texts, n);
}

// RMSNorm of fp32 rows [T, D] with weight [D] (fp32), independent for each row.
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

// Returns rows `index` [n] of a packed weight, in fp32 [n, K]; `k` is K.
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
      const uint8_t byte = block[(b * lines + quad % lines) * 4 * COLUMNS + column * 4 + k % 4];
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

// Returns the milliseconds of each phase since the last call, all 0 where they are not timed.
c10::Dict<std::string, double> phases() {
  c10::Dict<std::string, double> all;
  PhaseTimes times = std::exchange(PhaseTimes::of_process(), {});
  std::istringstream names(PHASES);
  std::string name;
  for (const Clock::duration time : times.of) {
    names >> name;
    all.insert(name, std::chrono::duration<double, std::milli>(time).count());
  }
  return all;
}

// Returns the nanoseconds of a barrier of all threads, next to none for one: what cores take to
// tell each other something. It shows whether they share a cache.
double barrier_ns() {
  constexpr int N = 2000;
  Clock::duration time{};
  in_parallel([&](const Worker& me) {
    me.team.barrier();
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < N; i++) me.team.barrier();
    if (me.id == 0) time = Clock::now() - begin;
  });
  return std::chrono::duration<double, std::nano>(time).count() / N;
}

// Names of the tensors in each list that an operator takes, in order.
c10::Dict<std::string, std::string> fields() {
  c10::Dict<std::string, std::string> all;
  const auto add = [&](const char* name, std::string_view names) {
    all.insert(name, std::string(names));
  };
  add("BlockTensors", BlockTensors::FIELDS);
  add("TargetTensors", TargetTensors::FIELDS);
  add("HeadTensors", HeadTensors::FIELDS);
  add("State", State::FIELDS);
  add("Tree", Tree::FIELDS);
  add("Sampling", Sampling::FIELDS);
  add("CorpusIndex", CorpusIndex::FIELDS);
  add("DraftTensors", DraftTensors::FIELDS);
  return all;
}

}  // namespace

TORCH_LIBRARY(FASTEAGLE_NAMESPACE, m) {
  m.def(
      "blocks(Tensor x, Tensor cos, Tensor sin, Tensor slots, Tensor? mask, Tensor? seq_len, "
      "Tensor? paths, Tensor? depths, int window, Tensor(a!)[] caches, Tensor[] tensors, "
      "int n_head, float eps, Tensor? entry=None) -> Tensor");
  m.def(
      "finish_cycle(Tensor logits, Tensor read, Tensor?[] tree, Tensor(a!)[] state, "
      "Tensor?[] sampling, int depth, bool in_place, bool extends, bool keeps) -> ()");
  m.class_<Head>("Head")
      .def(
          torch::init<std::vector<Tensor>, OptionalTensors, int64_t, double, bool, bool, int64_t>())
      .def("draft", &Head::draft);
  m.class_<Target>("Target")
      .def(torch::init<std::vector<Tensor>, std::vector<Tensor>, int64_t, int64_t, double>())
      .def("cycles", &cycles)
      .def("run_together", &Target::run_together);
  m.def("forbid(Tensor(a!) logits, Tensor words) -> ()");
  m.def("likeliest(Tensor row, int token, int n) -> (float, Tensor, Tensor)");
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int n, int first=0) -> Tensor");
  m.def(
      "look_up(Tensor text, Tensor last, Tensor(a!) table, Tensor(b!) recent, Tensor[] corpus, "
      "int longest, int reach, float verify) -> (Tensor, Tensor, float)");
  m.def("maximum(Tensor x) -> (Tensor, Tensor)");
  m.def("norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("rows(Tensor packed, Tensor index, int k) -> Tensor");
  m.def("isa() -> int", &isa);
  m.def("barrier_ns() -> float", &barrier_ns);
  m.def("phases() -> Dict(str, float)", &phases);
  m.def("fields() -> Dict(str, str)", &fields);
}

TORCH_LIBRARY_IMPL(FASTEAGLE_NAMESPACE, CPU, m) {
  m.impl("blocks", &blocks);
  m.impl("finish_cycle", &finish_by_lists);
  m.impl("forbid", &forbid);
  m.impl("likeliest", &likeliest);
  m.impl("linear", &linear);
  m.impl("look_up", &look_up_chain);
  m.impl("maximum", &maximum);
  m.impl("norm", &norm);
  m.impl("rows", &rows);
}

// Interprets the statements that run a block in a scope.

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include "tests/fuzz/run.h"

namespace fuzz {

namespace {

/// Returns a copy with the same layout, offset included, so that the same kernels run on it.
Tensor exact_copy(const Tensor& a) {
  at::NoGradGuard no_grad;
  if (!a.has_storage()) return a.detach().clone();
  const auto bytes = static_cast<int64_t>(a.storage().nbytes());
  const Tensor all =
      at::empty({0}, a.options().dtype(at::kByte)).set_(a.storage(), 0, {bytes}, {1});
  Tensor copy = at::empty({0}, a.options())
                    .set_(all.clone().storage(), a.storage_offset(), a.sizes(), a.strides());
  copy._set_conj(a.is_conj());
  copy._set_neg(a.is_neg());
  return copy;
}

Tensor with_layout_of(const Tensor& layout, const Tensor& numbers) {
  Tensor copy = exact_copy(layout);
  return copy.copy_(numbers);
}

/// Packs and unpacks exactly, and keeps the layout.
std::pair<bool, Tensor> twice(const Tensor& a) {
  const bool is_number = a.is_floating_point() && a.has_storage() && !overlaps_itself(a);
  return {is_number, is_number ? with_layout_of(a, a * 2) : a.detach()};
}
Tensor half(const std::pair<bool, Tensor>& packed) {
  return packed.first ? with_layout_of(packed.second, packed.second / 2) : packed.second;
}

class AutocastScope {
 public:
  AutocastScope() : before_(at::autocast::is_autocast_enabled(device().type())) {
    at::autocast::set_autocast_enabled(device().type(), true);
    at::autocast::increment_nesting();
  }
  ~AutocastScope() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device().type(), before_);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  bool before_;
};

struct Wrapped {
  Tensor tensor;
  int number = 0;
};

}  // namespace

std::unique_ptr<remat::SavedTensorHooksGuard> Interpreter::hooks(uint64_t salt) {
  using Guard = remat::SavedTensorHooksGuard;
  auto same = [](const Tensor& t) { return t; };
  if (mode_ == Mode::Undone) return copies_in(mode_);
  switch (salt % 4) {
    case 0:
      return std::make_unique<Guard>(same, same);
    case 1:
      return std::make_unique<Guard>(exact_copy, same);
    case 2:
      return std::make_unique<Guard>(twice, half);
    default:
      return std::make_unique<Guard>([](const Tensor& t) { return Wrapped{t.detach(), 3}; },
                                     [](const Wrapped& w) { return w.tensor; });
  }
}

std::unique_ptr<remat::SavedTensorHooksGuard> Interpreter::copies_in(Mode mode) {
  if (mode_ != mode) return nullptr;
  return std::make_unique<remat::SavedTensorHooksGuard>(exact_copy,
                                                        [](const Tensor& t) { return t; });
}

void Interpreter::run_offload(const Statement& s, Environment& values) {
  if (const auto copies = copies_in(Mode::Undone)) return run_block(s.block, values);
  const int64_t depth = prefetch_depth_of(s.salt);
  const int64_t in_flight = s.salt / 48 % 2 == 0 ? 64 : 64 << 20;
  if (s.salt % 3 == 0) {
    const remat::SaveOnCpuGuard guard({.skip_parameters = s.salt % 2 == 0,
                                       .prefetch_depth = depth,
                                       .max_bytes_in_flight = in_flight,
                                       .keep_last = static_cast<int64_t>(s.salt / 6 % 3)});
    return run_block(s.block, values);
  }
  if (s.salt % 3 == 1) {
    const remat::SaveOnDiskGuard guard(
        {.directory = "/tmp", .min_bytes = 0, .prefetch_depth = depth});
    return run_block(s.block, values);
  }
  const auto bytes = static_cast<int64_t>(s.salt / 3 % 4 * 32);
  const remat::SaveInTiersGuard guard({.device_bytes = bytes,
                                       .host_bytes = 2 * bytes,
                                       .directory = "/tmp",
                                       .min_bytes = 0,
                                       .max_bytes_in_flight = in_flight,
                                       .keep_last = static_cast<int64_t>(s.salt / 12 % 3)});
  run_block(s.block, values);
}

void Interpreter::run_wrap(const Statement& s, Environment& values) {
  switch (s.kind) {
    case Kind::NoGrad: {
      at::AutoGradMode mode(false);
      return run_block(s.block, values);
    }
    case Kind::WithGrad: {
      at::AutoGradMode mode(true);
      return run_block(s.block, values);
    }
    case Kind::EarlyStop: {
      remat::EarlyStopGuard guard(true);
      return run_block(s.block, values);
    }
    case Kind::NoEarlyStop: {
      remat::EarlyStopGuard guard(false);
      return run_block(s.block, values);
    }
    case Kind::Debug: {
      remat::DebugGuard guard(true);
      return run_block(s.block, values);
    }
    case Kind::Hooks: {
      const auto guard = hooks(s.salt);
      return run_block(s.block, values);
    }
    case Kind::Offload:
      return run_offload(s, values);
    case Kind::Toggle:
      return run_toggle(s, values);
    case Kind::Autocast: {
      AutocastScope scope;
      return run_block(s.block, values);
    }
    case Kind::Provider:
    case Kind::Generator:
    case Kind::Observer:
      return run_state_guard(s, values);
    default:
      try {
        run_block(s.block, values);
      } catch (const FuseBlown&) {  // a fault of one run must not change the program
        throw;
      } catch (const c10::OutOfMemoryError&) {
        throw;
      } catch (...) {
      }
  }
}

void Interpreter::run_state_guard(const Statement& s, Environment& values) {
  GuardsAround with = guards_;
  std::optional<remat::StateProviderGuard> provider;
  std::optional<remat::GeneratorGuard> generator;
  std::optional<remat::RecomputeObserverGuard> observers;
  const size_t chosen = s.salt % 2;
  if (s.kind == Kind::Provider) {
    provider.emplace(numbers_[chosen]);
    ++with.numbers[chosen];
  } else if (s.kind == Kind::Generator) {
    generator.emplace(generators_[chosen]);
    ++with.generators[chosen];
  } else {
    observers.emplace(observer());
    ++with.observers;
  }
  const Instead guards(guards_, with);
  run_block(s.block, values);
}

remat::RecomputeObserver Interpreter::observer() {
  auto tell = [this](const remat::PhaseInfo& info, int64_t change) {
    observed_now_ += change;
    if (observed_now_ < 0 || info.phase != remat::Phase::Recompute)
      record_.faults.push_back("in a recompute: an observer is told of what was not begun");
  };
  return {.begin = [tell](const remat::PhaseInfo& info) { tell(info, 1); },
          .end = [tell](const remat::PhaseInfo& info) { tell(info, -1); }};
}

}  // namespace fuzz

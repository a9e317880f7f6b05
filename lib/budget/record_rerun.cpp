#include "lib/budget/record_rerun.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "lib/base/invariant.h"
#include "lib/budget/settings.h"
#include "lib/budget/storages.h"
#include "lib/budget/trial.h"
#include "lib/rng/device_rng.h"
#include "lib/rng/draws.h"
#include "lib/seam/ready.h"
#include "lib/selective/call_record.h"

namespace remat::budget {

namespace {

[[noreturn]] void throw_other_settings(const Record& record, uint32_t now) {
  throw RerunError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      c10::str("remat::BudgetGuard: ", difference_of_settings(record.settings, now),
               " has changed between forward and backward, so that ", record.traits->name,
               " could give other results when it runs again.\n"
               "Cause: the setting applies to the whole process, so a rerun cannot change it for "
               "itself.\n"
               "Hint: restore the setting before the backward, or raise the budget."));
}

[[noreturn]] void throw_other_results(const Record& record) {
  throw RerunError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      c10::str("remat::BudgetGuard: ", record.traits->name,
               " gave other results when it ran again (BudgetOptions::check_values).\n"
               "Cause: the operator is not deterministic, leaves bytes of its results unwritten, "
               "or has an input that was changed past LibTorch's operators.\n"
               "Hint: use a deterministic operator, or do not change its inputs before the "
               "backward."));
}

/// Transforms around a backward (`is_grads_batched`, `torch.func.vmap`), which reruns exclude.
constexpr c10::DispatchKeySet transform_keys({c10::DispatchKey::VmapMode,
                                              c10::DispatchKey::FuncTorchVmapMode,
                                              c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                              c10::DispatchKey::FuncTorchDynamicLayerBackMode});

/// Gives a device's generator the state of forward for its lifetime.
class FarDraws {
 public:
  FarDraws(const at::Generator& generator, const at::Tensor& state)
      : before_{DeviceRng::present(generator)} {
    DeviceRng::set({{generator, state}});
  }
  ~FarDraws() { DeviceRng::set(before_); }
  FarDraws& operator=(FarDraws&&) = delete;

 private:
  const std::vector<GeneratorState> before_;
};

c10::Stream exchange(const c10::Stream& current, const c10::Stream& next) {
  Ready ready(current);
  ready.record();
  ready.block(next);
  return c10::impl::VirtualGuardImpl(next.device_type()).exchangeStream(next);
}

}  // namespace

OnOwnStreams::OnOwnStreams(c10::ArrayRef<c10::Stream> own) {
  for (const c10::Stream& each : own) {
    const c10::Stream current = current_stream(each.device());
    if (current != each) before_.push_back(exchange(current, each));
  }
}

OnOwnStreams::~OnOwnStreams() {
  for (const c10::Stream& each : before_) exchange(current_stream(each.device()), each);
}

// The caller holds the lock and has locked the contents of all values that the record reads.
Rerun::Rerun(Record& record, const Runtime& runtime, Dead& dead) : record_(record) {
  const uint32_t settings = settings_now();
  if (settings != record.settings) throw_other_settings(record, settings);
  if (record.of_device.is_far) streams_ = runtime.own_streams();
  for (const Read& read : record_.reads) contents_.push_back({read.value, read.value->content()});
  for (Content& each : contents_) {
    Value& value = *each.value;
    each.is_written =
        std::find(record_.written.begin(), record_.written.end(), &value) != record_.written.end();
    if (!each.is_written || value.is_source() || !value.saves.empty() || value.num_locks > 1 ||
        each.storage.use_count() > 2)  // this object's and the budget's
      continue;
    bool is_needed = false;
    for (const Read* read = value.reads; read != nullptr; read = read->next)
      if (read->record != &record_)
        for (const Value* const result : read->record->results)
          is_needed = is_needed || (result != nullptr && !result->has_content());
    if (is_needed || !value.held) continue;
    each.is_stolen = true;
    Graph::get().forget(*each.storage.unsafeGetStorageImpl(), dead);
  }
  for (const Content& each : contents_)
    if (each.is_written && !each.is_stolen) ++Trial::get().work.copies;
}

void Rerun::run() {
  const OnOwnStreams on_own_streams(streams_);
  for (Content& each : contents_)
    if (each.is_written && !each.is_stolen) each.storage = copy_of(each.storage);
  const auto tensor_at = [&](int32_t place) {
    const Geometry& geometry = record_.tensors[static_cast<std::size_t>(place)];
    if (geometry.value == nullptr) return at::Tensor();
    const auto* const content =
        std::find_if(contents_.begin(), contents_.end(),
                     [&](const Content& each) { return each.value == geometry.value; });
    return geometry.on(content->storage);
  };
  torch::jit::Stack stack;
  stack.reserve(record_.arguments.size());
  for (const Argument& each : record_.arguments) {
    if (each.first < 0) {
      stack.push_back(each.plain);
    } else if (each.is_list_of_optional) {
      c10::List<std::optional<at::Tensor>> list;
      for (int32_t i = 0; i < each.count; ++i) {
        at::Tensor tensor = tensor_at(each.first + i);
        list.push_back(tensor.defined() ? std::optional<at::Tensor>(std::move(tensor))
                                        : std::nullopt);
      }
      stack.emplace_back(std::move(list));
    } else if (each.is_list) {
      c10::List<at::Tensor> list;
      for (int32_t i = 0; i < each.count; ++i) list.push_back(tensor_at(each.first + i));
      stack.emplace_back(std::move(list));
    } else {
      stack.emplace_back(tensor_at(each.first));
    }
  }
  const StoragesOf given(stack);
  std::optional<at::Generator> generator;
  std::optional<DrawsFrom> draws;
  if (record_.random != nullptr) {
    auto& original = static_cast<at::CPUGeneratorImpl&>(*record_.generator);
    generator = at::make_generator<at::CPUGeneratorImpl>();
    set_state(*generator->get<at::CPUGeneratorImpl>(), *record_.random);
    draws.emplace(*generator, original);
  }
  std::optional<FarDraws> far_draws;
  if (record_.of_device.random.defined())
    far_draws.emplace(record_.of_device.generator, record_.of_device.random);
  const at::AutoGradMode grad_mode(record_.grad_mode);
  const c10::impl::ExcludeDispatchKeyGuard below_autograd(record_.traits->keys_met);
  const c10::impl::ExcludeDispatchKeyGuard below_transforms(transform_keys);
  record_.op.callBoxed(stack);
  made_.clear();
  for (const Value* const value : record_.written) {
    const auto* const content =
        std::find_if(contents_.begin(), contents_.end(),
                     [&](const Content& each) { return each.value == value; });
    made_.push_back(content->storage);
  }
  for (c10::Storage& each : new_storages(stack, given)) made_.push_back(std::move(each));
  contents_.clear();
}

void Rerun::end(Dead& dead) {
  Graph& graph = Graph::get();
  REMAT_INVARIANT(made_.size() == record_.results.size(), "{} made {} storages again, not {}",
                  record_.traits->name, made_.size(), record_.results.size());
  for (std::size_t i = 0; i < made_.size(); ++i) {
    Value* const value = record_.results[i];
    if (value == nullptr || value->has_content()) {
      dead.storages.push_back(std::move(made_[i]));
      continue;
    }
    if (value->hash != 0 && value->hash != hash_of(*made_[i].unsafeGetStorageImpl()))
      throw_other_results(record_);
    value->counter = c10::VariableVersion(c10::VariableVersion::DISABLED);
    value->is_rerun = value->saves.empty();
    value->last_use = value->runtime->clock;
    made_bytes_ += value->bytes;
    device_ = value->device;
    graph.set_content(*value, std::move(made_[i]));
  }
}

}  // namespace remat::budget

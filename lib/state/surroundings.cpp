#include "lib/state/surroundings.h"

#include <utility>

#include "lib/rng/device_claims.h"
#include "lib/seam/accelerator.h"
#include "lib/seam/engine.h"

namespace remat {

void Surroundings::begin(const StorageSet& inputs,
                         const std::shared_ptr<const UserRegistrations>& own) {
  snapshot_ = Snapshot::take();
  if (auto streams = CurrentStreams::here()) devices_or_make().streams = std::move(streams);
  const auto registered = UserRegistrations::around(own);
  const auto generators = registered ? c10::ArrayRef<at::Generator>(registered->generators)
                                     : c10::ArrayRef<at::Generator>();
  if (preserves_rng_ && (!generators.empty() || present_accelerator()))
    if (auto rng = DeviceRng::take(generators)) devices_or_make().rng = std::move(rng);
  // A region in a backward, or on an engine's thread, works for another thread.
  if (device_rng() != nullptr && seam::graph_task_id() < 0)
    inputs.visit([](const c10::StorageImpl& storage) { claim(storage.device()); });
  if (registered) user_state_ = std::make_unique<UserState>(registered, preserves_rng_);
  if (preserves_rng_) draws_.begin();
}

void Surroundings::settle(MeetDevices met) {
  visit_draw_logs([](DrawLog& log) { log.settle(); });
  if (device_rng() == nullptr) return;
  device_rng()->settle(met());
  if (device_rng()->is_empty()) devices_->rng.reset();
}

std::vector<GeneratorState> Surroundings::device_states(MeetDevices met) const {
  if (device_rng() == nullptr) return {};
  return device_rng()->at_begin(device_rng()->is_settled() ? DevicesMet() : met());
}

DrawLog* Surroundings::draw_log(const c10::GeneratorImpl& generator) {
  if (!preserves_rng_) return nullptr;
  if (&generator == &draws_.generator()) return &draws_;
  if (user_state_)
    for (const auto& log : user_state_->draw_logs())
      if (&generator == &log->generator()) return log.get();
  return nullptr;
}

DrawLog* Surroundings::draw_log_from_here(const c10::GeneratorImpl& generator) {
  DrawLog* const known = draw_log(generator);
  if (known != nullptr || !preserves_rng_) return known;
  auto* const impl = const_cast<c10::GeneratorImpl*>(&generator);
  user_state_or_make().keep(
      at::Generator(c10::intrusive_ptr<c10::GeneratorImpl>::unsafe_reclaim_from_nonowning(impl)));
  return draw_log(generator);
}

c10::SmallVector<DrawLog*, 1> Surroundings::draw_logs() {
  c10::SmallVector<DrawLog*, 1> logs;
  visit_draw_logs([&](DrawLog& log) { logs.push_back(&log); });
  return logs;
}

DrawMarks Surroundings::marks() {
  DrawMarks marks;
  for (DrawLog* log : draw_logs()) marks.logs.push_back(log->mark());
  if (device_rng() != nullptr) marks.others = device_rng()->now();
  return marks;
}

DrawSkips Surroundings::since(const DrawMarks& marks, const DevicesMet& met) {
  DrawSkips skips;
  const auto logs = draw_logs();
  for (std::size_t i = 0; i < logs.size(); ++i)
    skips.logs.push_back(i < marks.logs.size() ? logs[i]->since(marks.logs[i])
                                               : logs[i]->since_begin());
  if (device_rng() != nullptr)
    skips.others = device_rng()->moved(marks.others, device_rng()->now(), met);
  return skips;
}

Surroundings::Devices& Surroundings::devices_or_make() {
  if (!devices_) devices_ = std::make_unique<Devices>();
  return *devices_;
}

UserState& Surroundings::user_state_or_make() {
  if (!user_state_) user_state_ = std::make_unique<UserState>();
  return *user_state_;
}

void Surroundings::guard_opened(const UserRegistrations& opened,
                                const std::vector<std::any>& states) {
  for (std::size_t i = 0; i < opened.providers.size(); ++i)
    user_state_or_make().keep(opened.providers[i], states[i]);
  for (const auto& flags : opened.flags) user_state_or_make().keep(flags);
  if (!preserves_rng_) return;
  for (const at::Generator& generator : opened.generators) {
    user_state_or_make().keep(generator);
    if (as_cpu_generator(generator) == nullptr) DeviceRng::add(devices_or_make().rng, generator);
  }
}

}  // namespace remat

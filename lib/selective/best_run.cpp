#include "lib/selective/best_run.h"

#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <optional>

#include "lib/frame/inputs.h"
#include "lib/seam/accelerator.h"
#include "lib/seam/autograd_meta.h"

namespace remat {

namespace {

/// What decides how much is made, and what autograd will save.
uint64_t look_of(c10::ArrayRef<c10::IValue> arguments) {
  std::size_t look = c10::GradMode::is_enabled() ? 1 : 2;
  const auto add = [&look](auto value) {
    look = c10::hash_combine(look, c10::get_hash(static_cast<int64_t>(value)));
  };
  for (const c10::IValue& argument : arguments)
    visit_tensors_in(argument, [&](const at::Tensor& tensor) {
      add(tensor.defined());
      if (!tensor.defined()) return;
      add(tensor.scalar_type());
      add(tensor.device().type());
      add(tensor.device().index());
      add(tensor.requires_grad());
      if (tensor.is_nested()) return;
      add(tensor.dim());
      for (const int64_t size : tensor.sizes()) add(size);
    });
  return look;
}

/// Waits for what is queued on the devices of these. False where that is not possible.
bool wait_for_devices_of(c10::ArrayRef<c10::IValue> values) {
  bool may_wait = true;
  std::optional<c10::Device> last;
  visit_tensors_in(values, [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cpu() || tensor.device() == last) return;
    last = tensor.device();
    if (last->type() != present_accelerator()) return;
    const c10::Stream stream = c10::impl::VirtualGuardImpl(last->type()).getStream(*last);
    if (is_capturing(stream))
      may_wait = false;
    else
      stream.synchronize();
  });
  return may_wait;
}

}  // namespace

std::unique_ptr<BestRun> BestRun::begin(const Frame& frame,
                                        const std::shared_ptr<BestChooser>& chooser) {
  if (chooser == nullptr) return nullptr;
  return std::make_unique<BestRun>(chooser, frame);
}

BestRun::BestRun(std::shared_ptr<BestChooser> chooser, const Frame& frame)
    : chooser_(std::move(chooser)), frame_(frame) {
  const int64_t number = frame.region().info.outermost;
  BestChooser::Begin begin = chooser_->begin(frame.region().info.name());
  for (auto& way : begin.ways) {
    const bool holds = way->since <= number;
    ways_.emplace_back(std::move(way), holds);
  }
  num_ways_ = ways_.size();
  is_measured_ = begin.is_measured;
  if (begin.is_measured) measured_ = std::make_unique<MeasuredCalls>();
}

void BestRun::match(const OpTraits& op, uint64_t arguments) {
  std::erase_if(ways_, [&](const auto& way) {
    const auto& calls = way.first->measured.calls;
    return num_calls_ >= calls.size() || calls[num_calls_].op->name_number != op.name_number ||
           calls[num_calls_].arguments != arguments;
  });
  const auto first =
      std::find_if(ways_.begin(), ways_.end(), [](const auto& way) { return way.second; });
  const ChosenWay* const next = first == ways_.end() ? nullptr : first->first.get();
  // What was kept so far was to be read by other calls.
  if (next != current_ && spent_ > 0) has_switched_ = true;
  current_ = next;
}

bool BestRun::must_let_go() {
  if (!has_switched_ || spent_ <= chooser_->options().bytes) return false;
  spent_ = 0;
  return true;
}

std::size_t BestRun::begin_call(const c10::OperatorHandle& op, const OpTraits& traits,
                                c10::ArrayRef<c10::IValue> arguments, bool is_kept_anyway) {
  const uint64_t look = look_of(arguments);
  match(traits, look);
  keeps_last_ = false;
  if (current_ != nullptr && !is_kept_anyway && current_->chosen.keeps[num_calls_]) {
    const int64_t bytes = current_->measured.calls[num_calls_].bytes;
    keeps_last_ = !has_switched_ || spent_ + bytes <= chooser_->options().bytes;
    if (keeps_last_) spent_ += bytes;
  }
  const std::size_t call = num_calls_++;
  if (measured_ == nullptr) return call;
  measured_->calls.push_back({&traits, look});
  CallGraph::Call& node = measured_->graph.calls.emplace_back();
  node.is_kept_anyway = is_kept_anyway && traits.can_be_kept();
  if (traits.is_view) return call;
  visit_tensors_in(arguments, [&](const at::Tensor& tensor) {
    if (const Made* const found = made(storage_of(tensor))) node.reads.push_back(found->value);
  });
  std::sort(node.reads.begin(), node.reads.end());
  node.reads.erase(std::unique(node.reads.begin(), node.reads.end()), node.reads.end());
  if (traits.is_mutable) note_writes(op, arguments, call);
  for (const uint32_t value : node.reads) values_.is_read[value] = 1;
  return call;
}

// See Note [Results that are written to].
void BestRun::note_writes(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                          std::size_t call) {
  CallGraph::Call& node = measured_->graph.calls[call];
  std::size_t num_written = 0;
  visit_written(op, arguments, [&](const at::Tensor&) { ++num_written; });
  const auto& declared = op.schema().arguments();
  // What is being copied cannot be written to; what moves when it is let go of can.
  const SaveBestOptions& options = chooser_->options();
  const bool can_be_applied = !options.offload || options.selective.keep_last > 0;
  const bool is_like_library =
      can_be_applied && num_written == 1 && node.reads.size() <= 1 && !declared.empty() &&
      declared[0].alias_info() != nullptr && declared[0].alias_info()->isWrite() &&
      op.schema().returns().size() == 1 && !is_made_by(op, 0) && frame_.region().info.depth == 1 &&
      !options.selective.save_through_hooks;
  visit_written(op, arguments, [&](const at::Tensor& tensor) {
    Made* const found = made(storage_of(tensor));
    if (found == nullptr) return;
    const uint32_t maker = values_.maker[found->value];
    const bool shares =
        found->counter.enabled() && !tensor.is_inference() &&
        seam::is_same_counter(found->counter, tensor.unsafeGetTensorImpl()->version_counter());
    if (is_like_library && !shares && !values_.is_read[found->value]) {
      applied_.emplace_back(static_cast<uint32_t>(call), maker);
      node.reads.clear();
    } else {
      not_for_choice_.push_back(maker);
    }
  });
}

void BestRun::end_call(std::size_t call, c10::ArrayRef<c10::IValue> results,
                       const StoragesOf& given, bool can_be_kept, const CallClock& clock) {
  if (measured_ == nullptr) return;
  int64_t bytes = 0;
  bool has_all_storages = true;
  const bool may_have_placeholders = frame_.region().body->can_be_stopped();
  const auto value_of = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || given.contain(tensor)) return;
    const c10::StorageImpl* const storage = storage_of(tensor);
    if (storage == nullptr) {
      has_all_storages = false;
      return;
    }
    if (const Made* const found = made(storage)) {
      if (values_.maker[found->value] == call) return;
      // An operator that returns a tensor which it keeps.
      measured_->graph.values[found->value].is_held = true;
      has_all_storages = false;
      return;
    }
    const auto value = static_cast<uint32_t>(measured_->graph.values.size());
    const auto num_bytes = static_cast<int64_t>(storage->nbytes());
    bytes += num_bytes;
    const bool is_held = !may_have_placeholders || !KeptTensor::can_be_placeholder(tensor);
    measured_->graph.values.push_back({num_bytes, is_held});
    measured_->graph.calls[call].makes.push_back(value);
    values_.maker.push_back(static_cast<uint32_t>(call));
    values_.is_read.push_back(0);
    index_[storage] = made_.size();
    Made& entry = made_.emplace_back(Made{weak_storage_of(tensor), value});
    if (!tensor.is_inference()) entry.counter = tensor.unsafeGetTensorImpl()->version_counter();
  };
  visit_tensors_in(results, value_of);
  measured_->calls[call].bytes = bytes;
  measured_->calls[call].seconds = clock.seconds();
  CallGraph::Call& node = measured_->graph.calls[call];
  node.seconds = clock.seconds();
  node.can_be_kept = can_be_kept && has_all_storages;
  is_whole_ = is_whole_ && clock.is_true();
}

BestRun::Made* BestRun::made(const c10::StorageImpl* storage) {
  const auto found = storage == nullptr ? index_.end() : index_.find(storage);
  return found == index_.end() ? nullptr : &made_[found->second];
}

void BestRun::hold(const c10::StorageImpl* storage) {
  Made* const found = measured_ == nullptr ? nullptr : made(storage);
  if (found == nullptr) return;
  measured_->graph.values[found->value].is_held = true;
  values_.is_read[found->value] = 1;
}

void BestRun::hold(c10::ArrayRef<c10::IValue> values) {
  if (measured_ == nullptr) return;
  visit_tensors_in(values, [this](const at::Tensor& tensor) { hold(storage_of(tensor)); });
}

void BestRun::add_slot(const c10::StorageImpl* storage, int64_t position) {
  if (measured_ == nullptr) return;
  hold(storage);
  const auto index = static_cast<std::size_t>(position);
  if (slot_calls_.size() <= index) slot_calls_.resize(index + 1);
  slot_calls_[index] = static_cast<uint32_t>(num_calls_);
}

// As Filler decides it (Rule 5).
std::size_t BestRun::calls_before_stop() const {
  if (!frame_.region().options.early_stop || !frame_.region().body->can_be_stopped())
    return num_calls_;
  const SlotView view = frame_.slots().view_for(-1);
  if (view.last_needed < 0) return 0;
  bool goes_on = false;
  frame_.slots().with_slot(view.last_needed, /*is_settled=*/true, [&](const Slot& slot) {
    goes_on = slot.finish_operator || slot.saves_own_output;
  });
  return goes_on ? num_calls_ : slot_calls_[static_cast<std::size_t>(view.last_needed)];
}

void BestRun::end() {
  const bool is_new = std::none_of(ways_.begin(), ways_.end(), [this](const auto& way) {
    return way.first->measured.calls.size() == num_calls_;
  });
  if (measured_ != nullptr && is_whole_) {
    auto& calls = measured_->graph.calls;
    const std::size_t stop = calls_before_stop();
    for (std::size_t i = stop; i < calls.size(); ++i) calls[i].seconds = 0;
    for (const auto& [writer, maker] : applied_) {
      calls[maker].seconds += calls[writer].seconds;
      calls[writer].seconds = 0;
    }
    for (const uint32_t each : not_for_choice_) calls[each].can_be_kept = false;
  } else {
    measured_ = nullptr;
  }
  chooser_->end(frame_.region().info.name(), is_new, num_ways_, std::move(measured_));
}

CallClock::CallClock(const BestRun* run, const c10::OperatorHandle& op, const OpTraits& traits,
                     c10::ArrayRef<c10::IValue> arguments)
    : is_on_(run != nullptr && run->is_measured()) {
  if (!is_on_) return;
  if (const auto& seconds_of = run->chooser_->options().seconds_of) {
    static const std::string no_name;
    seconds_ = seconds_of({op, traits.name, arguments, /*is_recompute=*/false, no_name});
    is_on_ = false;
    return;
  }
  is_true_ = wait_for_devices_of(arguments);
  start_ = std::chrono::steady_clock::now();
}

void CallClock::stop(c10::ArrayRef<c10::IValue> results) {
  if (!is_on_) return;
  is_true_ = is_true_ && wait_for_devices_of(results);
  seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

}  // namespace remat

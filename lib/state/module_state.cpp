#include "lib/state/module_state.h"

#include <c10/util/SmallVector.h>
#include <c10/util/Type.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <typeindex>
#include <unordered_map>
#include <utility>

#include "lib/base/waiting.h"
#include "lib/seam/module_access.h"
#include "lib/seam/script.h"
#include "lib/state/buffer.h"
#include "lib/tensor/capture.h"
#include "remat/binding.h"
#include "remat/module.h"

namespace remat {

namespace {

/// The flags that recomputes hold, for the whole process. Recomputes that want a flag the same way
/// share it. A recompute that finds the flag right also holds it: otherwise the end of another one
/// would change it during the recompute.
class HeldFlags {
 public:
  using Flags = c10::ArrayRef<TrainingFlags::Flag>;

  bool take(Flags flags) {
    constexpr std::chrono::seconds longest_wait(10);
    const auto self = std::this_thread::get_id();
    std::unique_lock<std::mutex> lock(mutex_);
    const auto are_free = [&] {
      if (num_holds_ == 0) return true;
      for (const auto& [module, flag] : flags) {
        const auto found = held_.find(module);
        if (found == held_.end()) continue;
        for (const Hold& hold : found->second)
          if (hold.flag != flag && hold.owner != self) return false;
      }
      return true;
    };
    if (!wait_until(are_free, lock, changed_, longest_wait)) return false;
    for (const auto& [module, flag] : flags) {
      bool& now = ModuleAccess::training_flag(*module);
      held_[module].push_back({self, flag, now});
      set_flag(now, flag);
    }
    num_holds_ += flags.size();
    return true;
  }

  void give_back(Flags flags) noexcept {
    const auto self = std::this_thread::get_id();
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [module, flag] : flags) {
      const auto found = held_.find(module);
      auto& holds = found->second;
      auto* mine = holds.end();
      while (mine != holds.begin())
        if ((--mine)->owner == self) break;
      // The last holder leaves the value that the first one found.
      const bool before = mine->before;
      auto* const next = holds.erase(mine);
      if (next != holds.end())
        next->before = before;
      else
        set_flag(ModuleAccess::training_flag(*module), before);
      if (holds.empty() && held_.size() > max_idle) held_.erase(found);
    }
    num_holds_ -= flags.size();
    changed_.notify_all();
  }

 private:
  /// Skips equal values, since a forward on another thread may be reading the flag.
  static void set_flag(bool& flag, bool value) {
    if (flag != value) flag = value;
  }

  struct Hold {
    std::thread::id owner;
    bool flag, before;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  // An entry without holds stays for the module's next recompute, while there are few.
  static constexpr std::size_t max_idle = 1'000;
  std::size_t num_holds_ = 0;
  std::unordered_map<torch::nn::Module*, c10::SmallVector<Hold, 2>> held_;
};

HeldFlags& held_flags() {
  static auto* const all = new HeldFlags;  // leaked: recomputes may run in static destructors
  return *all;
}

/// Visits every module of a tree; one that is in it twice may be visited twice.
template <class Visitor>
void visit_modules(torch::nn::Module& root, Visitor&& visitor) {
  visitor(root);
  for (const auto& child : ModuleAccess::children(root))
    if (child.value() != nullptr) visit_modules(*child.value(), visitor);
}

/// Visits the buffers of a tree.
void visit_buffers_of(torch::nn::Module& root, c10::function_ref<void(const at::Tensor&)> visitor) {
  visit_modules(root, [&](torch::nn::Module& module) {
    for (const auto& buffer : ModuleAccess::buffers(module))
      if (buffer.value().defined()) visitor(buffer.value());
  });
}

bool ends_with_and_drop(std::string_view& text, std::string_view end) {
  if (!text.ends_with(end)) return false;
  text.remove_suffix(end.size());
  return true;
}

/// Returns whether it is LibTorch's own, or of a class named so: SyncBatchNormImpl.
bool is_batch_norm(const torch::nn::Module& module) {
  if (dynamic_cast<const torch::nn::BatchNorm1dImpl*>(&module) != nullptr ||
      dynamic_cast<const torch::nn::BatchNorm2dImpl*>(&module) != nullptr ||
      dynamic_cast<const torch::nn::BatchNorm3dImpl*>(&module) != nullptr)
    return true;
  static std::mutex mutex;
  static auto* const by_type = new std::unordered_map<std::type_index, bool>;
  const std::type_info& type = module_type(module);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [known, is_new] = by_type->try_emplace(type, false);
  if (is_new) {
    const std::string name = c10::demangle(type.name());
    std::string_view rest = name;
    ends_with_and_drop(rest, "Impl");
    if (rest.size() > 2 && rest.back() == 'd' && rest[rest.size() - 2] >= '1' &&
        rest[rest.size() - 2] <= '3')
      rest.remove_suffix(2);
    known->second = rest.ends_with("BatchNorm");
  }
  return known->second;
}

}  // namespace

TrainingFlags::TrainingFlags(torch::nn::Module& root, bool has_buffers)
    : root_(root.weak_from_this()), subject_(&root), has_buffers_(has_buffers) {
  visit_modules(root, [&](torch::nn::Module& module) {
    num_parameters_ += ModuleAccess::parameters(module).size();
    num_buffers_ += ModuleAccess::buffers(module).size();
    flags_.emplace_back(&module, ModuleAccess::training_flag(module));
  });
}

bool TrainingFlags::has_other_members() const {
  const auto root = root_.lock();
  if (root == nullptr) return false;
  std::size_t num_modules = 0, num_parameters = 0;
  visit_modules(*root, [&](torch::nn::Module& module) {
    ++num_modules;
    num_parameters += ModuleAccess::parameters(module).size();
  });
  return num_modules != flags_.size() || num_parameters != num_parameters_;
}

void TrainingFlags::visit_buffers(c10::function_ref<void(const at::Tensor&)> visitor) const {
  if (const auto root = has_buffers_ ? root_.lock() : nullptr) visit_buffers_of(*root, visitor);
}

bool TrainingFlags::has_replaced_buffers() const {
  const auto root = has_buffers_ ? root_.lock() : nullptr;
  if (root == nullptr || ModuleAccess::buffers(*root).is_empty()) return false;
  const auto* const stand_in = dynamic_cast<const StandInMembers*>(root.get());
  return stand_in != nullptr && stand_in->has_replaced_buffers();
}

TrainingFlags::Hold::Hold(const TrainingFlags& flags) {
  // A module that is gone, or was removed from the tree, does not run either.
  if (const auto root = flags.root_.lock()) add(flags, root);
  has_failed_ = !held_flags().take(flags_);
  if (has_failed_) flags_.clear();
}

TrainingFlags::Hold::Hold(Hold&& other) noexcept
    : flags_(std::exchange(other.flags_, {})),
      alive_(std::exchange(other.alive_, {})),
      has_failed_(other.has_failed_) {}

TrainingFlags::Hold::~Hold() {
  if (!flags_.empty()) held_flags().give_back(flags_);
}

void TrainingFlags::Hold::add(const TrainingFlags& flags,
                              const std::shared_ptr<torch::nn::Module>& module) {
  const auto& all = flags.flags_;
  auto found = all.begin() + static_cast<std::ptrdiff_t>(std::min(next_, all.size()));
  if (found == all.end() || found->first != module.get())
    found = std::find_if(all.begin(), all.end(),
                         [&](const Flag& flag) { return flag.first == module.get(); });
  if (found != all.end()) {
    flags_.push_back(*found);
    alive_.push_back(module);
    next_ = static_cast<std::size_t>(found - all.begin()) + 1;
  }
  for (const auto& child : ModuleAccess::children(*module))
    if (child.value() != nullptr) add(flags, child.value());
}

std::vector<std::shared_ptr<StateProvider>> buffers_of(torch::nn::Module& root) {
  std::vector<std::shared_ptr<StateProvider>> all;
  std::shared_ptr<Buffer> before;
  visit_buffers_of(root, [&](const at::Tensor& buffer) {
    before = Buffer::of(buffer, before);
    all.push_back(before);
  });
  return all;
}

namespace {

/// The training flags of script modules, which are attributes.
class ScriptFlags final : public StateProvider {
 public:
  explicit ScriptFlags(const torch::jit::Module& root)
      : root_(std::make_shared<const torch::jit::Module>(root)) {}
  std::any capture() override { return seam::training_flags_of(*root_); }
  void restore(const std::any& flags) override {
    seam::set_training_flags(*root_, std::any_cast<const std::vector<bool>&>(flags));
  }

 private:
  const std::shared_ptr<const torch::jit::Module> root_;
};

}  // namespace

std::vector<std::shared_ptr<StateProvider>> state_of(const torch::jit::Module& root,
                                                     bool flags_only) {
  std::vector<std::shared_ptr<StateProvider>> all;
  if (!seam::training_flags_of(root).empty()) all.push_back(std::make_shared<ScriptFlags>(root));
  if (flags_only) return all;
  std::shared_ptr<Buffer> before;
  for (const at::Tensor& buffer : seam::buffers_of(root)) {
    before = Buffer::of(buffer, before);
    all.push_back(before);
  }
  return all;
}

bool may_restore(const StateProvider& provider, const c10::StorageImpl* buffer) {
  const auto* const ours = dynamic_cast<const Buffer*>(&provider);
  return ours == nullptr ? is_users(provider) : storage_of(ours->tensor()) == buffer;
}

bool is_users(const StateProvider& provider) {
  return dynamic_cast<const Buffer*>(&provider) == nullptr &&
         dynamic_cast<const ScriptFlags*>(&provider) == nullptr;
}

bool contains_batch_norm(torch::nn::Module& root) {
  bool found = false;
  visit_modules(root, [&](torch::nn::Module& module) { found = found || is_batch_norm(module); });
  return found;
}

}  // namespace remat

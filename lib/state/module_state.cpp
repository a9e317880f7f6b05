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

HeldState::~HeldState() = default;

namespace {

/// The flags that recomputes hold, for the whole process. Two that want a flag the same way share it, and a
/// recompute that finds it right takes part too: otherwise another one's end would change it under its feet.
class HeldFlags {
 public:
  using Flag = std::pair<torch::nn::Module*, bool>;
  using Flags = c10::SmallVector<Flag, 4>;

  bool take(const Flags& flags) {
    constexpr std::chrono::seconds longest_wait(10);
    const auto self = std::this_thread::get_id();
    std::unique_lock<std::mutex> lock(mutex_);
    const auto are_free = [&] {
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
    return true;
  }

  void give_back(const Flags& flags) noexcept {
    const auto self = std::this_thread::get_id();
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [module, flag] : flags) {
      const auto found = held_.find(module);
      auto& holds = found->second;
      auto* mine = holds.end();
      while (mine != holds.begin())
        if ((--mine)->owner == self) break;
      // What the first holder found is what the last one leaves.
      const bool before = mine->before;
      auto* const next = holds.erase(mine);
      if (next != holds.end())
        next->before = before;
      else
        set_flag(ModuleAccess::training_flag(*module), before);
      if (holds.empty()) held_.erase(found);
    }
    changed_.notify_all();
  }

 private:
  /// A forward on another thread may read a flag that stays as it is.
  static void set_flag(bool& flag, bool value) {
    if (flag != value) flag = value;
  }

  struct Hold {
    std::thread::id owner;
    bool flag, before;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<torch::nn::Module*, c10::SmallVector<Hold, 2>> held_;
};

HeldFlags& held_flags() {
  static auto* const all = new HeldFlags;  // leaked: recomputes may run in static destructors
  return *all;
}

/// Every module of a tree, one that is in it twice maybe twice.
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

class TrainingFlags final : public HeldState {
 public:
  TrainingFlags(torch::nn::Module& root, bool has_buffers)
      : root_(root.weak_from_this()), subject_(&root), has_buffers_(has_buffers) {
    visit_modules(root, [&](torch::nn::Module& module) {
      num_parameters_ += ModuleAccess::parameters(module).size();
      flags_.emplace_back(&module, ModuleAccess::training_flag(module));
    });
  }

  const void* subject() const override { return subject_; }
  std::shared_ptr<torch::nn::Module> module() const override { return root_.lock(); }

  bool has_other_members() const override {
    const auto root = root_.lock();
    if (root == nullptr) return false;
    std::size_t num_modules = 0, num_parameters = 0;
    visit_modules(*root, [&](torch::nn::Module& module) {
      ++num_modules;
      num_parameters += ModuleAccess::parameters(module).size();
    });
    return num_modules != flags_.size() || num_parameters != num_parameters_;
  }

  void visit_buffers(c10::function_ref<void(const at::Tensor&)> visitor) const override {
    if (const auto root = has_buffers_ ? root_.lock() : nullptr) visit_buffers_of(*root, visitor);
  }

  bool has_replaced_buffers() const override {
    const auto root = has_buffers_ ? root_.lock() : nullptr;
    if (root == nullptr || ModuleAccess::buffers(*root).is_empty()) return false;
    const auto* const stand_in = dynamic_cast<const StandInMembers*>(root.get());
    return stand_in != nullptr && stand_in->has_replaced_buffers();
  }

  std::shared_ptr<void> hold() override {
    auto held = std::make_shared<Held>();
    // A module that is gone, or was taken out of the tree, does not run either.
    if (const auto root = root_.lock()) add(root, *held);
    if (!held_flags().take(held->flags)) return nullptr;
    held->is_taken = true;
    return held;
  }

 private:
  struct Held {
    HeldFlags::Flags flags;
    c10::SmallVector<std::shared_ptr<torch::nn::Module>, 4> alive;
    std::size_t next = 0;  // where the next module is expected, if the tree is as it was
    bool is_taken = false;
    ~Held() {
      if (is_taken) held_flags().give_back(flags);
    }
  };

  void add(const std::shared_ptr<torch::nn::Module>& module, Held& held) const {
    auto found = flags_.begin() + static_cast<std::ptrdiff_t>(std::min(held.next, flags_.size()));
    if (found == flags_.end() || found->first != module.get())
      found = std::find_if(flags_.begin(), flags_.end(),
                           [&](const auto& flag) { return flag.first == module.get(); });
    if (found != flags_.end()) {
      held.flags.push_back(*found);
      held.alive.push_back(module);
      held.next = static_cast<std::size_t>(found - flags_.begin()) + 1;
    }
    for (const auto& child : ModuleAccess::children(*module))
      if (child.value() != nullptr) add(child.value(), held);
  }

  const std::weak_ptr<torch::nn::Module> root_;
  const void* const subject_;
  const bool has_buffers_;
  c10::SmallVector<HeldFlags::Flag, 4> flags_;
  std::size_t num_parameters_ = 0;
};

bool ends_with_and_drop(std::string_view& text, std::string_view end) {
  if (!text.ends_with(end)) return false;
  text.remove_suffix(end.size());
  return true;
}

/// LibTorch's own, and others whose class says so: SyncBatchNormImpl.
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

std::shared_ptr<HeldState> training_flags_of(torch::nn::Module& root, bool has_buffers) {
  return std::make_shared<TrainingFlags>(root, has_buffers);
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

/// Their training flags are attributes of script modules.
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

#pragma once
// The scope of a frame's runs: the common part of the first run and of recomputes.

#include <c10/util/intrusive_ptr.h>

#include <any>
#include <thread>
#include <utility>
#include <vector>

#include "lib/frame/frame.h"
#include "lib/frame/script_watch.h"
#include "lib/scope/region_scope.h"
#include "lib/seam/engine.h"

namespace remat {

/// Base of every scope of a region except save_region's.
class FrameScope : public detail::RegionScope,
                   public DrawSource,
                   public detail::BackwardWatcher,
                   public detail::RegistrationWatcher,
                   public GuardWatcher {
 public:
  Frame& frame() const { return *frame_; }
  bool is_own_thread() const override {
    return std::this_thread::get_id() == owner || seam::graph_task_id() >= 0;
  }
  DrawSource* draws() override { return this; }
  detail::BackwardWatcher* backwards() override { return this; }
  detail::RegistrationWatcher* registrations() override { return this; }
  GuardWatcher* guards() override { return this; }
  ScriptWatch* scripts() override { return &scripts_; }
  /// In a recompute, sets the providers of the user's state to their state at this point of
  /// forward.
  virtual void move_providers(const std::vector<std::any>&) {}

 protected:
  explicit FrameScope(c10::intrusive_ptr<Frame> frame)
      : RegionScope(frame->region().info), frame_(std::move(frame)) {
    answers(detail::Ability::Hooks);
  }
  const std::thread::id owner = std::this_thread::get_id();

 private:
  const c10::intrusive_ptr<Frame> frame_;
  ScriptWatch scripts_;
};

}  // namespace remat

#include "lib/entry/opaque_arguments.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <cstdint>
#include <cstring>

#include "lib/base/once_per_name.h"
#include "lib/frame/frame.h"
#include "lib/frame/frame_scope.h"
#include "lib/scope/region_scope.h"
#include "lib/seam/warn.h"

namespace remat {

namespace {

/// Returns whether the argument's own bytes hold a saved tensor; does not follow its pointers.
bool holds_saved_tensor(Frame& frame, const Frame& around, const void* object,
                        std::size_t num_bytes) {
  const auto* const bytes = static_cast<const char*>(object);
  for (std::size_t at = 0; at + sizeof(void*) <= num_bytes; at += sizeof(void*)) {
    const void* word = nullptr;
    std::memcpy(&word, bytes + at, sizeof word);
    if (word == nullptr) continue;
    const at::Tensor captured = frame.slots().captured_at(word);
    if (captured.defined() && is_built_since(around.start(), captured)) return true;
  }
  return false;
}

const Frame* frame_around() {
  const Frame* found = nullptr;
  detail::visit_regions([&](detail::RegionScope& region) {
    if (found != nullptr) return;
    if (auto* const scope = dynamic_cast<FrameScope*>(&region)) found = &scope->frame();
  });
  return found;
}

}  // namespace

void warn_of_opaque_arguments(Frame& frame,
                              void (*visit_opaque)(const RegionBody&, OpaqueVisitor)) {
  const Frame* const around = frame_around();
  if (around == nullptr) return;
  visit_opaque(*frame.region().body, [&](int64_t number, const void* object, std::size_t num_bytes,
                                         const std::type_info& type) {
    if (!holds_saved_tensor(frame, *around, object, num_bytes)) return;
    static OncePerName warned;
    const std::string& name = frame.region().info.name();
    if (!warned.is_first(name)) return;
    const std::string type_name = c10::demangle(type.name());
    seam::warn(c10::str(
        "remat::checkpoint: argument ", number, " of ",
        name.empty() ? "a region without a name" : "region \"" + name + "\"",
        ", counted from 0, is a ", type_name,
        ". It holds a tensor that the region saved, but it has no visit_tensors. Cause: without "
        "visit_tensors its tensors, and the graph behind them, stay in memory, although the "
        "enclosing region would compute them again. Hint: write `template <class Visitor> void "
        "visit_tensors(",
        type_name,
        "& value, Visitor&& visit)` in the namespace of the type, and let it call visit(tensor) "
        "for each of its tensors; or pass the tensors as separate arguments."));
  });
}

}  // namespace remat

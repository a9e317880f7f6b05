#include "lib/frame/naming.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "lib/seam/engine.h"
#include "lib/state/parameter_names.h"
#include "lib/state/surroundings.h"
#include "remat/binding.h"

namespace remat {

namespace {

/// Returns ", options at train.cpp:42"; empty if that is unknown. Options initialized without
/// braces have the location of their declaration, which is useless.
std::string place_of_options(const Region& region) {
  if (region.file == nullptr) return {};
  const std::string_view path = region.file;
  if (path.ends_with("remat/options.h")) return {};
  const std::string_view file = path.substr(path.find_last_of("/\\") + 1);
  return fmt::format(", options at {}:{}", file, region.options.line);
}

const UserRegistrations* registrations_around(const Region& region) {
  const UserState* const state =
      region.surroundings == nullptr ? nullptr : region.surroundings->user_state();
  return state == nullptr ? nullptr : &state->registered();
}

const TensorNames* names_of_body(const Region& region) {
  return region.body == nullptr ? nullptr : region.body->tensor_names();
}

}  // namespace

std::string title(const Region& region) {
  const std::string& name = region.info.name();
  return fmt::format("region{} (frame {}{})", name.empty() ? "" : fmt::format(" \"{}\"", name),
                     region.info.id, place_of_options(region));
}

std::string name_of(const Region& region, const TensorIdentity& tensor) {
  if (const TensorNames* const names = names_of_body(region)) {
    if (std::string name = parameter_name(*names, tensor); !name.empty()) return name;
  }
  const UserRegistrations* const all = registrations_around(region);
  return all == nullptr ? std::string() : parameter_name(*all, tensor);
}

bool knows_modules(const Region& region) {
  if (names_of_body(region) != nullptr) return true;
  const UserRegistrations* const all = registrations_around(region);
  return all != nullptr && std::any_of(all->flags.begin(), all->flags.end(), [](const auto& flags) {
           return flags->module() != nullptr;
         });
}

// The operator's node is made before it saves anything, so its number is one less than the next
// number at the save.
std::string saver_of(const SlotIdentity& slot) {
  return slot.operator_number == 0 ? std::string() : seam::name_of_node(slot.operator_number - 1);
}

}  // namespace remat

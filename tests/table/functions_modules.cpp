// Functions that call a module whose forward writes to buffers, as part of a region or as a region
// of their own.

#include <ATen/ATen.h>

#include "remat/module.h"
#include "tests/support/stateful_module.h"
#include "tests/table/table.h"

namespace table {

namespace {

using remat::testing::State;
using remat::testing::StatefulImpl;
using Kind = Exception::Kind;

constexpr const char* written_by_save_region =
    "what the function of save_region writes to buffers it does not write again";
constexpr const char* written_once =
    "a policy does not see again what the module does in its first call only";
constexpr const char* not_over =
    "a recompute before forward is over is not compared, and finds the plain member";

/// Returns the buffers that a table of bytes can show.
Tensors dense_buffers(const torch::nn::Module& module) {
  Tensors dense;
  for (const Tensor& each : module.buffers())
    if (each.layout() == at::kStrided && !each.is_meta() && each.numel() < 100)
      dense.push_back(each);
  return dense;
}

/// Adds a function of two calls. `call` makes a region of each, or tells the regions around about
/// the module.
template <class Module, class... Options>
void add_state(std::vector<Function>& t, State state, uint64_t salt, const std::string& name,
               Options... options) {
  Function& row = add(t, name, [state, salt, options...] {
    const Tensor weight = leaf({3});
    const auto module =
        std::make_shared<Module>(options..., std::vector<State>{state}, salt, weight);
    Made made{{leaf({3, 4})}, body_of([module](const Tensors& a) {
                const auto call = [&](const Tensor& x) {
                  // Level 0 is no region: the module is reported to the regions around.
                  if constexpr (std::is_same_v<Module, StatefulImpl>)
                    return remat::checkpoint({.level = 0}, module, x);
                  else
                    return module->forward(x);
                };
                return Tensors{call(a[0].exp()).sin(), call(a[0].select(0, 1))};
              })};
    made.params = {weight};
    made.buffers = dense_buffers(*module);
    return made;
  });
  if (remat::testing::writes_each_time(state) || state == State::Norm || state == State::Table)
    row.except(Kind::Skipped, "policy_save_region/*", written_by_save_region);
  if (state == State::Table)
    row.except(Kind::Skipped, "*/backward_inside", not_over)
        .except(Kind::MayRaise, "policy_nested/threads", written_once, "different metadata");
  if (state == State::Table)
    row.except(Kind::MayRaise, "policy_*/*", written_once, "The recompute left buffer");
  if (state == State::Added)
    row.except(Kind::MayRaise, "policy_*/*", written_once, "in forward: ")
        .except(Kind::MayRaise, "policy_nested/*", written_once, "A different number of tensors")
        .except(Kind::MayRaise, "policy_nested/backward_inside", written_once,
                "different metadata");
}

}  // namespace

void add_modules(std::vector<Function>& table) {
  for (int i = 0; i < static_cast<int>(State::Count); ++i) {
    const auto state = static_cast<State>(i);
    const std::string name = std::string("module_") + name_of(state);
    for (const uint64_t salt : {0x0ULL, 0x1b3000ULL}) {  // see StatefulImpl
      const std::string end = salt == 0 ? "" : "_2";
      add_state<StatefulImpl>(table, state, salt, name + end);
      add_state<remat::CheckpointedImpl<StatefulImpl>>(table, state, salt, name + "_region" + end,
                                                       remat::ModuleOptions{});
    }
  }
}

}  // namespace table

#include "lib/seam/script.h"

#include <ATen/core/function.h>
#include <ATen/record_function.h>
#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/runtime/interpreter.h>
#include <torch/csrc/jit/runtime/profiling_record.h>

#include <algorithm>
#include <mutex>
#include <string_view>
#include <utility>

namespace remat::seam {

namespace {

namespace jit = torch::jit;

thread_local int num_pinned_running = 0;

struct RunsPinned {
  RunsPinned() { ++num_pinned_running; }
  ~RunsPinned() { --num_pinned_running; }
};

/// Visits the nodes of a block, of the blocks in it and of the graphs inside it, until the visitor
/// returns true. Returns whether it did.
template <class Visitor>
bool visit_until(const jit::Block& block, const Visitor& visitor) {
  for (const jit::Node* const node : block.nodes()) {
    if (visitor(*node)) return true;
    if (node->hasAttribute(c10::attr::Subgraph) &&
        node->kindOf(c10::attr::Subgraph) == jit::AttributeKind::g &&
        visit_until(*node->g(c10::attr::Subgraph)->block(), visitor))
      return true;
    for (const jit::Block* const inner : node->blocks())
      if (visit_until(*inner, visitor)) return true;
  }
  return false;
}

/// Returns the function that the node calls; null if it calls none, or an unknown one.
jit::Function* called_by(const jit::Node& node) {
  if (node.kind() != c10::prim::CallFunction) return nullptr;
  const auto type = node.input(0)->type()->cast<c10::FunctionType>();
  return type == nullptr ? nullptr : type->function();
}

void add_settled(ScriptPlan& plan, jit::Function& function);

/// Adds the settled plans of the functions that a graph calls.
void add_nested(ScriptPlan& plan, const jit::Graph& graph) {
  visit_until(*graph.block(), [&](const jit::Node& node) {
    if (jit::Function* const called = called_by(node))
      add_settled(plan, *called);
    else if (node.kind() == c10::prim::CallFunction || node.kind() == c10::prim::CallMethod)
      plan.is_known = false;  // of a method: through an interface, since other calls are inlined
    return false;
  });
}

void add_settled(ScriptPlan& plan, jit::Function& function) {
  auto* const graph_function = jit::tryToGraphFunction(function);
  if (graph_function == nullptr) return;
  jit::GraphExecutor& executor = graph_function->get_executor();
  if (!executor.isOptimized()) {
    plan.graphs.emplace_back();
    return;
  }
  for (const auto& [arguments, settled] : executor.getDebugState().execution_plans) {
    plan.graphs.push_back(settled.graph);
    add_nested(plan, *settled.graph);
  }
}

ScriptPlan plan_of(const std::shared_ptr<jit::Graph>& graph) {
  ScriptPlan plan;
  plan.graphs.push_back(graph);
  if (graph != nullptr) add_nested(plan, *graph);
  return plan;
}

/// Adds all methods of the module and of those below it, since calls through an interface reach
/// these.
void add_methods(ScriptPlan& plan, const jit::Module& module) {
  for (const auto& each : module.modules())
    for (jit::Function* const method : each.type()->methods()) add_settled(plan, *method);
  plan.is_known = true;
}

bool contains_profiling(const jit::Graph& graph) {
  return visit_until(*graph.block(), [](const jit::Node& node) {
    return node.kind() == c10::prim::profile || node.kind() == c10::prim::profile_ivalue;
  });
}

}  // namespace

struct PinnedScript::Plan {
  jit::Function* function;
  jit::ExecutionPlan plan;  // empty for a function without a graph, which has no executor
  ScriptPlan settled{};
  std::optional<jit::Module> module{};
  std::once_flag made_again{};
  jit::Code again{};  // the plan without profiling

  ScriptPlan settled_now() const {
    ScriptPlan now = plan_of(plan.graph);
    if (!now.is_known && module.has_value()) add_methods(now, *module);
    return now;
  }
};

PinnedScript::PinnedScript(jit::Function& function, const jit::Module* module,
                           std::vector<c10::IValue>& stack)
    : plan_(new Plan{.function = &function, .plan = {}}) {
  auto* const graph_function = jit::tryToGraphFunction(function);
  if (graph_function == nullptr) return;
  if (module != nullptr) plan_->module = *module;
  plan_->plan = graph_function->get_executor().getPlanFor(stack);
  plan_->settled = plan_->settled_now();
}

PinnedScript::~PinnedScript() = default;

void PinnedScript::run(std::vector<c10::IValue>& stack) const {
  const RunsPinned pinned;
  RECORD_TORCHSCRIPT_FUNCTION(plan_->function->name(), stack);
  const ScriptsUnoptimized nested;
  if (plan_->plan)
    jit::InterpreterState(plan_->plan.code).run(stack);
  else
    plan_->function->run(stack);
}

void PinnedScript::run_again(std::vector<c10::IValue>& stack) const {
  if (!plan_->plan) return run(stack);
  std::call_once(plan_->made_again, [this] {
    plan_->again = plan_->plan.code;
    if (!contains_profiling(*plan_->plan.graph)) return;
    const auto graph = plan_->plan.graph->copy();
    jit::ProfilingRecord::removeProfileCounter(graph->block());
    jit::ProfilingRecord::removeProfilingNodes(graph->block());
    plan_->again = jit::Code(graph, plan_->function->name());
  });
  const RunsPinned pinned;
  RECORD_TORCHSCRIPT_FUNCTION(plan_->function->name(), stack);
  const ScriptsUnoptimized nested;
  jit::InterpreterState(plan_->again).run(stack);
}

bool PinnedScript::is_changed() const {
  return plan_->plan && !(plan_->settled_now() == plan_->settled);
}

void normalize_arguments(jit::Function& function, std::vector<c10::IValue>& stack) {
  function.getSchema().checkAndNormalizeInputs(stack);
}

bool is_in_script() { return jit::in_torchscript_runtime() && num_pinned_running == 0; }

namespace {

/// A script function whose plan marks that there is no last plan.
struct Nothing {
  std::shared_ptr<jit::Graph> graph = std::make_shared<jit::Graph>();
  jit::GraphExecutor executor{graph, "remat_nothing", jit::ExecutorExecutionMode::SIMPLE};
  std::shared_ptr<jit::Graph> planned;
  Nothing() {
    jit::Stack stack;
    planned = executor.getPlanFor(stack).graph;
  }
};

Nothing& nothing() {
  static auto* const all = new Nothing;
  return *all;
}

}  // namespace

ScriptPlan last_script_plan() {
  const auto graph = jit::lastExecutedOptimizedGraph();
  if (graph == nullptr || graph == nothing().planned) return {};
  return plan_of(graph);
}

void forget_last_script_plan() {
  if (jit::lastExecutedOptimizedGraph() == nothing().planned) return;
  jit::Stack stack;
  nothing().executor.run(stack);
}

ScriptsUnoptimized::ScriptsUnoptimized() : before_(jit::getGraphExecutorOptimize()) {
  if (before_) jit::setGraphExecutorOptimize(false);
}

ScriptsUnoptimized::~ScriptsUnoptimized() {
  if (before_) jit::setGraphExecutorOptimize(true);
}

namespace {

ScriptCallObserver call_observer{};

struct Begun final : at::ObserverContext {
  explicit Begun(void* what) : begun(what) {}
  void* const begun;
};

std::unique_ptr<at::ObserverContext> call_began(const at::RecordFunction&) {
  // Interpreters also record calls, after the plan was chosen.
  if (num_pinned_running > 0 || jit::in_torchscript_runtime()) return nullptr;
  void* const begun = call_observer.began();
  return begun == nullptr ? nullptr : std::make_unique<Begun>(begun);
}

void call_ended(const at::RecordFunction&, at::ObserverContext* context) {
  if (context != nullptr) call_observer.ended(static_cast<Begun*>(context)->begun);
}

}  // namespace

void observe_script_calls(const ScriptCallObserver& observer) {
  call_observer = observer;
  at::addGlobalCallback(at::RecordFunctionCallback(call_began, call_ended)
                            .scopes({at::RecordScope::TORCHSCRIPT_FUNCTION}));
}

namespace {

bool calls_batch_norm(jit::Function& function) {
  auto* const graph_function = jit::tryToGraphFunction(function);
  return graph_function != nullptr &&
         visit_until(*graph_function->graph()->block(), [](const jit::Node& node) {
           if (std::string_view(node.kind().toUnqualString()).find("batch_norm") !=
               std::string_view::npos)
             return true;
           jit::Function* const called = called_by(node);
           return called != nullptr && calls_batch_norm(*called);
         });
}

}  // namespace

bool calls_batch_norm(const jit::Module& module) {
  for (const auto& each : module.modules())
    for (jit::Function* const method : each.type()->methods())
      if (calls_batch_norm(*method)) return true;
  return false;
}

std::vector<at::Tensor> buffers_of(const jit::Module& module) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& each : module.buffers())
    if (each.defined()) all.push_back(each);
  return all;
}

namespace {

template <class Visitor>
void visit_trainable(const jit::Module& module, Visitor&& visitor) {
  for (jit::Module each : module.modules())
    if (each.hasattr("training") && each.attr("training").isBool()) visitor(each);
}

}  // namespace

std::vector<bool> training_flags_of(const jit::Module& module) {
  std::vector<bool> flags;
  visit_trainable(
      module, [&](const jit::Module& each) { flags.push_back(each.attr("training").toBool()); });
  return flags;
}

void set_training_flags(const jit::Module& module, const std::vector<bool>& flags) {
  std::size_t next = 0;
  visit_trainable(module, [&](jit::Module& each) {
    const bool flag = next < flags.size() && flags[next];
    if (next++ < flags.size() && each.attr("training").toBool() != flag)
      each.setattr("training", flag);
  });
}

}  // namespace remat::seam

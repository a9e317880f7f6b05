// The two operator counters: calls seen by RecordFunction, and CPU kernels that really ran.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <mutex>
#include <set>

#include "tests/support/support.h"

namespace remat::testing {

namespace {

// RecordFunction callbacks and kernels are plain functions: their log is global.
class Log {
 public:
  void add(std::string name) {
    std::lock_guard<std::mutex> lock(mutex_);
    names_.push_back(std::move(name));
  }
  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    names_.clear();
  }
  std::vector<std::string> names() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return names_;
  }
  int64_t count(const std::string& name) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::count(names_.begin(), names_.end(), name);
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> names_;
};

Log operator_log;
Log kernel_log;

std::unique_ptr<at::ObserverContext> record_call(const at::RecordFunction& call) {
  operator_log.add(call.name());
  return nullptr;
}

// An explicit instantiation may name a private member.
template <auto Member>
struct Reveal {
  friend auto entry_of(const c10::OperatorHandle& op) { return op.*Member; }
};
auto entry_of(const c10::OperatorHandle& op);
template struct Reveal<&c10::OperatorHandle::operatorDef_>;

// Returns an operator's CPU kernel. LibTorch 2.6 has no public access to it.
template <class Handle>
auto cpu_kernel_of(const Handle& op) {
  if constexpr (requires { op.getComputedKernelForDispatchKey(c10::DispatchKey::CPU); })
    return op.getComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  else
    return entry_of(op)->op.lookup(c10::DispatchKeySet(c10::DispatchKey::CPU));
}

// Counts a call, and calls the kernel that it replaces.
class CountingKernel : public c10::OperatorKernel {
 public:
  using Kernel = decltype(cpu_kernel_of(std::declval<c10::OperatorHandle>()));

  CountingKernel(std::string name, Kernel kernel)
      : name_(std::move(name)), kernel_(std::move(kernel)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    kernel_log.add(name_);
    kernel_.callBoxed(op, keys, stack);
  }

 private:
  const std::string name_;
  const Kernel kernel_;
};

class QuietWarnings : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

OpCounter::OpCounter()
    : handle_(at::addThreadLocalCallback(
          at::RecordFunctionCallback(record_call).scopes({at::RecordScope::FUNCTION}))) {
  operator_log.clear();
}
OpCounter::~OpCounter() { at::removeCallback(handle_); }
int64_t OpCounter::count(const std::string& op) const { return operator_log.count(op); }
std::vector<std::string> OpCounter::names() const { return operator_log.names(); }
void OpCounter::reset() { operator_log.clear(); }

struct KernelCounter::State {
  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__};
  std::set<std::string> names;
};

KernelCounter::KernelCounter(const std::vector<std::string>& more) {
  QuietWarnings quiet;  // LibTorch warns about replaced kernels
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  state_ = std::make_unique<State>();
  state_->names = {"sin", "cos",        "exp",   "relu",   "sigmoid",        "mm",
                   "bmm", "mul.Tensor", "addmm", "cumsum", "native_dropout", "cat"};
  state_->names.insert(more.begin(), more.end());
  for (const std::string& name : state_->names) {
    const size_t dot = name.find('.');
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        ("aten::" + name.substr(0, dot)).c_str(),
        dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
    auto kernel = std::make_unique<CountingKernel>(name, cpu_kernel_of(op));
    state_->library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }
  kernel_log.clear();
}
KernelCounter::~KernelCounter() = default;
int64_t KernelCounter::count(const std::string& kernel) const {
  if (state_->names.count(kernel) == 0)
    throw std::logic_error("Nobody counts the kernel " + kernel +
                           ": name it to the KernelCounter.");
  return kernel_log.count(kernel);
}
std::vector<std::string> KernelCounter::names() const { return kernel_log.names(); }
void KernelCounter::reset() { kernel_log.clear(); }

namespace detail {

Counts counts_of(const Kernels& kernels, const std::function<void()>& run) {
  std::vector<std::string> names = kernels.kept;
  names.insert(names.end(), kernels.again.begin(), kernels.again.end());
  const KernelCounter counter(names);
  run();
  Counts counts;
  for (const std::string& name : names) counts[name] = counter.count(name);
  return counts;
}

void require_kernels(const Kernels& kernels, const Counts& actual, const Counts& plain) {
  for (const std::string& name : kernels.kept) {
    CAPTURE(name);
    REQUIRE(plain.at(name) > 0);
    CHECK(actual.at(name) == plain.at(name));
  }
  for (const std::string& name : kernels.again) {
    CAPTURE(name);
    CHECK(actual.at(name) > plain.at(name));
  }
}

}  // namespace detail

}  // namespace remat::testing

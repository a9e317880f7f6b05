// The two operator counters: calls seen by RecordFunction, and CPU kernels that really ran.

#include <ATen/CPUFunctions.h>
#include <ATen/ops/native_dropout_native.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <mutex>

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

// A kernel's name as a template argument.
template <size_t N>
struct Name {
  constexpr Name(const char (&text)[N]) { std::copy_n(text, N, value); }  // NOLINT: implicit
  char value[N];
};

template <Name name, class Signature, Signature* kernel>
struct Counting;
template <Name name, class Result, class... Args, Result (*kernel)(Args...)>
struct Counting<name, Result(Args...), kernel> {
  static Result run(Args... args) {
    kernel_log.add(name.value);
    return kernel(std::forward<Args>(args)...);
  }
};

template <Name name, class Signature, Signature* kernel>
void replace(torch::Library& library) {
  library.impl(name.value, &Counting<name, Signature, kernel>::run);
}

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
};

KernelCounter::KernelCounter() {
  QuietWarnings quiet;  // LibTorch warns about replaced kernels
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  state_ = std::make_unique<State>();
  torch::Library& library = state_->library;
  using Unary = Tensor(const Tensor&);
  using Binary = Tensor(const Tensor&, const Tensor&);
  replace<"sin", Unary, at::cpu::sin>(library);
  replace<"cos", Unary, at::cpu::cos>(library);
  replace<"exp", Unary, at::cpu::exp>(library);
  replace<"relu", Unary, at::cpu::relu>(library);
  replace<"sigmoid", Unary, at::cpu::sigmoid>(library);
  replace<"mm", Binary, at::cpu::mm>(library);
  replace<"bmm", Binary, at::cpu::bmm>(library);
  replace<"mul.Tensor", Binary, at::cpu::mul>(library);
  replace<"addmm",
          Tensor(const Tensor&, const Tensor&, const Tensor&, const at::Scalar&, const at::Scalar&),
          at::cpu::addmm>(library);
  replace<"cumsum", Tensor(const Tensor&, int64_t, std::optional<at::ScalarType>), at::cpu::cumsum>(
      library);
  replace<"native_dropout", std::tuple<Tensor, Tensor>(const Tensor&, double, std::optional<bool>),
          at::native::native_dropout_cpu>(library);
  replace<"cat", Tensor(const at::ITensorListRef&, int64_t), at::cpu::cat>(library);
  kernel_log.clear();
}
KernelCounter::~KernelCounter() = default;
int64_t KernelCounter::count(const std::string& kernel) const { return kernel_log.count(kernel); }
std::vector<std::string> KernelCounter::names() const { return kernel_log.names(); }
void KernelCounter::reset() { kernel_log.clear(); }

}  // namespace remat::testing

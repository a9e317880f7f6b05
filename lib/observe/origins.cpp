// Definitions of origin.h, and the look-up of a node's origin.

#include "lib/observe/origins.h"

#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_set>

namespace remat {

namespace {

thread_local OriginLog* origin_log = nullptr;

struct OriginLogs {
  std::mutex mutex;
  std::vector<const OriginLog*> all;
  static OriginLogs& get() {
    static auto* const logs = new OriginLogs;  // leaked: guards may be static
    return *logs;
  }
};

std::string text_of(const SourceLocation& where) {
  if (where.file == nullptr) return {};
  const std::string_view path = where.file;
  return fmt::format("{}:{}", path.substr(path.find_last_of("/\\") + 1), where.line);
}

}  // namespace

OriginLog::OriginLog(OriginOptions options)
    : options_(std::move(options)), outer_(std::exchange(origin_log, this)) {
  if (options_.operators)
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(on_operator).scopes({at::RecordScope::FUNCTION}));
  OriginLogs& logs = OriginLogs::get();
  const std::lock_guard<std::mutex> lock(logs.mutex);
  logs.all.push_back(this);
}

OriginLog::~OriginLog() {
  if (options_.operators) at::removeCallback(handle_);
  origin_log = outer_;
  OriginLogs& logs = OriginLogs::get();
  const std::lock_guard<std::mutex> lock(logs.mutex);
  std::erase(logs.all, this);
}

OriginLog* OriginLog::here() { return origin_log; }

// An operator that makes a node is observed before it takes the node's number. Operators inside it
// are observed later, and the last one with a number has made the node.
std::unique_ptr<at::ObserverContext> OriginLog::on_operator(const at::RecordFunction& operation) {
  OriginLog* const log = origin_log;
  if (log == nullptr || operation.seqNr() < 0) return nullptr;
  auto& [op, place] = log->operators_[static_cast<uint64_t>(operation.seqNr())];
  op = operation.name();
  if (log->options_.place) place = log->options_.place();
  return nullptr;
}

void OriginLog::note_change() {
  const uint64_t now = at::sequence_number::peek();
  if (!changes_.empty() && changes_.back().sequence == now) changes_.pop_back();
  changes_.push_back({now, open_.empty() ? -1 : open_.back()});
}

void OriginLog::enter(std::string_view path, const SourceLocation& where) {
  std::pair<std::string, std::string> module(path, text_of(where));
  const auto [known, is_new] =
      numbers_.emplace(module.first + '\n' + module.second, static_cast<int32_t>(modules_.size()));
  if (is_new) modules_.push_back(std::move(module));
  open_.push_back(known->second);
  note_change();
}

void OriginLog::leave() {
  if (!open_.empty()) open_.pop_back();
  note_change();
}

NodeOrigin OriginLog::of(uint64_t sequence) const {
  NodeOrigin origin;
  const auto after =
      std::upper_bound(changes_.begin(), changes_.end(), sequence,
                       [](uint64_t number, const Change& each) { return number < each.sequence; });
  if (after != changes_.begin() && std::prev(after)->module >= 0)
    std::tie(origin.module, origin.place) =
        modules_[static_cast<std::size_t>(std::prev(after)->module)];
  if (const auto found = operators_.find(sequence); found != operators_.end()) {
    origin.op = found->second.first;
    if (!found->second.second.empty()) origin.place = found->second.second;
  }
  return origin;
}

NodeOrigin origin_of(uint64_t thread, uint64_t sequence) {
  OriginLogs& logs = OriginLogs::get();
  const std::lock_guard<std::mutex> lock(logs.mutex);
  for (auto log = logs.all.rbegin(); log != logs.all.rend(); ++log)
    if ((*log)->thread() == thread) return (*log)->of(sequence);
  return {};
}

OriginGuard::OriginGuard(OriginOptions options)
    : log_(std::make_unique<OriginLog>(std::move(options))) {}
OriginGuard::~OriginGuard() = default;

ModuleScope::ModuleScope(std::string_view path, SourceLocation where) : log_(OriginLog::here()) {
  if (log_ != nullptr) log_->enter(path, where);
}
ModuleScope::~ModuleScope() {
  if (log_ != nullptr && log_ == OriginLog::here()) log_->leave();
}

namespace {

class SumsByModule {
 public:
  ModuleBytes& of(const std::string& path) {
    const auto [place, is_new] = numbers_.emplace(path, all_.size());
    if (is_new) all_.push_back({.module = path});
    return all_[place->second];
  }
  void add(const std::vector<SavedTensorInfo>& saved) {
    for (const SavedTensorInfo& each : saved) {
      ModuleBytes& sums = of(each.module);
      if (each.dropped)
        sums.dropped_bytes += each.bytes;
      else if (!each.shares_storage)
        sums.saved_bytes += each.bytes;
    }
  }
  std::vector<ModuleBytes> sorted() && {
    const auto sum = [](const ModuleBytes& each) {
      return each.saved_bytes + each.dropped_bytes + each.parameters_bytes + each.gradients_bytes +
             each.optimizer_bytes;
    };
    std::erase_if(all_, [&](const ModuleBytes& each) { return sum(each) == 0; });
    std::stable_sort(all_.begin(), all_.end(),
                     [&](const ModuleBytes& a, const ModuleBytes& b) { return sum(a) > sum(b); });
    return std::move(all_);
  }

 private:
  std::map<std::string, std::size_t> numbers_;
  std::vector<ModuleBytes> all_;
};

int64_t storage_bytes(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? static_cast<int64_t>(tensor.storage().nbytes())
                                                  : 0;
}

}  // namespace

std::vector<ModuleBytes> bytes_by_module(const std::vector<SavedTensorInfo>& saved) {
  SumsByModule sums;
  sums.add(saved);
  return std::move(sums).sorted();
}

std::vector<ModuleBytes> bytes_by_module(
    const std::vector<SavedTensorInfo>& saved, const torch::nn::Module& model,
    const std::function<std::vector<at::Tensor>(const at::Tensor& parameter)>& state) {
  SumsByModule sums;
  sums.add(saved);
  std::unordered_set<const c10::TensorImpl*> counted;
  const auto add_module = [&](const std::string& path, const torch::nn::Module& module) {
    for (const at::Tensor& parameter : module.parameters(/*recurse=*/false)) {
      if (!counted.insert(parameter.unsafeGetTensorImpl()).second) continue;
      ModuleBytes& own = sums.of(path);
      own.parameters_bytes += storage_bytes(parameter);
      own.gradients_bytes += storage_bytes(parameter.grad());
      if (!state) continue;
      for (const at::Tensor& kept : state(parameter)) own.optimizer_bytes += storage_bytes(kept);
    }
  };
  add_module("", model);
  for (const auto& each : model.named_modules("", /*include_self=*/false))
    add_module(each.key(), *each.value());
  return std::move(sums).sorted();
}

}  // namespace remat

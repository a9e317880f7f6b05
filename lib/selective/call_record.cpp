#include "lib/selective/call_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <sstream>

namespace remat {

namespace {

bool holds_tensors(const c10::IValue& value) {
  bool holds = false;
  visit_tensors_in(value, [&](const at::Tensor&) { holds = true; });
  return holds;
}

void append(std::string& text, const std::string& more) {
  if (!text.empty()) text += ", ";
  text += more;
}

std::string text_of_plain(const c10::IValue& value) {
  if (value.isGenerator()) return "generator";
  std::ostringstream stream;
  stream << value;
  return stream.str();
}

}  // namespace

bool CallRecord::is_changed() const {
  const bool is_overwritten =
      writes != nullptr && std::any_of(writes->begin(), writes->end(),
                                       [](const auto& each) { return each->is_written(); });
  return is_written || is_overwritten ||
         std::any_of(kept.begin(), kept.end(), [](const KeptResult& each) {
           return std::any_of(each.tensors.begin(), each.tensors.end(),
                              [](const KeptTensor& tensor) { return tensor.is_changed(); });
         });
}

bool is_same_value(const c10::IValue& a, const c10::IValue& b) {
  if (a.tagKind() != b.tagKind()) return false;
  if (a.isDouble())
    return std::bit_cast<uint64_t>(a.toDouble()) == std::bit_cast<uint64_t>(b.toDouble());
  if (a.isDoubleList()) {
    const auto x = a.toDoubleVector(), y = b.toDoubleVector();
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), [](double p, double q) {
      return std::bit_cast<uint64_t>(p) == std::bit_cast<uint64_t>(q);
    });
  }
  if (a.isInt() || a.isBool() || a.isString() || a.isDevice() || a.isIntList() || a.isBoolList() ||
      a.isComplexDouble())
    return a == b;
  return true;
}

std::string text_of(const CallRecord& call) {
  std::string text;
  for (const ArgumentRecord& each : call.tensors) append(text, each.metadata.text());
  for (const c10::IValue& each : call.others) append(text, text_of_plain(each));
  return text;
}

std::string text_of(c10::ArrayRef<c10::IValue> arguments) {
  std::string tensors, others;
  for (const c10::IValue& each : arguments) {
    if (holds_tensors(each))
      visit_tensors_in(each, [&](const at::Tensor& tensor) {
        append(tensors, tensor.defined() ? TensorMetadata(tensor, false).text() : "undefined");
      });
    else
      append(others, text_of_plain(each));
  }
  if (!others.empty()) append(tensors, others);
  return tensors;
}

}  // namespace remat

#include "lib/base/unwinding.h"

#include <unwind.h>

#include <cstdint>
#include <cstring>

namespace remat {

namespace {

// Note [Functions that nothing may pass]
// A compiler writes a table for each function with cleanups, handlers or a noexcept (the LSDA:
// Itanium C++ ABI, Exception Handling Tables). The table has a range for each call that may throw.
// A call outside all ranges must not throw: the runtime calls std::terminate.

constexpr uint8_t omitted = 0xFF, as_uleb128 = 0x01, as_udata4 = 0x03;

uint64_t read_uleb128(const uint8_t*& at) {
  uint64_t value = 0;
  for (unsigned shift = 0;; shift += 7) {
    const uint8_t byte = *at++;
    value |= static_cast<uint64_t>(byte & 0x7F) << shift;
    if ((byte & 0x80) == 0) return value;
  }
}

uint64_t read(const uint8_t*& at, uint8_t encoding) {
  if (encoding == as_uleb128) return read_uleb128(at);
  uint32_t value = 0;
  std::memcpy(&value, at, sizeof(value));
  at += sizeof(value);
  return value;
}

/// Returns whether the function in a frame lets an exception out of its current call, or catches
/// it.
bool can_pass(_Unwind_Context* frame) {
  const auto* at = reinterpret_cast<const uint8_t*>(_Unwind_GetLanguageSpecificData(frame));
  if (at == nullptr) return true;
  int is_before_instruction = 0;
  const uint64_t instruction =
      _Unwind_GetIPInfo(frame, &is_before_instruction) - (is_before_instruction == 0 ? 1 : 0);
  const uint64_t place = instruction - _Unwind_GetRegionStart(frame);
  if (*at++ != omitted) return true;  // no compiler writes it
  if (*at++ != omitted) read_uleb128(at);
  const uint8_t encoding = *at++;
  if (encoding != as_uleb128 && encoding != as_udata4) return true;
  const uint64_t size = read_uleb128(at);
  for (const uint8_t* const end = at + size; at < end;) {
    const uint64_t begin = read(at, encoding), length = read(at, encoding);
    read(at, encoding);  // the address of the cleanup or handler
    read_uleb128(at);
    if (place >= begin && place - begin < length) return true;
  }
  return false;
}

struct Walk {
  uintptr_t end;
  bool can_pass = true;
};

}  // namespace

bool can_unwind_to(const void* on_stack) {
  Walk walk{reinterpret_cast<uintptr_t>(on_stack)};
  _Unwind_Backtrace(
      [](_Unwind_Context* frame, void* argument) {
        auto& to = *static_cast<Walk*>(argument);
        if (_Unwind_GetCFA(frame) > to.end) return _URC_END_OF_STACK;
        to.can_pass = can_pass(frame);
        return to.can_pass ? _URC_NO_REASON : _URC_END_OF_STACK;
      },
      &walk);
  return walk.can_pass;
}

}  // namespace remat

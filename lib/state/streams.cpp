#include "lib/state/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <vector>

#include "lib/seam/accelerator.h"

namespace remat {

namespace {

using c10::impl::VirtualGuardImpl;

bool has_streams(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_cpu() && tensor.device().type() == present_accelerator();
}

void record_use(const at::Tensor& tensor, const c10::Stream& stream) {
  if (tensor.has_storage())
    VirtualGuardImpl(stream.device_type())
        .recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

}  // namespace

std::unique_ptr<CurrentStreams> CurrentStreams::here() {
  const auto devices = devices_in_use();
  if (devices.empty()) return nullptr;
  const VirtualGuardImpl guard(devices.front().type());
  auto current = std::make_unique<CurrentStreams>(CurrentStreams{guard.getDevice(), {}});
  for (const c10::Device& device : devices) current->streams.push_back(guard.getStream(device));
  return current;
}

namespace {

c10::Stream own_stream(const c10::Device& device) {
  static std::mutex mutex;
  static std::vector<c10::Stream> all;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const c10::Stream& each : all)
    if (each.device() == device) return each;
  return all.emplace_back(VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
}

}  // namespace

std::unique_ptr<const StreamsBeside> StreamsBeside::of(const CurrentStreams* of_forward) {
  const auto here = of_forward == nullptr ? nullptr : CurrentStreams::here();
  if (here == nullptr) return nullptr;
  for (const c10::Stream& stream : here->streams)
    if (is_capturing(stream)) return nullptr;
  auto beside = std::make_unique<StreamsBeside>(
      StreamsBeside{{of_forward->device, {}}, {of_forward->device, of_forward->streams}});
  for (const c10::Stream& stream : of_forward->streams)
    beside->own.streams.push_back(own_stream(stream.device()));
  return beside;
}

StreamScope::StreamScope(const CurrentStreams* of_forward, c10::ArrayRef<at::Tensor> inputs) {
  if (of_forward == nullptr) return;
  before_ = CurrentStreams::here();
  if (before_ == nullptr) return;
  const VirtualGuardImpl guard(of_forward->device.type());
  c10::SmallVector<c10::Stream, 2> other;
  for (const c10::Stream& stream : of_forward->streams)
    if (guard.getStream(stream.device()) != stream) other.push_back(stream);
  if (!other.empty())
    for (const c10::Stream& asking : before_->streams) {
      c10::Event asked(asking.device_type());
      asked.record(asking);
      for (const c10::Stream& stream : other) asked.block(stream);
    }
  for (const c10::Stream& stream : other)
    for (const at::Tensor& input : inputs)
      if (has_streams(input) && input.device() == stream.device()) record_use(input, stream);
  // Nothing throws from here on, so everything set is restored.
  for (const c10::Stream& stream : other) replaced_.push_back(guard.exchangeStream(stream));
  if (guard.getDevice() != of_forward->device) guard.setDevice(of_forward->device);
}

StreamScope::~StreamScope() {
  if (before_ == nullptr) return;
  const VirtualGuardImpl guard(before_->device.type());
  for (const c10::Stream& stream : replaced_) guard.exchangeStream(stream);
  if (guard.getDevice() != before_->device) guard.uncheckedSetDevice(before_->device);
}

std::shared_ptr<const Ready> ReadyStreams::of(const at::Tensor& tensor) {
  if (!has_streams(tensor)) return nullptr;
  const c10::Stream stream = VirtualGuardImpl(tensor.device().type()).getStream(tensor.device());
  for (const auto& each : all_)
    if (each->stream() == stream) return each;
  return all_.emplace_back(std::make_shared<Ready>(stream));
}

void ReadyStreams::record() const {
  for (const auto& each : all_) each->record();
}

}  // namespace remat

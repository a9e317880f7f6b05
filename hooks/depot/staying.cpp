#include "hooks/depot/staying.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <unordered_map>
#include <utility>

namespace remat {

namespace {

std::pair<c10::DeviceType, c10::DeviceIndex> key_of(c10::Device device) {
  return {device.type(), device.index()};
}

void add_in_order(std::deque<Staying::Entry>& to, std::deque<Staying::Entry>&& more) {
  const auto before = static_cast<std::ptrdiff_t>(to.size());
  std::move(more.begin(), more.end(), std::back_inserter(to));
  more.clear();
  const auto is_before = [](const Staying::Entry& a, const Staying::Entry& b) {
    return std::pair(a.number, a.added) < std::pair(b.number, b.added);
  };
  const auto middle = to.begin() + before;
  if (middle != to.begin() && middle != to.end() && is_before(*middle, *std::prev(middle)))
    std::inplace_merge(to.begin(), middle, to.end(), is_before);
}

}  // namespace

Staying::Staying(int64_t on_cpu, int64_t on_each_device,
                 std::shared_ptr<const std::atomic<int64_t>> host_copies, int64_t keep_last)
    : on_cpu_(on_cpu),
      on_each_device_(on_each_device),
      keep_last_(keep_last),
      host_copies_(std::move(host_copies)) {}

int64_t Staying::budget(c10::Device device) const {
  return device.is_cpu() ? std::max<int64_t>(0, on_cpu_ - *host_copies_) : on_each_device_;
}

std::unique_ptr<Staying::Share> Staying::share_of(const at::Tensor& tensor) {
  const std::lock_guard<std::mutex> lock(mutex_);
  OfDevice& here = devices_[key_of(tensor.device())];
  if (here.bytes == nullptr) here.bytes = std::make_shared<std::atomic<int64_t>>(0);
  return std::make_unique<Share>(here.bytes, static_cast<int64_t>(tensor.storage().nbytes()));
}

void Staying::add(c10::Device device, Entry entry) {
  const std::lock_guard<std::mutex> lock(mutex_);
  OfDevice& here = devices_[key_of(device)];
  here.num_since += 1;
  entry.added = ++num_added_;
  std::deque<Entry>& entries = here.entries;
  const auto after =
      std::upper_bound(entries.begin(), entries.end(), entry.number,
                       [](uint64_t number, const Entry& each) { return number < each.number; });
  entries.insert(after, std::move(entry));
}

/// Puts the entries with other owners back into `entries`, if it is time to check them again.
void Staying::look_at_held(OfDevice& here, bool at_all) {
  constexpr std::size_t few = 64, share = 4;
  if (!at_all && here.held.size() > few && here.num_since < here.held.size() / share) return;
  here.num_since = 0;
  add_in_order(here.entries, std::exchange(here.held, {}));
}

std::vector<Staying::Entry> Staying::take_excess(c10::Device device,
                                                 const SavingOperator* running) {
  std::vector<Entry> excess;
  std::vector<std::shared_ptr<InPlace>> alive;  // die after the lock, like `of_entry`
  std::vector<c10::Storage> of_entry;
  const int64_t allowed = budget(device);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = devices_.find(key_of(device));
  if (found == devices_.end() || *found->second.bytes <= allowed) return excess;
  look_at_held(found->second, /*at_all=*/running == nullptr);
  std::deque<Entry>& entries = found->second.entries;
  struct Stored {
    std::size_t num_ours = 0;
    bool is_looked_at = false, has_to_move = false, is_held = false;
  };
  std::unordered_map<const c10::StorageImpl*, Stored> storages;
  std::erase_if(entries, [&](const Entry& each) {
    auto saved = each.saved.lock();
    if (saved == nullptr) return true;
    c10::Storage storage = saved->storage_in_place();
    if (!storage) return true;
    of_entry.push_back(std::move(storage));
    storages[of_entry.back().unsafeGetStorageImpl()].num_ours += 1;
    alive.push_back(std::move(saved));
    return false;
  });
  // `of_entry` holds each storage once more.
  int64_t staying = 0, num_counted = 0;
  for (std::size_t i = entries.size(); i-- > 0;) {
    Stored& stored = storages[of_entry[i].unsafeGetStorageImpl()];
    if (std::exchange(stored.is_looked_at, true)) continue;
    stored.is_held = of_entry[i].use_count() > 2 * stored.num_ours;
    if (stored.is_held) continue;
    const auto bytes = static_cast<int64_t>(of_entry[i].nbytes());
    stored.has_to_move = ++num_counted > keep_last_ && staying + bytes > allowed;
    if (!stored.has_to_move) staying += bytes;
  }
  std::deque<Entry> rest, held;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = entries[i];
    const Stored& stored = storages[of_entry[i].unsafeGetStorageImpl()];
    const bool may_be_written =
        !entry.is_complete && running != nullptr &&
        (entry.by.thread != running->thread || entry.by.number == running->number);
    if (stored.has_to_move && !may_be_written)
      excess.push_back(std::move(entry));
    else
      (stored.is_held ? held : rest).push_back(std::move(entry));
  }
  std::reverse(excess.begin(), excess.end());
  entries = std::move(rest);
  add_in_order(found->second.held, std::move(held));
  return excess;
}

std::vector<c10::Device> Staying::devices() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<c10::Device> all;
  for (const auto& [key, each] : devices_) all.emplace_back(key.first, key.second);
  return all;
}

int64_t Staying::room(c10::Device device) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = devices_.find(key_of(device));
  return budget(device) - (found == devices_.end() ? 0 : found->second.bytes->load());
}

}  // namespace remat

#include "hooks/disk/save_in_tiers.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hooks/depot/nearer_contents.h"
#include "hooks/disk/file_watch.h"
#include "hooks/disk/save_on_disk.h"
#include "hooks/host/background.h"
#include "hooks/host/host_copy.h"
#include "lib/base/waiting.h"
#include "lib/seam/warn.h"

namespace remat {

namespace {

/// Counts its lifetime as a wait of this thread.
class Waiting {
 public:
  explicit Waiting(TierTotals& totals) : totals_(totals) {}
  ~Waiting() {
    const auto waited = std::chrono::steady_clock::now() - start_;
    totals_.num_waits += 1;
    totals_.waited_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count();
  }
  Waiting& operator=(Waiting&&) = delete;

 private:
  TierTotals& totals_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// The bytes of one tensor that are written to the file.
class Written {
 public:
  Written(std::shared_ptr<TierTotals> totals, int64_t size)
      : totals_(std::move(totals)), size_(size) {}
  ~Written() {
    if (is_counted_) totals_->on_disk -= size_;
  }
  Written& operator=(Written&&) = delete;

  /// Writes the bytes. `from`: returns their address, or throws. Any thread, once.
  template <class From>
  void write(Spool& spool, const From& from) {
    try {
      range_ = spool.write(from(), size_);
    } catch (const std::exception& error) {
      totals_->num_failed_writes += 1;
      error_ = seam::text_of(error);
    }
  }
  // The functions below are for the time after the write.
  /// Counts the bytes as moved from memory to the file.
  void count() {
    totals_->to_disk += size_;
    totals_->on_disk += size_;
    is_counted_ = true;
  }
  /// Returns the range in the file; null if the write failed or did not begin.
  const std::shared_ptr<const SpoolRange>& range() const { return range_; }
  void warn_if_failed() {
    if (const std::string error = std::exchange(error_, {}); !error.empty())
      seam::warn(c10::str(
          "remat: a saved tensor stays in memory, beyond the budget of its tier, since it could "
          "not be moved: ",
          error));
  }

 private:
  const std::shared_ptr<TierTotals> totals_;
  const int64_t size_;
  std::shared_ptr<const SpoolRange> range_;
  std::string error_;
  bool is_counted_ = false;
};

/// Returns the bytes of a range. Counts them and the thread's wait.
at::Tensor load_from(const Written& written, SpoolLoad& load, int64_t size, TierTotals& totals) {
  totals.num_loads += 1;
  totals.loaded += size;
  if (load.is_over()) return load.finish();
  const Waiting waiting(totals);
  return load.is_begun() ? load.finish() : read_now(*written.range(), size);
}

/// Bytes of the file that are in the host's memory, or are being loaded to it, before the device
/// has room for them.
class Nearer {
 public:
  Nearer(std::shared_ptr<TierTotals> totals, std::shared_ptr<const SpoolRange> range, int64_t size)
      : totals_(std::move(totals)), size_(size) {
    load_.begin(std::move(range), size_, /*can_wait=*/true);
    totals_->on_host += size_;
  }
  ~Nearer() {
    load_.cancel();
    totals_->on_host -= size_;
  }
  Nearer& operator=(Nearer&&) = delete;

  bool is_over() const { return load_.is_over(); }
  /// Waits for the bytes and returns them. Any thread, more than once. Throws c10::Error.
  at::Tensor bytes() {
    const auto lock = lock_in_turn(mutex_);
    if (!bytes_.defined()) {
      TORCH_CHECK(load_.is_begun(), "remat: a read ahead has failed");
      bytes_ = load_.finish();
    }
    return bytes_;
  }

 private:
  const std::shared_ptr<TierTotals> totals_;
  const int64_t size_;
  std::mutex mutex_;
  SpoolLoad load_;
  at::Tensor bytes_;
};

/// A tensor of the CPU itself.
class OwnOnDisk final : public ComparableContents {
 public:
  OwnOnDisk(std::shared_ptr<Spool> spool, const at::Tensor& flat,
            std::shared_ptr<TierTotals> totals)
      : size_(flat.numel()),
        totals_(std::move(totals)),
        state_(std::make_shared<State>(totals_, flat)),
        job_(Background::get().run([spool = std::move(spool), state = state_] {
          state->written.write(*spool, [&] { return state->flat.const_data_ptr(); });
          if (state->written.range() != nullptr) state->let_go();
        })) {}
  ~OwnOnDisk() override { job_->cancel(); }
  OwnOnDisk& operator=(OwnOnDisk&&) = delete;

  bool is_stored_late() const override { return true; }
  void finish_store() override {
    end_write();
    state_->written.warn_if_failed();
  }
  bool has_bytes_of(const void* memory) override {
    if (job_->is_waiting()) return true;
    end_write();
    // If the write failed or was canceled, the contents are still in that memory itself.
    return state_->written.range() == nullptr || state_->written.range()->equals(memory);
  }
  void begin_load() override {
    if (job_->cancel() || !job_->is_over()) return;  // it is still in memory
    if (state_->written.range() != nullptr) load_.begin(state_->written.range(), size_);
  }
  at::Tensor finish_load() override {
    if (state_->written.range() == nullptr) return state_->flat;
    return load_from(state_->written, load_, size_, *totals_);
  }
  void cancel_load() override { load_.cancel(); }

 private:
  void end_write() {
    if (job_->is_over()) return;
    const Waiting waiting(*totals_);
    const WatchedFileWork watched(FileWatch::Work::Wait, size_);
    job_->wait();
  }
  struct State {
    State(std::shared_ptr<TierTotals> totals, at::Tensor from)
        : written(std::move(totals), from.numel()), flat(std::move(from)) {}
    void let_go() {
      flat.reset();
      written.count();
    }
    Written written;
    at::Tensor flat;  ///< until it is written
  };
  const int64_t size_;
  const std::shared_ptr<TierTotals> totals_;
  const std::shared_ptr<State> state_;
  const std::shared_ptr<Background::Job> job_;
  SpoolLoad load_;
};

}  // namespace

/// A tensor from an accelerator.
class SaveInTiers::OnHost final : public StoredContents, public NearerContents {
 public:
  /// Makes the contents. `streams`: for copies back from the file; empty: the current stream.
  OnHost(std::shared_ptr<HostContents> host, const at::Tensor& flat,
         std::optional<CopyStreams> streams, std::shared_ptr<TierTotals> totals)
      : size_(flat.numel()),
        device_(flat.device()),
        streams_(streams),
        is_stored_late_(host->is_stored_late()),
        totals_(std::move(totals)),
        state_(std::make_shared<State>(totals_, size_, std::move(host))) {
    totals_->to_host += size_;
    totals_->not_leaving_host += size_;
  }
  ~OnHost() override {
    if (job_ != nullptr)
      job_->cancel();
    else
      totals_->not_leaving_host -= size_;
  }
  OnHost& operator=(OnHost&&) = delete;

  int64_t size() const { return size_; }
  /// Begins to write the contents to the file. Call it once.
  void begin_spill(std::shared_ptr<Spool> spool) {
    totals_->not_leaving_host -= size_;
    job_ = Background::get().run([spool = std::move(spool), state = state_] {
      auto host = state->host();
      state->written.write(*spool, [&] { return host->bytes_on_host().const_data_ptr(); });
      if (state->written.range() == nullptr) return;
      state->leave_host();
      host.reset();
      state->written.count();
    });
  }
  bool is_spilled() const { return job_->is_over(); }
  void wait_for_spill() {
    const Waiting waiting(*totals_);
    const WatchedFileWork watched(FileWatch::Work::Wait, size_);
    job_->wait();
    state_->written.warn_if_failed();
  }

  bool is_stored_late() const override { return is_stored_late_; }
  void finish_store() override {
    if (const auto host = state_->host()) host->finish_store();
  }
  int64_t bytes_to_approach() const override { return state_->host() != nullptr ? 0 : size_; }
  void begin_approach() override {
    if (state_->host() != nullptr || load_.is_begun() || device_load_.is_begun()) return;
    nearer_ = std::make_shared<Nearer>(totals_, state_->written.range(), size_);
  }
  void begin_load() override {
    loading_ = state_->host();
    if (loading_ != nullptr)
      loading_->begin_load();
    else if (streams_)
      device_load_.begin(
          [nearer = nearer_, range = state_->written.range(), size = size_] {
            return nearer != nullptr ? nearer->bytes() : read_now(*range, size);
          },
          size_, streams_->in, device_);
    else if (nearer_ == nullptr)
      load_.begin(state_->written.range(), size_);
  }
  at::Tensor finish_load() override {
    const bool is_begun = load_.is_begun() || device_load_.is_begun() || nearer_ != nullptr;
    if (!is_begun && loading_ == nullptr) loading_ = state_->host();
    if (const auto host = std::exchange(loading_, nullptr)) {
      totals_->num_loads += 1;
      totals_->loaded += size_;
      return host->finish_load();
    }
    const auto nearer = std::exchange(nearer_, nullptr);
    if (device_load_.is_begun()) {
      if (at::Tensor loaded = finish_device_load(); loaded.defined()) return loaded;
    } else if (nearer != nullptr) {
      if (at::Tensor loaded = finish_approach(*nearer); loaded.defined()) return loaded.to(device_);
    }
    return load_from(state_->written, load_, size_, *totals_).to(device_);
  }
  void cancel_load() override {
    if (const auto host = std::exchange(loading_, nullptr)) host->cancel_load();
    load_.cancel();
    device_load_.cancel();
    nearer_.reset();
  }

 private:
  /// Returns the loaded bytes; undefined after a failure, so that they are read again.
  at::Tensor finish_approach(Nearer& nearer) {
    std::optional<Waiting> waiting;
    if (!nearer.is_over()) waiting.emplace(*totals_);
    try {
      at::Tensor loaded = nearer.bytes();
      totals_->num_loads += 1;
      totals_->loaded += size_;
      return loaded;
    } catch (const std::exception&) {
      return {};
    }
  }
  /// Returns the loaded tensor; undefined after a failure: there may be memory now.
  at::Tensor finish_device_load() {
    std::optional<Waiting> waiting;
    std::optional<WatchedFileWork> watched;
    if (!device_load_.is_over()) {
      waiting.emplace(*totals_);
      watched.emplace(FileWatch::Work::Wait, size_);
    }
    try {
      at::Tensor loaded = device_load_.finish();
      totals_->num_loads += 1;
      totals_->loaded += size_;
      return loaded;
    } catch (const std::exception&) {
      return {};
    }
  }
  class State {
   public:
    State(std::shared_ptr<TierTotals> totals, int64_t size, std::shared_ptr<HostContents> host)
        : written(totals, size), totals_(std::move(totals)), size_(size), host_(std::move(host)) {
      totals_->on_host += size_;
    }
    ~State() { leave_host(); }
    State& operator=(State&&) = delete;

    /// Returns the contents on the host; null after they have left: then `written` has them.
    std::shared_ptr<HostContents> host() const {
      const std::lock_guard<std::mutex> lock(mutex_);
      return host_;
    }
    void leave_host() {
      std::shared_ptr<HostContents> left;
      const std::lock_guard<std::mutex> lock(mutex_);
      left.swap(host_);
      if (left != nullptr) totals_->on_host -= size_;
    }
    Written written;

   private:
    const std::shared_ptr<TierTotals> totals_;
    const int64_t size_;
    mutable std::mutex mutex_;
    std::shared_ptr<HostContents> host_;
  };

  const int64_t size_;
  const c10::Device device_;
  const std::optional<CopyStreams> streams_;
  const bool is_stored_late_;
  const std::shared_ptr<TierTotals> totals_;
  const std::shared_ptr<State> state_;
  std::shared_ptr<Background::Job> job_;  ///< the spill
  std::shared_ptr<HostContents> loading_;
  SpoolLoad load_;
  DeviceLoad device_load_;
  std::shared_ptr<Nearer> nearer_;
};

SaveInTiers::SaveInTiers(const SaveInTiersOptions& options, std::shared_ptr<TierTotals> totals)
    : host_bytes_(options.host_bytes),
      max_bytes_in_flight_(options.max_bytes_in_flight),
      pin_memory_(options.pin_memory),
      cpu_(options.pin_memory),
      spool_(options.directory.empty()
                 ? nullptr
                 : std::make_shared<Spool>(options.directory, "SaveInTiersGuard")),
      totals_(std::move(totals)) {}

std::shared_ptr<StoredContents> SaveInTiers::begin_store(const at::Tensor& flat) {
  if (flat.is_cpu()) return std::make_shared<OwnOnDisk>(spool_, flat, totals_);
  auto contents =
      std::make_shared<OnHost>(cpu_.begin_host_store(flat), flat,
                               pin_memory_ ? copy_streams(flat.device()) : std::nullopt, totals_);
  if (has_disk()) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      on_host_.push_back(contents);
    }
    spill();
  }
  return contents;
}

void SaveInTiers::spill() {
  for (;;) {
    std::shared_ptr<OnHost> slowest;
    std::vector<std::shared_ptr<OnHost>> looked_at;  // die after the lock
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      int64_t leaving = 0;
      std::erase_if(spilling_, [&](const std::weak_ptr<OnHost>& each) {
        auto contents = each.lock();
        if (contents == nullptr || contents->is_spilled()) return true;
        leaving += contents->size();
        looked_at.push_back(std::move(contents));
        return false;
      });
      while (totals_->not_leaving_host > host_bytes_ && !on_host_.empty()) {
        auto oldest = on_host_.front().lock();
        on_host_.pop_front();
        if (oldest == nullptr) continue;
        oldest->begin_spill(spool_);
        leaving += oldest->size();
        spilling_.push_back(oldest);
        looked_at.push_back(std::move(oldest));
      }
      if (leaving <= max_bytes_in_flight_ || spilling_.empty()) return;
      slowest = spilling_.front().lock();
    }
    if (slowest != nullptr) slowest->wait_for_spill();
  }
}

}  // namespace remat

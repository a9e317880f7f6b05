#include "lib/budget/moving.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "hooks/disk/save_on_disk.h"
#include "lib/budget/storages.h"
#include "lib/seam/dispatch_mode.h"
#include "lib/seam/on_stream.h"
#include "lib/seam/ready.h"
#include "lib/seam/unseen.h"
#include "lib/seam/warn.h"

namespace remat::budget {

namespace {

/// Measures a copy from its construction on.
class TimeOfCopy {
 public:
  void note(CopyTime& time, int64_t bytes) const {
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start_;
    time.note(taken.count(), bytes);
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

std::unique_ptr<Spool> spool_in(const MoveOptions& options, c10::Device device) {
  TORCH_CHECK_VALUE(options.min_bytes >= 0, "remat::BudgetGuard: moving's min_bytes was ",
                    options.min_bytes, ". Hint: give 0 or more.");
  TORCH_CHECK_VALUE(!device.is_cpu() || !options.directory.empty(),
                    "remat::BudgetGuard: moving has no directory, and values of the CPU can be "
                    "moved only to a file. Hint: set a directory.");
  return options.directory.empty() ? nullptr
                                   : std::make_unique<Spool>(options.directory, "BudgetGuard");
}

}  // namespace

void CopyTime::note(double seconds, int64_t bytes) {
  const double each = seconds / static_cast<double>(bytes);
  double least = s_per_byte_;
  while (each < least && !s_per_byte_.compare_exchange_weak(least, each)) {
  }
  ++num_timed_;
}

Mover::Mover(const MoveOptions& options, c10::Device device)
    : min_bytes_(options.min_bytes), spool_(spool_in(options, device)), cpu_(options.pin_memory) {}

void Mover::stop(const std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!is_stopped_.exchange(true)) error_ = error;
}

void Mover::warn_if_stopped() {
  if (!is_stopped()) return;
  std::string error;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    error.swap(error_);
  }
  if (!error.empty())
    seam::warn(
        c10::str("remat::BudgetGuard: no more values are moved, because a value could not "
                 "be copied away: ",
                 error));
}

Moved::Moved(std::shared_ptr<Mover> mover, c10::Storage content)
    : mover_(std::move(mover)),
      bytes_(static_cast<int64_t>(content.nbytes())),
      device_(content.device()),
      original_(std::move(content)),
      job_(mover_->spool_ == nullptr ? nullptr
                                     : std::make_shared<Background::Job>([this] { write(); })) {}

Moved::~Moved() {
  if (job_ != nullptr && !job_->cancel()) job_->wait_with_lock();
}

// The thread of Background runs this, or a thread that needs the room at once.
void Moved::write() noexcept {
  try {
    const TimeOfCopy time;
    const void* const from =
        host_ == nullptr ? original_.data() : host_->bytes_on_host().const_data_ptr();
    range_ = mover_->spool_->write(from, bytes_);
    time.note(mover_->out_, bytes_);
    host_.reset();
  } catch (const std::exception& error) {
    has_failed_ = true;
    mover_->stop(seam::text_of(error));
  }
}

void Moved::begin() noexcept {
  if (device_.is_cpu()) return Background::get().queue(job_);
  // The time of a copy is known only if the host waits for it.
  const bool is_timed = mover_->is_learning();
  try {
    const seam::DispatchModeOff unseen_by_budgets;
    const Unseen unseen;
    if (is_timed) {
      Ready ready(current_stream(device_));
      ready.record();
      ready.synchronize();
    }
    const TimeOfCopy time;
    host_ = mover_->cpu_.begin_host_store(bytes_in(original_));
    waits_by_operators_ = host_->holds_original();
    if (is_timed && job_ == nullptr) {
      host_->wait_for_store();
      time.note(mover_->out_, bytes_);
    }
  } catch (const std::exception& error) {
    has_failed_ = true;
    mover_->stop(seam::text_of(error));
  }
  is_begun_ = true;
  if (job_ == nullptr || has_failed_) return;
  Background::get().queue(job_);
  if (is_timed) wait();
}

bool Moved::is_over() const {
  if (device_.is_cpu()) return job_->is_over();
  if (!is_begun_) return false;
  return has_failed_ || (job_ != nullptr ? job_->is_over() : host_->is_store_over());
}

void Moved::wait() noexcept {
  if (device_.is_cpu()) return job_->wait_with_lock();
  try {
    const Unseen unseen;
    if (job_ != nullptr && !has_failed_)
      waits_by_operators_ ? job_->wait() : job_->wait_with_lock();
    else if (!has_failed_)
      host_->wait_for_store();
  } catch (const std::exception& error) {
    has_failed_ = true;
    mover_->stop(seam::text_of(error));
  }
}

void Moved::settle() {
  if (!has_failed_ && host_ != nullptr && host_->holds_original()) {
    has_failed_ = true;
    mover_->stop("the copy to the CPU could not be made");
  }
  is_complete_ = !has_failed_;
  original_ = c10::Storage();
}

c10::Storage Moved::load() {
  if (device_.is_cpu()) {
    at::DataPtr data = c10::GetCPUAllocator()->allocate(static_cast<std::size_t>(bytes_));
    const TimeOfCopy time;
    range_->read(data.get());
    time.note(mover_->back_, bytes_);
    return storage_of_data(std::move(data), bytes_);
  }
  const Unseen unseen;
  if (host_ != nullptr) return host_->finish_load().storage();
  return read_now(*range_, bytes_).to(device_).storage();
}

}  // namespace remat::budget

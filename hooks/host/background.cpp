#include "hooks/host/background.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <system_error>
#include <thread>
#include <utility>

#include "lib/base/waiting.h"

namespace remat {

namespace {

/// A number that differs in each child of a fork.
std::atomic<int64_t> process_now{1};

thread_local bool is_serving = false;

}  // namespace

bool Background::Job::begin() {
  const int64_t process = process_now;
  int64_t state = state_.load();
  while (state != over && state != process)
    if (state_.compare_exchange_weak(state, process)) return true;
  return false;
}

void Background::Job::run() noexcept {
  try {
    work_();
  } catch (...) {
    error_ = std::current_exception();
  }
  work_ = nullptr;
  state_.store(over);
  state_.notify_all();
}

void Background::Job::wait() {
  if (begin()) run();
  if (state_.load() != over) {
    // At its end the job may free memory of a binding's language, which needs the lock that
    // WaitForThread releases.
    const WaitForThread waiting;
    for (int64_t state = state_.load(); state != over; state = state_.load()) state_.wait(state);
  }
  if (error_) std::rethrow_exception(error_);
}

void Background::Job::wait_with_lock() noexcept {
  if (begin()) run();
  for (int64_t state = state_.load(); state != over; state = state_.load()) state_.wait(state);
}

bool Background::Job::cancel() {
  int64_t state = waiting;
  if (!state_.compare_exchange_strong(state, process_now)) return false;
  work_ = nullptr;
  state_.store(over);
  state_.notify_all();
  return true;
}

// The object is never destroyed: the thread may outlive the program's static objects.
Background& Background::get() {
  static auto* const background = new Background;
  return *background;
}

bool Background::is_here() { return is_serving; }

Background::Background() {
  std::atexit([] { get().end(); });
  // The child's copy of the queue is consistent. Its copy of the condition is constructed again,
  // since the thread that waits on it does not exist in the child.
  pthread_atfork(
      [] {
        Background& here = Background::get();
        std::unique_lock<std::mutex> lock(here.mutex_);
        // The running job may need a lock of the binding's thread that forks, as in `wait`.
        while (!wait_until([&] { return !here.is_running_; }, lock, here.work_comes_,
                           std::chrono::hours(1))) {
        }
        lock.release();  // until parent and child are separate
      },
      [] { Background::get().mutex_.unlock(); },
      [] {
        Background& here = Background::get();
        ++process_now;
        new (&here.work_comes_) std::condition_variable;
        here.jobs_.clear();  // waiting threads run their jobs themselves
        here.jobs_that_can_wait_.clear();
        here.is_running_ = false;
        here.mutex_.unlock();
      });
}

std::shared_ptr<Background::Job> Background::run(std::function<void()> work, bool can_wait) {
  auto job = std::make_shared<Job>(std::move(work));
  queue(job, can_wait);
  return job;
}

void Background::queue(std::shared_ptr<Job> job, bool can_wait) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (process_with_thread_ != process_now && !is_over_) start();
    if (process_with_thread_ == process_now && !is_over_)
      (can_wait ? jobs_that_can_wait_ : jobs_).push_back(std::move(job));
  }
  work_comes_.notify_all();
}

void Background::start() {
  try {
    std::thread([this] { serve(); }).detach();
    process_with_thread_ = process_now;
  } catch (const std::system_error&) {  // no thread is available
  }
}

void Background::serve() {
  is_serving = true;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_comes_.wait(lock, [&] { return !jobs_.empty() || !jobs_that_can_wait_.empty(); });
    auto& next = jobs_.empty() ? jobs_that_can_wait_ : jobs_;
    std::shared_ptr<Job> job = std::move(next.front());
    next.pop_front();
    is_running_ = true;
    lock.unlock();
    if (job->begin()) job->run();
    job.reset();
    lock.lock();
    is_running_ = false;
    work_comes_.notify_all();
  }
}

void Background::end() {
  std::unique_lock<std::mutex> lock(mutex_);
  is_over_ = true;
  jobs_.clear();  // waiting threads run their jobs themselves
  jobs_that_can_wait_.clear();
  work_comes_.wait(lock, [&] { return !is_running_; });
}

}  // namespace remat

#pragma once
// One thread of the process that reads and writes files beside the program.
//
// Note [Jobs]
// A job that nobody has begun is run by whoever waits for it: nothing waits behind others, and
// without the thread (there is none to be had, or the process is the child of a fork) all goes on
// as if it were not there. A job works on memory and files, and copies to and from devices on
// streams of its own; it calls nothing of LibTorch's but what does that and what frees memory.
//
// At the end of the process no job is begun any more, and the one that runs is waited for: it may
// free what static objects of LibTorch's count.
//
// After fork() the child has the jobs of its parent, and not the thread. fork() waits for the one
// that the thread runs: half done in the child's memory, nobody could end it.

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>

namespace remat {

class Background {
 public:
  /// Something to be done; kept by those who care.
  class Job {
   public:
    explicit Job(std::function<void()> work) : work_(std::move(work)) {}
    /// Returns when it is done or was cancelled; runs it here if nobody has begun. Throws what it
    /// threw.
    void wait();
    /// Does the same, but keeps hold of the interpreter's lock and throws nothing: for work that
    /// does not need that lock.
    void wait_with_lock() noexcept;
    /// False if it has begun. What it holds is let go of.
    bool cancel();
    bool is_over() const { return state_.load() == over; }
    /// Whether nobody has begun it. Who begins it after this sees what this thread has written to
    /// memory.
    bool is_waiting() {
      int64_t state = waiting;
      return state_.compare_exchange_strong(state, waiting);
    }

   private:
    friend class Background;
    static constexpr int64_t waiting = 0, over = -1;  ///< else: the process that runs it
    /// Whether this thread is to run it.
    bool begin();
    void run() noexcept;

    std::function<void()> work_;
    std::exception_ptr error_;
    std::atomic<int64_t> state_{waiting};
  };

  static Background& get();
  /// Whether this thread is the one that runs jobs.
  static bool is_here();
  /// Queues it. First come, first served; `can_wait`: after all that cannot.
  std::shared_ptr<Job> run(std::function<void()> work, bool can_wait = false);
  /// Queues a job that a caller may have begun already.
  void queue(std::shared_ptr<Job> job, bool can_wait = false);

 private:
  Background();
  void start();
  void serve();
  void end();

  std::mutex mutex_;
  std::condition_variable work_comes_;
  std::deque<std::shared_ptr<Job>> jobs_, jobs_that_can_wait_;
  int64_t process_with_thread_ = 0;
  bool is_running_ = false, is_over_ = false;
};

}  // namespace remat

#pragma once
// One thread of the process that reads and writes files beside the program.
//
// Note [Jobs]
// A thread that waits for a job runs it itself if the job has not begun. Therefore no job waits
// behind others, and the program also works without the background thread (if no thread can be
// made, or in the child of a fork). A job works on memory and files, and copies to and from devices
// on its own streams. It calls LibTorch only for such copies and for releasing memory.
//
// At the end of the process no further job begins, and the exit waits for the running one: it may
// free memory that static objects of LibTorch count.
//
// After fork() the child has the jobs of its parent, but not the thread. fork() waits for the
// running job: the child could not finish a half-done job in its copy of the memory.

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
  /// A unit of work, owned by the threads that need its result.
  class Job {
   public:
    explicit Job(std::function<void()> work) : work_(std::move(work)) {}
    /// Returns when the job is done or was canceled; runs it here if it has not begun. Throws the
    /// error of the job.
    void wait();
    /// Does the same, but keeps the interpreter's lock and throws nothing. For work that does not
    /// need that lock.
    void wait_with_lock() noexcept;
    /// Cancels the job and releases its objects. Returns false if it has begun.
    bool cancel();
    bool is_over() const { return state_.load() == over; }
    /// Returns whether the job has not begun. A thread that begins it afterwards sees this thread's
    /// writes to memory.
    bool is_waiting() {
      int64_t state = waiting;
      return state_.compare_exchange_strong(state, waiting);
    }

   private:
    friend class Background;
    static constexpr int64_t waiting = 0, over = -1;  ///< other values: the process that runs it
    /// Returns whether this thread must run the job.
    bool begin();
    void run() noexcept;

    std::function<void()> work_;
    std::exception_ptr error_;
    std::atomic<int64_t> state_{waiting};
  };

  static Background& get();
  /// Returns whether this thread is the background thread.
  static bool is_here();
  /// Queues a job, first come, first served. `can_wait`: after all jobs that cannot wait.
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

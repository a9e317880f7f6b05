#pragma once
// The worker processes that a program starts.

#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "place.h"

// Starts the workers of `place`. Each ends with this object, and with the process that made it, in
// whatever way that ends.
class Workers {
 public:
  Workers(const Place& place, uint16_t port) {
    for (int rank = 0; rank < place.size; ++rank) {
      std::vector<std::string> words{"worker",
                                     "--rank",
                                     std::to_string(rank),
                                     "--port",
                                     std::to_string(port),
                                     "--leader",
                                     std::to_string(getpid())};
      for (const std::string& word : place.words()) words.push_back(word);
      std::vector<char*> argv;
      for (std::string& word : words) argv.push_back(word.data());
      argv.push_back(nullptr);
      pid_t id = 0;
      const int error = posix_spawn(&id, "/proc/self/exe", nullptr, nullptr, argv.data(), environ);
      if (error != 0) {
        end();
        throw std::runtime_error(std::string("a process could not be started: ") +
                                 std::strerror(error));
      }
      running_.push_back({rank, id});
    }
  }
  ~Workers() { end(); }
  Workers& operator=(Workers&&) = delete;

  // Waits until all workers have ended well. Throws as soon as one has not, or the time is over,
  // since the others would wait for that one.
  void wait(std::chrono::seconds limit) {
    const auto until = std::chrono::steady_clock::now() + limit;
    while (!running_.empty()) {
      std::erase_if(running_, [](const Running& worker) { return has_ended(worker); });
      if (running_.empty()) return;
      if (std::chrono::steady_clock::now() > until)
        throw std::runtime_error("process " + std::to_string(running_.front().rank) +
                                 " had not ended after " + std::to_string(limit.count()) + " s");
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  // Must be a worker's first call: the worker is killed when the process that started it ends.
  static void follow(pid_t leader) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != leader) _exit(1);  // the leader ended before the line above
  }

 private:
  struct Running {
    int rank;
    pid_t id;
  };

  // Returns whether a worker has ended. Throws if it has not ended well.
  static bool has_ended(const Running& worker) {
    int status = 0;
    const pid_t ended = waitpid(worker.id, &status, WNOHANG);
    if (ended == 0) return false;
    const std::string who = "process " + std::to_string(worker.rank);
    if (ended < 0) throw std::runtime_error(who + " cannot be waited for");
    if (WIFSIGNALED(status))
      throw std::runtime_error(who + " was killed by signal " + std::to_string(WTERMSIG(status)));
    if (WEXITSTATUS(status) != 0)
      throw std::runtime_error(who + " ended with status " + std::to_string(WEXITSTATUS(status)));
    return true;
  }

  void end() {
    for (const Running& worker : running_) kill(worker.id, SIGKILL);
    for (const Running& worker : running_) waitpid(worker.id, nullptr, 0);
    running_.clear();
  }

  std::vector<Running> running_;
};

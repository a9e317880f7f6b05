#pragma once
// Code that runs in a process of its own.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>

#include "tests/support/support.h"

namespace remat::testing {

/// Runs `f` in a child; its exit status, or the negative signal that ended it.
template <class F>
int in_child(F&& f) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      ::_exit(f());
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s\n", e.what());
    }
    ::_exit(99);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace remat::testing

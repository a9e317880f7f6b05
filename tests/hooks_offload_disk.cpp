// SaveOnDiskGuard: its file, full disks, limits, and processes that end or fork.

#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <optional>
#include <thread>

#include "remat/tiers.h"
#include "tests/support/child_process.h"
#include "tests/support/each_guard.h"
#include "tests/support/files.h"
#include "tests/support/saved_tensors.h"
#include "tests/support/sizes.h"
#include "tests/support/warnings.h"

using remat::SaveOnCpuGuard;
using remat::SaveOnDiskGuard;
using torch::autograd::SavedVariable;

TEST_CASE("tensors wait in one unnamed private file that goes with the graph", "[hooks][offload]") {
  using Mul = nodes::MulBackward0;
  const Folder folder;
  const Tensor x = leaf({64, 64});
  const LiveBytes bytes;
  {
    Tensor y;
    {
      const SaveOnDiskGuard guard(all_in(folder));
      const Tensor a = x + 1;
      y = a * a;
      CHECK(folder.num_entries() == 0);
      const auto status = folder.status();
      CHECK(status.st_nlink == 0);
      CHECK((status.st_mode & 0777) == 0600);
      CHECK(status.st_uid == ::geteuid());
      CHECK(status.st_size == 64 * 64 * 4);
    }
    CHECK(bytes.held() == bytes_of(y));
    CHECK(folder.open_files().size() == 1);
    CHECK(at::equal(read_saved(y, &Mul::self_), x + 1));
    CHECK(at::equal(grad_of(y, {x}, {.retain_graph = true})[0], 2 * (x + 1)));
    CHECK(at::equal(grad_of(y, {x})[0], 2 * (x + 1)));
    CHECK(folder.open_files().empty());  // backward has let go of the last range
  }
  CHECK(folder.num_entries() == 0);
}

TEST_CASE("ten thousand tensors wait on disk with few file descriptors", "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({4}, at::kDouble);
  const Limit descriptors(RLIMIT_NOFILE, 64);
  const LiveBytes bytes;
  const auto f = [](Tensor t) {
    for (int i = 0; i < 10000; ++i) t = t.sin();
    return t;
  };
  Tensor y;
  {
    const SaveOnDiskGuard guard(all_in(folder));
    y = f(x);
    CHECK(bytes.held() == bytes_of(y));
    CHECK(folder.open_files().size() == 1);
  }
  const Tensor grad = grad_of(y, {x})[0];
  CHECK(folder.open_files().empty());
  require_bit_equal({grad}, grad_of(f(x), {x}));
}

TEST_CASE("ranges of the file are used again, and neighbours merge", "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({1024});
  const SaveOnDiskGuard guard(all_in(folder));
  int64_t after_first = 0;
  for (int step = 0; step < 20; ++step) {
    Tensor y = x + 1;
    for (int i = 0; i < 10; ++i) y = y.sin();
    if (step == 0) after_first = folder.status().st_size;
    // Larger than any single one that was freed: only merged ranges hold it.
    if (step % 2 == 1) y = at::cat({y, y, y, y, y, y, y, y}).sin();
    grad_of(y, {x});
  }
  CHECK(after_first == 10 * 4096);
  CHECK(folder.status().st_size <= after_first + 8 * 4096);
}

TEST_CASE("a full disk is an error that names directory and bytes, and loses nothing",
          "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({4096});
  const LiveBytes bytes;
  {
    const SaveOnDiskGuard guard(all_in(folder));
    const Tensor before = (x + 1).sin();
    const auto program = [&] { return (x + 2).sin().sin(); };
    {
      const FileSizeLimit limit(40000);
      const auto error = error_of<c10::Error>(program);
      CHECK_THAT(text_of(error), contains("could not be written to a file in \"" + folder.path()));
      CHECK_THAT(text_of(error), contains("16384 bytes of a saved tensor"));
      CHECK_THAT(text_of(error), contains("File too large"));
    }
    const Tensor again = program();  // there is room now
    require_bit_equal(grad_of(before, {x}), {(x + 1).cos().detach()});
    Tensors plain;
    {
      const SaveOnCpuGuard in_memory;
      plain = grad_of(program(), {x});
    }
    require_bit_equal(grad_of(again, {x}), plain);
  }
  CHECK(bytes.held() == 0);
  CHECK(folder.open_files().empty());
}

TEST_CASE("a file size limit is an error, and no signal comes of it", "[hooks][offload]") {
  static std::atomic<int> num_signals{0};
  struct Handler {
    void (*const before)(int) = std::signal(SIGXFSZ, [](int) { ++num_signals; });
    ~Handler() { std::signal(SIGXFSZ, before); }
  } const handler;
  const auto is_blocked = [] {
    sigset_t mask{};
    ::pthread_sigmask(SIG_BLOCK, nullptr, &mask);
    return sigismember(&mask, SIGXFSZ) == 1;
  };
  const auto is_pending = [] {
    sigset_t pending{};
    ::sigpending(&pending);
    return sigismember(&pending, SIGXFSZ) == 1;
  };
  const Folder folder;
  const Tensor x = leaf({4096});
  const auto write = [&] {
    const SaveOnDiskGuard guard(all_in(folder));
    (x + 2).sin().sin();
  };
  const Limit limit(RLIMIT_FSIZE, 20000);
  CHECK_THAT(text_of(error_of<c10::Error>(write)), contains("File too large"));
  CHECK(num_signals == 0);
  CHECK_FALSE(is_blocked());

  // A signal of the program's that waits goes on waiting.
  sigset_t signal{};
  sigemptyset(&signal);
  sigaddset(&signal, SIGXFSZ);
  ::pthread_sigmask(SIG_BLOCK, &signal, nullptr);
  CHECK_THROWS_AS(write(), c10::Error);
  CHECK_FALSE(is_pending());
  ::pthread_kill(::pthread_self(), SIGXFSZ);
  CHECK_THROWS_AS(write(), c10::Error);
  CHECK(is_pending());
  CHECK(num_signals == 0);
  CHECK(is_blocked());
  ::pthread_sigmask(SIG_UNBLOCK, &signal, nullptr);
  CHECK(num_signals == 1);
}

TEST_CASE("tiers keep what a file size limit refuses, and no signal comes of it",
          "[hooks][tiers]") {
  const auto program = [](const Tensor& t) { return t.sin().cos().exp().sin().cos(); };
  const Folder folder;
  const Tensor x = leaf({4096});
  const Limit limit(RLIMIT_FSIZE, 20000);  // the signal would end this process
  std::optional<remat::SaveInTiersGuard> guard;
  guard.emplace(
      remat::SaveInTiersOptions{.host_bytes = 0, .directory = folder.path(), .min_bytes = 0});
  const remat::TierCounters counters = guard->counters();
  const Tensor y = program(x);
  guard.reset();
  // They are written beside the program.
  for (int i = 0; i < 1000 && counters.now().failed_writes == 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(counters.now().failed_writes > 0);
  require_bit_equal(grad_of(y, {x}), grad_of(program(x), {x}));
}

TEST_CASE("a disk that is full at the guard's end leaves the tensor in memory",
          "[hooks][offload]") {
  Warnings warnings;
  const Folder folder;
  const Tensor x = leaf({4096});
  Tensor y;
  {
    const FileSizeLimit limit(100);
    const SaveOnDiskGuard guard(all_in(folder));
    y = x * at::full({4096}, 2.f);
  }
  REQUIRE(warnings.texts.size() == 1);
  CHECK_THAT(warnings.texts[0], contains("a saved tensor stays in memory"));
  require_bit_equal(grad_of(y, {x}), {at::full({4096}, 2.f)});
}

TEST_CASE("a directory in which no file can be made is refused with its name", "[hooks][offload]") {
  const Folder folder;
  const std::string file = folder.path() + "/file";
  std::ofstream(file) << "not a directory";
  for (const std::string& path : {folder.path() + "/missing", file, std::string()}) {
    const auto error =
        error_of<c10::ValueError>([&] { const SaveOnDiskGuard guard({.directory = path}); });
    CHECK_THAT(text_of(error), contains("no file could be made in the directory \"" + path + "\""));
  }
  const Tensor x = leaf({4});  // nothing is left on the stack of scopes
  require_bit_equal(grad_of(x.sin(), {x}), {x.cos().detach()});
}

TEST_CASE("nothing is left on disk by a process that is killed, exits or throws",
          "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({4096});
  const auto save = [&] {
    const SaveOnDiskGuard guard(all_in(folder));
    return (x + 1).sin();
  };
  CHECK(in_child([&] {
          const SaveOnDiskGuard guard(all_in(folder));
          const Tensor y = (x + 1).sin();
          std::raise(SIGKILL);
          return 0;
        }) == -SIGKILL);
  CHECK(in_child([&] {
          const Tensor y = save();
          ::_exit(7);
          return 0;
        }) == 7);
  CHECK(in_child([&] {
          const SaveOnDiskGuard guard(all_in(folder));
          const Tensor y = (x + 1).sin();
          throw std::runtime_error("expected");
          return 0;
        }) == 99);
  CHECK(folder.num_entries() == 0);
}

TEST_CASE("parent and child of a fork do not write over each other", "[hooks][offload]") {
  const Folder folder;
  const Tensor x = leaf({4096});
  const SaveOnDiskGuard guard(all_in(folder));
  // Read without a backward, which LibTorch refuses in a child if its engine has threads.
  const auto save = [&](double shift) { return SavedVariable(x + shift, /*is_output=*/false); };
  const auto right = [&](const SavedVariable& saved, double shift) {
    return bit_equal(saved.unpack().detach(), (x + shift).detach());
  };
  SavedVariable old = save(1);
  const SavedVariable kept = save(3);
  int pipes[2];
  REQUIRE(::pipe(pipes) == 0);
  CHECK(in_child([&] {
          old = SavedVariable();
          const SavedVariable mine = save(2);  // would take the range of `old` in a shared file
          char go = 1;
          if (::write(pipes[1], &go, 1) != 1) return 1;
          return right(mine, 2) && right(kept, 3) ? 0 : 2;
        }) == 0);
  CHECK(right(old, 1));
  CHECK(right(kept, 3));
  old = SavedVariable();
  const SavedVariable mine = save(5);
  CHECK(right(mine, 5));
  CHECK(right(kept, 3));
  ::close(pipes[0]);
  ::close(pipes[1]);
}

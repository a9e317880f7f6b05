#include "lib/seam/torch_version.h"

#include <ATen/Version.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <string>
#include <string_view>

#include "lib/base/error.h"

namespace remat::seam {

namespace {

/// Returns "2.13", say, from LibTorch's description of itself; empty if it is not there.
std::string minor_version_in(const std::string& description) {
  constexpr std::string_view mark = "TORCH_VERSION=";
  const std::size_t found = description.find(mark);
  if (found == std::string::npos) return "";
  const std::size_t begin = found + mark.size();
  const std::size_t after_major = description.find('.', begin);
  if (after_major == std::string::npos) return "";
  const std::size_t end = description.find_first_not_of("0123456789", after_major + 1);
  return description.substr(begin, end - begin);
}

}  // namespace

void refuse_other_torch() {
  const std::string built_for = fmt::format("{}.{}", TORCH_VERSION_MAJOR, TORCH_VERSION_MINOR);
  const std::string here = minor_version_in(at::show_config());
  if (here.empty() || here == built_for) return;
  throw_unsupported(
      fmt::format("remat was built for LibTorch {}, but this process runs LibTorch {}", built_for,
                  here),
      "a binary of remat works with one minor version of LibTorch only, since the classes of "
      "LibTorch change between minor versions",
      fmt::format("build remat with LibTorch {}, or run the program with LibTorch {}", here,
                  built_for));
}

}  // namespace remat::seam

# Sourced: installs the tools that are missing, or names them.

can_apt() { [[ $(id -u) == 0 ]] && have apt-get; }

# apt PACKAGE...: installs them where this user can; otherwise prints the line that does, and
# returns 1.
apt() {
  if ! can_apt; then
    say "Not installed: $*. With Debian's names for them, the line to run is:"
    printf '     sudo apt-get install -y --no-install-recommends %s\n' "$*" >&2
    return 1
  fi
  say "Installing with apt-get: $*"
  export DEBIAN_FRONTEND=noninteractive
  local install=(apt-get install -y -q --no-install-recommends "$@")
  "${install[@]}" || { apt-get update -q && "${install[@]}"; }
}

# The oldest g++ that knows enough of C++20; clang passes.
compiles_cxx20() {
  have "${CXX%% *}" && $CXX -std=c++20 -x c++ -fsyntax-only - >/dev/null 2>&1 <<'END'
#include <concepts>
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
#error too old
#endif
END
}

python_has() { python3 -c "import $1" 2>/dev/null; }
python_headers() {
  local print_folder='import sysconfig; print(sysconfig.get_paths()["include"])'
  have python3 && [[ -f $(python3 -c "$print_folder")/Python.h ]]
}
meson_is_new() { [[ $("$1" --version 2>/dev/null) =~ ^[1-9] ]]; }
has_header() { $CXX -E -x c++ -include "$1" /dev/null >/dev/null 2>&1; }
known() { have pkg-config && pkg-config --exists "$1"; }

# What Debian has and this machine lacks, in one apt-get. Where that cannot be: without the compiler
# and Python there is nothing to do; Meson and Ninja come from pip, fmt, nlohmann-json, xxHash and
# Catch2 from Meson wraps, the rest is optional.
set_up_tools() {
  local missing=()
  have "${CXX%% *}" || missing+=(g++)
  have python3 || missing+=(python3)
  have pkg-config || missing+=(pkg-config)
  have meson || meson_is_new .venv/bin/meson || missing+=(meson)
  have ninja || missing+=(ninja-build)
  known 'fmt >= 9' || missing+=(libfmt-dev)
  known 'nlohmann_json >= 3.11' || missing+=(nlohmann-json3-dev)
  known 'libxxhash >= 0.8' || missing+=(libxxhash-dev)
  known catch2 || missing+=(catch2)
  have ccache || missing+=(ccache)
  have cmake || missing+=(cmake)        # the install test builds one program with it
  python_has ensurepip || missing+=(python3-venv)
  python_headers || missing+=(python3-dev)    # the Python test builds an extension module
  local all=("${missing[@]}")
  has_header gloo/context.h || all+=(libgloo-dev)   # for two examples; not every release has it
  known libzstd || all+=(libzstd-dev)               # for one example
  # Said once: what stays missing because it is optional is not asked for again.
  if [[ ${#all[@]} -gt 0 && $(cat build/.missing 2>/dev/null) != "${all[*]}" ]]; then
    apt "${all[@]}" ||
      { can_apt && { [[ ${#missing[@]} == 0 ]] || apt "${missing[@]}" || true; }; } ||
      { mkdir -p build && echo "${all[*]}" >build/.missing; }
  fi
  compiles_cxx20 ||
    fail "$CXX is missing or too old: g++ 12 (or clang with C++20) is needed. CXX names another."
  have python3 || fail "python3 is needed."

  if ! known 'fmt >= 9' || ! known 'nlohmann_json >= 3.11' || ! known 'libxxhash >= 0.8' ||
    ! known catch2; then
    if ! ls -d subprojects/{fmt,nlohmann_json,xxhash,catch2}/ >/dev/null 2>&1; then
      have git ||
        fail "fmt, nlohmann-json, xxHash or Catch2 is not installed, and to fetch it git is needed."
      say "fmt, nlohmann-json, xxHash or Catch2 is missing: git fetches a few MB to subprojects/."
    fi
  fi
  have meson && meson_is_new meson || [[ -x .venv/bin/meson ]] ||
    pip 'meson>=1.0' "No Meson 1.0 or newer here: fetching it with pip into .venv (1 MB)"
  have ninja || pip ninja "No Ninja here: fetching it with pip into .venv (under 1 MB)"
}

# pip PACKAGE WHY: installs it into .venv, which is made if need be.
pip() {
  say "$2"
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python_has ensurepip || apt python3-venv ||
      fail "python3 cannot make a virtual environment without its ensurepip."
    python3 -m venv --clear .venv
  fi
  .venv/bin/python -m pip install --disable-pip-version-check "$1"
}

# optional PACKAGE WHY PROGRAM...: installs what a test is skipped without, unless one of the
# programs is there. Asked for once.
optional() {
  local package=$1 why=$2 name
  for name in "${@:3}"; do if have "$name"; then return; fi; done
  if [[ -f build/.no-$package ]]; then return; fi
  say "$why"
  apt "$package" || { mkdir -p build && touch "build/.no-$package"; }
}

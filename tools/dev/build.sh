# Sourced by every job: words for the user, then all that configuring, building and testing needs.

say() { printf '\n== %s\n' "$*" >&2; }
fail() { printf '\ndev: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }

. tools/dev/tools.sh
. tools/dev/torch.sh

# One job per core, but a compilation that includes torch/torch.h takes up to 1.5 GB, and one of
# several files of tests 2 GB.
jobs=$(nproc)
if [[ -r /proc/meminfo ]]; then
  fit=$(awk '/MemAvailable/ { print int($2 / 2000000) }' /proc/meminfo)
  if ((fit < jobs)); then jobs=$((fit > 1 ? fit : 1)); fi
fi

set_up() {
  CXX=${CXX:-g++}
  export PATH=$PATH:$PWD/.venv/bin       # last: what the system has comes first
  export CCACHE_NOHASHDIR=1              # the same file in another build folder is a hit
  # Without it ccache keeps nothing that uses a precompiled header.
  export CCACHE_SLOPPINESS=pch_defines,time_macros
  export JOBS=$jobs MESON_TESTTHREADS=$jobs
  # A configured build folder says that the tools are there; asking for each would take a second.
  if [[ ! -f build/build.ninja ]] || ! have ninja; then set_up_tools; fi
  # The system's where it will do: `./dev python` brings another one, which cannot read what this
  # one has configured.
  MESON=meson
  if [[ -x .venv/bin/meson ]] && ! meson_is_new meson; then MESON=$PWD/.venv/bin/meson; fi
  export MESON
  # Meson adds it to its own choice only.
  if have ccache && [[ $CXX != ccache* ]]; then CXX="ccache $CXX"; fi
  export CXX
  set_up_torch
}

# configure FOLDER OPTION...: once, and again when LibTorch, the compiler or an option is another
# one, or Gloo's headers or zstd came or went: Meson remembers what it has looked for.
configure() {
  local folder=$1 wanted how=()
  wanted="$CXX $torch ${*:2}$(has_header gloo/context.h && echo ' gloo' || true)"
  wanted+=$(known libzstd && echo ' zstd' || true)
  if [[ -f $folder/build.ninja && $(cat "$folder/.configured" 2>/dev/null) == "$wanted" ]]; then
    return
  fi
  if [[ -f $folder/meson-private/coredata.dat ]]; then how=(--wipe); fi
  say "Configuring $folder/"
  "$MESON" setup "${how[@]}" "$folder" -Dtorch_root="$torch" "${@:2}" ||
    fail "Meson could not configure $folder/."
  echo "$wanted" >"$folder/.configured"
}

build() { ninja -C "$1" -j "$jobs" "${@:2}"; }

# names FOLDER: its programs, one a source file.
names() {
  local file
  for file in "$1"/*.cpp; do if [[ -f $file ]]; then basename "$file" .cpp; fi; done
}

# run_tests FOLDER [MESON_OPTION...] [-- FILTER...]: runs and sums up; a filter leaves the Catch2
# programs only.
run_with=()
run_tests() {
  local folder=$1 options=() ; shift
  while [[ $# -gt 0 && $1 != -- ]]; do options+=("$1"); shift; done
  if [[ $# -gt 1 ]]; then
    shift
    options+=(--suite catch --test-args
              "$(python3 -c 'import shlex, sys; print(shlex.join(sys.argv[1:]))' "$@")")
  fi
  rm -f "$folder/meson-logs/testlog.json"
  # What failed is said below.
  "${run_with[@]}" "$MESON" test -C "$folder" --no-rebuild "${options[@]}" >&2 || true
  python3 tools/sum_tests.py "$folder"
}

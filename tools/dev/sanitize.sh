# ./dev sanitize: the tests, with library and tests under sanitizers.

# What instrumented code makes g++ 12 warn of, in its own and LibTorch's headers.
quiet='-Wno-maybe-uninitialized -Wno-tsan'
declare -A sanitizers=([address]=address,undefined [thread]=thread)

# configure_sanitized FOLDER KIND OPTION...
# -g1: line numbers in reports, for a tenth of the size of full debug information.
# b_lundef: clang leaves the sanitizer's own symbols undefined in a shared library.
configure_sanitized() {
  configure "$1" -Db_sanitize="${sanitizers[$2]}" -Db_lundef=false -Dbuildtype=debugoptimized \
    -Doptimization=1 -Ddebug=false -Dcpp_args="-g1 $quiet" -Dexamples=disabled \
    -Dbench=disabled "${@:3}"
}

# Neither Python nor LibTorch is instrumented: what they do with memory is seen where they allocate,
# free and copy it, and by the thread sanitizer where they lock and start threads. The latter takes
# twice as long, and is no default.
sanitize_python() {
  local kind=address chosen folder runtime=asan
  if [[ ${1:-} == address || ${1:-} == thread ]]; then kind=$1; shift; fi
  if [[ $kind == thread ]]; then runtime=tsan; fi
  set_up
  find_python
  folder=build-$kind-python
  # Not optimized: it compiles in half the time, and Python takes most of the tests'.
  configure_sanitized "$folder" "$kind" -Dtests=disabled -Dpython=enabled -Doptimization=0
  build "$folder" python-package || fail "the build with ${sanitizers[$kind]} failed."
  chosen=("${@/#/test_}")
  if [[ $# == 0 ]]; then chosen=(discover -s python/tests -t python/tests); fi
  # Both come before the interpreter, which is C: the sanitizer looks for the C++ library's
  # functions when it starts. Python's own allocator would hide its objects; what it leaves at
  # its end is no leak.
  export LD_PRELOAD="$($CXX -print-file-name=lib$runtime.so) $($CXX -print-file-name=libstdc++.so)"
  export PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1
  export REMAT_TEST_SLOWNESS=10 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
  export TSAN_OPTIONS=die_after_fork=0:suppressions=$PWD/tools/tsan.supp
  PYTHONPATH=$folder/python:python/tests \
    "${run_with[@]}" "$python" -W ignore -m unittest "${chosen[@]}" -v
}

kinds=(address thread) result=0
# g++ 12's thread sanitizer cannot live with the address layouts of newer kernels, unless they are
# not random.
if setarch -R true 2>/dev/null; then run_with=(setarch -R); fi
if [[ ${1:-} == python ]]; then sanitize_python "${@:2}"; exit; fi
if [[ ${1:-} == address || ${1:-} == thread ]]; then kinds=("$1"); shift; fi
set_up
export ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=second_deadlock_stack=1:suppressions=$PWD/tools/tsan.supp
declare -A verdicts=()
for kind in "${kinds[@]}"; do
  # units: one of the builds finds sources that include too little.
  configure_sanitized "build-$kind" "$kind" -Dtests=enabled \
    -Dunits="$([[ $kind == address ]] && echo false || echo true)"
  # LibTorch is not instrumented: that a device thread of its engine frees what another thread has
  # read, behind a reference count, looks like a race. So the thread sanitizer leaves the stand-in
  # for a device out.
  programs=(cases)
  if [[ $kind == address ]]; then programs+=(device); fi
  build "build-$kind" "${programs[@]/#/tests/}" ||
    fail "the build with ${sanitizers[$kind]} failed."
  run_tests "build-$kind" "${programs[@]}" --suite catch --timeout-multiplier 10 -- "$@" |
    tee "build-$kind/summary" || result=1
  verdicts[$kind]=$(tail -n 1 "build-$kind/summary")
done
say "Sanitizers"
for kind in "${kinds[@]}"; do echo "${sanitizers[$kind]}: ${verdicts[$kind]}"; done
exit $result

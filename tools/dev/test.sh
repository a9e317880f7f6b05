# ./dev test: the tests that a change needs while it is written; with --all every test; with
# filters those Catch2 cases.
targets=(default-tests) options=(--no-suite more)
export REMAT_TEST_SAMPLE=1    # python/tests/common.py says of what
if [[ ${1:-} == --all ]]; then
  shift
  [[ $# == 0 ]] || fail "a filter leaves the Catch2 programs only, so --all takes none."
  targets=() options=() REMAT_TEST_SAMPLE=0
elif [[ $# -gt 0 ]]; then
  targets=(tests/cases tests/device)
fi
set_up
if [[ ${#targets[@]} == 0 ]]; then
  optional chromium \
    "No Chromium here, in which a test opens pages: about 90 MB. Without it the test is skipped." \
    chromium chromium-browser google-chrome google-chrome-stable
  optional doxygen \
    "No Doxygen here, which makes the site: about 45 MB. Without it a test is skipped." \
    doxygen
  if have doxygen && [[ ! -f build/.no-site ]]; then
    python3 tools/docs/build.py --set-up || { mkdir -p build && touch build/.no-site; }
  fi
fi
configure build
build build "${targets[@]}" || { echo "The build failed."; echo "0 passed, 1 failed"; exit 1; }
run_tests build "${options[@]}" -- "$@"

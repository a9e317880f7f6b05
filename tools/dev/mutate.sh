# ./dev mutate: goes on where it was interrupted; what is done stands in build/mutants.
set_up
configure build
build build tests/cases tests/device tests/fuzz
python3 tools/mutate/run.py "$@"

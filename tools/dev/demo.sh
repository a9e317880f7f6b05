# ./dev demo: builds and runs an example.
name=char_transformer
if [[ $# -gt 0 && $1 != -* ]]; then name=$1; shift; fi

if [[ $name == python ]]; then
  set_up
  find_python
  configure build
  build build python-package
  if ! "$python" -c 'import transformers' 2>/dev/null; then
    [[ $python == "$PWD/.venv/bin/python" ]] ||
      fail "the demo needs the package transformers: $python -m pip install transformers"
    pip transformers \
      "No transformers here, whose GPT2 the demo trains: pip fetches it into .venv (about 50 MB)"
  fi
  say "python/examples/gpt2.py $*"
  PYTHONPATH=$PWD/build/python exec "$python" python/examples/gpt2.py "$@"
fi

[[ -f examples/$name.cpp ]] ||
  fail "there is no examples/$name.cpp. There are: $(names examples | xargs) python"
note_device "$@"
set_up
configure build
build build "examples/$name"
say "build/examples/$name $*"
exec "build/examples/$name" "$@"

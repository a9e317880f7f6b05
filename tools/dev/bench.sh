# ./dev bench: builds and runs one program of bench/, or all of them for bench/RESULTS.md.

# A program of bench/, or, as python_NAME, one of python/bench/.
run_bench() {
  if [[ $1 == python_* ]]; then
    PYTHONPATH=build/python "$python" -W ignore "python/bench/${1#python_}.py" "${@:2}"
  else
    "build/bench/$1" "${@:2}"
  fi
}

# Those of the Python package that run here: one needs the package transformers.
python_benches() {
  if [[ -z ${torch_python:-} ]]; then return; fi
  printf '%s\n' python_region_cost python_budget_peers
  if "$torch_python" -c 'import transformers' 2>/dev/null; then echo python_gpt2_step; fi
}

# --against REF [ARGUMENT...]: the times and bytes of this tree, beside those of another commit.
against() {
  local ref=$1 tree=build/against/tree old=build/against/build
  local names=(peak_bytes region_cost selective_cost checks_cost step_cost)
  set_up
  configure build
  build build "${names[@]/#/bench/}" >&2
  rm -rf "$tree" && git clone --quiet . "$tree" && git -C "$tree" checkout --quiet "$ref"
  rm -rf "$old"
  "$MESON" setup "$old" "$tree" -Dtorch_root="$torch" -D{tests,examples,python}=disabled >&2
  build "$old" "${names[@]/#/bench/}" >&2
  python3 bench/against.py "$old/bench" build/bench "${@:2}" "${names[@]}"
}

if [[ ${1:-} == --against ]]; then
  [[ $# -gt 1 ]] || fail "--against takes a commit: ./dev bench --against v0.1.0"
  against "${@:2}"
  exit
fi
chosen=() targets=() folder=build/bench-results
if [[ $# -gt 0 && $1 != --* ]]; then chosen=("$1"); shift; fi
note_device "$@"
set_up
if [[ ${#chosen[@]} -eq 0 ]]; then
  if [[ $device == cpu ]]; then
    mapfile -t chosen < <(names bench; python_benches)
  else
    mapfile -t chosen < <(python3 bench/page.py --on-devices)
    folder=build/bench-${device//:/-}
  fi
fi
configure build
for name in "${chosen[@]}"; do
  if [[ $name == python_* ]]; then
    find_python
    targets+=(python-package)
  else
    targets+=("bench/$name")
  fi
done
build build "${targets[@]}" >&2
if [[ ${#chosen[@]} == 1 ]]; then run_bench "${chosen[0]}" "$@"; exit; fi

# A smoke run leaves what was measured alone.
if [[ " $* " == *" --smoke "* ]]; then folder=build/bench-smoke; fi
rm -rf "$folder"
mkdir -p "$folder"
python3 bench/page.py --begin "$folder" "$@"
for name in "${chosen[@]}"; do
  say "./dev bench $name $*"
  run_bench "$name" "$@" 2>&1 >"$folder/$name.jsonl" | tee "$folder/$name.txt" >&2
done
if [[ $folder != build/bench-smoke ]]; then python3 bench/page.py "$folder"; fi

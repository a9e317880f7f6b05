# Sourced: finds LibTorch, or installs the Python package of it.

torch_release=2.13.0

# The device that the arguments name; the CPU without one.
device=cpu
note_device() {
  while [[ $# -gt 0 ]]; do
    if [[ $1 == --device && $# -gt 1 ]]; then device=$2; fi
    shift
  done
}

# Sets `torch` to its folder. tools/find_torch.py knows the order; a system's LibTorch comes after
# the .venv.
set_up_torch() {
  local found root version origin find=(python3 tools/find_torch.py)
  if [[ $device != cpu ]]; then
    find+=(--device "$device")
    found=$("${find[@]}") || exit 1
  elif ! found=$("${find[@]}" 2>/dev/null) ||
    [[ -z ${TORCH_ROOT:-} && $found == *"the system" ]]; then
    if [[ -z ${TORCH_ROOT:-} ]]; then
      pip "torch==$torch_release" \
        "No Python package of LibTorch here: pip installs torch $torch_release into .venv.
   This may fetch several GB (200 MB where pip finds a CPU build). To use a LibTorch that you have
   instead, stop here and set TORCH_ROOT to its
   folder${found:+ (the system has one: TORCH_ROOT=${found%%$'\n'*})}." ||
        say "pip could not install torch."
    fi
    found=$("${find[@]}") || exit 1
  fi
  { read -r root; read -r _; read -r version; read -r origin
    read -r torch_python || true; } <<<"$found"
  say "LibTorch $version from $origin: $root"
  torch=$root
}

# The Python whose torch is the one that is built against.
find_python() {
  python=${torch_python:-}
  [[ -n $python ]] ||
    fail "the LibTorch in $torch is no Python package, which the Python package needs."
}

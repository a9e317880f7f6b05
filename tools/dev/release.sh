# ./dev release: writes dist/, from the last commit; --check tries what is there in fresh
# environments.
set_up
find_python
if [[ ${1:-} == --check ]]; then
  "$python" tests/install/release.py "$torch" "${@:2}"
  exit
fi
have doxygen || apt doxygen || fail "doxygen is needed."
"$python" packaging/release.py "$torch"

# ./dev fuzz: the table, then random programs that no run has tried before; a finding names
# its seed.
[[ ${1:-} =~ ^[0-9]+$ ]] || fail "fuzz needs a number of seconds."
result=0
set_up
configure build
build build tests/table tests/fuzz
build/tests/table || result=1
from=$(date +%s)000000
for kind in '' --selective --arguments '--moves --selective' '--waits --copies' --modules; do
  say "build/tests/fuzz $kind"
  build/tests/fuzz $kind --seconds $((($1 + 5) / 6)) --from "$from" || result=1
done
exit $result

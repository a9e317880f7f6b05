# ./dev matrix: goes on where it was interrupted; what is done stands in build/matrix.
set_up
python3 tools/matrix.py "$@"

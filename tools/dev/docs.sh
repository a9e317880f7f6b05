# ./dev docs: the site of the documents.
have python3 || apt python3 || fail "python3 is needed."
have doxygen || apt doxygen || fail "doxygen is needed."
python_has ensurepip || apt python3-venv ||
  fail "python3 cannot make a virtual environment without its ensurepip."
python3 tools/docs/build.py --set-up build/docs ||
  fail "the site could not be built without warnings."

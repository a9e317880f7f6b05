# ./dev docs: the site of the documents.
have python3 || apt python3 || fail "python3 is needed."
have doxygen || apt doxygen || fail "doxygen is needed."
python3 tools/docs/build.py build/docs || fail "the site could not be built, or Doxygen has something to say about it."

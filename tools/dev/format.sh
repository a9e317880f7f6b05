# ./dev format: one release of clang-format for everyone, since releases differ: Debian's if it has
# that one, else pip's.
clang_format_release=19.1.7
tool=clang-format-${clang_format_release%%.*} check=() wrap=()
if ! have "$tool" && ! { can_apt && apt "$tool"; }; then
  tool=.venv/bin/clang-format
  [[ -x $tool ]] ||
    pip "clang-format==$clang_format_release" \
      "Fetching clang-format $clang_format_release with pip into .venv (2 MB)"
fi
if [[ ${1:-} == --check ]]; then check=(--dry-run --Werror) wrap=(--check); fi
folders=(include lib hooks python tests examples bench)
mapfile -t files < <(find "${folders[@]}" -name '*.h' -o -name '*.cpp')
"$tool" -i "${check[@]}" "${files[@]}"
python3 tools/wrap_prose.py "${wrap[@]}" "${files[@]}" ./*.md docs/*.md bench/*.md

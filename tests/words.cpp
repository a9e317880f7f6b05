// Warnings in the words of another language: remat/words.h.

#include "remat/words.h"

#include <cctype>

#include "tests/support/support.h"
#include "tests/support/warnings.h"

using remat::testing::Warnings;

namespace {

std::string loudly(std::string text) {
  for (char& each : text) each = static_cast<char>(std::toupper(static_cast<unsigned char>(each)));
  return text;
}

std::vector<std::string> warnings_of_matmul() {
  Warnings seen;
  (void)remat::save_ops({"aten::matmul"});
  return seen.texts;
}

}  // namespace

TEST_CASE("warnings come in the words that a binding sets", "[words]") {
  const auto plain = warnings_of_matmul();
  REQUIRE(plain.size() == 1);
  CHECK_THAT(plain[0],
             contains("remat::save_ops: \"aten::matmul\" is composed of other operators"));
  remat::set_warning_words(loudly);
  const auto said = warnings_of_matmul();
  remat::set_warning_words(nullptr);
  CHECK(said == std::vector{loudly(plain[0])});
  CHECK(warnings_of_matmul() == plain);
}

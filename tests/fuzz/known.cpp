#include "tests/fuzz/known.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>

namespace fuzz {

namespace {

template <class Word>
std::vector<Word> words_in(const std::string& text) {
  std::istringstream in(text);
  std::vector<Word> words;
  for (Word word; in >> word;) words.push_back(word);
  if (!in.eof()) throw std::runtime_error("tests/fuzz/known.txt: no number in: " + text);
  return words;
}

}  // namespace

std::vector<KnownFinding> known_findings() {
  std::ifstream file(REMAT_KNOWN_FINDINGS);
  if (!file) throw std::runtime_error(std::string("cannot read ") + REMAT_KNOWN_FINDINGS);
  std::vector<KnownFinding> all;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line.front() == '#') continue;
    const std::size_t first = line.find('|'), second = line.find('|', first + 1);
    if (first == std::string::npos || second == std::string::npos)
      throw std::runtime_error("tests/fuzz/known.txt: topics | seeds | text, not: " + line);
    KnownFinding each{words_in<std::string>(line.substr(0, first)),
                      words_in<uint64_t>(line.substr(first + 1, second - first - 1)),
                      line.substr(line.find_first_not_of(' ', second + 1))};
    std::sort(each.topics.begin(), each.topics.end());
    all.push_back(std::move(each));
  }
  return all;
}

std::string known_text(const std::vector<std::string>& topics, uint64_t seed) {
  static const std::vector<KnownFinding> all = known_findings();
  for (const KnownFinding& each : all)
    if (each.topics == topics &&
        std::find(each.seeds.begin(), each.seeds.end(), seed) != each.seeds.end())
      return each.text;
  return {};
}

}  // namespace fuzz

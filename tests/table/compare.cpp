// Compares the records of a checkpointed run and a plain one, but for the exceptions.

#include <fnmatch.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>

#include "tests/table/run.h"

namespace table {

namespace {

using Exceptions = std::vector<const Exception*>;

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

template <class T>
std::vector<double> numbers_as(const std::string& bytes) {
  std::vector<T> numbers(bytes.size() / sizeof(T));
  std::memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(T));
  return {numbers.begin(), numbers.end()};
}

std::vector<double> numbers_of(const Entry& entry) {
  if (contains(entry.meta, "Double")) return numbers_as<double>(entry.bytes);
  if (contains(entry.meta, "Float")) return numbers_as<float>(entry.bytes);
  if (contains(entry.meta, "Long")) return numbers_as<int64_t>(entry.bytes);
  return numbers_as<unsigned char>(entry.bytes);
}

std::string text_of(const Entry& entry) {
  std::ostringstream text;
  text.precision(9);
  text << entry.meta << " :";
  const std::vector<double> numbers = numbers_of(entry);
  for (std::size_t i = 0; i < numbers.size() && i < 12; ++i) text << " " << numbers[i];
  return text.str();
}

/// Returns whether an exception of a kind applies to `text`; counts it.
bool is_excepted(const Exceptions& exceptions, Exception::Kind kind, const std::string& text = {}) {
  for (const Exception* exception : exceptions)
    if (exception->kind == kind && contains(text, exception->error)) {
      ++exception->needed;
      return true;
    }
  return false;
}

std::string difference(const Stage& plain, const Stage& checkpointed, const Exceptions& except) {
  using Kind = Exception::Kind;
  for (std::size_t i = 0; i < plain.entries.size() || i < checkpointed.entries.size(); ++i) {
    if (i >= plain.entries.size() || i >= checkpointed.entries.size())
      return plain.label + ": one of the runs has more entries";
    const Entry &p = plain.entries[i], &c = checkpointed.entries[i];
    if (p == c) continue;
    if (p.label == "versions" && is_excepted(except, Kind::Versions)) continue;
    return plain.label + ", " + p.label + (p.label == c.label ? "" : " and " + c.label) +
           "\n  plain        " + text_of(p) + "\n  checkpointed " + text_of(c);
  }
  return {};
}

std::string difference(const Cell& cell, const Record& plain, const Record& checkpointed,
                       const Exceptions& except) {
  using Kind = Exception::Kind;
  for (std::size_t i = 0; i < plain.stages.size() || i < checkpointed.stages.size(); ++i) {
    // A run ends with its first error.
    if (i >= plain.stages.size() || i >= checkpointed.stages.size()) return "other stages";
    const Stage &p = plain.stages[i], &c = checkpointed.stages[i];
    const bool may_differ = i > 0 || cell.mode.wrap != nullptr;  // a backward is part of it
    if (p.raised && c.raised) {
      if (i > 0 || first_line(p.error) == first_line(c.error) ||
          is_excepted(except, Kind::MayRaise, c.error))
        return {};
      return "forward raises other errors\n  plain        " + p.error + "\n  checkpointed " +
             c.error;
    }
    if (c.raised) {
      if (is_excepted(except, Kind::MayRaise, c.error)) return {};
      return c.label + ": only the checkpointed run raised\n  " + c.error;
    }
    if (p.raised) {
      if (may_differ && is_excepted(except, Kind::NotRaised)) {
        Exceptions rest = except;
        std::erase_if(rest, [](const Exception* e) { return e->kind == Kind::NotRaised; });
        return difference(cell, record_of(cell, Run::Way::Copying), checkpointed, rest);
      }
      return p.label + ": only the plain run raised\n  " + p.error;
    }
    if (std::string text = difference(p, c, except); !text.empty()) return text;
  }
  return {};
}

/// Returns whether bytes are lost in every run: kernels may keep the memory of their first run.
bool leaks(const Cell& cell, const Record& plain, const Record& checkpointed) {
  bool is_lost = checkpointed.leaked_bytes > std::max<int64_t>(plain.leaked_bytes, 0);
  for (int i = 0; i < 3 && is_lost; ++i) {
    const int64_t without = record_of(cell, Run::Way::Plain).leaked_bytes;
    is_lost = record_of(cell, Run::Way::Checkpointed).leaked_bytes > std::max<int64_t>(without, 0);
  }
  return is_lost;
}

/// Returns the plain record of a cell. Cells that differ only in the treatment of memory share it.
const Record& plain_record(const Cell& cell) {
  static std::map<std::string, Record> known;
  static std::string function;
  const std::string of = cell.function.name + " " + std::to_string(cell.seed);
  if (std::exchange(function, of) != of) known.clear();
  const std::string key = cell.mode.name + " " + cell.configuration.plain_name;
  auto found = known.find(key);
  if (found == known.end()) found = known.emplace(key, record_of(cell, Run::Way::Plain)).first;
  return found->second;
}

}  // namespace

std::vector<const Exception*> exceptions_of(const Cell& cell) {
  Exceptions found;
  const std::string place = cell.configuration.name + "/" + cell.mode.name;
  auto look = [&](const std::vector<Exception>& exceptions) {
    for (const Exception& each : exceptions)
      if ((each.traits == 0 || (each.traits & cell.function.traits) != 0) &&
          fnmatch(each.where.c_str(), place.c_str(), FNM_EXTMATCH) == 0)
        found.push_back(&each);
  };
  look(cell.function.exceptions);
  look(shared_exceptions());
  return found;
}

bool is_skipped(const Cell& cell) {
  const Exceptions except = exceptions_of(cell);
  return std::any_of(except.begin(), except.end(),
                     [](const Exception* e) { return e->kind == Exception::Kind::Skipped; });
}

std::string disagreement(const Cell& cell) {
  const Exceptions except = exceptions_of(cell);
  for (const Exception* exception : except) ++exception->cells;
  const Record& plain = plain_record(cell);
  const Record checkpointed = record_of(cell, Run::Way::Checkpointed);
  std::string text = difference(cell, plain, checkpointed, except);
  for (const std::string& fault : checkpointed.faults)
    text += (text.empty() ? "afterwards: " : "\nafterwards: ") + fault;
  if (text.empty() && leaks(cell, plain, checkpointed))
    text = std::to_string(checkpointed.leaked_bytes) + " bytes are never freed";
  if (!text.empty() && !difference(cell, plain, record_of(cell, Run::Way::Plain), except).empty())
    text += "\n(two plain runs differ as well)";
  return text;
}

}  // namespace table

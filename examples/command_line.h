#pragma once
// The command line of an example, and its exit status.

#include <c10/util/Exception.h>

#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <string>

// The default places of an example's text and output; its command line can change them.
#ifndef REMAT_EXAMPLE_TEXT
#define REMAT_EXAMPLE_TEXT "examples/data/genesis-exodus.txt"
#endif
#ifndef REMAT_EXAMPLE_OUT
#define REMAT_EXAMPLE_OUT "."
#endif

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Returns a number from `least` to `most`, which is whole if these are.
template <class Number>
Number parse_number(const std::string& name, const std::string& text, Number least, Number most) {
  std::istringstream words(text);
  Number number{};
  if (words >> number && words.eof() && number >= least && number <= most) return number;
  std::ostringstream error;
  error << name << " needs a number from " << least << " to " << most << ", got '" << text << "'";
  throw UsageError(error.str());
}

// Gives each option to `take`, with a function that returns the word behind it. `take` returns
// whether it knows the option.
template <class Take>
void parse_options(int argc, char** argv, const Take& take) {
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 >= argc) throw UsageError(name + " needs a value");
      return argv[++i];
    };
    if (!take(name, value)) throw UsageError("unknown option '" + name + "'");
  }
}

// Runs the main function of an example. Returns the result of `run`, 0 after --help, or 2 after an
// error, whose text begins with `name`.
template <class Run>
int run_example(const std::string& name, const std::string& usage, int argc, char** argv,
                const Run& run) {
  try {
    for (int i = 1; i < argc; ++i) {
      if (argv[i] != std::string("--help") && argv[i] != std::string("-h")) continue;
      std::printf("%s", usage.c_str());
      return 0;
    }
    return run();
  } catch (const UsageError& error) {
    std::fprintf(stderr, "%s: %s\n%s", name.c_str(), error.what(), usage.c_str());
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
  }
  return 2;
}

#pragma once
// Symbol visibility: marks the symbols that the shared library exports.

#if defined(__GNUC__) || defined(__clang__)
#define REMAT_API __attribute__((visibility("default")))
#else
#define REMAT_API
#endif

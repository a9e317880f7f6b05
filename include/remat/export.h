#pragma once
// Symbol visibility: what the shared library shows to its users.

#if defined(__GNUC__) || defined(__clang__)
#define REMAT_API __attribute__((visibility("default")))
#else
#define REMAT_API
#endif

#pragma once
// Catch2, of either version, beside LibTorch.

#include <ATen/ATen.h>

// LibTorch's logging defines a CHECK of its own, which ends the process. Catch2 comes after it.
#undef CHECK
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#define REMAT_TEST_CATCH3 1
#else
#include <catch2/catch.hpp>
#define REMAT_TEST_CATCH3 0
#endif

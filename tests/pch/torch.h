// Precompiled for the tests: torch/torch.h takes the compiler longer than a file of tests.
#include <torch/torch.h>

#undef CHECK  // LibTorch's logging and Catch2 both have one; the tests mean Catch2's

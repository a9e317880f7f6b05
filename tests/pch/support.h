// Precompiled for the tests: what each of them includes.
#include "tests/support/support.h"

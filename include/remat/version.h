#pragma once
// The version of the library, as numbers and as text.

#define REMAT_VERSION_MAJOR 0
#define REMAT_VERSION_MINOR 1
#define REMAT_VERSION_PATCH 0
#define REMAT_VERSION "0.1.0"

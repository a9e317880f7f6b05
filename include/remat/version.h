#pragma once
// The version of the library, as numbers and as text.

#define REMAT_VERSION_MAJOR 0  ///< before 1.0 a minor version may break programs
#define REMAT_VERSION_MINOR 1  ///< new features
#define REMAT_VERSION_PATCH 0  ///< bug fixes only
#define REMAT_VERSION "0.1.0"  ///< as text

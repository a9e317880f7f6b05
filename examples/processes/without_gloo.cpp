// Replaces an example of several processes where it cannot be built.

#include <cstdio>

int main() {
  std::printf("This program cannot be built here: " REMAT_LACKS_GLOO "\n");
  return 77;
}

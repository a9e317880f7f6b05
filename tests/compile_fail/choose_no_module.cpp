// expect: remat::choose takes the type of a module
#include "remat/apply.h"

struct Block {};

int main() { return remat::choose<Block>().every == 1 ? 0 : 1; }

// The kernels for x86-64-v3 CPUs; CMakeLists.txt gives the compiler flags.
#define KEDGE_EXAMPLE_LEVEL "x86-64-v3"
#define KEDGE_EXAMPLE_TABLE kKernelsV3
#define KEDGE_EXAMPLE_VECTOR_FLOATS 8
#define KEDGE_EXAMPLE_TILE_ROWS 6
#define KEDGE_EXAMPLE_TILE_VECTORS 2
#include "kedge/examples/model/kernels.inc"

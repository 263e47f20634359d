// The kernels for x86-64-v4 CPUs; CMakeLists.txt gives the compiler flags.
#define KEDGE_EXAMPLE_LEVEL "x86-64-v4"
#define KEDGE_EXAMPLE_TABLE kKernelsV4
#define KEDGE_EXAMPLE_VECTOR_FLOATS 16
#define KEDGE_EXAMPLE_TILE_ROWS 12
#define KEDGE_EXAMPLE_TILE_VECTORS 2
#include "kedge/examples/model/kernels.inc"

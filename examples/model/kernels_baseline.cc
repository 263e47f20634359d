// The kernels for any CPU the compiler targets by default.
#define KEDGE_EXAMPLE_LEVEL "baseline"
#define KEDGE_EXAMPLE_TABLE kKernelsBaseline
#define KEDGE_EXAMPLE_VECTOR_FLOATS 4
#define KEDGE_EXAMPLE_TILE_ROWS 4
#define KEDGE_EXAMPLE_TILE_VECTORS 2
#include "kedge/examples/model/kernels.inc"

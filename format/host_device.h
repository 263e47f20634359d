#ifndef KEDGE_FORMAT_HOST_DEVICE_H_
#define KEDGE_FORMAT_HOST_DEVICE_H_

// Marks what host code and CUDA kernels share.
#ifdef __CUDACC__
#define KEDGE_HOST_DEVICE __host__ __device__
#else
#define KEDGE_HOST_DEVICE
#endif

#endif  // KEDGE_FORMAT_HOST_DEVICE_H_

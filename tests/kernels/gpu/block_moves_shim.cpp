// Runs the CUDA source of headway_kernels.gpu.block_moves on a CPU, one thread after the other: the kernels have no
// barrier and share nothing, so that any order of their threads is a right one. SOURCE names a file with that source.

struct Place {
    unsigned x;
};

static Place blockIdx, threadIdx, blockDim, gridDim;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

#define __global__ __attribute__((visibility("default")))
#define __device__ static

template <typename T> static T __ldcs(const T *place) { return *place; }

template <typename T> static void __stcs(T *place, T value) { *place = value; }

#include SOURCE

using Kernel = void(PIECE *, long long, long long, PIECE *, long long, long long, const int *, int, int, int);

extern "C" __attribute__((visibility("default"))) void run(Kernel *kernel, unsigned thread_blocks, unsigned threads,
                                                           PIECE *from, long long from_block, long long from_layer,
                                                           PIECE *to, long long to_block, long long to_layer,
                                                           const int *pairs, int num_pairs, int num_layers,
                                                           int block_pieces) {
    gridDim.x = thread_blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < thread_blocks; ++blockIdx.x) {
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
            kernel(from, from_block, from_layer, to, to_block, to_layer, pairs, num_pairs, num_layers, block_pieces);
        }
    }
}

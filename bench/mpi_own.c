// MPI's own all-gather and reduce-scatter of BYTES bytes of f32, as bench/collectives.sh runs it beside ours.
//   mpicc -O2 bench/mpi_own.c -o mpi_own && mpirun -n 2 ./mpi_own [BYTES [ROUNDS]]
// Rank 0 prints GB/s of the whole tensor, medians over rounds of a barrier and the collective with its result's allocation.
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

enum { WARM = 3 };

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    long bytes = argc > 1 ? atol(argv[1]) : 100000000;
    int rounds = argc > 2 ? atoi(argv[2]) : 15, rank, world;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    int part = (int)(bytes / 4 / world);
    double *times = malloc(sizeof(double) * rounds);
    for (int scatter = 0; scatter < 2; scatter++) {
        for (int round = 0; round < WARM + rounds; round++) {
            int in = scatter ? part * world : part, out = scatter ? part : part * world;
            float *from = malloc(4L * in);
            for (int i = 0; i < in; i++) from[i] = (float)rank;
            double begin = MPI_Wtime();
            MPI_Barrier(MPI_COMM_WORLD);
            float *to = malloc(4L * out);
            if (scatter) MPI_Reduce_scatter_block(from, to, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            else MPI_Allgather(from, part, MPI_FLOAT, to, part, MPI_FLOAT, MPI_COMM_WORLD);
            if (round >= WARM) times[round - WARM] = MPI_Wtime() - begin;
            free(from);
            free(to);
        }
        qsort(times, rounds, sizeof(double), ascending);
        if (rank == 0)
            printf("own %s %.2f GB/s\n", scatter ? "reduce_scatter" : "all_gather", 4.0 * part * world / times[rounds / 2] / 1e9);
    }
    free(times);
    MPI_Finalize();
    return 0;
}

/* NCCL in software, for tests of the nccl engine's calls and of what it does about faults; it says nothing of NCCL itself.
 *
 * The ranks of a communicator, threads or processes, meet in a file that they map; its name is the unique identity. A
 * collective runs on the stream that it was given (cuda.c): each rank lays its input into its slot, all meet, each computes
 * its own output, all meet. Calls of a communicator return "in progress", and what they ask for happens only when
 * ncclCommGetAsyncError has been called a few times: who does not wait for that marks a stream too early.
 *
 * SHIM_NCCL_FAULT, in a rank's environment or for all: KIND:RANK:OP. Rank RANK of the communicator, in its operation number
 * OP (from 0): "hang" never comes to it; "async" reports an error instead of ending it; "init-hang" never finishes making
 * the communicator (OP is of no meaning); "call" has the call itself fail; "no-abort" hangs, and cannot be aborted. SHIM_NCCL_VERSION: what ncclGetVersion says. Compiled with
 * NO_SPLIT it is an NCCL older than 2.18. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST };
enum { MAX_RANKS = 8, SLOT = 8 << 20, POLLS = 3, MAX_GROUP = 64 };

extern int cuLaunchHostFunc(void *stream, void (*fn)(void *), void *data);
extern int cuCtxGetDevice(int *device);

typedef struct { char internal[128]; } unique_id;
typedef struct { size_t size; unsigned magic, version; int blocking; } config;

/* What the ranks share. */
typedef struct {
    uint32_t arrived, round;
    uint8_t slots[MAX_RANKS][SLOT];
} meeting;

typedef struct comm comm;
typedef struct {
    comm *c;
    int kind, type, op, root, number;
    const void *in;
    void *out;
    size_t count;
    void *stream;
} launch;
struct comm {
    meeting *m;
    char name[128];
    int rank, world, device, splits, issued, state, polls, pending;
    volatile int aborted, running;
    launch staged[MAX_GROUP];
    int fault_kind, fault_op;
};
enum { NONE, HANG, ASYNC, INIT_HANG, CALL, NO_ABORT };

static __thread int group_depth;
static __thread launch group[MAX_GROUP];
static __thread int grouped;

static void nap(void) {
    struct timespec t = { 0, 100000 };
    nanosleep(&t, NULL);
}

int ncclGetVersion(int *version) {
    const char *text = getenv("SHIM_NCCL_VERSION");
    *version = text ? atoi(text) : 22704;
    return SUCCESS;
}
const char *ncclGetErrorString(int code) {
    return code == REMOTE_ERROR ? "remote process exited or there was a network error" : "an error of the software NCCL";
}
const char *ncclGetLastError(comm *c) { (void)c; return ""; }

int ncclGetUniqueId(unique_id *id) {
    static int count;
    const char *folder = getenv("SHIM_DIR");
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%s/n%d-%d-%ld", folder ? folder : "/tmp", getpid(),
             __sync_fetch_and_add(&count, 1), t.tv_nsec);
    return SUCCESS;
}

static comm *open_comm(const char *name, int rank, int world) {
    int file = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(meeting))) return NULL;
    comm *c = calloc(1, sizeof *c);
    c->m = mmap(NULL, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    snprintf(c->name, sizeof c->name, "%s", name);
    c->rank = rank, c->world = world, c->state = IN_PROGRESS, c->polls = POLLS;
    cuCtxGetDevice(&c->device);
    const char *fault = getenv("SHIM_NCCL_FAULT");
    char kind[32];
    int of, op;
    if (fault && sscanf(fault, "%31[a-z-]:%d:%d", kind, &of, &op) == 3 && of == rank) {
        c->fault_kind = !strcmp(kind, "hang") ? HANG : !strcmp(kind, "async") ? ASYNC
                      : !strcmp(kind, "init-hang") ? INIT_HANG : !strcmp(kind, "call") ? CALL
                      : !strcmp(kind, "no-abort") ? NO_ABORT : NONE;
        c->fault_op = op;
    }
    return c;
}

int ncclCommInitRankConfig(comm **out, int world, unique_id id, int rank, config *cfg) {
    int device;
    if (!cfg || cfg->magic != 0xcafebeef || cfg->blocking != 0 || cfg->size < sizeof *cfg) return INVALID_ARGUMENT;
    if (world > MAX_RANKS || rank < 0 || rank >= world || cuCtxGetDevice(&device)) return INVALID_USAGE;
    *out = open_comm(id.internal, rank, world);
    return *out ? IN_PROGRESS : INVALID_ARGUMENT;
}
#ifndef NO_SPLIT
/* The control group has said who is in which; here the children find each other by the colors they leave in a file. */
int ncclCommSplit(comm *parent, int color, int key, comm **out, config *cfg) {
    (void)cfg;
    if (parent->state != SUCCESS || parent->running) return INVALID_USAGE;
    int number = parent->splits++;
    char name[256];
    snprintf(name, sizeof name, "%.100s-s%d", parent->name, number);
    int file = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, 4096)) return INVALID_ARGUMENT;
    volatile int32_t *said = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    said[3 * parent->rank] = color, said[3 * parent->rank + 1] = key;
    __sync_synchronize();
    said[3 * parent->rank + 2] = 1;
    for (int r = 0; r < parent->world; r++)
        while (!said[3 * r + 2] && !parent->aborted) nap();
    parent->state = IN_PROGRESS, parent->polls = POLLS;
    *out = NULL;
    if (color < 0) return IN_PROGRESS;
    int rank = 0, world = 0;
    for (int r = 0; r < parent->world; r++) {
        if (said[3 * r] != color) continue;
        world++;
        rank += said[3 * r + 1] < key || (said[3 * r + 1] == key && r < parent->rank);
    }
    snprintf(name, sizeof name, "%.100s-s%d-%d", parent->name, number, color);
    *out = open_comm(name, rank, world);
    return *out ? IN_PROGRESS : INVALID_ARGUMENT;
}
#endif

/* All ranks come, or this one is aborted. */
static int meet(comm *c) {
    uint32_t round = __atomic_load_n(&c->m->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&c->m->arrived, 1, __ATOMIC_ACQ_REL) == (uint32_t)c->world) {
        __atomic_store_n(&c->m->arrived, 0, __ATOMIC_RELEASE);
        __atomic_add_fetch(&c->m->round, 1, __ATOMIC_ACQ_REL);
        return 1;
    }
    while (__atomic_load_n(&c->m->round, __ATOMIC_ACQUIRE) == round) {
        if (c->aborted) return 0;
        nap();
    }
    return 1;
}

static const int sizes[] = { 1, 1, 4, 4, 8, 8, 2, 4, 8, 2 };

static double value(int type, const void *at, size_t i) {
    uint32_t bits;
    float f;
    switch (type) {
    case 1: return ((const uint8_t *)at)[i];
    case 6: return (double)((const _Float16 *)at)[i];
    case 7: return ((const float *)at)[i];
    case 8: return ((const double *)at)[i];
    default:
        bits = (uint32_t)((const uint16_t *)at)[i] << 16;
        memcpy(&f, &bits, 4);
        return f;
    }
}
static void put(int type, void *at, size_t i, double v) {
    float f = (float)v;
    uint32_t bits;
    switch (type) {
    case 1: ((uint8_t *)at)[i] = (uint8_t)v; break;
    case 6: ((_Float16 *)at)[i] = (_Float16)v; break;
    case 7: ((float *)at)[i] = f; break;
    case 8: ((double *)at)[i] = v; break;
    default:
        memcpy(&bits, &f, 4);
        bits += 0x7fff + ((bits >> 16) & 1);
        ((uint16_t *)at)[i] = (uint16_t)(bits >> 16);
    }
}

static void reduce(const launch *l, size_t begin, size_t count) {
    for (size_t i = 0; i < count; i++) {
        double sum = value(l->type, l->c->m->slots[0], begin + i);
        for (int r = 1; r < l->c->world; r++) {
            double v = value(l->type, l->c->m->slots[r], begin + i);
            sum = l->op == 2 ? (v > sum ? v : sum) : sum + v;
        }
        put(l->type, l->out, i, l->op == 4 ? sum / l->c->world : sum);
    }
}

static void perform(void *data) {
    launch *l = data;
    comm *c = l->c;
    size_t size = sizes[l->type], bytes = l->count * size;
    if (l->kind == REDUCE_SCATTER) bytes *= c->world;
    int faulty = c->fault_op == l->number;
    if (faulty && c->fault_kind == ASYNC) c->state = REMOTE_ERROR;
    while (faulty && c->fault_kind == NO_ABORT) nap();
    if (faulty && (c->fault_kind == HANG || c->fault_kind == ASYNC)) {
        while (!c->aborted) nap();
    } else if (!c->aborted) {
        memcpy(c->m->slots[c->rank], l->in, bytes);
        if (meet(c)) {
            switch (l->kind) {
            case ALL_GATHER:
                for (int r = 0; r < c->world; r++) memcpy((char *)l->out + r * bytes, c->m->slots[r], bytes);
                break;
            case REDUCE_SCATTER: reduce(l, c->rank * l->count, l->count); break;
            case ALL_REDUCE: reduce(l, 0, l->count); break;
            case BROADCAST: memcpy(l->out, c->m->slots[l->root], bytes);
            }
            meet(c);
        }
    }
    __sync_fetch_and_sub(&c->running, 1);
    free(l);
}

static int add(int kind, const void *in, void *out, size_t count, int type, int op, int root, comm *c, void *stream) {
    int device;
    if (type < 0 || type > 9 || (size_t)sizes[type] * count * (kind == REDUCE_SCATTER ? c->world : 1) > SLOT)
        return INVALID_ARGUMENT;
    if (c->state != SUCCESS || !group_depth || grouped == MAX_GROUP) return INVALID_USAGE;
    if (cuCtxGetDevice(&device) || device != c->device) return INVALID_USAGE;
    if (c->fault_kind == CALL && c->fault_op == c->issued) return REMOTE_ERROR;
    launch l = { c, kind, type, op, root, c->issued++, in, out, count, stream };
    group[grouped++] = l;
    return SUCCESS;
}
int ncclAllGather(const void *in, void *out, size_t count, int type, comm *c, void *stream) {
    return add(ALL_GATHER, in, out, count, type, 0, 0, c, stream);
}
int ncclReduceScatter(const void *in, void *out, size_t count, int type, int op, comm *c, void *stream) {
    return add(REDUCE_SCATTER, in, out, count, type, op, 0, c, stream);
}
int ncclAllReduce(const void *in, void *out, size_t count, int type, int op, comm *c, void *stream) {
    return add(ALL_REDUCE, in, out, count, type, op, 0, c, stream);
}
int ncclBroadcast(const void *in, void *out, size_t count, int type, int root, comm *c, void *stream) {
    return add(BROADCAST, in, out, count, type, 0, root, c, stream);
}
int ncclGroupStart(void) { group_depth++; return SUCCESS; }
int ncclGroupEnd(void) {
    if (!group_depth) return INVALID_USAGE;
    if (--group_depth) return SUCCESS;
    for (int i = 0; i < grouped; i++) {
        comm *c = group[i].c;
        c->staged[c->pending++] = group[i];
        c->state = IN_PROGRESS, c->polls = POLLS;
    }
    int any = grouped;
    grouped = 0;
    return any ? IN_PROGRESS : SUCCESS;
}

int ncclCommGetAsyncError(comm *c, int *state) {
    if (c->state == IN_PROGRESS && c->fault_kind != INIT_HANG && --c->polls <= 0) {
        c->state = SUCCESS;
        for (int i = 0; i < c->pending; i++) {
            launch *l = malloc(sizeof *l);
            *l = c->staged[i];
            __sync_fetch_and_add(&c->running, 1);
            cuLaunchHostFunc(l->stream, perform, l);
        }
        c->pending = 0;
    }
    *state = c->state;
    return SUCCESS;
}
int ncclCommAbort(comm *c) {
    if (c->fault_kind == NO_ABORT) return REMOTE_ERROR;
    c->aborted = 1;
    while (c->running) nap();
    munmap(c->m, sizeof *c->m);
    free(c);
    return SUCCESS;
}
int ncclCommFinalize(comm *c) {
    c->state = IN_PROGRESS, c->polls = POLLS;
    return IN_PROGRESS;
}
int ncclCommDestroy(comm *c) { return ncclCommAbort(c); }

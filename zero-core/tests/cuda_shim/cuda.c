/* A CUDA driver in software, for tests of the nccl engine, and of copies, without a GPU: just the functions that these and their
 * tests call. "Device memory" is the host's; a stream is a thread that runs what it is given, in order, so that work that is not
 * ordered really runs at another time; an event is a list of streams and how far each must have come.
 *
 * SHIM_DEVICES: number of devices (4). SHIM_CUDA_VERSION: what cuDriverGetVersion says (13000). Compiled with
 * NO_CONTEXT_EVENTS it is a driver older than CUDA 12.5. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_READY = 600 };
enum { MAX_STREAMS = 256, MAX_DEVICES = 16, MAX_DEPTH = 16 };

typedef struct context context;
typedef struct stream stream;

/* How far streams must have come. */
typedef struct { int count; stream *streams[MAX_STREAMS]; uint64_t until[MAX_STREAMS]; } mark;
typedef struct { context *ctx; mark at; } event;
typedef void (*host_fn)(void *);
typedef struct task { host_fn fn; void *data; mark *wait; struct task *next; } task;
struct stream { context *ctx; pthread_t thread; task *head, *tail; uint64_t given, done; int closing; };
struct context { int device; stream *streams[MAX_STREAMS]; int count; };

/* One lock for everything; streams run tasks outside of it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static context contexts[MAX_DEVICES];
static int initialised;
static __thread context *current[MAX_DEPTH];
static __thread int depth;

static context *now(void) { return depth ? current[depth - 1] : NULL; }
static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}
static int reached(const mark *at) {
    for (int i = 0; i < at->count; i++)
        if (at->streams[i]->done < at->until[i]) return 0;
    return 1;
}

static void *run(void *argument) {
    stream *s = argument;
    /* As a device's kernels do, what runs here may look at the context. */
    current[0] = s->ctx, depth = 1;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!s->head && !s->closing) pthread_cond_wait(&changed, &lock);
        task *t = s->head;
        if (!t) break;
        s->head = t->next;
        if (!s->head) s->tail = NULL;
        if (t->wait) {
            while (!reached(t->wait)) pthread_cond_wait(&changed, &lock);
        } else if (t->fn) {
            pthread_mutex_unlock(&lock);
            t->fn(t->data);
            pthread_mutex_lock(&lock);
        }
        s->done++;
        free(t->wait), free(t);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* The caller holds the lock. */
static void give(stream *s, host_fn fn, void *data, const mark *wait) {
    task *t = calloc(1, sizeof *t);
    t->fn = fn, t->data = data;
    if (wait) t->wait = malloc(sizeof *wait), *t->wait = *wait;
    if (s->tail) s->tail->next = t; else s->head = t;
    s->tail = t, s->given++;
    pthread_cond_broadcast(&changed);
}

int cuInit(unsigned flags) { (void)flags; initialised = 1; return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = number("SHIM_CUDA_VERSION", 13000); return SUCCESS; }
int cuGetErrorString(int code, const char **text) { (void)code; *text = "an error of the software driver"; return SUCCESS; }
int cuDeviceGetCount(int *count) {
    if (!initialised) return NOT_INITIALIZED;
    *count = number("SHIM_DEVICES", 4);
    return SUCCESS;
}
int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= number("SHIM_DEVICES", 4)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
int cuDeviceGetPCIBusId(char *text, int length, int device) {
    snprintf(text, length, "0000:%02X:00.0", device + 1);
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(context **ctx, int device) {
    contexts[device].device = device;
    *ctx = &contexts[device];
    return SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
int cuCtxPushCurrent_v2(context *ctx) {
    if (!ctx || depth == MAX_DEPTH) return INVALID_CONTEXT;
    current[depth++] = ctx;
    return SUCCESS;
}
int cuCtxPopCurrent_v2(context **ctx) {
    if (!depth) return INVALID_CONTEXT;
    *ctx = current[--depth];
    return SUCCESS;
}
int cuCtxGetDevice(int *device) {
    if (!now()) return INVALID_CONTEXT;
    *device = now()->device;
    return SUCCESS;
}
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return SUCCESS; }

int cuStreamCreateWithPriority(stream **out, unsigned flags, int priority) {
    context *ctx = now();
    if (!ctx) return INVALID_CONTEXT;
    if (flags != 1 || priority > 0 || priority < -5) return INVALID_VALUE;
    pthread_mutex_lock(&lock);
    if (ctx->count == MAX_STREAMS) { pthread_mutex_unlock(&lock); return INVALID_VALUE; }
    stream *s = calloc(1, sizeof *s);
    s->ctx = ctx;
    ctx->streams[ctx->count++] = s;
    pthread_mutex_unlock(&lock);
    pthread_create(&s->thread, NULL, run, s);
    pthread_detach(s->thread);
    *out = s;
    return SUCCESS;
}
/* The structure stays: marks may know it. */
int cuStreamDestroy_v2(stream *s) {
    pthread_mutex_lock(&lock);
    s->closing = 1;
    for (int i = 0; i < s->ctx->count; i++)
        if (s->ctx->streams[i] == s) s->ctx->streams[i] = s->ctx->streams[--s->ctx->count];
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int cuStreamWaitEvent(stream *s, event *e, unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    give(s, NULL, NULL, &e->at);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int cuLaunchHostFunc(stream *s, host_fn fn, void *data) {
    pthread_mutex_lock(&lock);
    give(s, fn, data, NULL);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

static void wait_for(const mark *at) {
    while (!reached(at)) pthread_cond_wait(&changed, &lock);
}
static void all_of(context *ctx, mark *at) {
    at->count = ctx->count;
    for (int i = 0; i < ctx->count; i++) at->streams[i] = ctx->streams[i], at->until[i] = ctx->streams[i]->given;
}
int cuStreamSynchronize(stream *s) {
    mark at = { 1, { s }, { 0 } };
    pthread_mutex_lock(&lock);
    at.until[0] = s->given;
    wait_for(&at);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int cuCtxSynchronize(void) {
    mark at;
    if (!now()) return INVALID_CONTEXT;
    pthread_mutex_lock(&lock);
    all_of(now(), &at);
    wait_for(&at);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cuEventCreate(event **out, unsigned flags) {
    (void)flags;
    if (!now()) return INVALID_CONTEXT;
    *out = calloc(1, sizeof **out);
    (*out)->ctx = now();
    return SUCCESS;
}
int cuEventDestroy_v2(event *e) { free(e); return SUCCESS; }
int cuEventRecord(event *e, stream *s) {
    if (e->ctx != s->ctx) return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    e->at.count = 1, e->at.streams[0] = s, e->at.until[0] = s->given;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int cuEventQuery(event *e) {
    pthread_mutex_lock(&lock);
    int done = reached(&e->at);
    pthread_mutex_unlock(&lock);
    return done ? SUCCESS : NOT_READY;
}
#ifndef NO_CONTEXT_EVENTS
int cuCtxRecordEvent(context *ctx, event *e) {
    if (e->ctx != ctx) return INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    all_of(ctx, &e->at);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
int cuCtxWaitEvent(context *ctx, event *e) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < ctx->count; i++) give(ctx->streams[i], NULL, NULL, &e->at);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
#endif

int cuMemAlloc_v2(uint64_t *pointer, size_t bytes) {
    *pointer = (uint64_t)(uintptr_t)calloc(1, bytes ? bytes : 1);
    return *pointer ? SUCCESS : INVALID_VALUE;
}
int cuMemFree_v2(uint64_t pointer) { free((void *)(uintptr_t)pointer); return SUCCESS; }
/* These wait for nothing, as the real ones do not for streams that were created without blocking. */
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
    memcpy((void *)(uintptr_t)to, from, bytes);
    return SUCCESS;
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
    memcpy(to, (void *)(uintptr_t)from, bytes);
    return SUCCESS;
}
typedef struct { void *to; const void *from; size_t bytes; } copy;
static void do_copy(void *data) {
    copy *c = data;
    memcpy(c->to, c->from, c->bytes);
    free(c);
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, stream *s) {
    copy *c = malloc(sizeof *c);
    c->to = (void *)(uintptr_t)to, c->from = (void *)(uintptr_t)from, c->bytes = bytes;
    return cuLaunchHostFunc(s, do_copy, c);
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, stream *s) {
    return cuMemcpyDtoDAsync_v2(to, (uint64_t)(uintptr_t)from, bytes, s);
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, stream *s) {
    return cuMemcpyDtoDAsync_v2((uint64_t)(uintptr_t)to, from, bytes, s);
}
/* SHIM_LOCKABLE: bytes that may be page-locked at a time; without end if it is not set. */
static size_t locked;
int cuMemHostAlloc(void **out, size_t bytes, unsigned flags) {
    if (!now() || flags != 1) return INVALID_VALUE;
    size_t *block = malloc(64 + bytes);
    const char *most = getenv("SHIM_LOCKABLE");
    if (most && locked + bytes > (size_t)atoll(most)) { free(block); return 2; }
    locked += bytes, *block = bytes, *out = (char *)block + 64;
    return SUCCESS;
}
int cuMemFreeHost(void *pointer) {
    size_t *block = (size_t *)((char *)pointer - 64);
    locked -= *block;
    free(block);
    return SUCCESS;
}

/* A CUDA driver that answers as one H100 does and executes nothing: what is launched, copied, allocated and waited for is
 * checked and counted, and all is done at once. Device memory is addresses without anything behind them; what is read from it
 * is zeros. So a program compiles, and launches, on a machine without a GPU what it would there.
 *
 * DRY_OUT: a folder for each module's PTX (001.ptx ...) and, when the program ends, for what was counted (driver.json).
 * DRY_TRACE: a file to which each launch's kernel and blocks are added. DRY_DEVICES: devices (1; 0: none). DRY_MEMORY: bytes of memory
 * (an H100's). DRY_TAKEN: those that another program has (0). DRY_VERSION: of the driver (13000). DRY_REFUSE: what kernels' names begin
 * with whose PTX it does not take. DRY_TUNING: a launch takes milliseconds, fewest with tensor maps, most with uploads before it. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_PTX = 218, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       NOT_FOUND = 500 };
/* What a block may take of an H100's shared memory, without asking and by asking. */
enum { SHARED = 48 << 10, SHARED_BY_ASKING = 227 << 10 };
enum { MAX_MODULES = 100000 };

typedef struct module { int number; char *ptx; } module;
typedef struct { module *of; char *name; unsigned shared, allowed, block; uint64_t launches, uploads; } function;
/* What the device had been given when it was recorded. */
typedef struct { uint64_t given; } event;
typedef struct span { uint64_t from, bytes; struct span *next; } span;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int context;
static __thread void *current;
static function *functions[MAX_MODULES];
static int modules, function_count;
static span *spans;
static uint64_t next_address = 1ull << 44;
/* Launches and copies; of these, those that the host has waited for. Copies to the device since the last launch. */
static uint64_t given, awaited, uploads_before, maps_before;
/* What is counted, in the order in which it is written. */
static struct { uint64_t launches, uploads, upload_bytes, downloads, download_bytes, copies, waits, drains, allocations, in_use, peak, refused, faults; } count;
static const char *const names[] = { "launches", "uploads", "upload_bytes", "downloads", "download_bytes", "copies", "waits", "drains",
                                     "allocations", "in_use", "peak", "refused", "faults" };

static uint64_t number(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}
static FILE *file(const char *name) {
    char path[4096];
    const char *folder = getenv("DRY_OUT");
    if (!folder) return NULL;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return fopen(path, "w");
}
/* What the program should not have asked for. */
#define FAULT(code, ...) return fprintf(stderr, "dry driver: " __VA_ARGS__), fputc('\n', stderr), count.faults++, code

__attribute__((destructor)) static void write_counts(void) {
    FILE *out = file("driver.json");
    if (!out) return;
    fputc('{', out);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        fprintf(out, "\"%s\": %llu, ", names[i], ((unsigned long long *)&count)[i]);
    fprintf(out, "\"modules\": %d, \"functions\": [", modules);
    for (int i = 0; i < function_count; i++) {
        function *f = functions[i];
        fprintf(out, "%s\n{\"module\": %d, \"name\": \"%s\", \"threads\": %u, \"shared\": %u, \"launches\": %llu, \"uploads\": %llu}", i ? "," : "",
                f->of->number, f->name, f->block, f->shared, (unsigned long long)f->launches, (unsigned long long)f->uploads);
    }
    fputs("]}\n", out);
    fclose(out);
}

int cuDriverGetVersion(int *version) { *version = number("DRY_VERSION", 13000); return SUCCESS; }
int cuInit(unsigned flags) { (void)flags; return number("DRY_DEVICES", 1) ? SUCCESS : NO_DEVICE; }
int cuGetErrorString(int code, const char **text) { (void)code; *text = "an error of the dry driver"; return SUCCESS; }
int cuGetErrorName(int code, const char **text) { return cuGetErrorString(code, text); }
int cuDeviceGetCount(int *devices) { *devices = number("DRY_DEVICES", 1); return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= (int)number("DRY_DEVICES", 1)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}
int cuDeviceGetName(char *text, int length, int device) {
    (void)device;
    snprintf(text, length, "NVIDIA H100 80GB HBM3 (dry)");
    return SUCCESS;
}
int cuDeviceGetPCIBusId(char *text, int length, int device) { snprintf(text, length, "0000:%02X:00.0", device + 1); return SUCCESS; }
static uint64_t memory(void) { return number("DRY_MEMORY", 85017493504); }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = memory(); return SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    static const int known[][2] = {
        { 1, 1024 }, { 2, 1024 }, { 3, 1024 }, { 4, 64 },         /* threads of a block; along x, y, z */
        { 5, 0x7fffffff }, { 6, 65535 }, { 7, 65535 },            /* blocks along x, y, z */
        { 8, SHARED }, { 10, 32 }, { 16, 132 },                   /* shared memory; threads of a warp; multiprocessors */
        { 75, 9 }, { 76, 0 }, { 97, SHARED_BY_ASKING }, { 115, 1 } /* compute capability; memory pools */
    };
    (void)device;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i][0] == attribute) return *value = known[i][1], SUCCESS;
    FAULT(INVALID_VALUE, "what is attribute %d of an H100? Add it to cuDeviceGetAttribute", attribute);
}

int cuDevicePrimaryCtxRetain(void **ctx, int device) { (void)device; *ctx = &context; return SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return SUCCESS; }
int cuCtxSetCurrent(void *ctx) { current = ctx; return SUCCESS; }
int cuCtxGetCurrent(void **ctx) { *ctx = current; return SUCCESS; }
int cuCtxPushCurrent_v2(void *ctx) { return cuCtxSetCurrent(ctx); }
int cuCtxPopCurrent_v2(void **ctx) { return cuCtxGetCurrent(ctx); }
int cuCtxGetDevice(int *device) { *device = 0; return current ? SUCCESS : INVALID_CONTEXT; }

/* All is done as it is given, so streams are only names. A wait for what had been given up to some time counts if the host has not
 * waited for it before, and as a drain if the device has nothing else: it then idles until the host gives it more. */
static int wait(uint64_t upto) {
    pthread_mutex_lock(&lock);
    if (upto > awaited) count.waits++, count.drains += upto == given, awaited = upto;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}
static int name(void **out) { *out = malloc(1); return current ? SUCCESS : INVALID_CONTEXT; }
int cuStreamCreate(void **stream, unsigned flags) { (void)flags; return name(stream); }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { (void)flags, (void)priority; return name(stream); }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return SUCCESS; }
int cuStreamDestroy_v2(void *stream) { free(stream); return SUCCESS; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { (void)stream, (void)event, (void)flags; return SUCCESS; }
int cuStreamSynchronize(void *stream) { (void)stream; return wait(given); }
int cuCtxSynchronize(void) { return wait(given); }
int cuLaunchHostFunc(void *stream, void (*run)(void *), void *data) { (void)stream; run(data); return SUCCESS; }
int cuEventCreate(event **out, unsigned flags) { (void)flags; *out = calloc(1, sizeof **out); return current ? SUCCESS : INVALID_CONTEXT; }
int cuEventDestroy_v2(event *e) { free(e); return SUCCESS; }
int cuEventRecord(event *e, void *stream) { (void)stream; e->given = given; return SUCCESS; }
int cuEventQuery(event *e) { (void)e; return SUCCESS; }
int cuEventSynchronize(event *e) { return wait(e->given); }
int cuCtxRecordEvent(void *ctx, event *e) { (void)ctx; return cuEventRecord(e, NULL); }
int cuCtxWaitEvent(void *ctx, void *event) { (void)ctx, (void)event; return SUCCESS; }

int cuMemGetInfo_v2(size_t *free, size_t *total) { *total = memory(), *free = *total - number("DRY_TAKEN", 0) - count.in_use; return SUCCESS; }
int cuMemAlloc_v2(uint64_t *pointer, size_t bytes) {
    int code = OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    if (count.in_use + bytes + number("DRY_TAKEN", 0) <= memory()) {
        span *s = malloc(sizeof *s);
        /* A gap behind each, in which a copy that is too long is seen. */
        *s = (span){ next_address, bytes, spans };
        spans = s, next_address += (bytes + 4096) & ~(uint64_t)511, *pointer = s->from;
        count.allocations++, count.in_use += bytes;
        if (count.peak < count.in_use) count.peak = count.in_use;
        code = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return code;
}
int cuMemFree_v2(uint64_t pointer) {
    pthread_mutex_lock(&lock);
    span **at = &spans, *s;
    while (*at && (*at)->from != pointer) at = &(*at)->next;
    if ((s = *at)) *at = s->next, count.in_use -= s->bytes, free(s);
    pthread_mutex_unlock(&lock);
    if (!s) FAULT(INVALID_VALUE, "%#llx is freed and was not allocated", (unsigned long long)pointer);
    return SUCCESS;
}
int cuMemAllocAsync(uint64_t *pointer, size_t bytes, void *stream) { (void)stream; return cuMemAlloc_v2(pointer, bytes); }
int cuMemFreeAsync(uint64_t pointer, void *stream) { (void)stream; return cuMemFree_v2(pointer); }
int cuMemAllocHost_v2(void **out, size_t bytes) { return (*out = malloc(bytes)) ? SUCCESS : OUT_OF_MEMORY; }
int cuMemHostAlloc(void **out, size_t bytes, unsigned flags) { (void)flags; return cuMemAllocHost_v2(out, bytes); }
int cuMemFreeHost(void *pointer) { free(pointer); return SUCCESS; }

/* Whether a copy stays within an allocation; then it counts. */
static int counted(uint64_t pointer, uint64_t bytes, uint64_t moved, uint64_t *copies, uint64_t *total) {
    pthread_mutex_lock(&lock);
    span *s = spans;
    while (s && (pointer < s->from || pointer + bytes > s->from + s->bytes)) s = s->next;
    if (s) ++*copies, *total += moved, given++;
    pthread_mutex_unlock(&lock);
    if (!s) FAULT(INVALID_VALUE, "a copy of %llu bytes at %#llx is in no allocation", (unsigned long long)bytes, (unsigned long long)pointer);
    return SUCCESS;
}
static int upload(uint64_t to, uint64_t bytes, uint64_t moved) {
    __sync_fetch_and_add(&uploads_before, 1);
    return counted(to, bytes, moved, &count.uploads, &count.upload_bytes);
}
static int download(uint64_t from, uint64_t bytes, uint64_t moved) { return counted(from, bytes, moved, &count.downloads, &count.download_bytes); }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) { (void)from, (void)stream; return upload(to, bytes, bytes); }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    (void)stream;
    memset(to, 0, bytes);
    return download(from, bytes, bytes);
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    uint64_t none = 0;
    (void)stream;
    int code = counted(from, bytes, 0, &none, &none);
    return code ? code : counted(to, bytes, 0, &count.copies, &none);
}
/* CUDA_MEMCPY2D: which kind of memory is 1 (the host's) or 2 (the device's). */
typedef struct { size_t x, y; unsigned kind; void *host; uint64_t device; void *array; size_t pitch; } side;
typedef struct { side from, to; size_t width, height; } copy_2d;
int cuMemcpy2DAsync_v2(const copy_2d *c, void *stream) {
    (void)stream;
    if (!c->height || !c->width) return SUCCESS;
    const side *device = c->to.kind == 2 ? &c->to : &c->from;
    if (c->from.kind + c->to.kind != 3 || device->pitch < c->width)
        FAULT(INVALID_VALUE, "a copy of rows of %zu bytes, %zu apart, from kind %u to kind %u", c->width, device->pitch, c->from.kind, c->to.kind);
    if (c->to.kind == 1)
        for (size_t y = 0; y < c->height; y++) memset((char *)c->to.host + (c->to.y + y) * c->to.pitch + c->to.x, 0, c->width);
    uint64_t first = device->device + device->y * device->pitch + device->x, bytes = (c->height - 1) * device->pitch + c->width;
    return (c->to.kind == 2 ? upload : download)(first, bytes, c->width * c->height);
}

int cuModuleLoadData(module **out, const char *ptx) {
    char text[600];
    const char *refused = getenv("DRY_REFUSE");
    snprintf(text, sizeof text, ".entry %s", refused ? refused : "");
    if (refused && strstr(ptx, text)) return INVALID_PTX;
    module *m = malloc(sizeof *m);
    pthread_mutex_lock(&lock);
    m->number = ++modules, m->ptx = strdup(ptx);
    pthread_mutex_unlock(&lock);
    snprintf(text, sizeof text, "%03d.ptx", m->number);
    FILE *to = file(text);
    if (to) fputs(ptx, to), fclose(to);
    *out = m;
    return SUCCESS;
}
int cuModuleGetFunction(function **out, module *m, const char *name) {
    char entry[512];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    const char *at = strstr(m->ptx, entry);
    if (!at) FAULT(NOT_FOUND, "module %d has no entry %s", m->number, name);
    function *f = calloc(1, sizeof *f);
    f->of = m, f->name = strdup(name), f->allowed = SHARED;
    /* Threads of a block, as __launch_bounds__ says. */
    unsigned threads;
    const char *bounds = strstr(at, ".maxntid");
    f->block = bounds && sscanf(bounds, ".maxntid %u", &threads) == 1 ? threads : 1024;
    pthread_mutex_lock(&lock);
    if (function_count < MAX_MODULES) functions[function_count++] = f;
    pthread_mutex_unlock(&lock);
    *out = f;
    return SUCCESS;
}
int cuFuncSetAttribute(function *f, int attribute, int value) {
    if (attribute != 8 || value < 0 || value > SHARED_BY_ASKING)
        FAULT(INVALID_VALUE, "%s: attribute %d may not be %d (8: dynamic shared memory, at most %d)", f->name, attribute, value, SHARED_BY_ASKING);
    f->allowed = value > SHARED ? value : SHARED;
    return SUCCESS;
}
static int tuning(void) {
    static int known = -1;
    if (known < 0) known = getenv("DRY_TUNING") != NULL;
    return known;
}
int cuLaunchKernel(function *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
    (void)stream, (void)parameters, (void)extra;
    if (!x || !y || !z || x > 0x7fffffff || y > 65535 || z > 65535 || bx * by * bz > f->block || !bx || !by || !bz || bz > 64 || shared > f->allowed)
        FAULT(INVALID_VALUE, "%s: %u x %u x %u blocks of %u x %u x %u threads with %u bytes of shared memory; at most %u threads and %u bytes",
              f->name, x, y, z, bx, by, bz, shared, f->block, f->allowed);
    const char *trace = getenv("DRY_TRACE");
    FILE *to = trace ? fopen(trace, "a") : NULL;
    if (to) fprintf(to, "%s %u %u %u\n", f->name, x, y, z), fclose(to);
    pthread_mutex_lock(&lock);
    uint64_t uploads = __sync_fetch_and_and(&uploads_before, 0), maps = __sync_fetch_and_and(&maps_before, 0);
    count.launches++, f->launches++, given++;
    f->uploads += uploads;
    if (f->shared < shared) f->shared = shared;
    pthread_mutex_unlock(&lock);
    if (tuning()) {
        /* Long beside what the host takes, so that the tuner's choice is this table's and not chance. */
        struct timespec cost = { 0, 1000000 * (uploads ? 9 : maps ? 3 : 6) };
        nanosleep(&cost, NULL);
    }
    return SUCCESS;
}

/* https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html: what it asks of its arguments. Some
 * of Burn's candidates ask for more rows than a map may have; its tuner drops them. */
int cuTensorMapEncodeTiled(void *map, unsigned type, unsigned rank, uint64_t address, const uint64_t *size, const uint64_t *stride,
                           const uint32_t *box, const uint32_t *step, int interleave, int swizzle, int promotion, int fill) {
    static const unsigned bytes_of[] = { 1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4 }, most[] = { 0, 32, 64, 128 };
    (void)promotion, (void)fill;
    __sync_fetch_and_add(&maps_before, 1);
    if ((uintptr_t)map % 64 || address % 16 || rank < 1 || rank > 5 || type >= sizeof bytes_of / sizeof *bytes_of)
        FAULT(INVALID_VALUE, "a tensor map at %p of type %u, rank %u and address %#llx", map, type, rank, (unsigned long long)address);
    uint64_t inner = (uint64_t)box[0] * bytes_of[type];
    int bad = !interleave && (inner % 16 || (swizzle > 0 && swizzle < 4 && inner > most[swizzle]));
    for (unsigned i = 0; i < rank; i++) {
        bad |= !size[i] || size[i] > 1ull << 32 || !box[i] || box[i] > 256 || !step[i] || step[i] > 8;
        if (i + 1 < rank) bad |= stride[i] % 16 || stride[i] >= 1ull << 40;
    }
    if (bad) {
        char text[512];
        int at = snprintf(text, sizeof text, "a tensor map of type %u, swizzle %d; size, stride, box, step:", type, swizzle);
        for (unsigned i = 0; i < rank; i++)
            at += snprintf(text + at, sizeof text - at, " %llu %llu %u %u;", (unsigned long long)size[i],
                           (unsigned long long)(i + 1 < rank ? stride[i] : 0), box[i], step[i]);
        return fprintf(stderr, "dry driver: refused: %s\n", text), count.refused++, INVALID_VALUE;
    }
    memset(map, 0, 128);
    return SUCCESS;
}

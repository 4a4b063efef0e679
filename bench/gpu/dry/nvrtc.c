/* NVRTC, NVIDIA's compiler at run time, with a memory: what was compiled before, of the same source with the same options by
 * the same version, is read from DRY_PTX, a folder of <hash>.ptx. The compiler itself is libnvrtc.so.13. The functions are
 * those that cudarc calls for CubeCL.
 *
 * DRY_STUB: what kernels' names begin with that are not compiled; they get an entry without a body, which counts as well.
 * DRY_BREAK: what kernels' names begin with that do not compile: an error is added to their source. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 1, INTERNAL_ERROR = 11 };

typedef struct { char *source, *ptx; size_t size; void *real; } program;

/* The compiler's function of this name, which gives an int. */
static int (*real(const char *name))() {
    static void *library;
    if (!library && !(library = dlopen("libnvrtc.so.13", RTLD_NOW))) {
        fprintf(stderr, "dry compiler: %s: LD_LIBRARY_PATH has no NVRTC 13\n", dlerror());
        exit(2);
    }
    return (int (*)())dlsym(library, name);
}

static uint64_t hash(uint64_t seed, const char *text, const char *end) {
    while (text < end) seed = (seed ^ (unsigned char)*text++) * 0x100000001b3ull;
    return (seed ^ 0xff) * 0x100000001b3ull;
}
static uint64_t hash_all(uint64_t seed, const char *text) { return hash(seed, text, text + strlen(text)); }
/* CubeCL writes the types that a kernel uses, and its shared memory, in another order in each process: such lines are added up. */
static uint64_t hash_source(uint64_t seed, const char *source) {
    const char *kernel = strstr(source, "__global__"), *end;
    uint64_t sum = 0, order = seed;
    for (const char *line = source; *line; line = *end ? end + 1 : end) {
        end = strchrnul(line, '\n');
        const char *shared = strcasestr(line, "shared");
        if (line < kernel || (shared && shared < end)) sum += hash(seed, line, end);
        else order = hash(order, line, end);
    }
    return order ^ sum;
}
/* Where the program's PTX is kept, if anywhere. */
static char *path(const program *p, int count, const char *const *options) {
    char *to = NULL;
    int major = 0, minor = 0;
    const char *folder = getenv("DRY_PTX");
    if (!folder) return NULL;
    real("nvrtcVersion")(&major, &minor);
    uint64_t a = hash_source(0xcbf29ce484222325ull + 100 * major + minor, p->source), b = hash_source(~a, p->source);
    for (int i = 0; i < count; i++)
        /* Where headers are is another on every machine. */
        if (strncmp(options[i], "--include-path", 14)) a = hash_all(a, options[i]), b = hash_all(b, options[i]);
    return asprintf(&to, "%s/%016llx%016llx.ptx", folder, (unsigned long long)a, (unsigned long long)b) < 0 ? NULL : to;
}
static int load(program *p, const char *from) {
    FILE *in = fopen(from, "r");
    if (!in) return 0;
    fseek(in, 0, SEEK_END);
    p->size = ftell(in), p->ptx = malloc(p->size), rewind(in);
    int whole = fread(p->ptx, 1, p->size, in) == p->size;
    fclose(in);
    return whole;
}
static void save(const program *p, const char *to) {
    char *temporary = NULL;
    if (asprintf(&temporary, "%s.%d", to, getpid()) < 0) return;
    FILE *out = fopen(temporary, "w");
    if (out) {
        int whole = fwrite(p->ptx, 1, p->size, out) == p->size;
        if (fclose(out) || !whole || rename(temporary, to)) remove(temporary);
    }
    free(temporary);
}

/* Whether the kernel's name begins with what a variable says; its name and threads. */
static int is_named(const char *variable, const char *source, char name[512], unsigned *threads) {
    const char *begin = getenv(variable), *bounds = strstr(source, "__launch_bounds__(");
    return begin && bounds && sscanf(bounds, "__launch_bounds__(%u)%511[A-Za-z0-9_]", threads, name) == 2 && !strncmp(name, begin, strlen(begin));
}

int nvrtcVersion(int *major, int *minor) { return real("nvrtcVersion")(major, minor); }
const char *nvrtcGetErrorString(int code) { return ((const char *(*)(int))(void *)real("nvrtcGetErrorString"))(code); }
int nvrtcCreateProgram(program **out, const char *source, const char *name, int headers, const char *const *texts, const char *const *names) {
    char kernel[512];
    unsigned threads;
    const char *added = is_named("DRY_BREAK", source, kernel, &threads) ? "\n#error broken by DRY_BREAK\n" : "";
    if (headers || !(*out = calloc(1, sizeof **out)) || asprintf(&(*out)->source, "%s%s", source, added) < 0) return INTERNAL_ERROR;
    return real("nvrtcCreateProgram")(&(*out)->real, (*out)->source, name, headers, texts, names);
}
int nvrtcDestroyProgram(program **p) {
    int code = real("nvrtcDestroyProgram")(&(*p)->real);
    free((*p)->source), free((*p)->ptx), free(*p);
    *p = NULL;
    return code;
}
/* The program without its kernel's body, if that is wanted. */
static char *stub(const char *source) {
    char *to = NULL, name[512];
    unsigned threads;
    if (!is_named("DRY_STUB", source, name, &threads)) return NULL;
    return asprintf(&to, ".visible .entry %s(\n)\n.maxntid %u, 1, 1\n", name, threads) < 0 ? NULL : to;
}
int nvrtcCompileProgram(program *p, int count, const char *const *options) {
    if ((p->ptx = stub(p->source))) return p->size = strlen(p->ptx) + 1, SUCCESS;
    char *kept = path(p, count, options);
    if (kept && load(p, kept)) return free(kept), SUCCESS;
    int code = real("nvrtcCompileProgram")(p->real, count, options);
    if (!code) code = real("nvrtcGetPTXSize")(p->real, &p->size);
    if (!code) code = (p->ptx = malloc(p->size)) ? real("nvrtcGetPTX")(p->real, p->ptx) : OUT_OF_MEMORY;
    if (!code && kept) save(p, kept);
    free(kept);
    return code;
}
int nvrtcGetPTXSize(program *p, size_t *size) { *size = p->size; return SUCCESS; }
int nvrtcGetPTX(program *p, char *ptx) { memcpy(ptx, p->ptx, p->size); return SUCCESS; }
int nvrtcGetProgramLogSize(program *p, size_t *size) { return real("nvrtcGetProgramLogSize")(p->real, size); }
int nvrtcGetProgramLog(program *p, char *log) { return real("nvrtcGetProgramLog")(p->real, log); }

/* A CUDA driver without a GPU: device memory is host memory, launches run nothing, and every call is written down.
 *
 * `stub_driver.py` puts a table of all functions of the driver behind this file: those that are not here return
 * CUDA_ERROR_NOT_SUPPORTED and are written down too, so that nothing passes unseen. All work is done at once, in the order of the
 * calls, whatever the stream. What a real driver refuses is refused: sizes of launches, calls that would break a
 * capture, pointers that nobody allocated.
 *
 * `stub_fail` has calls of a name fail, once or from then on, as they do when a kernel has gone astray.
 *
 * A test may hang in a function that is called for every launch (`stub_on_launch`): an interpreter of kernels. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef unsigned int uint;
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_CONTEXT = 201, BAD_HANDLE = 400, NOT_FOUND = 500, NOT_SUPPORTED = 801, CAPTURING = 900, INVALIDATED = 901, NOT_CAPTURED = 903, ISOLATION = 905 };
enum { DEVICE = 1, PINNED = 2, MANAGED = 3 };
enum { MAX_DEVICES = 8, LEGACY = 1, PER_THREAD = 2, DEFAULT_DYNAMIC_SHARED = 48 * 1024, MOST_SHARED = 227 * 1024 };
#define EXPORT __attribute__((visibility("default")))

/* ------------------------------------------------------------------ the log */

typedef struct { const char *name; size_t note; void *stream; } Entry;
enum { MAX_LOG = 1 << 20 };
static Entry entries[MAX_LOG];
static int logged = 0, logging = 1;

static void note(const char *name, size_t what, void *stream) {
    if (!logging) return;
    int i = __atomic_fetch_add(&logged, 1, __ATOMIC_RELAXED);
    if (i < MAX_LOG) entries[i] = (Entry){name, what, stream};
}

EXPORT int stub_count(void) { return logged < MAX_LOG ? logged : MAX_LOG; }
EXPORT const char *stub_name(int i) { return entries[i].name; }
EXPORT size_t stub_note(int i) { return entries[i].note; }
EXPORT void *stub_stream(int i) { return entries[i].stream; }
EXPORT void stub_reset(void) { logged = 0; }
EXPORT void stub_logging(int on) { logging = on; }

/* ------------------------------------------------------------------ what is to fail */

static char failing[64] = "";
static int failure = 0, sticky = 0, after = 0;

/* Calls of a name ("" for all) fail with a code after so many have passed; with `sticks` everything fails from then on. */
EXPORT void stub_fail(const char *name, int code, int sticks, int passing) {
    snprintf(failing, sizeof failing, "%s", name);
    failure = code; sticky = sticks; after = passing;
}
static CUresult fails(const char *name) {
    if (!failure || (*failing && strcmp(name, failing)) || after-- > 0) return OK;
    int code = failure;
    if (sticky) { *failing = 0; after = 0; } else failure = 0;
    return code;
}
#define MAY_FAIL(name) do { CUresult f_ = fails(name); if (f_) return f_; } while (0)

/* ------------------------------------------------------------------ devices and contexts */

static int num_devices = 1, major = 9, minor = 0;
static __thread int stack[64], depth = 0; /* devices of the thread's contexts */
static char contexts[MAX_DEVICES][16];

EXPORT void stub_devices(int count, int of_major, int of_minor) {
    num_devices = count < MAX_DEVICES ? count : MAX_DEVICES;
    major = of_major;
    minor = of_minor;
}

static void *context_of(int device) { return contexts[device]; }
static int device_of(void *context) { return (int)(((char *)context - contexts[0]) / 16); }
static int current(void) { return depth ? stack[depth - 1] : 0; }
static int known(int device) { return device >= 0 && device < num_devices; }

CUresult cuInit(uint flags) { return OK; }
CUresult cuDriverGetVersion(int *v) { *v = 13050; return OK; }
CUresult cuDeviceGetCount(int *n) { *n = num_devices; return OK; }
CUresult cuDeviceGet(int *d, int i) { if (!known(i)) return 101; *d = i; return OK; }
CUresult cuDeviceGetName(char *s, int n, int d) { snprintf(s, n, "stub of sm_%d%d", major, minor); return OK; }
CUresult cuDeviceTotalMem(size_t *b, int d) { *b = 140ull << 30; return OK; }
CUresult cuDeviceGetUuid(char *u, int d) { memset(u, d + 1, 16); return OK; }
CUresult cuDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", d + 1); return OK; }
CUresult cuDeviceGetAttribute(int *v, int a, int d) {
    switch (a) { /* numbers of CUdevice_attribute */
    case 1: case 2: case 3: *v = 1024; break; /* threads of a block */
    case 4: *v = 64; break;
    case 5: *v = 2147483647; break; /* the grid */
    case 6: case 7: *v = 65535; break;
    case 8: *v = DEFAULT_DYNAMIC_SHARED; break;
    case 10: *v = 32; break;
    case 12: case 82: *v = 65536; break; /* registers */
    case 16: *v = 132; break; /* multiprocessors */
    case 33: case 50: case 34: *v = d + 1; break; /* bus, domain, device */
    case 39: *v = 2048; break; /* threads of a multiprocessor */
    case 38: *v = 50 << 20; break; /* L2 */
    case 75: *v = major; break;
    case 76: *v = minor; break;
    case 81: *v = 228 * 1024; break;
    case 97: *v = MOST_SHARED; break;
    case 106: *v = 32; break; /* blocks of a multiprocessor */
    case 111: *v = 1024; break; /* shared memory kept back */
    case 20: case 35: *v = 0; break; /* compute mode, integrated */
    default: *v = 1;
    }
    return OK;
}
CUresult cuDevicePrimaryCtxRetain(void **c, int d) { if (!known(d)) return 101; *c = context_of(d); return OK; }
CUresult cuDevicePrimaryCtxRelease(int d) { return OK; }
CUresult cuDevicePrimaryCtxReset(int d) { note("cuDevicePrimaryCtxReset", d, 0); return OK; }
CUresult cuDevicePrimaryCtxSetFlags(int d, uint f) { return OK; }
CUresult cuDevicePrimaryCtxGetState(int d, uint *f, int *a) { *f = 0; *a = 1; return OK; }
CUresult cuDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return OK; }
CUresult cuCtxGetCurrent(void **c) { note("cuCtxGetCurrent", 0, 0); *c = depth ? context_of(current()) : 0; return OK; }
CUresult cuCtxPushCurrent(void *c) { note("cuCtxPushCurrent", 0, 0); if (depth == 64) return INVALID; stack[depth++] = device_of(c); return OK; }
CUresult cuCtxPopCurrent(void **c) { note("cuCtxPopCurrent", 0, 0); if (!depth) return NO_CONTEXT; depth--; if (c) *c = context_of(stack[depth]); return OK; }
CUresult cuCtxSetCurrent(void *c) {
    note("cuCtxSetCurrent", 0, 0);
    if (!c) { if (depth) depth--; return OK; }
    if (!depth) depth = 1;
    stack[depth - 1] = device_of(c);
    return OK;
}
CUresult cuCtxGetDevice(int *d) { note("cuCtxGetDevice", 0, 0); if (!depth) return NO_CONTEXT; *d = current(); return OK; }
CUresult cuCtxGetDevice_v2(int *d, void *c) { *d = c ? device_of(c) : current(); return OK; }
CUresult cuCtxGetId(void *c, unsigned long long *i) { *i = 1 + (c ? device_of(c) : current()); return OK; }
CUresult cuCtxGetFlags(uint *f) { *f = 0; return OK; }
CUresult cuCtxGetApiVersion(void *c, uint *v) { *v = 13050; return OK; }
CUresult cuCtxGetLimit(size_t *v, int l) { *v = 1024; return OK; }
CUresult cuCtxSetLimit(int l, size_t v) { return OK; }
CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return OK; }
CUresult cuModuleGetLoadingMode(int *m) { *m = 2; return OK; }
CUresult cuGetErrorName(int e, const char **s) {
    *s = e == CAPTURING ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : e == NOT_SUPPORTED ? "CUDA_ERROR_NOT_SUPPORTED"
       : e == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : e == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : e == BAD_HANDLE ? "CUDA_ERROR_INVALID_HANDLE"
       : e == NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : e == INVALID ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_OF_THE_STUB";
    return OK;
}
CUresult cuGetErrorString(int e, const char **s) { return cuGetErrorName(e, s); }

/* ------------------------------------------------------------------ streams, events, graphs */

typedef struct { int what; void *to; const void *from; size_t size; int value; long node; } Node; /* what: copy, fill, launch */
enum { COPY, FILL, LAUNCH };
typedef struct { void *of; void (*destroy)(void *); int count; } UserObject;
typedef struct { Node *nodes; int count, refs, broken; UserObject **objects; int num_objects; unsigned long long id; } Graph;
typedef struct Stream { uint flags; int device, priority; Graph *capturing; int mode, begun; unsigned long long id; struct Stream *next; } Stream;
typedef struct { uint flags; Graph *capturing; int recorded; } Event;

static Stream default_streams[MAX_DEVICES], *all_streams = 0;
/* Captures under way by mode, all and of this thread, and the mode in which this thread minds them. */
enum { GLOBAL, THREAD_LOCAL, RELAXED };
static int captures[3];
static __thread int own_captures[3], minds = GLOBAL;
static Graph *under_way[64]; /* those that an unsafe call breaks */
static unsigned long long numbers = 1;

static Stream *stream_of(void *s) { return (uintptr_t)s <= PER_THREAD ? &default_streams[current()] : (Stream *)s; }

static void add(Graph *g, Node node) {
    g->nodes = realloc(g->nodes, (g->count + 1) * sizeof(Node));
    g->nodes[g->count++] = node;
}

/* Whether a call that waits, or is not in stream order, is refused; then it breaks the captures under way. */
static int refused(void) {
    int own = own_captures[GLOBAL] + own_captures[THREAD_LOCAL];
    int found = minds == RELAXED ? 0 : minds == THREAD_LOCAL ? own : own + captures[GLOBAL] - own_captures[GLOBAL];
    for (int i = 0; found && i < 64; i++) if (under_way[i]) under_way[i]->broken = 1;
    return found;
}
static int captured(void) { return captures[GLOBAL] + captures[THREAD_LOCAL] + captures[RELAXED]; }
static CUresult unsafe(const char *name, size_t what) {
    note(name, what, 0);
    MAY_FAIL(name);
    return refused() ? CAPTURING : OK;
}
static void drop_graph(Graph *g) {
    if (--g->refs) return;
    for (int i = 0; i < g->num_objects; i++)
        if (!--g->objects[i]->count) g->objects[i]->destroy(g->objects[i]->of);
}
#define UNSAFE(name, what) do { CUresult e_ = unsafe(name, what); if (e_) return e_; } while (0)

CUresult cuStreamCreateWithPriority(void **s, uint flags, int priority) {
    Stream *made = calloc(1, sizeof(Stream));
    made->flags = flags; made->device = current(); made->priority = priority;
    made->id = __atomic_add_fetch(&numbers, 1, __ATOMIC_RELAXED) + PER_THREAD;
    made->next = all_streams;
    all_streams = made;
    note("cuStreamCreate", 0, made);
    *s = made;
    return OK;
}
CUresult cuStreamCreate(void **s, uint flags) { return cuStreamCreateWithPriority(s, flags, 0); }
CUresult cuStreamDestroy(void *s) { note("cuStreamDestroy", 0, s); return OK; } /* kept, as handles may linger */
CUresult cuStreamGetCtx(void *s, void **c) { *c = context_of((uintptr_t)s <= PER_THREAD ? current() : stream_of(s)->device); return OK; }
CUresult cuStreamGetCtx_v2(void *s, void **c, void **green) { if (green) *green = 0; return cuStreamGetCtx(s, c); }
CUresult cuStreamGetDevice(void *s, int *d) { *d = (uintptr_t)s <= PER_THREAD ? current() : stream_of(s)->device; return OK; }
CUresult cuStreamGetFlags(void *s, uint *f) { *f = stream_of(s)->flags; return OK; }
CUresult cuStreamGetPriority(void *s, int *p) { *p = stream_of(s)->priority; return OK; }
CUresult cuStreamGetId(void *s, unsigned long long *i) { *i = (uintptr_t)s <= PER_THREAD ? 1 : stream_of(s)->id; return OK; }
CUresult cuStreamQuery(void *s) { note("cuStreamQuery", 0, s); return stream_of(s)->capturing ? CAPTURING : OK; }
CUresult cuStreamSynchronize(void *s) {
    note("cuStreamSynchronize", 0, s);
    MAY_FAIL("cuStreamSynchronize");
    return stream_of(s)->capturing || refused() ? CAPTURING : OK;
}
CUresult cuCtxSynchronize(void) { UNSAFE("cuCtxSynchronize", 0); return OK; }
CUresult cuCtxSynchronize_v2(void *c) { return cuCtxSynchronize(); }
CUresult cuLaunchHostFunc(void *s, void (*f)(void *), void *data) {
    note("cuLaunchHostFunc", 0, s);
    if (stream_of(s)->capturing) return NOT_SUPPORTED;
    f(data);
    return OK;
}
CUresult cuStreamBeginCapture(void *s, int mode) {
    note("cuStreamBeginCapture", mode, s);
    if ((uintptr_t)s <= LEGACY || stream_of(s)->capturing) return CAPTURING;
    Graph *made = stream_of(s)->capturing = calloc(1, sizeof(Graph));
    made->refs = 1;
    made->id = __atomic_add_fetch(&numbers, 1, __ATOMIC_RELAXED);
    stream_of(s)->mode = mode;
    stream_of(s)->begun = 1;
    captures[mode]++; own_captures[mode]++;
    for (int i = 0; i < 64; i++) if (!under_way[i]) { under_way[i] = made; break; }
    return OK;
}
CUresult cuStreamEndCapture(void *s, void **graph) {
    note("cuStreamEndCapture", 0, s);
    Stream *of = stream_of(s);
    Graph *made = of->capturing;
    if (!made || !of->begun) return NOT_CAPTURED;
    captures[of->mode]--; own_captures[of->mode]--;
    of->begun = 0;
    for (int i = 0; i < 64; i++) if (under_way[i] == made) under_way[i] = 0;
    for (Stream *at = all_streams; at; at = at->next) if (at->capturing == made) at->capturing = 0;
    *graph = made->broken ? 0 : made;
    if (made->broken) drop_graph(made);
    return made->broken ? INVALIDATED : OK;
}
static int status_of(void *s) { Graph *g = stream_of(s)->capturing; return !g ? 0 : g->broken ? 2 : 1; }
CUresult cuStreamIsCapturing(void *s, int *status) { note("cuStreamIsCapturing", 0, s); *status = status_of(s); return OK; }
CUresult cuStreamGetCaptureInfo_v2(void *s, int *status, unsigned long long *id, void **graph, void **deps, size_t *n) {
    note("cuStreamGetCaptureInfo", 0, s);
    *status = status_of(s);
    if (id) *id = *status == 1 ? stream_of(s)->capturing->id : 0;
    if (graph) *graph = stream_of(s)->capturing;
    if (deps) *deps = 0;
    if (n) *n = 0;
    return OK;
}
CUresult cuStreamGetCaptureInfo_v3(void *s, int *status, unsigned long long *id, void **graph, void **deps, void **edges, size_t *n) {
    return cuStreamGetCaptureInfo_v2(s, status, id, graph, deps, n);
}
CUresult cuStreamGetCaptureInfo(void *s, int *status, unsigned long long *id, void **graph, void **deps, void **edges, size_t *n) {
    return cuStreamGetCaptureInfo_v2(s, status, id, graph, deps, n);
}
CUresult cuThreadExchangeStreamCaptureMode(int *mode) { int was = minds; minds = *mode; *mode = was; return OK; }
CUresult cuEventCreate(void **e, uint flags) { note("cuEventCreate", flags, 0); Event *made = calloc(1, sizeof(Event)); made->flags = flags; *e = made; return OK; }
CUresult cuEventDestroy(void *e) { note("cuEventDestroy", 0, 0); free(e); return OK; }
CUresult cuEventRecord(void *e, void *s) { note("cuEventRecord", (size_t)e, s); MAY_FAIL("cuEventRecord"); ((Event *)e)->capturing = stream_of(s)->capturing; ((Event *)e)->recorded = 1; return OK; }
CUresult cuEventRecordWithFlags(void *e, void *s, uint f) { return cuEventRecord(e, s); }
CUresult cuEventQuery(void *e) { note("cuEventQuery", (size_t)e, 0); return ((Event *)e)->capturing ? CAPTURING : OK; }
CUresult cuEventSynchronize(void *e) { note("cuEventSynchronize", (size_t)e, 0); return ((Event *)e)->capturing ? CAPTURING : OK; }
CUresult cuEventElapsedTime(float *f, void *a, void *b) { *f = 1; return OK; }
CUresult cuStreamWaitEvent(void *s, void *e, uint flags) {
    note("cuStreamWaitEvent", (size_t)e, s);
    Stream *of = stream_of(s);
    if (of->capturing && ((Event *)e)->capturing != of->capturing && ((Event *)e)->recorded) { of->capturing->broken = 1; return ISOLATION; }
    if (((Event *)e)->capturing && !of->capturing) { of->capturing = ((Event *)e)->capturing; } /* it joins the capture */
    return OK;
}

/* ------------------------------------------------------------------ memory */

typedef struct { uint64_t base; size_t size; int kind, device; } Block;
static Block *blocks = 0;
static int num_blocks = 0, room = 0, poison = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

EXPORT void stub_poison(int byte) { poison = byte; }

static int place_of(uint64_t p) { /* of the first block that starts above p */
    int low = 0, high = num_blocks;
    while (low < high) { int m = (low + high) / 2; if (blocks[m].base <= p) low = m + 1; else high = m; }
    return low;
}
EXPORT int stub_find(uint64_t p, uint64_t *base, size_t *size, int *kind, int *device) {
    pthread_mutex_lock(&lock);
    int i = place_of(p) - 1, found = i >= 0 && p < blocks[i].base + (blocks[i].size ? blocks[i].size : 1);
    if (found) { *base = blocks[i].base; *size = blocks[i].size; *kind = blocks[i].kind; *device = blocks[i].device; }
    pthread_mutex_unlock(&lock);
    return found;
}
static CUresult take(void **p, size_t size, int kind) {
    *p = size > (64ull << 30) ? 0 : aligned_alloc(512, (size + 1023) / 512 * 512); /* at least one byte apart */
    if (!*p) return NO_MEMORY;
    if (poison >= 0) memset(*p, poison, size);
    pthread_mutex_lock(&lock);
    if (num_blocks == room) blocks = realloc(blocks, (room = room ? 2 * room : 256) * sizeof(Block));
    int i = place_of((uint64_t)*p);
    memmove(blocks + i + 1, blocks + i, (num_blocks++ - i) * sizeof(Block));
    blocks[i] = (Block){(uint64_t)*p, size, kind, current()};
    pthread_mutex_unlock(&lock);
    return OK;
}
static CUresult give(void *p) {
    if (!p) return OK;
    pthread_mutex_lock(&lock);
    int i = place_of((uint64_t)p) - 1, found = i >= 0 && blocks[i].base == (uint64_t)p;
    if (found) memmove(blocks + i, blocks + i + 1, (--num_blocks - i) * sizeof(Block));
    pthread_mutex_unlock(&lock);
    if (!found) return INVALID;
    free(p);
    return OK;
}
static int kind_of(uint64_t p) {
    uint64_t base; size_t size; int kind = 0, device;
    return stub_find(p, &base, &size, &kind, &device) ? kind : 0;
}

CUresult cuMemAlloc(CUdeviceptr *p, size_t n) { UNSAFE("cuMemAlloc", n); return n ? take((void **)p, n, DEVICE) : INVALID; }
CUresult cuMemFree(CUdeviceptr p) { UNSAFE("cuMemFree", 0); return give((void *)p); }
CUresult cuMemAllocAsync(CUdeviceptr *p, size_t n, void *s) { note("cuMemAllocAsync", n, s); return take((void **)p, n, DEVICE); }
CUresult cuMemAllocFromPoolAsync(CUdeviceptr *p, size_t n, void *pool, void *s) { return cuMemAllocAsync(p, n, s); }
CUresult cuMemFreeAsync(CUdeviceptr p, void *s) { note("cuMemFreeAsync", 0, s); return give((void *)p); }
CUresult cuMemHostAlloc(void **p, size_t n, uint f) { UNSAFE("cuMemHostAlloc", n); return take(p, n, PINNED); }
CUresult cuMemAllocHost(void **p, size_t n) { return cuMemHostAlloc(p, n, 0); }
CUresult cuMemFreeHost(void *p) { UNSAFE("cuMemFreeHost", 0); return give(p); }
CUresult cuMemAllocManaged(CUdeviceptr *p, size_t n, uint f) { UNSAFE("cuMemAllocManaged", n); return take((void **)p, n, MANAGED); }
CUresult cuMemHostGetDevicePointer(CUdeviceptr *d, void *p, uint f) { *d = (CUdeviceptr)p; return OK; }
CUresult cuMemGetInfo(size_t *f, size_t *t) { *f = 120ull << 30; *t = 140ull << 30; return OK; }
CUresult cuMemGetAddressRange(CUdeviceptr *b, size_t *n, CUdeviceptr p) {
    int kind, device; uint64_t base; size_t size;
    note("cuMemGetAddressRange", 0, 0);
    if (!stub_find(p, &base, &size, &kind, &device)) return INVALID;
    if (b) *b = base;
    if (n) *n = size;
    return OK;
}

static CUresult copy(const char *name, void *to, const void *from, size_t n, void *s, int blocking) {
    note(name, n, s);
    Stream *of = stream_of(s);
    MAY_FAIL(name);
    if (blocking && (captured() || refused())) { refused(); return CAPTURING; }
    if (!blocking && of->capturing) { add(of->capturing, (Node){COPY, to, from, n, 0, 0}); return OK; }
    memcpy(to, from, n);
    return OK;
}
/* A copy to or from memory that is not pinned is no copy behind the host's back. */
static int pageable(const void *p) { return kind_of((uint64_t)p) != PINNED; }

CUresult cuMemcpyHtoD(CUdeviceptr d, const void *s, size_t n) { return copy("cuMemcpyHtoD", (void *)d, s, n, 0, 1); }
CUresult cuMemcpyDtoH(void *d, CUdeviceptr s, size_t n) { return copy("cuMemcpyDtoH", d, (void *)s, n, 0, 1); }
CUresult cuMemcpyDtoD(CUdeviceptr d, CUdeviceptr s, size_t n) { return copy("cuMemcpyDtoD", (void *)d, (void *)s, n, 0, captured() != 0); }
CUresult cuMemcpy(CUdeviceptr d, CUdeviceptr s, size_t n) { return copy("cuMemcpy", (void *)d, (void *)s, n, 0, 1); }
CUresult cuMemcpyHtoDAsync(CUdeviceptr d, const void *s, size_t n, void *st) { return copy(pageable(s) ? "cuMemcpyHtoDAsync (pageable)" : "cuMemcpyHtoDAsync", (void *)d, s, n, st, 0); }
CUresult cuMemcpyDtoHAsync(void *d, CUdeviceptr s, size_t n, void *st) { return copy(pageable(d) ? "cuMemcpyDtoHAsync (pageable)" : "cuMemcpyDtoHAsync", d, (void *)s, n, st, 0); }
CUresult cuMemcpyDtoDAsync(CUdeviceptr d, CUdeviceptr s, size_t n, void *st) { return copy("cuMemcpyDtoDAsync", (void *)d, (void *)s, n, st, 0); }
CUresult cuMemcpyAsync(CUdeviceptr d, CUdeviceptr s, size_t n, void *st) {
    int host = !kind_of(d) || !kind_of(s);
    return copy(host ? "cuMemcpyAsync (pageable)" : "cuMemcpyAsync", (void *)d, (void *)s, n, st, 0);
}

static void fill(void *to, int value, size_t n, int width) {
    for (size_t i = 0; i < n; i++) memcpy((char *)to + i * width, &value, width);
}
static CUresult set(const char *name, CUdeviceptr d, int value, size_t n, int width, void *s, int blocking) {
    note(name, n * width, s);
    Stream *of = stream_of(s);
    MAY_FAIL(name);
    if (blocking && captured()) return CAPTURING;
    if (of->capturing) { add(of->capturing, (Node){FILL, (void *)d, 0, n, value, width}); return OK; }
    fill((void *)d, value, n, width);
    return OK;
}
CUresult cuMemsetD8(CUdeviceptr d, unsigned char v, size_t n) { return set("cuMemsetD8", d, v, n, 1, 0, 1); }
CUresult cuMemsetD16(CUdeviceptr d, unsigned short v, size_t n) { return set("cuMemsetD16", d, v, n, 2, 0, 1); }
CUresult cuMemsetD32(CUdeviceptr d, uint v, size_t n) { return set("cuMemsetD32", d, (int)v, n, 4, 0, 1); }
CUresult cuMemsetD8Async(CUdeviceptr d, unsigned char v, size_t n, void *s) { return set("cuMemsetD8Async", d, v, n, 1, s, 0); }
CUresult cuMemsetD16Async(CUdeviceptr d, unsigned short v, size_t n, void *s) { return set("cuMemsetD16Async", d, v, n, 2, s, 0); }
CUresult cuMemsetD32Async(CUdeviceptr d, uint v, size_t n, void *s) { return set("cuMemsetD32Async", d, (int)v, n, 4, s, 0); }

CUresult cuPointerGetAttribute(void *data, int a, CUdeviceptr p) { /* numbers of CUpointer_attribute */
    uint64_t base = 0; size_t size = 0; int kind = 0, device = 0;
    note("cuPointerGetAttribute", a, 0);
    if (!stub_find(p, &base, &size, &kind, &device)) return INVALID;
    switch (a) {
    case 1: *(void **)data = context_of(device); break;
    case 2: *(uint *)data = kind == PINNED ? 1 : 2; break;
    case 3: case 4: *(uint64_t *)data = p; break;
    case 6: *(int *)data = 1; break;
    case 7: *(uint64_t *)data = base; break; /* an id of the buffer */
    case 8: *(uint *)data = kind == MANAGED; break;
    case 9: *(int *)data = device; break;
    case 11: *(uint64_t *)data = base; break;
    case 12: *(size_t *)data = size; break;
    default: *(uint *)data = 0;
    }
    return OK;
}
CUresult cuPointerGetAttributes(uint n, int *a, void **data, CUdeviceptr p) { /* of host memory it says 0 and succeeds */
    int was = logging, found = kind_of(p) != 0;
    note("cuPointerGetAttributes", n, 0);
    logging = 0;
    for (uint i = 0; i < n; i++) {
        if (found) cuPointerGetAttribute(data[i], a[i], p);
        else if (a[i] == 1 || a[i] == 3 || a[i] == 4 || a[i] == 7 || a[i] == 11 || a[i] == 12) *(uint64_t *)data[i] = 0;
        else *(int *)data[i] = a[i] == 9 ? -2 : 0;
    }
    logging = was;
    return OK;
}

static char pools[MAX_DEVICES][16];
CUresult cuDeviceGetDefaultMemPool(void **p, int d) { *p = pools[d]; return OK; }
CUresult cuDeviceGetMemPool(void **p, int d) { *p = pools[d]; return OK; }
CUresult cuDeviceSetMemPool(int d, void *p) { return OK; }
CUresult cuMemPoolCreate(void **p, const void *props) { note("cuMemPoolCreate", 0, 0); *p = malloc(16); return OK; }
CUresult cuMemPoolDestroy(void *p) { note("cuMemPoolDestroy", 0, 0); return OK; }
CUresult cuMemPoolTrimTo(void *p, size_t n) { note("cuMemPoolTrimTo", n, 0); return OK; }
CUresult cuMemPoolSetAttribute(void *p, int a, void *v) { return OK; }
CUresult cuMemPoolGetAttribute(void *p, int a, void *v) { if (a < 4) *(int *)v = 0; else *(uint64_t *)v = 0; return OK; }
CUresult cuMemPoolSetAccess(void *p, const void *m, size_t n) { return OK; }
CUresult cuMemPoolGetAccess(int *f, void *p, void *l) { *f = 3; return OK; }

/* ------------------------------------------------------------------ modules and launches */

typedef struct { const void *image; size_t size; } Module;
typedef struct Function { char *name; Module *module; int dynamic_shared; struct Function *next; } Function;
static Function *functions = 0;

typedef void (*OnLaunch)(void *function, const uint *sizes, void **params, long node);
typedef void (*OnReplay)(long node);
static OnLaunch on_launch = 0;
static OnReplay on_replay = 0;
EXPORT void stub_on_launch(OnLaunch launch, OnReplay replay) { on_launch = launch; on_replay = replay; }
EXPORT const char *stub_function_name(void *f) { return ((Function *)f)->name; }
EXPORT const void *stub_function_image(void *f) { return ((Function *)f)->module->image; }

/* Bytes of an image: of an ELF file as its headers say, else of text. */
static size_t image_size(const unsigned char *p) {
    if (memcmp(p, "\177ELF", 4)) return strlen((const char *)p) + 1;
    uint64_t sections, segments; uint16_t sizes[6];
    memcpy(&segments, p + 32, 8); memcpy(&sections, p + 40, 8); memcpy(sizes, p + 52, 12); /* e_phoff, e_shoff; e_ehsize … */
    uint64_t a = segments + (uint64_t)sizes[1] * sizes[2], b = sections + (uint64_t)sizes[3] * sizes[4];
    return a > b ? a : b;
}
static void *load(const char *name, const void *image) {
    Module *m = malloc(sizeof(Module));
    m->size = image_size(image);
    note(name, m->size, 0);
    m->image = memcpy(malloc(m->size), image, m->size);
    return m;
}
EXPORT size_t stub_function_image_size(void *f) { return ((Function *)f)->module->size; }
static CUresult function_of(void **f, Module *m, const char *name) {
    pthread_mutex_lock(&lock);
    Function *at = functions;
    while (at && (at->module != m || strcmp(at->name, name))) at = at->next;
    if (!at) {
        at = calloc(1, sizeof(Function));
        *at = (Function){strdup(name), m, DEFAULT_DYNAMIC_SHARED, functions};
        functions = at;
    }
    pthread_mutex_unlock(&lock);
    *f = at;
    return OK;
}
CUresult cuModuleLoadData(void **m, const void *i) { UNSAFE("cuModuleLoadData", 0); *m = load("(bytes of a module)", i); return OK; }
CUresult cuModuleLoadDataEx(void **m, const void *i, uint n, void *o, void *v) { return cuModuleLoadData(m, i); }
CUresult cuModuleUnload(void *m) { note("cuModuleUnload", 0, 0); return OK; }
CUresult cuModuleGetFunction(void **f, void *m, const char *n) { note("cuModuleGetFunction", 0, 0); return function_of(f, m, n); }
CUresult cuLibraryLoadData(void **l, const void *c, void *a, void *b, uint n, void *d, void *e, uint k) { UNSAFE("cuLibraryLoadData", 0); *l = load("(bytes of a library)", c); return OK; }
CUresult cuLibraryUnload(void *l) { note("cuLibraryUnload", 0, 0); return OK; }
CUresult cuLibraryGetKernel(void **k, void *l, const char *n) { note("cuLibraryGetKernel", 0, 0); return function_of(k, l, n); }
CUresult cuLibraryGetModule(void **m, void *l) { *m = l; return OK; }
CUresult cuKernelGetFunction(void **f, void *k) { *f = k; return OK; }
CUresult cuKernelGetLibrary(void **l, void *k) { *l = ((Function *)k)->module; return OK; }
CUresult cuKernelGetName(const char **n, void *k) { *n = ((Function *)k)->name; return OK; }
CUresult cuFuncGetName(const char **n, void *f) { *n = ((Function *)f)->name; return OK; }
CUresult cuFuncGetModule(void **m, void *f) { *m = ((Function *)f)->module; return OK; }
CUresult cuFuncLoad(void *f) { return OK; }
CUresult cuFuncIsLoaded(int *s, void *f) { *s = 1; return OK; }
CUresult cuFuncGetAttribute(int *v, int a, void *f) { *v = a == 0 ? 1024 : a == 4 ? 32 : a == 5 || a == 6 ? 10 * major + minor : a == 8 ? ((Function *)f)->dynamic_shared : 0; return OK; }
CUresult cuKernelGetAttribute(int *v, int a, void *k, int d) { return cuFuncGetAttribute(v, a, k); }
CUresult cuFuncSetAttribute(void *f, int a, int v) {
    note("cuFuncSetAttribute", v, 0);
    if (a == 8) { if (v > MOST_SHARED) return INVALID; ((Function *)f)->dynamic_shared = v; }
    return OK;
}
CUresult cuKernelSetAttribute(int a, int v, void *k, int d) { return cuFuncSetAttribute(k, a, v); }
CUresult cuFuncSetCacheConfig(void *f, int c) { return OK; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t s) { *n = 4; return OK; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, void *f, int b, size_t s, uint g) { *n = 4; return OK; }
CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, void *f, void *size, size_t s, int limit) { *grid = 264; *block = 256; return OK; }

static CUresult launch(const char *name, void *f, const uint *z, void *s, void **params) {
    uint threads = z[3] * z[4] * z[5], blocks_ = z[0];
    note(name, blocks_, s);
    if (!f || !z[0] || !z[1] || !z[2] || !threads || threads > 1024 || z[5] > 64) return INVALID;
    if (z[1] > 65535 || z[2] > 65535 || z[0] > 2147483647u) return INVALID;
    if (z[6] > (uint)((Function *)f)->dynamic_shared) return INVALID;
    Stream *of = stream_of(s);
    MAY_FAIL(name);
    if ((uintptr_t)s > PER_THREAD && of->device != current()) return BAD_HANDLE;
    if ((uintptr_t)s <= LEGACY && captured() - captures[RELAXED]) return CAPTURING;
    long node = 0;
    if (of->capturing) {
        node = __atomic_add_fetch(&numbers, 1, __ATOMIC_RELAXED);
        add(of->capturing, (Node){LAUNCH, 0, 0, 0, 0, node});
    }
    if (on_launch) on_launch(f, z, params, node);
    return OK;
}
CUresult cuLaunchKernel(void *f, uint gx, uint gy, uint gz, uint bx, uint by, uint bz, uint shared, void *s, void **params, void **extra) {
    uint sizes[7] = {gx, gy, gz, bx, by, bz, shared};
    return launch("cuLaunchKernel", f, sizes, s, params);
}
CUresult cuLaunchCooperativeKernel(void *f, uint gx, uint gy, uint gz, uint bx, uint by, uint bz, uint shared, void *s, void **params) {
    uint sizes[7] = {gx, gy, gz, bx, by, bz, shared};
    return launch("cuLaunchCooperativeKernel", f, sizes, s, params);
}
typedef struct { uint sizes[7]; void *stream; void *attributes; uint count; } Config;
CUresult cuLaunchKernelEx(const Config *c, void *f, void **params, void **extra) { return launch("cuLaunchKernelEx", f, c->sizes, c->stream, params); }

/* What is instantiated is a copy of the graph, with references of its own. */
CUresult cuGraphInstantiateWithFlags(void **e, void *g, unsigned long long f) {
    Graph *of = g, *made = malloc(sizeof(Graph));
    note("cuGraphInstantiate", 0, 0);
    if (!g) return INVALID;
    *made = *of;
    made->refs = 1;
    made->nodes = memcpy(malloc(of->count * sizeof(Node) + 1), of->nodes, of->count * sizeof(Node));
    made->objects = memcpy(malloc(of->num_objects * sizeof(void *) + 1), of->objects, of->num_objects * sizeof(void *));
    for (int i = 0; i < of->num_objects; i++) of->objects[i]->count++;
    *e = made;
    return OK;
}
CUresult cuGraphInstantiateWithParams(void **e, void *g, void *p) { return cuGraphInstantiateWithFlags(e, g, 0); }
CUresult cuGraphInstantiate(void **e, void *g, unsigned long long f) { return cuGraphInstantiateWithFlags(e, g, f); }
CUresult cuUserObjectCreate(void **o, void *p, void *destroy, uint count, uint flags) {
    note("cuUserObjectCreate", count, 0);
    *(UserObject *)(*o = malloc(sizeof(UserObject))) = (UserObject){p, (void (*)(void *))destroy, (int)count};
    return OK;
}
CUresult cuUserObjectRetain(void *o, uint count) { ((UserObject *)o)->count += count; return OK; }
CUresult cuUserObjectRelease(void *o, uint count) { UserObject *of = o; if (!(of->count -= count)) of->destroy(of->of); return OK; }
CUresult cuGraphRetainUserObject(void *g, void *o, uint count, uint flags) {
    Graph *of = g;
    note("cuGraphRetainUserObject", count, 0);
    if (!(flags & 1)) ((UserObject *)o)->count += count; /* else the references move */
    of->objects = realloc(of->objects, (of->num_objects + count) * sizeof(UserObject *));
    while (count--) of->objects[of->num_objects++] = o;
    return OK;
}
CUresult cuGraphReleaseUserObject(void *g, void *o, uint count) {
    Graph *of = g;
    for (int i = 0; count && i < of->num_objects;)
        if (of->objects[i] == o) { of->objects[i] = of->objects[--of->num_objects]; cuUserObjectRelease(o, 1); count--; } else i++;
    return OK;
}
CUresult cuGraphExecDestroy(void *e) { note("cuGraphExecDestroy", 0, 0); drop_graph(e); return OK; }
CUresult cuGraphDestroy(void *g) { note("cuGraphDestroy", 0, 0); drop_graph(g); return OK; } /* memory is kept, as handles may linger */
CUresult cuGraphUpload(void *e, void *s) { note("cuGraphUpload", 0, s); return OK; }
CUresult cuGraphGetNodes(void *g, void **nodes, size_t *n) { *n = ((Graph *)g)->count; return OK; }
CUresult cuGraphLaunch(void *e, void *s) {
    Graph *g = e;
    note("cuGraphLaunch", g->count, s);
    MAY_FAIL("cuGraphLaunch");
    if (!g->refs) return INVALID;
    for (int i = 0; i < g->count; i++) {
        Node *n = &g->nodes[i];
        if (n->what == COPY) memcpy(n->to, n->from, n->size);
        else if (n->what == FILL) fill(n->to, n->value, n->size, (int)n->node);
        else if (on_replay) on_replay(n->node);
    }
    return OK;
}

/* ------------------------------------------------------------------ functions by name */

extern const struct named { const char *name; void *function; } stub_table[]; /* `stub_driver.py` writes it */

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **f, int version, uint64_t flags, int *status) {
    *f = strncmp(name, "cuGetProcAddress", 16) ? 0 : (void *)cuGetProcAddress_v2;
    for (size_t i = 0; !*f && stub_table[i].name; i++)
        if (!strcmp(stub_table[i].name, name)) *f = stub_table[i].function;
    if (status) *status = *f ? 0 : 1;
    return *f ? OK : NOT_FOUND;
}
EXPORT CUresult cuGetProcAddress(const char *name, void **f, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, f, version, flags, 0);
}

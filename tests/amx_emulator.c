/* Intel's matrix unit (AMX) for CPUs without one: what its instructions raise as illegal is done here instead.

   Decodes the VEX forms of ldtilecfg, sttilecfg, tilerelease, tilezero, tileloadd, tileloaddt1, tilestored, tdpbf16ps,
   tdpbssd, tdpbsud, tdpbusd and tdpbuud; any other instruction goes to the handler that was there before. What they
   do is written after the operations in Intel's manual (volume 2), with palette 1: eight tiles of 16 rows of 64 bytes.
   Memory is touched where, and only where, the instruction would touch it. Each thread has tiles of its own.

   What the manual has raise #UD or #GP is noted, with the instruction left out: `amx_fault` tells what it was. */

#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <ucontext.h>

enum { TILES = 8, ROWS = 16, BYTES = 64, KINDS = 12 };
enum { LOAD_CONFIG, STORE_CONFIG, RELEASE, ZERO, LOAD, LOAD_ONCE, STORE, BF16, SS, SU, US, UU };

typedef struct {
    int configured;
    uint8_t rows[TILES];
    uint16_t bytes[TILES];
    uint8_t data[TILES][ROWS][BYTES] __attribute__((aligned(64)));
} Unit;

static __thread Unit unit;
static struct sigaction before;
static int installed;
static char fault_text[200];
static int faults;
static int64_t counts[KINDS];

static const char *const names[KINDS] = {
    "ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileloadd", "tileloaddt1", "tilestored",
    "tdpbf16ps", "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud",
};

static void fault(int kind, const char *what, int a, int b) {
    if (__atomic_fetch_add(&faults, 1, __ATOMIC_SEQ_CST) == 0)
        snprintf(fault_text, sizeof fault_text, "%s: %s (%d, %d)", names[kind], what, a, b);
}

static int is_set_up(int kind, int tile) {
    if (tile >= TILES) { fault(kind, "no such tile", tile, 0); return 0; }
    if (!unit.configured) { fault(kind, "no configuration", tile, 0); return 0; }
    if (!unit.rows[tile] || !unit.bytes[tile]) { fault(kind, "a tile without a shape", tile, 0); return 0; }
    return 1;
}

static void load_config(const uint8_t *from) {
    int used = 0;
    for (int i = 0; i < 64; i++) used |= from[i];
    if (from[0] > 1) { fault(LOAD_CONFIG, "an unknown palette", from[0], 0); return; }
    if (from[0] == 0) { memset(&unit, 0, sizeof unit); return; }
    for (int i = 2; i < 16; i++)
        if (from[i]) { fault(LOAD_CONFIG, "a reserved byte that is not 0", i, from[i]); return; }
    Unit next;
    memset(&next, 0, sizeof next);
    next.configured = used != 0;
    for (int i = 0; i < 16; i++) {
        uint16_t bytes = (uint16_t)(from[16 + 2 * i] | from[17 + 2 * i] << 8);
        uint8_t rows = from[48 + i];
        if (i >= TILES) {
            if (bytes || rows) { fault(LOAD_CONFIG, "a tile past the last", i, rows); return; }
            continue;
        }
        if (bytes > BYTES) { fault(LOAD_CONFIG, "rows that are too long", i, bytes); return; }
        if (rows > ROWS) { fault(LOAD_CONFIG, "too many rows", i, rows); return; }
        if (!bytes != !rows) { fault(LOAD_CONFIG, "rows without bytes, or bytes without rows", i, rows); return; }
        next.bytes[i] = bytes;
        next.rows[i] = rows;
    }
    memcpy(&unit, &next, sizeof unit);
}

static void store_config(uint8_t *to) {
    memset(to, 0, 64);
    if (!unit.configured) return;
    to[0] = 1;
    for (int i = 0; i < TILES; i++) {
        to[16 + 2 * i] = (uint8_t)unit.bytes[i];
        to[48 + i] = unit.rows[i];
    }
}

static void load_tile(int kind, int tile, const uint8_t *base, int64_t step) {
    if (!is_set_up(kind, tile)) return;
    memset(unit.data[tile], 0, sizeof unit.data[tile]);
    for (int i = 0; i < unit.rows[tile]; i++)
        memcpy(unit.data[tile][i], base + i * step, unit.bytes[tile]);
}

static void store_tile(int tile, uint8_t *base, int64_t step) {
    if (!is_set_up(STORE, tile)) return;
    for (int i = 0; i < unit.rows[tile]; i++)
        memcpy(base + i * step, unit.data[tile][i], unit.bytes[tile]);
}

/* Even products and odd ones are added apart, each with one rounding, then both to the sum. */
static __attribute__((noinline, noclone)) void add_products(int c, int a, int b) {
    int lanes = unit.bytes[c] / 4;
    for (int m = 0; m < unit.rows[c]; m++) {
        float even[16] = {0}, odd[16] = {0}, sum[16];
        for (int k = 0; k < unit.bytes[a] / 4; k++) {
            uint32_t pair, bits[2], other[16];
            float x[2], y[2][16];
            memcpy(&pair, unit.data[a][m] + 4 * k, 4);
            bits[0] = pair << 16, bits[1] = pair & 0xFFFF0000u;
            memcpy(x, bits, 8);
            memcpy(other, unit.data[b][k], 64);
            for (int n = 0; n < 16; n++) {
                uint32_t low = other[n] << 16, high = other[n] & 0xFFFF0000u;
                memcpy(&y[0][n], &low, 4), memcpy(&y[1][n], &high, 4);
            }
            for (int n = 0; n < 16; n++) {
                even[n] = __builtin_fmaf(x[0], y[0][n], even[n]);
                odd[n] = __builtin_fmaf(x[1], y[1][n], odd[n]);
            }
        }
        memcpy(sum, unit.data[c][m], 64);
        for (int n = 0; n < lanes; n++) sum[n] = sum[n] + (even[n] + odd[n]);
        memcpy(unit.data[c][m], sum, 64);
    }
}

static void multiply_bf16(int c, int a, int b) {
    unsigned set = _mm_getcsr();
    _mm_setcsr(0x9FC0); /* denormal numbers count as 0, rounding to nearest even, nothing raised */
    add_products(c, a, b);
    _mm_setcsr(set);
}

static void multiply_bytes(int kind, int c, int a, int b) {
    int left_signed = kind == SS || kind == SU, right_signed = kind == SS || kind == US;
    for (int m = 0; m < unit.rows[c]; m++) {
        uint32_t sum[16];
        memcpy(sum, unit.data[c][m], 64);
        for (int k = 0; k < unit.bytes[a] / 4; k++)
            for (int n = 0; n < unit.bytes[c] / 4; n++)
                for (int i = 0; i < 4; i++) {
                    uint8_t x = unit.data[a][m][4 * k + i], y = unit.data[b][k][4 * n + i];
                    int left = left_signed ? (int8_t)x : x, right = right_signed ? (int8_t)y : y;
                    sum[n] += (uint32_t)(left * right);
                }
        memcpy(unit.data[c][m], sum, 64);
    }
}

static void multiply(int kind, int c, int a, int b) {
    if (!is_set_up(kind, c) || !is_set_up(kind, a) || !is_set_up(kind, b)) return;
    if (c == a || c == b || a == b) { fault(kind, "a tile that is named twice", a, b); return; }
    if (unit.rows[c] != unit.rows[a]) { fault(kind, "rows of the sum and of the first", unit.rows[c], unit.rows[a]); return; }
    if (unit.bytes[c] != unit.bytes[b]) { fault(kind, "bytes of the sum and of the second", unit.bytes[c], unit.bytes[b]); return; }
    if (unit.bytes[c] % 4 || unit.bytes[a] % 4) { fault(kind, "bytes that are no lanes", unit.bytes[c], unit.bytes[a]); return; }
    if (unit.bytes[a] / 4 != unit.rows[b]) { fault(kind, "lanes of the first and rows of the second", unit.bytes[a] / 4, unit.rows[b]); return; }
    if (kind == BF16) multiply_bf16(c, a, b);
    else multiply_bytes(kind, c, a, b);
}

static const int registers[16] = {
    REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
    REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15,
};

/* Do the instruction at `at`; how many bytes it has, or 0 if it is none of ours. */
static int run(const uint8_t *at, greg_t *gregs) {
    if (at[0] != 0xC4 || (at[1] & 0x1F) != 2 || (at[2] & 0x84)) return 0; /* 0F38, W0, 128 */
    int pp = at[2] & 3, vvvv = (~at[2] >> 3) & 15, code = at[3], modrm = at[4];
    int mod = modrm >> 6, reg = (modrm >> 3 & 7) | (at[1] & 0x80 ? 0 : 8), rm = modrm & 7;
    int length = 5, kind = -1;
    int64_t step = 0;
    uint8_t *place = NULL;
    if (code == 0x5C && pp == 2 && mod == 3) kind = BF16;
    else if (code == 0x5E && mod == 3) kind = (int[]){UU, US, SU, SS}[pp];
    else if (code == 0x49 && mod == 3) kind = pp == 3 && rm == 0 ? ZERO : pp == 0 && modrm == 0xC0 ? RELEASE : -1;
    else if (code == 0x49 && mod != 3 && (modrm >> 3 & 7) == 0) kind = pp == 0 ? LOAD_CONFIG : pp == 1 ? STORE_CONFIG : -1;
    else if (code == 0x4B && mod != 3 && rm == 4) kind = (int[]){-1, LOAD_ONCE, STORE, LOAD}[pp];
    if (kind < 0) return 0;
    if (mod != 3) {
        int base = rm, high = at[1] & 0x20 ? 0 : 8;
        int64_t address = 0;
        if (rm == 4) {
            int sib = at[length++], index = (sib >> 3 & 7) | (at[1] & 0x40 ? 0 : 8);
            base = sib & 7;
            if (index != 4) step = gregs[registers[index]] * (1 << (sib >> 6));
        }
        int relative = mod == 0 && rm == 5, bare = mod == 0 && rm == 4 && base == 5;
        if (!relative && !bare) address = gregs[registers[base | high]];
        int32_t wide = 0;
        if (mod == 1) wide = (int8_t)at[length++];
        else if (mod == 2 || relative || bare) memcpy(&wide, at + length, 4), length += 4;
        address += wide;
        if (relative) address += (int64_t)(intptr_t)(at + length);
        if (kind == LOAD_CONFIG || kind == STORE_CONFIG) address += step;
        place = (uint8_t *)(intptr_t)address;
    }
    __atomic_fetch_add(&counts[kind], 1, __ATOMIC_RELAXED);
    int source = rm | (at[1] & 0x20 ? 0 : 8);
    switch (kind) {
    case LOAD_CONFIG: load_config(place); break;
    case STORE_CONFIG: store_config(place); break;
    case RELEASE: memset(&unit, 0, sizeof unit); break;
    case ZERO: if (is_set_up(ZERO, reg)) memset(unit.data[reg], 0, sizeof unit.data[reg]); break;
    case LOAD: case LOAD_ONCE: load_tile(kind, reg, place, step); break;
    case STORE: store_tile(reg, place, step); break;
    default: multiply(kind, reg, source, vvvv);
    }
    return length;
}

static void on_illegal(int signal, siginfo_t *info, void *context) {
    greg_t *gregs = ((ucontext_t *)context)->uc_mcontext.gregs;
    int length = run((const uint8_t *)(intptr_t)gregs[REG_RIP], gregs);
    if (length) { gregs[REG_RIP] += length; return; }
    if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(signal, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(signal);
    else sigaction(SIGILL, &before, NULL); /* the instruction comes again, and ends the process */
}

/* Not on the alternate stack: that may be too small, and the instructions come where the stack is sound. */
int amx_install(void) {
    if (installed) return 0;
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_illegal;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    installed = 1;
    return sigaction(SIGILL, &action, &before);
}

/* What was wrong first since the last call, or an empty text. */
const char *amx_fault(void) {
    static char text[sizeof fault_text];
    strcpy(text, faults ? fault_text : "");
    fault_text[0] = 0;
    faults = 0;
    return text;
}

/* How often each instruction ran since the last call. */
void amx_counts(int64_t *to) {
    for (int i = 0; i < KINDS; i++) to[i] = __atomic_exchange_n(&counts[i], 0, __ATOMIC_SEQ_CST);
}

/* Moves KV blocks between paged engine memory and slots, and takes their checksum from the very bytes it moves.
 *
 * Plain C without the CPython API: native.py loads it with ctypes, which lets go of the GIL while it runs. The checksum
 * is defined in checksum.py; what is computed here must be the same number, and the tests hold it to that.
 *
 *     engine memory   run 0 [........]     run 1 [...............]     run 2 [....]          anywhere
 *     slot            [........|...............|....]                                        one piece
 *     checksum rows   [    4096    |    4096    |...0]                                       of the slot's bytes
 *     strips          [........|...|...........||....]                                       cut at both
 *
 * A strip is contiguous on both sides and lies in one row. Strips are worked on four at a time, a line of each in turn,
 * and the next four are prefetched meanwhile: one core that follows a single stream mostly waits for memory (the
 * processor's own prefetcher stops at the end of each page). Each line is loaded once, stored and hashed from the
 * register, so the bytes that were hashed are the bytes that arrive, even if somebody overwrites the source meanwhile.
 *
 * On 64-bit ARM, whose prefetcher follows one stream best, strips are worked on one after the other instead.
 *
 * Stores bypass the cache: a plain store to memory that is not in the cache first reads the line that it is about to
 * overwrite, half as much traffic again for nothing. They need aligned destinations; blocks whose runs or destinations
 * are not multiples of a line take the slower road at the end of this file. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define NEON 1
#endif

#define ROW 4096
#define LANES (ROW / 8)
#define LINE 64
#define GROUP 4    /* strips worked on at a time */
#define WINDOW 128 /* strips planned at a time, a multiple of GROUP */
#define GOLDEN UINT64_C(0x9E3779B97F4A7C15)
#define KEY_SEED UINT64_C(0x6B766B6565700001)

#define INLINE __attribute__((always_inline)) static inline

enum { STORE = 1, HASH = 2 }; /* what to do with the bytes: either or both */

int kvkeep_guarded(void (*work)(const void *), const void *given); /* _guard.c */

struct strip {
    const uint8_t *from;
    uint8_t *to;
    int64_t nbytes;
    int64_t at; /* of its first byte in the block */
};

struct job;

/* What differs between processors. `lines` does a whole job whose runs and destinations are made of whole lines.
 * `group` works on `width` strips of the same length (GROUP or 1), prefetches those that follow, and adds up each
 * strip's lanes in values[]. `stream` copies any bytes past the cache. */
struct kernels {
    void (*lines)(const struct job *job);
    void (*group)(const struct strip *strips, int width, int what, uint64_t *values);
    void (*stream)(uint8_t *to, const uint8_t *from, size_t nbytes);
};

static uint64_t keys[LANES] __attribute__((aligned(LINE)));
static uint64_t padding[LANES + 1]; /* padding[i]: what lanes i, i+1, ... of a row add when they are zero */

INLINE uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

static uint64_t hash_lane(uint64_t lane, uint64_t key) {
    uint64_t a = (uint32_t)((uint32_t)lane + (uint32_t)key);
    uint64_t b = (uint32_t)((uint32_t)(lane >> 32) + (uint32_t)(key >> 32));
    return a * b + a + b;
}

/* ---- any processor ---------------------------------------------------------------------------------------------- */

static uint64_t load_lane(const uint8_t *from) {
    uint64_t lane;
    memcpy(&lane, from, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    lane = __builtin_bswap64(lane);
#endif
    return lane;
}

/* One lane at a time through a register, not memcpy and then a second look: the source is read once. */
static void group_portable(const struct strip *strips, int width, int what, uint64_t *values) {
    for (int s = 0; s < width; s++) {
        const struct strip strip = strips[s];
        const uint64_t *key = keys + strip.at % ROW / 8;
        values[s] = 0;
        for (int64_t at = 0; at < strip.nbytes; at += 8) {
            uint64_t raw;
            memcpy(&raw, strip.from + at, 8);
            if (what & STORE)
                memcpy(strip.to + at, &raw, 8);
            if (what & HASH)
                values[s] += hash_lane(load_lane((const uint8_t *)&raw), key[at / 8]);
        }
    }
}

static void stream_portable(uint8_t *to, const uint8_t *from, size_t nbytes) {
    memcpy(to, from, nbytes);
}

/* ---- x86: 4 or 8 lanes at a time -------------------------------------------------------------------------------- */

#ifdef X86
/* Per lane, t holds A and B after the keys are added: t = A + 2^32 B. Adding up t and B, rather than A and B, saves a
 * mask per lane: sum(A) + sum(B) = sum(t) - 2^32 sum(B) + sum(B). */
static uint64_t joined(uint64_t products, uint64_t ts, uint64_t bs) {
    return products + ts - (bs << 32) + bs;
}

/* The kernel, once per instruction set. `width` and `what` are constants wherever it is called, so each call becomes
 * a loop of its own without branches. Pointers are copied out first: as far as the compiler knows, the stores could
 * change the strips. */
#define GROUP_KERNEL(name, isa, vec, LOAD, STREAM, ADD32, ADD64, SHIFT, MUL, ZERO, SUM)                               \
    __attribute__((target(isa), always_inline)) static inline void name##_as(const struct strip *strips,              \
                                                                             const int width, const int what,         \
                                                                             uint64_t *values) {                      \
        vec products[GROUP], ts[GROUP], bs[GROUP];                                                                    \
        const uint8_t *from[GROUP], *next[GROUP], *key[GROUP];                                                        \
        uint8_t *to[GROUP];                                                                                           \
        const int64_t nbytes = strips[0].nbytes;                                                                      \
        for (int s = 0; s < width; s++) {                                                                             \
            products[s] = ts[s] = bs[s] = ZERO();                                                                     \
            from[s] = strips[s].from, to[s] = strips[s].to, next[s] = strips[width + s].from;                         \
            key[s] = (const uint8_t *)keys + strips[s].at % ROW;                                                      \
        }                                                                                                             \
        for (int64_t at = 0; at < nbytes; at += LINE) {                                                               \
            for (int s = 0; s < width; s++) {                                                                         \
                _mm_prefetch((const char *)next[s] + at, _MM_HINT_T1);                                                \
                for (size_t in = 0; in < LINE; in += sizeof(vec)) {                                                   \
                    vec v = LOAD((const void *)(from[s] + at + in));                                                  \
                    if (what & STORE)                                                                                 \
                        STREAM((void *)(to[s] + at + in), v);                                                         \
                    if (what & HASH) {                                                                                \
                        vec t = ADD32(v, *(const vec *)(key[s] + at + in));                                           \
                        vec b = SHIFT(t, 32);                                                                         \
                        products[s] = ADD64(products[s], MUL(t, b));                                                  \
                        ts[s] = ADD64(ts[s], t);                                                                      \
                        bs[s] = ADD64(bs[s], b);                                                                      \
                    }                                                                                                 \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
        for (int s = 0; s < width && (what & HASH); s++)                                                              \
            values[s] = joined(SUM(products[s]), SUM(ts[s]), SUM(bs[s]));                                             \
    }                                                                                                                 \
    __attribute__((target(isa))) static void name(const struct strip *strips, int width, int what,                    \
                                                  uint64_t *values) {                                                 \
        if (what == STORE)                                                                                            \
            width == GROUP ? name##_as(strips, GROUP, STORE, values) : name##_as(strips, 1, STORE, values);           \
        else if (what == HASH)                                                                                        \
            width == GROUP ? name##_as(strips, GROUP, HASH, values) : name##_as(strips, 1, HASH, values);             \
        else                                                                                                          \
            width == GROUP ? name##_as(strips, GROUP, STORE | HASH, values)                                           \
                           : name##_as(strips, 1, STORE | HASH, values);                                              \
    }

__attribute__((target("avx2"))) static inline uint64_t sum_avx2(__m256i v) {
    uint64_t lanes[4];
    _mm256_storeu_si256((__m256i *)lanes, v);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

GROUP_KERNEL(group_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256, _mm256_add_epi32, _mm256_add_epi64,
             _mm256_srli_epi64, _mm256_mul_epu32, _mm256_setzero_si256, sum_avx2)

GROUP_KERNEL(group_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512, _mm512_add_epi32,
             _mm512_add_epi64, _mm512_srli_epi64, _mm512_mul_epu32, _mm512_setzero_si512,
             (uint64_t)_mm512_reduce_add_epi64)

/* Head and tail, each shorter than a line, go through memcpy. */
__attribute__((target("avx2"))) static void stream_avx2(uint8_t *to, const uint8_t *from, size_t nbytes) {
    size_t at = (size_t)(-(uintptr_t)to & (LINE - 1));
    if (at > nbytes)
        at = nbytes;
    memcpy(to, from, at);
    for (; at + LINE <= nbytes; at += LINE) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(from + at));
        __m256i w = _mm256_loadu_si256((const __m256i *)(from + at + 32));
        _mm256_stream_si256((__m256i *)(to + at), v);
        _mm256_stream_si256((__m256i *)(to + at + 32), w);
    }
    memcpy(to + at, from + at, nbytes - at);
}
#endif

/* ---- 64-bit ARM: 4 lanes at a time ------------------------------------------------------------------------------- */

#ifdef NEON
static uint64_t inverse_keys[LANES] __attribute__((aligned(LINE))); /* every bit of keys[] flipped */

/* The sum of a strip's lanes. With x = ~A = (2^32 - 1) - A and y = ~B, which are 32-bit numbers again, a lane adds
 *
 *     (A + 1)(B + 1) - 1  =  (2^32 - x)(2^32 - y) - 1  =  x y - 2^32 (x + y) - 1      mod 2^64
 *
 * so x + y is needed mod 2^32 only: a plain 32-bit addition, which either vector pipe can do, where the sum of A and B
 * takes a widening one, which only one of them can. x is the inverse key less the word.
 *
 * In assembly, because arithmetic and memory take about as long as each other, and only overlap in full if each line
 * is loaded one round before it is hashed, and if nothing is ever written but whole lines (see lines_neon_as).
 *
 *     v0-v3 a line    v4-v7 its keys    v16-v19 x and y, interleaved    v24, v26 x    v25, v27 y
 *     v20, v21 sums of x y              v22, v23 sums of x and y */
#define HASH_STRIP(STORE_FIRST_HALF, STORE_SECOND_HALF)                                                               \
    __asm__ volatile("movi v20.2d, #0\n\t"                                                                            \
                     "movi v21.2d, #0\n\t"                                                                            \
                     "movi v22.2d, #0\n\t"                                                                            \
                     "movi v23.2d, #0\n\t" LOAD_LINE_NEON("", "", "") "b 2f\n"                                        \
                     "1:\n\t" LOAD_LINE_NEON("uzp1 v24.4s, v16.4s, v17.4s\n\tuzp2 v25.4s, v16.4s, v17.4s\n\t",        \
                                             "uzp1 v26.4s, v18.4s, v19.4s\n\tuzp2 v27.4s, v18.4s, v19.4s\n\t",        \
                                             "umlal v20.2d, v24.2s, v25.2s\n\tadd v22.4s, v22.4s, v16.4s\n\t")        \
                     "umlal2 v21.2d, v24.4s, v25.4s\n\t"                                                              \
                     "add v23.4s, v23.4s, v17.4s\n\t"                                                                 \
                     "umlal v20.2d, v26.2s, v27.2s\n\t"                                                               \
                     "add v22.4s, v22.4s, v18.4s\n\t"                                                                 \
                     "umlal2 v21.2d, v26.4s, v27.4s\n\t"                                                              \
                     "add v23.4s, v23.4s, v19.4s\n"                                                                   \
                     "2:\n\t" STORE_FIRST_HALF "sub v16.4s, v4.4s, v0.4s\n\t"                                        \
                     "sub v17.4s, v5.4s, v1.4s\n\t" STORE_SECOND_HALF "sub v18.4s, v6.4s, v2.4s\n\t"                 \
                     "sub v19.4s, v7.4s, v3.4s\n\t"                                                                   \
                     "prfm pldl1keep, [%[from], #256]\n\t"                                                            \
                     "prfm pldl2keep, [%[next]]\n\t"                                                                  \
                     "add %[next], %[next], #64\n\t"                                                                  \
                     "add %[to], %[to], #64\n\t"                                                                      \
                     "subs %[left], %[left], #64\n\t"                                                                 \
                     "b.ne 1b\n\t"                                                                                    \
                     "uzp1 v24.4s, v16.4s, v17.4s\n\t"                                                                \
                     "uzp2 v25.4s, v16.4s, v17.4s\n\t"                                                                \
                     "uzp1 v26.4s, v18.4s, v19.4s\n\t"                                                                \
                     "uzp2 v27.4s, v18.4s, v19.4s\n\t"                                                                \
                     "umlal v20.2d, v24.2s, v25.2s\n\t"                                                               \
                     "umlal2 v21.2d, v24.4s, v25.4s\n\t"                                                              \
                     "umlal v20.2d, v26.2s, v27.2s\n\t"                                                               \
                     "umlal2 v21.2d, v26.4s, v27.4s\n\t"                                                              \
                     "add v16.4s, v16.4s, v17.4s\n\t"                                                                 \
                     "add v18.4s, v18.4s, v19.4s\n\t"                                                                 \
                     "add v22.4s, v22.4s, v23.4s\n\t"                                                                 \
                     "add v16.4s, v16.4s, v18.4s\n\t"                                                                 \
                     "add v22.4s, v22.4s, v16.4s\n\t"                                                                 \
                     "add v20.2d, v20.2d, v21.2d\n\t"                                                                 \
                     "addv s22, v22.4s\n\t"                                                                           \
                     "addp d20, v20.2d\n\t"                                                                           \
                     "fmov %[products], d20\n\t"                                                                      \
                     "fmov %w[words], s22"                                                                            \
                     : [products] "=&r"(products), [words] "=&r"(words), [from] "+r"(from), [to] "+r"(to),            \
                       [key] "+r"(key), [next] "+r"(next), [left] "+r"(left)                                          \
                     :                                                                                                \
                     : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v16", "v17", "v18", "v19",    \
                       "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27")

/* The next line and its keys, with other work in between. */
#define LOAD_LINE_NEON(FIRST, SECOND, THIRD)                                                                          \
    "ldp q0, q1, [%[from]]\n\t" FIRST "ldp q2, q3, [%[from], #32]\n\t" SECOND "ldp q4, q5, [%[key]]\n\t" THIRD       \
    "ldp q6, q7, [%[key], #32]\n\t"                                                                                   \
    "add %[from], %[from], #64\n\t"                                                                                   \
    "add %[key], %[key], #64\n\t"

/* Copies a strip. In assembly for the same reason: a compiler may take other stores, or a call, in between. */
INLINE void store_strip_neon(uint8_t *to, const uint8_t *from, const uint8_t *next, int64_t left) {
    __asm__ volatile("1:\n\t"
                     "ldp q0, q1, [%[from]]\n\t"
                     "ldp q2, q3, [%[from], #32]\n\t"
                     "add %[from], %[from], #64\n\t"
                     "stp q0, q1, [%[to]]\n\t"
                     "stp q2, q3, [%[to], #32]\n\t"
                     "prfm pldl1keep, [%[from], #256]\n\t"
                     "prfm pldl2keep, [%[next]]\n\t"
                     "add %[to], %[to], #64\n\t"
                     "add %[next], %[next], #64\n\t"
                     "subs %[left], %[left], #64\n\t"
                     "b.ne 1b"
                     : [from] "+r"(from), [to] "+r"(to), [next] "+r"(next), [left] "+r"(left)
                     :
                     : "memory", "cc", "v0", "v1", "v2", "v3");
}

/* Works on a strip and returns the sum of its lanes. Prefetches into the first-level cache what comes four lines later,
 * and into the second-level cache as many bytes from `next` on: the processor's own prefetcher neither knows where the
 * next strip begins nor notices a short one before its end. */
INLINE uint64_t strip_neon(const struct strip *strip, const uint8_t *next, const int what) {
    const uint8_t *from = strip->from, *key = (const uint8_t *)inverse_keys + (size_t)strip->at % ROW;
    uint8_t *to = strip->to;
    int64_t left = strip->nbytes;
    uint64_t products, words;
    if (!(what & HASH)) {
        store_strip_neon(to, from, next, left);
        return 0;
    }
    if (what & STORE)
        HASH_STRIP("stp q0, q1, [%[to]]\n\t", "stp q2, q3, [%[to], #32]\n\t");
    else
        HASH_STRIP("", "");
    return products - (words << 32) - (uint64_t)strip->nbytes / 8;
}

static void group_neon(const struct strip *strips, int width, int what, uint64_t *values) {
    for (int s = 0; s < width; s++)
        values[s] = strip_neon(strips + s, strips[s].from, what);
}
#endif

static struct kernels kernel;

/* ---- the work of one call --------------------------------------------------------------------------------------- */

/* Run r of block b starts at base[r] + b * stride[r] and has length[r] > 0 bytes. Block blocks[i] goes to slots[i], or
 * back when to_runs, for i < count; sums[i] becomes the checksum when what has HASH. */
struct job {
    int64_t count, run_count, nbytes; /* nbytes: of one block */
    const int64_t *blocks;
    const uint64_t *slots, *base;
    const int64_t *stride, *length;
    uint64_t *sums;
    int what, to_runs;
};

/* A place in the work: byte `at` of block number i, which is byte `offset` of run `run`. */
struct place {
    int64_t i, at, run, offset;
};

/* The strip from here to the end of the run or row, whichever comes first; moves the place behind it. */
INLINE struct strip next_strip(const struct job *job, struct place *p) {
    const int64_t in_run = job->length[p->run] - p->offset, in_row = ROW - p->at % ROW;
    const int64_t block = job->blocks == NULL ? 0 : job->blocks[p->i];
    uint8_t *run = (uint8_t *)(uintptr_t)(job->base[p->run] + (uint64_t)(block * job->stride[p->run])) + p->offset;
    uint8_t *slot = (uint8_t *)(uintptr_t)job->slots[p->i] + p->at;
    struct strip strip = {run, slot, in_run < in_row ? in_run : in_row, p->at};
    if (job->to_runs)
        strip.from = slot, strip.to = run;
    p->at += strip.nbytes;
    p->offset += strip.nbytes;
    if (p->offset == job->length[p->run])
        p->run++, p->offset = 0;
    if (p->at == job->nbytes)
        *p = (struct place){p->i + 1, 0, 0, 0};
    return strip;
}

/* The checksum of the block being worked on, as far as it got; `row` is the value of the row, likewise. */
struct tally {
    int64_t i;
    uint64_t row, sum;
};

/* What the zeros add that fill up a block's last row, if the strip is the last of its block. */
INLINE uint64_t padding_after(const struct job *job, const struct strip *strip) {
    const int64_t end = strip->at + strip->nbytes;
    return end == job->nbytes && end % ROW != 0 ? padding[end % ROW / 8] : 0;
}

/* Takes in the value of the bytes up to `end`. */
INLINE void tally_add(const struct job *job, struct tally *tally, uint64_t value, int64_t end) {
    tally->row += value;
    if (end % ROW != 0 && end < job->nbytes)
        return;
    tally->sum += mix64(tally->row + (uint64_t)((end + ROW - 1) / ROW) * GOLDEN);
    tally->row = 0;
    if (end == job->nbytes) {
        job->sums[tally->i++] = mix64(tally->sum + (uint64_t)job->nbytes);
        tally->sum = 0;
    }
}

/* ---- the fast road: runs in whole lines, destinations aligned ---------------------------------------------------- */

static int same_length(const struct strip *strips) {
    for (int s = 1; s < GROUP; s++)
        if (strips[s].nbytes != strips[0].nbytes)
            return 0;
    return 1;
}

static void work_on_lines(const struct job *job) {
    struct strip strips[WINDOW + GROUP]; /* the last GROUP only to be prefetched */
    struct place place = {0, 0, 0, 0};
    struct tally tally = {0, 0, 0};
    while (place.i < job->count) {
        int n = 0;
        while (n < WINDOW && place.i < job->count)
            strips[n++] = next_strip(job, &place);
        for (int s = 0; s < GROUP; s++)
            strips[n + s] = strips[n - 1];
        for (int s = 0, width; s < n; s += width) {
            uint64_t values[GROUP];
            width = s + GROUP <= n && same_length(strips + s) ? GROUP : 1;
            kernel.group(strips + s, width, job->what, values);
            for (int v = 0; v < width && (job->what & HASH); v++) {
                const struct strip *strip = strips + s + v;
                tally_add(job, &tally, values[v] + padding_after(job, strip), strip->at + strip->nbytes);
            }
        }
    }
}

/* ---- the fast road on 64-bit ARM --------------------------------------------------------------------------------- */

#ifdef NEON
#define NEON_WINDOW 128 /* strips planned at a time */

/* On a Neoverse N1 a copy that stores anything else between two strips, such as a strip's value or the plan of the next
 * one, ran at 0.58 to 0.73 of memcpy, and this one, which does not, at 0.92. Probably the processor stops reading the
 * lines that it overwrites only while it sees whole lines being stored, and any other store makes it start over. So
 * strips are planned many at a time, and all that changes from strip to strip is kept in registers. */
INLINE void lines_neon_as(const struct job *job, const int what) {
    struct strip strips[NEON_WINDOW + 1];
    /* Slots are long: the processor follows them by itself, and prefetching takes 5 % from a copy without checksums. */
    const int ahead = job->to_runs && what == STORE ? 0 : 1;
    struct place place = {0, 0, 0, 0};
    struct tally tally = {0, 0, 0};
    while (place.i < job->count) {
        int n = 0;
        while (n < NEON_WINDOW && place.i < job->count)
            strips[n++] = next_strip(job, &place);
        strips[n] = strips[n - 1]; /* only to be prefetched */
        for (int s = 0; s < n; s++) {
            const uint64_t value = strip_neon(strips + s, strips[s + ahead].from, what);
            if (what & HASH)
                tally_add(job, &tally, value + padding_after(job, strips + s), strips[s].at + strips[s].nbytes);
        }
    }
}

static void lines_neon(const struct job *job) {
    if (job->what == STORE)
        lines_neon_as(job, STORE);
    else if (job->what == HASH)
        lines_neon_as(job, HASH);
    else
        lines_neon_as(job, STORE | HASH);
}
#endif

static int fits_lines(const struct job *job) {
    uint64_t bits = 0;
    for (int64_t r = 0; r < job->run_count; r++)
        bits |= (uint64_t)job->length[r] | (job->to_runs ? job->base[r] | (uint64_t)job->stride[r] : 0);
    for (int64_t i = 0; i < job->count && !job->to_runs; i++)
        bits |= job->slots[i];
    return bits % LINE == 0;
}

/* ---- the slow road: anything ------------------------------------------------------------------------------------- */

/* Row by row through a buffer that stays in the first-level cache: filled from the source, hashed, delivered. */
static void work_on_bytes(const struct job *job) {
    uint8_t row[ROW] __attribute__((aligned(LINE)));
    const struct strip whole[2] = {{row, NULL, ROW, 0}, {row, NULL, ROW, 0}};
    struct place place = {0, 0, 0, 0};
    struct tally tally = {0, 0, 0};
    while (place.i < job->count) {
        const struct place start = place;
        const int64_t left = job->nbytes - start.at, n = left < ROW ? left : ROW;
        for (int64_t filled = 0; filled < n;) {
            struct strip strip = next_strip(job, &place);
            memcpy(row + filled, strip.from, (size_t)strip.nbytes);
            filled += strip.nbytes;
        }
        if (job->what & HASH) {
            uint64_t value;
            memset(row + n, 0, (size_t)(ROW - n));
            kernel.group(whole, 1, HASH, &value);
            tally_add(job, &tally, value, start.at + n);
        }
        place = start;
        for (int64_t sent = 0; sent < n;) {
            struct strip strip = next_strip(job, &place);
            if (job->what & STORE)
                kernel.stream(strip.to, row + sent, (size_t)strip.nbytes);
            sent += strip.nbytes;
        }
    }
}

static void work(const void *given) {
    const struct job *job = given;
    if (fits_lines(job))
        kernel.lines(job);
    else
        work_on_bytes(job);
}

/* Not 0: memory that the job names is not there (any more), and what it has done is of no use. */
static int guarded(const struct job *job) {
    const int failed = kvkeep_guarded(work, job);
#ifdef X86
    _mm_sfence(); /* streamed stores keep no order with others: without it another core could see "done" first */
#endif
    return failed;
}

/* ---- which processor this is ------------------------------------------------------------------------------------- */

/* Takes the best kernels up to `level` (0: any processor; x86: 1 AVX2, 2 AVX-512; 64-bit ARM: 3 NEON); returns the level
 * found. Not for while copies run: tests go through the levels with it. */
int kvkeep_use(int level) {
    kernel = (struct kernels){work_on_lines, group_portable, stream_portable};
#if defined(X86)
    __builtin_cpu_init();
    if (level < 1 || !__builtin_cpu_supports("avx2"))
        return 0;
    kernel = (struct kernels){work_on_lines, group_avx2, stream_avx2};
    if (level < 2 || !__builtin_cpu_supports("avx512f"))
        return 1;
    kernel.group = group_avx512;
    return 2;
#elif defined(NEON)
    if (level < 3)
        return 0;
    kernel = (struct kernels){lines_neon, group_neon, stream_portable};
    return 3;
#else
    (void)level;
    return 0;
#endif
}

__attribute__((constructor)) static void start(void) {
    uint64_t state = KEY_SEED;
    for (int i = 0; i < LANES; i++)
        keys[i] = mix64(state += GOLDEN);
    for (int i = LANES - 1; i >= 0; i--)
        padding[i] = padding[i + 1] + hash_lane(0, keys[i]);
#ifdef NEON
    for (int i = 0; i < LANES; i++)
        inverse_keys[i] = ~keys[i];
#endif
    kvkeep_use(3);
}

/* ---- what native.py calls ---------------------------------------------------------------------------------------- */

/* Copies blocks[i] of the runs into slots[i] (or back, when to_runs), for i < count; sums[i] becomes the checksum of
 * the bytes copied, unless sums is NULL. Block numbers, addresses and lengths (> 0) are the caller's to check. Not 0 if
 * the memory behind some address is gone, as with a file that was mapped and is shorter now: then nothing can be said of
 * what was copied. */
int kvkeep_move(int64_t count, const int64_t *blocks, const uint64_t *slots, int64_t run_count, const uint64_t *base,
                const int64_t *stride, const int64_t *length, uint64_t *sums, int to_runs) {
    struct job job = {count, run_count, 0, blocks, slots, base, stride, length, sums, STORE, to_runs};
    for (int64_t r = 0; r < run_count; r++)
        job.nbytes += length[r];
    if (sums != NULL)
        job.what |= HASH;
    return guarded(&job);
}

/* sums[i] becomes the checksum of the `nbytes` > 0 bytes at addresses[i], for i < count. Not 0 as above. */
int kvkeep_checksum(int64_t count, const uint64_t *addresses, int64_t nbytes, uint64_t *sums) {
    const uint64_t nowhere = 0;
    const int64_t still = 0;
    const struct job job = {count, 1, nbytes, NULL, addresses, &nowhere, &still, &nbytes, sums, HASH, 1};
    return guarded(&job);
}

struct word {
    const volatile uint32_t *from;
    uint32_t *to;
};

static void read_word(const void *given) {
    const struct word *word = given;
    *word->to = *word->from;
}

/* The word at that address, or -1 if its memory is gone. Callers keep the GIL: it takes less time than to get it back. */
int64_t kvkeep_peek(uint64_t address) {
    uint32_t value = 0;
    const struct word word = {(const volatile uint32_t *)(uintptr_t)address, &value};
    return kvkeep_guarded(read_word, &word) ? -1 : (int64_t)value;
}

/* A chain of block keys (keys.py): each is BLAKE2b, as in RFC 7693, of the key before it and a block's tokens, with 16
 * bytes of output and "kvkeep.block" for its personalisation. In Python a key takes five calls, here it takes one turn
 * of a loop, and nobody waits for the interpreter meanwhile. tests/kv/test_keys.py holds it to hashlib's results. */
#include <stdint.h>
#include <string.h>

#define EXPORTED __attribute__((visibility("default")))
#define KEY 16
#define PART 128 /* bytes that one compression takes */

static const uint64_t start[8] = {
    UINT64_C(0x6a09e667f3bcc908), UINT64_C(0xbb67ae8584caa73b), UINT64_C(0x3c6ef372fe94f82b),
    UINT64_C(0xa54ff53a5f1d36f1), UINT64_C(0x510e527fade682d1), UINT64_C(0x9b05688c2b3e6c1f),
    UINT64_C(0x1f83d9abfb41bd6b), UINT64_C(0x5be0cd19137e2179),
};

static const uint8_t order[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

/* Little-endian everywhere. A copy, not a loop over bytes: GCC 12 makes a slow vector of that, three times the work of
 * the hash itself. */
static inline uint64_t little(uint64_t value) {
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

static inline uint64_t word(const uint8_t *from) {
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return little(value);
}

static inline void put(uint8_t *to, uint64_t value) {
    value = little(value);
    memcpy(to, &value, sizeof value);
}

static inline uint64_t rotated(uint64_t value, int by) { return value >> by | value << (64 - by); }

#define MIX(a, b, c, d, x, y)                                                                                          \
    do {                                                                                                               \
        v[a] += v[b] + (x);                                                                                            \
        v[d] = rotated(v[d] ^ v[a], 32);                                                                               \
        v[c] += v[d];                                                                                                  \
        v[b] = rotated(v[b] ^ v[c], 24);                                                                               \
        v[a] += v[b] + (y);                                                                                            \
        v[d] = rotated(v[d] ^ v[a], 16);                                                                               \
        v[c] += v[d];                                                                                                  \
        v[b] = rotated(v[b] ^ v[c], 63);                                                                               \
    } while (0)

/* `taken` bytes of the message have come by the end of this part. */
static void compress(uint64_t *state, const uint8_t *part, uint64_t taken, int is_last) {
    uint64_t m[16], v[16];
    for (int at = 0; at < 16; at++) m[at] = word(part + 8 * at);
    memcpy(v, state, 64);
    memcpy(v + 8, start, 64);
    v[12] ^= taken;
    if (is_last) v[14] = ~v[14];
#pragma GCC unroll 12
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = order[round];
        MIX(0, 4, 8, 12, m[s[0]], m[s[1]]);
        MIX(1, 5, 9, 13, m[s[2]], m[s[3]]);
        MIX(2, 6, 10, 14, m[s[4]], m[s[5]]);
        MIX(3, 7, 11, 15, m[s[6]], m[s[7]]);
        MIX(0, 5, 10, 15, m[s[8]], m[s[9]]);
        MIX(1, 6, 11, 12, m[s[10]], m[s[11]]);
        MIX(2, 7, 8, 13, m[s[12]], m[s[13]]);
        MIX(3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int at = 0; at < 8; at++) state[at] ^= v[at] ^ v[at + 8];
}

/* The keys of `count` blocks of `width` bytes, one after the other, go to `keys`; the first follows `parent`. */
EXPORTED void kvkeep_chain(const uint8_t *parent, const uint8_t *blocks, int64_t width, int64_t count, uint8_t *keys) {
    uint64_t fresh[8];
    memcpy(fresh, start, sizeof fresh);
    fresh[0] ^= UINT64_C(0x01010000) ^ KEY;
    fresh[6] ^= word((const uint8_t *)"kvkeep.b");
    fresh[7] ^= word((const uint8_t *)"lock\0\0\0\0");
    for (int64_t at = 0; at < count; at++, blocks += width, parent = keys, keys += KEY) {
        uint64_t state[8];
        uint8_t part[PART];
        int64_t left = width, room = PART - KEY;
        const uint8_t *from = blocks;
        memcpy(state, fresh, sizeof state);
        memcpy(part, parent, KEY);
        for (; left > room; from += room, left -= room, room = PART) {
            memcpy(part + PART - room, from, (size_t)room);
            compress(state, part, (uint64_t)(KEY + from - blocks + room), 0);
        }
        memset(part + PART - room, 0, (size_t)room);
        memcpy(part + PART - room, from, (size_t)left);
        compress(state, part, (uint64_t)(KEY + width), 1);
        put(keys, state[0]);
        put(keys + 8, state[1]);
    }
}

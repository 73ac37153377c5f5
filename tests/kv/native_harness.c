/* Runs the kernel without Python, so that an emulator can run it for another processor (test_native_foreign.py).
 *
 * For each instruction set that the processor has, prints "<level> <name of the case> <checksum>" for bytes that the
 * test makes in the same way, and fails if a copy differs from a plain one. */
#include "_guard.c"
#include "_native.c"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BLOCKS = 5, MAX_RUNS = 4, LONGEST = 40960 };

static const int64_t sizes[] = {1, 7, 8, 63, 64, 65, 2048, 4032, 4095, 4096, 4097, 4160, 8192, 20480, 33333};
static const int64_t layouts[][MAX_RUNS] = {
    {64, 4032, 192, 9216}, {2048, 2048, 2048, 2048}, {8192, 8192, 8192, 8192}, {1, 4095, 61, 4097}, {20480, 64, 64, 64},
};
static uint8_t source[BLOCKS * LONGEST + LINE] __attribute__((aligned(LINE)));
static uint8_t slots[BLOCKS * LONGEST + LINE] __attribute__((aligned(LINE)));
static uint8_t back[BLOCKS * LONGEST + LINE] __attribute__((aligned(LINE)));

static void fail(const char *what, int level, int layout) {
    fprintf(stderr, "level %d, layout %d: %s\n", level, layout, what);
    exit(1);
}

/* Block b lies at b * LONGEST in `source`, and its runs one after the other, as they do in slot b. */
static void copy_and_compare(int level, int layout, int shift, int checked) {
    uint64_t base[MAX_RUNS], base_back[MAX_RUNS], at[BLOCKS], sums[BLOCKS], sums_back[BLOCKS];
    int64_t stride[MAX_RUNS], blocks[BLOCKS] = {3, 0, 4, 1, 2}, nbytes = 0;
    for (int r = 0; r < MAX_RUNS; r++) {
        base[r] = (uint64_t)(uintptr_t)(source + nbytes);
        base_back[r] = (uint64_t)(uintptr_t)(back + nbytes);
        stride[r] = LONGEST;
        nbytes += layouts[layout][r];
    }
    for (int b = 0; b < BLOCKS; b++)
        at[b] = (uint64_t)(uintptr_t)(slots + blocks[b] * LONGEST + shift);
    memset(slots, 0xEE, sizeof slots);
    memset(back, 0xEE, sizeof back);
    kvkeep_move(BLOCKS, blocks, at, MAX_RUNS, base, stride, layouts[layout], checked ? sums : NULL, 0);
    kvkeep_move(BLOCKS, blocks, at, MAX_RUNS, base_back, stride, layouts[layout], checked ? sums_back : NULL, 1);
    for (int b = 0; b < BLOCKS; b++) {
        const int64_t block = blocks[b], start = block * LONGEST;
        if (memcmp(slots + start + shift, source + start, (size_t)nbytes) != 0)
            fail("gather copied other bytes", level, layout);
        if (memcmp(back + start, source + start, (size_t)nbytes) != 0)
            fail("scatter copied other bytes", level, layout);
        if (slots[start + shift + nbytes] != 0xEE || back[start + nbytes] != 0xEE)
            fail("a byte after the block was written", level, layout);
        if (checked && sums[b] != sums_back[b])
            fail("gather and scatter have different checksums", level, layout);
        if (checked)
            printf("%d layout%d.%d.%" PRId64 " %016" PRIx64 "\n", level, layout, shift, block, sums[b]);
    }
}

/* Memory behind a slot goes away: each call says so, none ends the process, and the next one works. */
static void cut_off(int level, int layout, int to_runs, int checked) {
    FILE *const file = tmpfile();
    const int64_t blocks[2] = {1, 2};
    uint64_t base[MAX_RUNS], at[2], sums[2];
    int64_t stride[MAX_RUNS], nbytes = 0;
    for (int r = 0; r < MAX_RUNS; r++) {
        base[r] = (uint64_t)(uintptr_t)((to_runs ? back : source) + nbytes);
        stride[r] = LONGEST;
        nbytes += layouts[layout][r];
    }
    if (file == NULL || ftruncate(fileno(file), 2 * LONGEST) != 0)
        fail("no file", level, layout);
    uint8_t *const map = mmap(NULL, 2 * LONGEST, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    if (map == MAP_FAILED)
        fail("no memory", level, layout);
    for (int b = 0; b < 2; b++)
        at[b] = (uint64_t)(uintptr_t)(map + b * LONGEST);
    for (int round = 0; round < 2; round++) {
        if (ftruncate(fileno(file), 2 * LONGEST) != 0)
            fail("no file", level, layout);
        if (kvkeep_move(2, blocks, at, MAX_RUNS, base, stride, layouts[layout], checked ? sums : NULL, to_runs) != 0)
            fail("a fault where there was none", level, layout);
        if (ftruncate(fileno(file), LONGEST) != 0)
            fail("no file", level, layout);
        if (kvkeep_move(2, blocks, at, MAX_RUNS, base, stride, layouts[layout], checked ? sums : NULL, to_runs) == 0)
            fail("a fault that nobody was told of", level, layout);
        if (kvkeep_checksum(2, at, nbytes, sums) == 0 || kvkeep_checksum(1, at, nbytes, sums) != 0)
            fail("a fault in a checksum that nobody was told of", level, layout);
    }
    munmap(map, 2 * LONGEST);
    fclose(file);
}

int main(void) {
    for (size_t i = 0; i < sizeof source / 8; i++) {
        const uint64_t lane = mix64(i + 1);
        memcpy(source + 8 * i, &lane, 8);
    }
    for (int level = 0; level <= 3; level++) {
        if (kvkeep_use(level) != level)
            continue;
        for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
            for (uint64_t shift = 0; shift < 2; shift++) {
                const uint64_t address = (uint64_t)(uintptr_t)source + shift;
                uint64_t sum;
                kvkeep_checksum(1, &address, sizes[s], &sum);
                printf("%d bytes%" PRId64 ".%" PRIu64 " %016" PRIx64 "\n", level, sizes[s], shift, sum);
            }
        for (int layout = 0; layout < (int)(sizeof layouts / sizeof *layouts); layout++)
            for (int shift = 0; shift < 2; shift++)
                for (int checked = 0; checked < 2; checked++) {
                    copy_and_compare(level, layout, shift, checked);
                    cut_off(level, layout, shift, checked);
                }
    }
    return 0;
}

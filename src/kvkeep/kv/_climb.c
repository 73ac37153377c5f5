/* The way from a block up to the root of its chain, over the column of parents (kvkeep/store/tree.py). In Python each
 * step is a fifth of a microsecond, and a prompt has thousands. */
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

/* `row`, its parent and so on, at most `count` of them, go to the end of `rows`, the last one first. How many there are:
 * a parent that is no row of the `parents_count` ends the way, whoever wrote it. */
EXPORTED int64_t kvkeep_climb(const int32_t *parents, int64_t parents_count, int64_t row, int64_t count, int64_t *rows) {
    int64_t found = 0;
    for (; found < count && row >= 0 && row < parents_count; row = parents[row]) rows[count - ++found] = row;
    return found;
}

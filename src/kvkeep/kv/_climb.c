/* The way from a block up to the root of its chain, over the column of parents (kvkeep/store/tree.py). In Python each
 * step is a fifth of a microsecond, and a prompt has thousands. A parent that is no row of the `count` there are ends
 * the way, whoever wrote it. */
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

/* `row`, its parent and so on, at most `most` of them, go to the end of `rows`, the last one first. How many there are. */
EXPORTED int64_t kvkeep_climb(const int32_t *parents, int64_t count, int64_t row, int64_t most, int64_t *rows) {
    int64_t found = 0;
    for (; found < most && row >= 0 && row < count; row = parents[row]) rows[most - ++found] = row;
    return found;
}

/* One more lease or write on each of `rows`. `held` counts those of a row and its children that are held. How many rows
 * are held now and were not. */
EXPORTED int64_t kvkeep_hold(const int32_t *parents, int32_t *held, int64_t count, const int64_t *rows, int64_t n) {
    int64_t newly = 0;
    for (int64_t i = 0; i < n; i++)
        for (int64_t row = rows[i]; row >= 0 && row < count && held[row]++ == 0; row = parents[row]) newly++;
    return newly;
}

/* One lease or write less on each of `rows`. How many rows were held and are not now. */
EXPORTED int64_t kvkeep_let_go(const int32_t *parents, int32_t *held, int64_t count, const int64_t *rows, int64_t n) {
    int64_t gone = 0;
    for (int64_t i = 0; i < n; i++)
        for (int64_t row = rows[i]; row >= 0 && row < count && --held[row] == 0; row = parents[row]) gone++;
    return gone;
}

/* How many rows a lease that ends in `row` would hold that are not held. */
EXPORTED int64_t kvkeep_not_held(const int32_t *parents, const int32_t *held, int64_t count, int64_t row) {
    int64_t found = 0;
    for (; row >= 0 && row < count && held[row] == 0; row = parents[row]) found++;
    return found;
}

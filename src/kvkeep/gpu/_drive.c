/* Gives a list of work to the CUDA driver in one go. batch.py makes the list and calls this with ctypes, which lets go of
 * the GIL for all of it: call by call, an engine's thread and ours would hand the interpreter to and fro for every copy.
 *
 * No CUDA header is needed: the driver's functions come as addresses, and a command is WORDS numbers of 64 bits, the
 * first of which says what is to be done with the others.
 *
 * A list that reads blocks passes a gate before each buffer of them, and says when that buffer's reads are in the GPU's queue.
 * Whoever needs a block back closes the gate, and knows then what is read and what is not: nothing is half done. */
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

#define WORDS 14
#define EXPORTED __attribute__((visibility("default")))

enum { RECORD, AFTER, TO_HOST, TO_DEVICE, TO_HOST_2D, TO_DEVICE_2D, ZERO, LAUNCH, WAIT, PASS, READ };
enum { UNKNOWN = -1, HALTED = -2 }; /* no answers of the driver */
enum { NOT_READY = 600 };           /* CUDA_ERROR_NOT_READY */

/* CUDA_MEMCPY2D */
struct copy2d {
    uint64_t src_x, src_y;
    uint32_t src_type, src_unused;
    uint64_t src_host, src_device, src_array, src_pitch;
    uint64_t dst_x, dst_y;
    uint32_t dst_type, dst_unused;
    uint64_t dst_host, dst_device, dst_array, dst_pitch;
    uint64_t width, height;
};

/* CU_MEMORYTYPE_* */
enum { HOST = 1, DEVICE = 2 };

typedef int (*one)(uint64_t);
typedef int (*two)(uint64_t, uint64_t);
typedef int (*after)(uint64_t, uint64_t, unsigned);
typedef int (*copy)(uint64_t, uint64_t, uint64_t, uint64_t);
typedef int (*copy_2d)(const struct copy2d *, uint64_t);
typedef int (*zero)(uint64_t, unsigned char, uint64_t, uint64_t);
typedef int (*launch)(uint64_t, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, uint64_t, void **,
                      void **);

/* In the order of the commands. */
struct driver {
    two record;
    after after;
    copy to_host, to_device;
    copy_2d copy_2d;
    zero zero;
    launch launch;
    one wait, query;
};

static int copy_rows(const struct driver *cuda, const uint64_t *w, int to_host) {
    struct copy2d rows = {0};
    rows.width = w[5];
    rows.height = w[6];
    if (to_host) { /* host, its pitch, device, its pitch */
        rows.dst_type = HOST, rows.dst_host = w[1], rows.dst_pitch = w[2];
        rows.src_type = DEVICE, rows.src_device = w[3], rows.src_pitch = w[4];
    } else {
        rows.src_type = HOST, rows.src_host = w[1], rows.src_pitch = w[2];
        rows.dst_type = DEVICE, rows.dst_device = w[3], rows.dst_pitch = w[4];
    }
    return cuda->copy_2d(&rows, w[7]);
}

static int start(const struct driver *cuda, uint64_t *w) {
    uint64_t none = 0; /* Triton's kernels take two more pointers that ours do not use */
    void *arguments[] = {&w[7], &w[8], &w[9], &w[10], &w[11], &w[12], &none, &none};
    return cuda->launch(w[1], (unsigned)w[2], (unsigned)w[3], 1, (unsigned)w[4], 1, 1, (unsigned)w[5], w[6], arguments, 0);
}

static void rest(void) {
    for (int times = 0; times < 32; times++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb");
#endif
    }
}

/* A thread that sleeps meanwhile goes on slowly: its core has rested, too. */
static int wait_awake(const struct driver *cuda, uint64_t event) {
    int result;
    while ((result = cuda->query(event)) == NOT_READY) rest();
    return result;
}

/* How many buffers have passed, with CLOSED from when no more may; and how many of them are read. */
struct gate {
    _Atomic int64_t passed, read;
};

#define CLOSED (INT64_C(1) << 62)

static int pass(struct gate *gate, int64_t buffer) {
    int64_t before = atomic_load(&gate->passed);
    do {
        if (before & CLOSED) return HALTED;
    } while (!atomic_compare_exchange_weak(&gate->passed, &before, buffer));
    return 0;
}

/* Closes it. Returns how many have passed, when all of these are read: some calls to the driver later at most. If the
 * driver refuses one of those calls it is one less: what was not read did not pass. */
EXPORTED int64_t kvkeep_halt(struct gate *gate) {
    int64_t passed = atomic_fetch_or(&gate->passed, CLOSED) & ~CLOSED;
    while (atomic_load(&gate->read) < passed) sched_yield();
    return atomic_load(&gate->passed) & ~CLOSED;
}

static void fail(struct gate *gate) {
    atomic_store(&gate->passed, atomic_load(&gate->read) | CLOSED);
    atomic_store(&gate->read, CLOSED); /* nobody waits for what will not come */
}

/* The driver's answer to the first command that failed, and in `failed` which one; 0 if all went well. */
EXPORTED int kvkeep_drive(const struct driver *cuda, uint64_t *commands, int64_t count, int64_t *failed) {
    struct gate *gate = 0;
    for (int64_t at = 0; at < count; at++) {
        uint64_t *w = commands + at * WORDS;
        int result = UNKNOWN;
        switch (w[0]) {
        case RECORD: result = cuda->record(w[1], w[2]); break;
        case AFTER: result = cuda->after(w[1], w[2], 0); break;
        case TO_HOST: result = cuda->to_host(w[1], w[2], w[3], w[4]); break;
        case TO_DEVICE: result = cuda->to_device(w[1], w[2], w[3], w[4]); break;
        case TO_HOST_2D: result = copy_rows(cuda, w, 1); break;
        case TO_DEVICE_2D: result = copy_rows(cuda, w, 0); break;
        case ZERO: result = cuda->zero(w[1], 0, w[2], w[3]); break;
        case LAUNCH: result = start(cuda, w); break;
        case WAIT: result = w[2] ? wait_awake(cuda, w[1]) : cuda->wait(w[1]); break;
        case PASS:
            gate = (struct gate *)w[1];
            result = pass(gate, (int64_t)w[2]);
            break;
        case READ:
            atomic_store(&gate->read, (int64_t)w[2]);
            result = 0;
            break;
        }
        if (result) {
            if (gate) fail(gate);
            *failed = at;
            return result;
        }
    }
    return 0;
}

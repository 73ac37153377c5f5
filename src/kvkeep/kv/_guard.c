/* Runs work on memory that somebody may cut off: a fault in it is an answer, not the end of the process.
 *
 * A mapped file that is made shorter has no memory behind its last pages any more. Whoever touches those gets SIGBUS, and
 * a process that has no handler for it dies. So there is one, for all threads:
 *
 *     a fault in guarded work                        the work ends there, and its caller is told
 *     a fault anywhere else, or a signal that        whatever was installed before us has it, as if we were not here
 *     a process has sent
 *
 * Others install handlers as well, before us or after (Python's faulthandler, which vLLM enables). Before each work it is
 * seen to that ours is on top; what is found in its place is remembered, and called for what is not ours. A handler that was
 * installed after us may call what it found itself: us again. So each handler that is called from here hands on to the
 * one before it.
 *
 * Nothing helps where the thread blocks SIGBUS: the kernel ends the process then without asking. And a faulthandler that
 * was enabled after us and disabled again still gets what is not ours: it then ignores a signal that a process has sent. */
#define _GNU_SOURCE
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>

#define MOST_BEFORE 8
#define MOST_IN_VAIN 16 /* times that handlers may return without having mended a fault: then they never will */

/* Not allocated at its first use, as such variables of a loaded library may be: that could be in the signal handler. */
#ifdef __GLIBC__
#define OF_THREAD static __thread __attribute__((tls_model("initial-exec")))
#else
#define OF_THREAD static __thread
#endif

OF_THREAD sigjmp_buf *volatile landing; /* where this thread's guarded work ends; NULL: it does none */
OF_THREAD volatile int handing_on;      /* how many handlers of `before` this thread is in */
OF_THREAD void *volatile last_fault;    /* of those that were handed on */
OF_THREAD volatile int in_vain;

static struct sigaction before[MOST_BEFORE]; /* what was found in our place, the latest last */
static int before_count;

static void use_default(int number, int is_fault) {
    struct sigaction plain;
    memset(&plain, 0, sizeof plain);
    plain.sa_handler = SIG_DFL;
    sigaction(number, &plain, NULL);
    if (!is_fault) /* else the instruction is tried again, and faults again */
        raise(number);
}

static void hand_on(int number, siginfo_t *info, void *context, int is_fault) {
    const int at = __atomic_load_n(&before_count, __ATOMIC_ACQUIRE) - 1 - handing_on;
    if (is_fault) {
        in_vain = info->si_addr == last_fault ? in_vain + 1 : 0;
        last_fault = info->si_addr;
    }
    const struct sigaction *next = at >= 0 && in_vain < MOST_IN_VAIN ? before + at : NULL;
    if (next == NULL || next->sa_handler == SIG_DFL || (next->sa_handler == SIG_IGN && is_fault)) {
        use_default(number, is_fault);
        return;
    }
    if (next->sa_handler == SIG_IGN)
        return;
    sigjmp_buf *const mine = landing;
    landing = NULL; /* a fault in that handler is its own */
    handing_on++;
    if (next->sa_flags & SA_SIGINFO)
        next->sa_sigaction(number, info, context);
    else
        next->sa_handler(number);
    handing_on--;
    landing = mine;
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    /* Not what a process has sent, nor news of broken memory that nobody has touched yet. */
    const int is_fault = info->si_code > 0 && info->si_code != BUS_MCEERR_AO, saved = errno;
    if (is_fault && landing != NULL)
        siglongjmp(*landing, 1);
    hand_on(number, info, context, is_fault);
    errno = saved;
}

static int is_ours(const struct sigaction *action) {
    return (action->sa_flags & SA_SIGINFO) && action->sa_sigaction == on_bus_error;
}

static void remember(const struct sigaction *found) {
    int count = __atomic_load_n(&before_count, __ATOMIC_ACQUIRE);
    for (int i = 0; i < count; i++)
        if (before[i].sa_handler == found->sa_handler) { /* those after it are gone */
            __atomic_store_n(&before_count, i + 1, __ATOMIC_RELEASE);
            return;
        }
    count = count < MOST_BEFORE ? count : MOST_BEFORE - 1;
    before[count] = *found;
    __atomic_store_n(&before_count, count + 1, __ATOMIC_RELEASE);
}

/* Of threads that do this at once one finds what was there, and the others find ours. */
static void install(void) {
    struct sigaction ours, found;
    if (sigaction(SIGBUS, NULL, &found) != 0 || is_ours(&found))
        return;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_bus_error;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK; /* with NODEFER a jump out of it leaves nothing blocked */
    sigemptyset(&ours.sa_mask);
    if (sigaction(SIGBUS, &ours, &found) == 0 && !is_ours(&found))
        remember(&found);
}

/* Does work(given). Not 0: memory that it touched is not there, and it was not finished. */
int kvkeep_guarded(void (*work)(const void *), const void *given) {
    sigjmp_buf here;
    install();
    if (sigsetjmp(here, 0)) {
        landing = NULL;
        return 1;
    }
    landing = &here;
    work(given);
    landing = NULL;
    return 0;
}

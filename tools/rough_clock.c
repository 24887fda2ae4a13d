/* Moves the wall clock of a process and of its children: LD_PRELOAD=rough_clock.so ROUGH_CLOCK=FILE.
 *
 * FILE holds one signed 64-bit number in the machine's byte order: nanoseconds to add to CLOCK_REALTIME. It is mapped, so that a
 * change of the file moves the clock of all who have it mapped at once. Deadlines by the wall clock are moved back before the
 * kernel gets them. Times of files are the kernel's and do not move.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define WALL_S 1000000000LL /* a monotonic clock shows less: the machine would be up for 31 years */

static const volatile int64_t *ahead;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("ROUGH_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (found != MAP_FAILED)
        ahead = found;
}

static void moved(struct timespec *when, int64_t by) {
    int64_t at = (int64_t)when->tv_sec * SECOND + when->tv_nsec + by;
    when->tv_sec = at / SECOND;
    when->tv_nsec = at % SECOND;
}

static int is_wall(clockid_t clock) {
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI || clock == CLOCK_REALTIME_ALARM;
}

int clock_gettime(clockid_t clock, struct timespec *when) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next)
        next = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = next(clock, when);
    if (!result && ahead && is_wall(clock))
        moved(when, *ahead);
    return result;
}

int gettimeofday(struct timeval *restrict when, void *restrict zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    when->tv_sec = now.tv_sec;
    when->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *when, int base) {
    if (base != TIME_UTC)
        return 0;
    clock_gettime(CLOCK_REALTIME, when);
    return base;
}

/* A deadline by the wall clock is one of the moved clock. */
static const struct timespec *back(const struct timespec *deadline, struct timespec *room) {
    if (!ahead || !deadline || (int64_t)deadline->tv_sec < WALL_S)
        return deadline;
    *room = *deadline;
    moved(room, -*ahead);
    return room;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec room;
    if (!next) {
        next = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlvsym(
            RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
        if (!next)
            next = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    }
    return next(cond, mutex, back(until, &room));
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until) {
    static int (*next)(sem_t *, const struct timespec *);
    struct timespec room;
    if (!next)
        next = (int (*)(sem_t *, const struct timespec *))dlsym(RTLD_NEXT, "sem_timedwait");
    return next(sem, back(until, &room));
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*next)(pthread_mutex_t *, const struct timespec *);
    struct timespec room;
    if (!next)
        next = (int (*)(pthread_mutex_t *, const struct timespec *))dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    return next(mutex, back(until, &room));
}
